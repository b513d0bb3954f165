"""The baseline: dispatch and combine as a plain framework does them, torch index permutes around
all_to_all_single, over gloo on the CPU and over NCCL on GPUs.

Dispatch: sort the (token, expert) pairs by expert, gather their rows into a send buffer, exchange counts,
exchange rows, and put the received chunks into expert-major order. Combine: the same backwards, then a
weighted index_add at the home rank. Rows come out in moecomm's order (expert, source rank, token), so both
pass the same check.

Two variants. Plain allocates its buffers in each call and adds up with index_add, as frameworks do. Tuned
keeps all buffers from call to call (sparing the page faults of fresh memory) and sums with one fused weighted
gather (embedding_bag): what a user could get out of gloo with care.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..harness.case import Case
from .baseline import Baseline


class PermutedExchange(Baseline):
    """Dispatch and combine over the default process group. No weights travel with a dispatch: they are
    applied at home, in combine. S rows are sent, P rows received.
    """

    def __init__(self, case: Case, *, tuned: bool) -> None:
        if case.options.layout != "expert":
            raise ValueError("a plain framework has no rank layout")
        backend = "nccl" if case.device.type == "cuda" else "gloo"
        self.name = f"{backend}-tuned" if tuned else backend
        self.case, self.tuned = case, tuned
        self.kept: dict[str, Tensor] = {}
        self.ranks = dist.get_world_size()
        self.experts, self.local = case.point.experts, case.point.experts // self.ranks
        self.waits_in_combine = tuned

    def _empty(self, name: str, count: int, like: Tensor) -> Tensor:
        """(count, columns of `like`), uninitialised: fresh, or if tuned the same again if that will do."""
        if not self.tuned:
            return like.new_empty(count, like.shape[1])
        if name not in self.kept or self.kept[name].shape[0] < count:
            self.kept[name] = like.new_empty(count, like.shape[1])
        return self.kept[name][:count]

    def dispatch(self) -> Tensor:
        """Returns the rows that this rank's experts want, in expert-major order, and keeps the plan."""
        x_TH, topk_idx_TK = self.case.x_TH, self.case.topk_idx_TK
        flat = topk_idx_TK.reshape(-1)
        counts_E = torch.bincount(flat.clamp_min(-1) + 1, minlength=self.experts + 1)
        # -1 entries sort first and stay home.
        self.pair_S = torch.argsort(flat, stable=True)[int(counts_E[0]) :]
        self.token_S = self.pair_S // topk_idx_TK.shape[1]
        counts_E = counts_E[1:]
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E.contiguous())
        received_RL = received_E.view(self.ranks, self.local)
        self.counts = received_RL.sum(0)
        self.chunks_RL: list[int] = received_E.tolist()
        self.send_splits = counts_E.view(self.ranks, self.local).sum(1).tolist()
        self.receive_splits = received_RL.sum(1).tolist()
        send_SH = self._empty("send", self.token_S.numel(), x_TH)
        torch.index_select(x_TH, 0, self.token_S, out=send_SH)
        arrived = self._empty("arrived", sum(self.receive_splits), x_TH)
        dist.all_to_all_single(arrived, send_SH, self.receive_splits, self.send_splits)
        if self.local > 1:
            arrived = self._reorder("permuted", arrived, self.chunks_RL, self.ranks, self.local)
        return arrived

    def combine(self, rows_PH: Tensor) -> Tensor:
        """(T, H): each token's rows summed, times its weights; by the plan of the last dispatch."""
        weights_TK = self.case.weights_TK
        back = rows_PH
        if self.local > 1:
            transposed = [
                self.chunks_RL[rank * self.local + expert]
                for expert in range(self.local)
                for rank in range(self.ranks)
            ]
            back = self._reorder("unpermuted", rows_PH, transposed, self.local, self.ranks)
        home_SH = self._empty("home", sum(self.send_splits), rows_PH)
        dist.all_to_all_single(home_SH, back, self.send_splits, self.receive_splits)
        weight_S = weights_TK.reshape(-1)[self.pair_S]
        return (self._sum_fused if self.tuned else self._sum_index_add)(
            home_SH, weight_S, weights_TK.shape[0]
        )

    def _reorder(self, name: str, rows: Tensor, chunks: Sequence[int], outer: int, inner: int) -> Tensor:
        """Chunks stored (outer, inner)-major, copied to (inner, outer)-major order by one concatenation."""
        parts = rows.split(list(chunks))
        out = self._empty(name, rows.shape[0], rows)
        torch.cat([parts[a * inner + b] for b in range(inner) for a in range(outer)], out=out)
        return out

    def _sum_index_add(self, rows_SH: Tensor, weight_S: Tensor, tokens: int) -> Tensor:
        wide = torch.float64 if rows_SH.dtype == torch.float64 else torch.float32
        if rows_SH.dtype == wide:
            scaled = rows_SH.mul_(weight_S[:, None])  # in place: the buffer is this call's own
        else:
            scaled = rows_SH * weight_S[:, None]
        total = torch.zeros(tokens, rows_SH.shape[1], dtype=wide, device=rows_SH.device)
        return total.index_add_(0, self.token_S, scaled).to(rows_SH.dtype)

    def _sum_fused(self, rows_SH: Tensor, weight_S: Tensor, tokens: int) -> Tensor:
        if rows_SH.shape[0] == 0:
            return rows_SH.new_zeros(tokens, rows_SH.shape[1])
        order = torch.argsort(self.token_S, stable=True)
        per_token = torch.bincount(self.token_S, minlength=tokens)
        scale = weight_S[order].to(rows_SH.dtype)
        return functional.embedding_bag(
            order, rows_SH, per_token.cumsum(0) - per_token, mode="sum", per_sample_weights=scale
        )


class BareAllToAll(Baseline):
    """The bare exchange: equal contiguous blocks, no permutes, no counts, result buffer reused."""

    def __init__(self, case: Case) -> None:
        self.name = "nccl" if case.device.type == "cuda" else "gloo"
        self.case = case
        self.send_splits = [int((case.ids_TK == rank).sum()) for rank in range(case.options.ranks)]
        self.receive_splits = [int((ids_TK == case.rank).sum()) for ids_TK in case.ids_R]
        rows = sum(self.receive_splits)
        self.arrived_PH = torch.empty(rows, case.point.hidden, dtype=case.dtype, device=case.device)
        self.kept = {"arrived": self.arrived_PH}
        self.waits_in_dispatch = self.fresh_ids = False

    def dispatch(self) -> Tensor:
        """The blocks of all ranks."""
        dist.all_to_all_single(self.arrived_PH, self.case.x_TH, self.receive_splits, self.send_splits)
        return self.arrived_PH
