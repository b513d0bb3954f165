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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from ..harness import verify
from ..harness.case import Case, poison
from ..harness.path import CALL, Path, Verdict
from ..harness.verify import Received


class _Buffers:
    """Uninitialised memory by name: fresh for every request, or, if kept, the same again when it is large
    enough.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._held: dict[str, torch.Tensor] = {}

    def rows(self, name: str, count: int, like: torch.Tensor) -> torch.Tensor:
        """(count, columns of `like`)."""
        if not self.keep:
            return like.new_empty(count, like.shape[1])
        held = self._held.get(name)
        if held is None or held.shape[0] < count or held.dtype != like.dtype:
            held = self._held[name] = like.new_empty(count, like.shape[1])
        return held[:count]

    def all(self) -> list[torch.Tensor]:
        return list(self._held.values())


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The plan of one dispatch, kept for its combine. S rows sent, P rows received."""

    token_S: torch.Tensor  # home token of each row sent
    pair_S: torch.Tensor  # its place in the flattened top-k ids
    send_splits: list[int]
    receive_splits: list[int]
    chunks_RL: list[int]  # rows per (source rank, local expert)
    counts_L: torch.Tensor


class PermutedExchange:
    """Dispatch and combine over the default process group."""

    def __init__(self, case: Case, *, tuned: bool) -> None:
        if case.options.layout != "expert":
            raise ValueError("a plain framework has no rank layout")
        self.ranks = dist.get_world_size()
        self.experts, self.local = case.point.experts, case.point.experts // self.ranks
        self.tuned = tuned
        self.buffers = _Buffers(keep=tuned)

    def combine(self, rows_PH: torch.Tensor, exchange: Exchange, weights_TK: torch.Tensor) -> torch.Tensor:
        """(T, H): each token's rows summed, times its weights."""
        chunks = exchange.chunks_RL
        if self.local > 1:
            back = self._reorder("unpermuted", rows_PH, self._transposed(chunks), self.local, self.ranks)
        else:
            back = rows_PH
        home_SH = self.buffers.rows("home", sum(exchange.send_splits), rows_PH)
        dist.all_to_all_single(home_SH, back, exchange.send_splits, exchange.receive_splits)
        weight_S = weights_TK.reshape(-1)[exchange.pair_S]
        add = self._sum_fused if self.tuned else self._sum_index_add
        return add(home_SH, exchange.token_S, weight_S, weights_TK.shape[0])

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> tuple[torch.Tensor, Exchange]:
        """Rows of all ranks that this rank's experts want, in expert-major order."""
        flat = topk_idx_TK.reshape(-1)
        counts_E = torch.bincount(flat.clamp_min(-1) + 1, minlength=self.experts + 1)
        pair_S = torch.argsort(flat, stable=True)[int(counts_E[0]) :]  # -1 entries sort first and stay home
        counts_E = counts_E[1:]
        token_S = pair_S // topk_idx_TK.shape[1]
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E.contiguous())
        received_RL = received_E.view(self.ranks, self.local)
        chunks = received_E.tolist()
        exchange = Exchange(
            token_S=token_S,
            pair_S=pair_S,
            send_splits=counts_E.view(self.ranks, self.local).sum(1).tolist(),
            receive_splits=received_RL.sum(1).tolist(),
            chunks_RL=chunks,
            counts_L=received_RL.sum(0),
        )
        arrived = self._exchange_rows(x_TH, exchange)
        if self.local > 1:
            arrived = self._reorder("permuted", arrived, chunks, self.ranks, self.local)
        return arrived, exchange

    def _exchange_rows(self, x_TH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        send_SH = self.buffers.rows("send", exchange.token_S.numel(), x_TH)
        torch.index_select(x_TH, 0, exchange.token_S, out=send_SH)
        arrived = self.buffers.rows("arrived", sum(exchange.receive_splits), x_TH)
        dist.all_to_all_single(arrived, send_SH, exchange.receive_splits, exchange.send_splits)
        return arrived

    def _transposed(self, chunks_RL: Sequence[int]) -> list[int]:
        return [
            chunks_RL[rank * self.local + expert]
            for expert in range(self.local)
            for rank in range(self.ranks)
        ]

    def _reorder(
        self, name: str, rows: torch.Tensor, chunks: Sequence[int], outer: int, inner: int
    ) -> torch.Tensor:
        """Chunks stored (outer, inner)-major, copied to (inner, outer)-major order by one concatenation."""
        parts = rows.split(list(chunks))
        out = self.buffers.rows(name, rows.shape[0], rows)
        torch.cat([parts[a * inner + b] for b in range(inner) for a in range(outer)], out=out)
        return out

    def _sum_index_add(
        self, rows_SH: torch.Tensor, token_S: torch.Tensor, weight_S: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        wide = torch.float64 if rows_SH.dtype == torch.float64 else torch.float32
        if rows_SH.dtype == wide:
            scaled = rows_SH.mul_(weight_S[:, None])  # in place: the buffer is this call's own
        else:
            scaled = rows_SH * weight_S[:, None]
        total = torch.zeros(tokens, rows_SH.shape[1], dtype=wide, device=rows_SH.device)
        return total.index_add_(0, token_S, scaled).to(rows_SH.dtype)

    def _sum_fused(
        self, rows_SH: torch.Tensor, token_S: torch.Tensor, weight_S: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        if rows_SH.shape[0] == 0:
            return rows_SH.new_zeros(tokens, rows_SH.shape[1])
        order = torch.argsort(token_S, stable=True)
        per_token = torch.bincount(token_S, minlength=tokens)
        scale = weight_S[order].to(rows_SH.dtype)
        return functional.embedding_bag(
            order, rows_SH, per_token.cumsum(0) - per_token, mode="sum", per_sample_weights=scale
        )


def _name(case: Case, tuned: bool = False) -> str:
    backend = "nccl" if case.device.type == "cuda" else "gloo"
    return f"{backend}-tuned" if tuned else backend


def dispatch_path(case: Case, *, tuned: bool) -> Path:
    """Dispatch over torch.distributed. No weights travel: they are applied at home, in combine."""
    path = PermutedExchange(case, tuned=tuned)
    rows = case.rows_of(case.rank, 1)

    def call() -> tuple[torch.Tensor, Exchange]:
        return path.dispatch(case.x_TH, case.topk_idx_TK)

    def check(round: int) -> Verdict:
        case.load(round)
        poison(*path.buffers.all())
        rows_PH, exchange = call()
        case.maybe_corrupt(rows_PH)
        received = Received(tokens=rows_PH, counts=exchange.counts_L)
        wrong = verify.wrong_dispatch(received, rows, case.key, case.point.topk)
        poison(rows_PH)
        return Verdict(wrong)

    return Path(name=_name(case, tuned), calls={CALL: call}, check=check, before=case.fresh_ids, blocks=True)


def combine_path(case: Case, *, tuned: bool) -> Path:
    """Combine over torch.distributed of rows in the layout that its own dispatch made."""
    path = PermutedExchange(case, tuned=tuned)
    rows = case.rows_of(case.rank, 1)
    _, exchange = path.dispatch(case.x_TH, case.topk_idx_TK)
    rows_PH = torch.empty(rows.num_rows, case.point.hidden, dtype=case.dtype, device=case.device)

    def call() -> torch.Tensor:
        return path.combine(rows_PH, exchange, case.weights_TK)

    def check(round: int) -> Verdict:
        case.load(round)
        rows_PH.copy_(verify.answers(rows, case.key, rows.num_rows, case.device))
        poison(*path.buffers.all())
        y_TH = call()
        case.maybe_corrupt(y_TH)
        wrong = verify.wrong_combine(y_TH, case)
        poison(y_TH)
        return Verdict(wrong)

    check(0)  # gives rows_PH its values also when checks are off
    return Path(name=_name(case, tuned), calls={CALL: call}, check=check, blocks=tuned)


def bare_alltoall_path(case: Case) -> Path:
    """The bare exchange: equal contiguous blocks, no permutes, no counts, result buffer reused."""
    rows = case.rows_of(case.rank, 1)
    send_splits = [int((case.ids_TK == rank).sum()) for rank in range(case.options.ranks)]
    receive_splits = [int((ids_TK == case.rank).sum()) for ids_TK in case.ids_R]
    arrived = torch.empty(sum(receive_splits), case.point.hidden, dtype=case.dtype, device=case.device)

    def call() -> torch.Tensor:
        dist.all_to_all_single(arrived, case.x_TH, receive_splits, send_splits)
        return arrived

    def check(round: int) -> Verdict:
        case.load(round)
        poison(arrived)
        call()
        case.maybe_corrupt(arrived)
        return Verdict(verify.wrong_dispatch(Received(tokens=arrived), rows, case.key, case.point.topk))

    return Path(name=_name(case), calls={CALL: call}, check=check)
