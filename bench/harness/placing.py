"""Computes where the rows of a dispatch have to be, by the reference of the tests (tests/reference.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests import reference

from .inputs import Ids

IntArray = npt.NDArray[np.int64]


def on(device: torch.device, index: npt.NDArray[Any]) -> Tensor:
    """Returns an index of numpy on a device."""
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Origins of the N real rows of one rank's result, in result order, without padding.

    `slot_N` is the position in the token's top-k ids and `expert_N` the global expert, in the rank layout
    those of the first of the row's assignments; there `ids_NK` holds local expert ids or -1.
    """

    row_N: IntArray  # row of the result
    source_N: IntArray
    token_N: IntArray
    slot_N: IntArray
    expert_N: IntArray
    ids_NK: IntArray | None
    expert_rows_L: IntArray  # (token, expert) pairs per local expert, in either layout
    offsets_G: IntArray  # inclusive ends of the groups in the result

    @property
    def num_rows(self) -> int:
        """Rows of an exactly sized result, padding counted."""
        return int(self.offsets_G[-1]) if self.offsets_G.size else 0

    def from_source(self, source: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(row, token, slot) of the rows that come from one rank."""
        here_N = self.source_N == source
        row, token, slot = (on(device, each[here_N]) for each in (self.row_N, self.token_N, self.slot_N))
        return row, token, slot

    @property
    def sources(self) -> list[int]:
        """Ranks that rows come from."""
        found: list[int] = np.unique(self.source_N).tolist()
        return found


def rows_of(
    ids_R: Sequence[Ids], rank: int, experts: int, layout: str = "expert", alignment: int = 1
) -> Rows:
    """The rows of `rank` as the reference has them."""
    placed = reference.layout_of(ids_R, rank=rank, num_experts=experts, layout=layout, alignment=alignment)
    real = [(row, *answers[0]) for row, answers in enumerate(placed.origin) if answers]
    row_N, source_N, token_N, slot_N = np.array(real, dtype=np.int64).reshape(-1, 4).T
    ids_NK = np.stack(ids_R)[source_N, token_N].astype(np.int64)
    local = experts // len(ids_R)
    return Rows(
        row_N=row_N,
        source_N=source_N,
        token_N=token_N,
        slot_N=slot_N,
        expert_N=np.take_along_axis(ids_NK, slot_N[:, None], axis=1)[:, 0],
        ids_NK=np.where(ids_NK // local == rank, ids_NK % local, -1) if layout == "rank" else None,
        expert_rows_L=np.array(placed.tokens_per_expert, dtype=np.int64),
        offsets_G=np.array(placed.offsets, dtype=np.int64),
    )
