"""The part of each expert that a rank holds, where expert tensor parallelism (ETP) splits its inner width.

Part p of P has F / P of the F inner columns, from p F / P on: of a w_in (H, 2F) with gates in its first half
these columns of both halves, of an interleaved one these pairs of columns, of w_out (F, H) these rows. An
expert's result is the sum of its parts' results. So b_out, which is added once, is with part 0 alone.

Example: F = 4, P = 2. Part 1 of a w_in in halves, columns g0 g1 g2 g3 u0 u1 u2 u3, has g2 g3 u2 u3; of an
interleaved one, g0 u0 g1 u1 g2 u2 g3 u3, it has g2 u2 g3 u3.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moecomm.kernels.activation import INPUTS, INTERLEAVED


class Split(NamedTuple):
    """How parts divide one dimension of a weight."""

    dim: int
    """The dimension of the (E, ...) tensor of all experts."""
    blocks: int
    """Equal blocks of that dimension, of each of which a part has its share."""


class ExpertPart(NamedTuple):
    """One of the equal parts that experts are split into: part `number` of `of`, from 0 on."""

    number: int = 0
    of: int = 1

    def take(self, whole: Tensor, split: Split | None) -> Tensor:
        """Returns this part's share of a weight of whole experts, (E, ...) for any E; without a split, the
        weight itself."""
        if split is None or self.of == 1:
            return whole
        shares = whole.unflatten(split.dim, (split.blocks, self.of, -1))
        return shares.select(split.dim + 1, self.number).flatten(split.dim, split.dim + 1)


def splits_of(activation: str) -> dict[str, Split | None]:
    """Returns how parts divide each parameter of GroupedExperts; None: it is not divided."""
    halves = 1 if activation in INTERLEAVED else INPUTS[activation]
    return {"w_in": Split(2, halves), "w_out": Split(1, 1), "b_in": Split(1, halves), "b_out": None}
