"""The handle of a dispatch: DeepEP's tuple of six, for programs that look into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_ep.operations import PlanHandle
from moecomm import Communicator, Handle


class DispatchHandle(PlanHandle, Sequence[Any]):
    """The handle of a dispatch of `Buffer`, for its combine and for dispatches along its plan.

    As a sequence it has DeepEP's elements. [0] is the rank prefix matrix, (R, R) int32: [i, r] is the number
    of tokens that this rank, r, gets from the ranks 0 to i; the columns of other ranks are -1. [4] is
    `is_token_in_rank` as it was given. The others serve DeepEP's kernels alone and are None.
    """

    def __init__(
        self,
        comm: Communicator,
        handle: Handle,
        offsets_R: torch.Tensor,
        is_token_in_rank: torch.Tensor | None,
    ) -> None:
        self.comm, self.handle = comm, handle
        self._offsets_R, self._is_token_in_rank = offsets_R, is_token_in_rank

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: Any) -> Any:
        return self._elements()[index]

    def _elements(self) -> tuple[Any, ...]:
        size = self.comm.size
        matrix_RR = torch.full((size, size), -1, dtype=torch.int32, device=self._offsets_R.device)
        matrix_RR[:, self.comm.rank] = self._offsets_R
        return matrix_RR, None, None, None, self._is_token_in_rank, None
