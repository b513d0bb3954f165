"""Handles of dispatches that have the elements of DeepEP's tuples, for programs that look into them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from deep_ep.maps import spread
from deep_ep.operations import PlanHandle, all_rounded_up, unchanging
from moecomm import Communicator, DispatchOutput


class TupleHandle(PlanHandle, Sequence[Any]):
    """A base of handles with elements, made on demand."""

    @abstractmethod
    def _elements(self) -> tuple[Any, ...]: ...

    def __len__(self) -> int:
        return len(self._elements())

    def __getitem__(self, index: Any) -> Any:
        return self._elements()[index]


class DispatchHandle(TupleHandle):
    """The handle of a dispatch of `Buffer`, for its combine and for dispatches along its plan.

    As a sequence it has DeepEP's six elements. [0] is the rank prefix matrix, (R, R) int32: [i, r] is the
    number of tokens that this rank, r, gets from the ranks 0 to i; the columns of other ranks are -1. [4] is
    `is_token_in_rank` as it was given. The others serve DeepEP's kernels alone and are None.
    """

    def __init__(
        self,
        comm: Communicator,
        out: DispatchOutput,
        ids_TK: torch.Tensor,
        is_token_in_rank: torch.Tensor | None,
        capacity: int | None,
    ) -> None:
        self.comm, self.options = comm, {"layout": "rank", "capacity": capacity}
        self.keep(out, unchanging(ids_TK))
        self._is_token_in_rank = is_token_in_rank

    def _elements(self) -> tuple[Any, ...]:
        size = self.comm.size
        matrix_RR = torch.full((size, size), -1, dtype=torch.int32, device=self.comm.device)
        matrix_RR[:, self.comm.rank] = self.view("offsets")
        return matrix_RR, None, None, None, self._is_token_in_rank, None


class HybridHandle(TupleHandle):
    """The handle of a dispatch of `HybridEPBuffer`, for its combine and for dispatches along its plan.

    As a sequence it has DeepEP's elements: 11 with permute, 7 without. With permute: [7] (L,) int32 rows of
    each local expert without padding, as far as they fit, [8] T, [9] the config, [10] the overflow flag, (1,)
    int32: 1 if rows were left out. Without: [3] (1,) int32 P, [4] (P, L) bool local experts of the rows, [5]
    T, [6] the config. The others serve DeepEP's kernels alone and are None.
    """

    def __init__(
        self,
        comm: Communicator,
        out: DispatchOutput,
        ids_TK: torch.Tensor,
        options: dict[str, Any],
        config: Any,
    ) -> None:
        self.comm, self.options = comm, options
        self.keep(out, unchanging(ids_TK))
        self._config, self._host_counts, self._ids_PK = config, out.host_counts, out.topk_idx

    def padded_counts(self) -> torch.Tensor:
        """Returns (L,) int32 rows of each local expert, with padding, as far as they fit."""
        ends_L = self.view("offsets")
        return torch.diff(ends_L, prepend=ends_L.new_zeros(1))

    def padded_counts_on_host(self) -> torch.Tensor:
        """Returns `padded_counts()` as int64 on the CPU. With a capacity the host waits for the dispatch."""
        if self._host_counts is None:
            return self.padded_counts().long().cpu()
        return torch.tensor(all_rounded_up(self._host_counts, self.options["alignment"]), device="cpu")

    def received_ids(self) -> torch.Tensor:
        """Returns (P, K) ids of received rows among all experts, -1 where an expert is elsewhere."""
        assert self._ids_PK is not None
        first = self.comm.rank * self.comm.num_local_experts
        return torch.where(self._ids_PK < 0, -1, self._ids_PK + first)

    def _elements(self) -> tuple[Any, ...]:
        tokens = self.handle.num_tokens
        if self._ids_PK is None:
            counts_L = torch.minimum(self.view("tokens_per_expert"), self.padded_counts())
            flag = (self.view("overflow") > 0).to(torch.int32).view(1)
            return *[None] * 7, counts_L, tokens, self._config, flag
        ones_PK = torch.ones_like(self._ids_PK, dtype=torch.bool)
        local_PL = spread(ones_PK, self._ids_PK, self.comm.num_local_experts)
        return None, None, None, self.view("offsets")[-1:], local_PL, tokens, self._config
