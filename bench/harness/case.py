"""One size of a benchmark as one rank sees it: everybody's ids, its own rows and weights, and the bytes at
stake.
"""

from __future__ import annotations

import numpy as np
import torch

from . import data, verify
from .data import DataKey
from .options import DTYPES, Options
from .routing import topk_ids
from .traffic import pairs, traffic


def device_of(options: Options) -> torch.device:
    """The device that this rank's tensors are on."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )


def poison(*tensors: torch.Tensor | None) -> None:
    """Overwrites tensors with all-ones bits, so that a result that is not written anew cannot pass a check.

    Results of an earlier call are poisoned before they are released: memory that an allocator hands out again
    does not carry right-looking values.
    """
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor.detach().view(torch.uint8).fill_(0xFF)


class Case:
    """Inputs and expectations of one size on one rank. `load` fills in another round of data, same ids."""

    def __init__(self, options: Options, rank: int, tokens: int, dtype: str) -> None:
        self.options, self.rank, self.tokens, self.dtype = options, rank, tokens, dtype
        self.device = device_of(options)
        self.torch_dtype: torch.dtype = getattr(torch, dtype)
        self.ids_R = [topk_ids(options, tokens, source) for source in range(options.ranks)]
        self.ids_TK = self.ids_R[rank]
        self.topk_idx_TK = torch.from_numpy(self.ids_TK.copy()).to(self.device)
        self._shuffles = np.random.default_rng([options.seed, 5, tokens, rank])
        self.row_bytes = options.hidden * DTYPES[dtype]
        self.wire_row_bytes = self._wire_row_bytes()
        handed_on = options.wire is not None and not options.dequantize
        self.traffic = traffic(
            self.ids_R,
            options.experts,
            self.wire_row_bytes if handed_on else self.row_bytes,
            options.layout,
            self.wire_row_bytes,
        )
        self.layout = self.layout_for(rank, options.alignment)
        self.capacity = self._capacity()
        self.x_TH = torch.empty(tokens, options.hidden, dtype=self.torch_dtype, device=self.device)
        weight_dtype = torch.float64 if dtype == "float64" else torch.float32
        self.topk_weights_TK = torch.empty(tokens, options.topk, dtype=weight_dtype, device=self.device)
        self.key = DataKey(options.seed, 0, tokens, options.hidden, dtype)
        self.load(0)

    def _wire_row_bytes(self) -> int:
        # Combine and the backward travel in the rows' own type.
        if self.options.wire is None or self.options.operation == "combine" or self.options.kept_handle:
            return self.row_bytes
        return self.options.hidden + 4 * -(-self.options.hidden // data.SCALE_BLOCK)

    def rows_between(self) -> list[list[int]]:
        """[from][to]: rows that travel between two ranks, each (token, other rank) once; 0 within a rank."""
        found = pairs(self.ids_R, self.options.experts)
        np.fill_diagonal(found, 0)
        way = found.T if self.options.operation == "combine" else found
        rows: list[list[int]] = way.tolist()
        return rows

    def layout_for(self, rank: int, alignment: int) -> verify.Layout:
        """Where the rows of `rank`'s result come from."""
        if self.options.layout == "rank":
            return verify.rank_layout(self.ids_R, rank, self.options.experts)
        return verify.expert_layout(self.ids_R, rank, self.options.experts, alignment)

    def _capacity(self) -> int | None:
        if self.options.capacity == "auto":
            rows = [
                self.layout_for(rank, self.options.alignment).num_rows for rank in range(self.options.ranks)
            ]
            return max(1, *rows)
        assert not isinstance(self.options.capacity, str)
        return self.options.capacity

    def load(self, round: int) -> None:
        """Fills `x_TH` and `topk_weights_TK` with the data of `round`, and puts the ids back as they were."""
        self.topk_idx_TK.copy_(torch.from_numpy(self.ids_TK))
        self.key = DataKey(self.options.seed, round, self.tokens, self.options.hidden, self.dtype)
        self.x_TH.copy_(data.rows(self.key, self.rank, self.device))
        self.topk_weights_TK.copy_(data.weights(self.key, self.rank, self.options.topk, self.device))

    def fresh_ids(self) -> None:
        """Other ids with the same traffic: tokens rolled, each token's slots shuffled.

        A training step never sees its ids twice, and a product may keep what it worked out for ids it has
        seen. With --ids same they stay.
        """
        if self.options.ids == "same":
            return
        rolled = np.roll(self.ids_TK, int(self._shuffles.integers(max(self.tokens, 1))), axis=0)
        self.topk_idx_TK.copy_(torch.from_numpy(self._shuffles.permuted(rolled, axis=1)))

    def answers(self, layout: verify.Layout, rows: int) -> torch.Tensor:
        """(rows, H) expert (or rank) outputs of this round's data at this rank, for combine; padding is
        NaN.
        """
        by_rank = self.rank if self.options.layout == "rank" else None
        return verify.answers(layout, self.key, rows, self.device, by_rank)

    def wrong_dispatch(
        self,
        got: verify.Received,
        layout: verify.Layout,
        capacity: int | None = None,
        wire: str | None = None,
    ) -> int:
        """Checks a dispatch result against `layout` and this round's data."""
        return verify.wrong_dispatch(got, layout, self.key, self.options.topk, capacity, wire)

    def wrong_backward(
        self, grad_PH: torch.Tensor, grad_weights_P: torch.Tensor, rows_PH: torch.Tensor, made: DataKey
    ) -> int:
        """Checks the backward of a weighted combine of `rows_PH`, with the weights of `made`, when the
        gradient of its result are this round's rows.
        """
        return verify.wrong_backward(
            grad_PH, grad_weights_P, rows_PH, self.layout, self.key, made, self.options.topk
        )

    def wrong_combine(self, got_TH: torch.Tensor) -> int:
        """Checks a combined result against this round's data."""
        return verify.wrong_combine(
            got_TH,
            self.ids_TK,
            self.key,
            self.rank,
            experts=self.options.experts,
            ranks=self.options.ranks,
            layout=self.options.layout,
            node_sums=1 < self.options.nodes < self.options.ranks,
        )

    def maybe_corrupt(self, result: torch.Tensor) -> None:
        """With --inject-error, flips a high bit of the result's first value on every rank that has one."""
        if self.options.inject_error and result.numel():
            result.detach().view(-1).view(torch.uint8)[result.element_size() - 1] ^= 0x40
