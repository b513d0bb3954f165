"""The baseline of torch's symmetric memory: all_to_all_vdev_2d, which needs NVSHMEM, between torch permutes.

Rows leave once for each expert. Splits stay on the device, so there is no wait of the host. Buffers are
symmetric and kept; rows for combine are taken to lie in one already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ..harness.case import Case
from .baseline import Baseline


class SymmetricExchange(Baseline):
    """Buffers of one case, dispatch and combine through them."""

    name = "torch-symm"
    waits_in_dispatch = False

    def __init__(self, case: Case) -> None:
        options = case.options
        if options.layout != "expert" or any(bool((ids < 0).any()) for ids in case.ids_R):
            raise ValueError("expert layout and full top-k ids only")
        if not symmetric.is_nvshmem_available():
            raise RuntimeError("this torch has no NVSHMEM")
        self.case = case
        self._world: Any = dist.group.WORLD
        pairs, experts, hidden = case.point.tokens * case.point.topk, case.point.experts, case.point.hidden
        arriving = max(case.rows_of(rank, 1).num_rows for rank in range(options.ranks))
        self.home_SH = self._empty((pairs, hidden), case.dtype)
        self.owner_PH = self._empty((arriving, hidden), case.dtype)
        self.splits_E = self._empty((experts,), torch.int64)
        self.there = self._empty((2, experts), torch.int64)
        self.back = self._empty((2, experts), torch.int64)
        self.kept = {"home": self.home_SH, "owner": self.owner_PH}
        self._ones = torch.ones(pairs, dtype=torch.int64, device=case.device)
        self._order = torch.empty(0, dtype=torch.int64, device=case.device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = symmetric.empty(shape, dtype=dtype, device=self.case.device)
        symmetric.rendezvous(tensor, self._world)
        return tensor

    def dispatch(self) -> torch.Tensor:
        """Returns the buffer of the owner's rows."""
        case = self.case
        flat = case.topk_idx_TK.reshape(-1).long()
        self._order = torch.argsort(flat, stable=True)
        self.splits_E.zero_().scatter_add_(0, flat, self._ones)
        torch.index_select(case.x_TH, 0, self._order // case.point.topk, out=self.home_SH)
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self.home_SH, self.owner_PH, self.splits_E, self.there, self._world.group_name
        )
        return self.owner_PH

    def combine(self, rows_PH: torch.Tensor) -> torch.Tensor:
        """Returns the sums of the rows in the owner's buffer, where `dispatch` has put them."""
        case = self.case
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.owner_PH, self.home_SH, self.there, self.back, self._world.group_name
        )
        inverse = torch.empty_like(self._order)
        inverse[self._order] = torch.arange(inverse.numel(), device=case.device)
        rows_TKH = self.home_SH.index_select(0, inverse).view(case.point.tokens, case.point.topk, -1)
        weights = case.weights_TK.to(rows_TKH.dtype)[:, None, :]
        return torch.bmm(weights, rows_TKH)[:, 0]
