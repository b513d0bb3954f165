"""DeepEP's `ElasticBuffer` (version 2 of its API; `EPBuffer` from 2.5 on), on moecomm.

Names, order and defaults of arguments are those of DeepEP's deep_ep/buffers/elastic.py. Shape letters and
dtypes are as in buffer.py, and C is num_max_tokens_per_rank.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.checks import checked, require_counts, top_k_of
from deep_ep.operations import (
    Operations,
    PlanHandle,
    all_rounded_up,
    by_columns,
    carriers,
    events_of,
    parts_of,
    plan_of,
    rounded_up,
    unchanging,
)
from deep_ep.utils import EventHandle, EventOverlap
from moecomm import Communicator, DispatchOutput
from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument

_UNIT = 2 << 20
"""The unit of buffer sizes, in bytes."""


@dataclass(eq=False)
class EPHandle(PlanHandle):
    """The handle of a dispatch of `ElasticBuffer`, for its combine and for dispatches along its plan.

    Attributes:
        comm, handle: moecomm's communicator, and its handle of the dispatch.
        do_expand: the expanded layout: one row for each (token, local expert), by expert. Else the compact
            layout: one row for each (token, rank).
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as given to the dispatch.
        topk_idx: (T, K) of the dispatch, copied unless do_handle_copy=False.
        num_recv_tokens: rows of the compact layout (expanded: 0); without do_cpu_sync the most possible.
        num_expanded_tokens: rows of the expanded layout with padding (compact: 0), or the most possible.
        num_recv_tokens_per_expert_list: the L counts, rounded up; empty without do_cpu_sync.
        psum_num_recv_tokens_per_scaleup_rank: (R,) int32 inclusive sums of the rows from each rank; None in
            the expanded layout, whose rows are not counted by rank.
        psum_num_recv_tokens_per_expert: (L,) int32. Compact: inclusive sums of the counts, rounded up.
            Expanded: the ends of the experts' groups without their padding.
        num_unaligned_recv_tokens_per_expert: (L,) int32 counts; None in the compact layout.
    """

    comm: Communicator
    out: InitVar[DispatchOutput]
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    options: dict[str, Any]

    def __post_init__(self, out: DispatchOutput) -> None:
        self.keep(out, self.topk_idx)
        rows = len(out.tokens)
        self.num_recv_tokens, self.num_expanded_tokens = (0, rows) if self.do_expand else (rows, 0)

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor | None:
        return self.view("tokens_per_expert") if self.do_expand else None

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor | None:
        return None if self.do_expand else self.view("offsets")

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        counts_L = self.view("tokens_per_expert")
        if self.do_expand:
            return self.view("expert_starts")[:-1] + counts_L
        aligned_L: Tensor = rounded_up(counts_L, self.expert_alignment)
        return aligned_L.cumsum(0, dtype=torch.int32)


class ElasticBuffer(Operations):
    """Dispatch and combine between the ranks of `group`, with the calls of DeepEP's version 2.

    All ranks call the operations together. Communicators of moecomm are built and made larger as by `Buffer`.

    Args:
        group: the ranks.
        num_bytes, num_allocated_qps: kept as attributes; moecomm makes memory by the largest batch.
        num_cpu_bytes: 0; more raises NotImplementedError.
        num_max_tokens_per_rank: C, where a dispatch gives none; needed without do_cpu_sync.
        explicitly_destroy: `destroy()` may be called.
        The others are ignored: every result has the same bits on every run.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group, explicitly_destroy)
        if num_cpu_bytes:
            raise NotImplementedError("num_cpu_bytes: this package has dispatch and combine alone")
        self.rank_idx, self.num_ranks = self.group.rank(), self.group.size()
        sizes = (num_max_tokens_per_rank, hidden, num_topk)
        self.num_bytes = self.get_buffer_size_hint(group, *sizes) if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank, self.deterministic = num_max_tokens_per_rank, deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 17
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes of the rows that a rank may receive, in whole 2 MiB: larger for larger sizes, as
        callers compare it. moecomm makes its own memory (`moecomm.Communicator.memory_plan`)."""
        row = 2 * hidden + 8 * num_topk
        return rounded_up(group.size() * num_max_tokens_per_rank * row, _UNIT)

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event on the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns (1, R): nodes are moecomm's own matter."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *args: Any, **options: Any) -> int:
        """Returns the SMs that moecomm uses by itself: three quarters of a GPU; 1 without one."""
        if not torch.cuda.is_available():
            return 1
        return torch.cuda.get_device_properties("cuda").multi_processor_count * 3 // 4

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns `num_allocated_qps` of the construction, or 17 if it was 0."""
        return self.num_allocated_qps

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits for all ranks; with_cpu_sync: also for the device."""
        dist.barrier(self.group)
        if with_cpu_sync and torch.cuda.is_available():
            torch.cuda.synchronize()

    @checked
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Brings each token to the ranks of its experts.

        Args:
            x, topk_idx, topk_weights, handle: as in `Buffer.dispatch`.
            cumulative_local_expert_recv_stats: (L,), to which each local expert's rows are added.
            num_experts: E; needed without a handle.
            num_max_tokens_per_rank: C; None: that of the construction.
            expert_alignment: the experts' counts are rounded up to a multiple of it, and in the expanded
                layout their groups, with rows of zeros; None: 1.
            num_sms: SMs of an operation; 0: moecomm's own number.
            previous_event, previous_event_before_epilogue: with async_with_compute_stream the operation
                begins after them, else after the current stream.
            async_with_compute_stream: the current stream does not wait; the returned event is for the
                operation.
            do_handle_copy: the handle copies topk_idx.
            do_cpu_sync: the host waits, and the result has as many rows as arrived. False: nothing waits, and
                it has R * C rows; if expanded, R * C * min(K, L) and those for padding; T is at most C. None:
                True.
            do_expand: expanded layout: a row for each (token, local expert), by expert, source rank, token.
            num_qps, allocate_on_comm_stream, do_zero_padding: ignored; padding is zero.
            use_tma_aligned_col_major_sf: the memory of scales is by columns, each of a multiple of 16 bytes,
                as DeepGEMM reads them.
            defer_epilogue: the event alone is returned, whose `wait()` returns the rest; needs
                async_with_compute_stream. A host wait of do_cpu_sync still happens in this call.

        Returns:
            The rows, (P, H), or a pair as given; compact: (P, K) local expert ids in the dtype of topk_idx,
            -1 elsewhere, expanded: None; weights, (P, K) or expanded (P,), or None; the handle; an event.
            With a handle ids are None, and weights travel with fp8 rows, or in a small dispatch of their own.
            Errors are those of `Buffer.dispatch`.
        """
        before = self._before(previous_event, previous_event_before_epilogue)
        apart = async_with_compute_stream
        _require_apart(defer_epilogue, apart)
        if handle is not None:
            if topk_idx is not None or do_cpu_sync:
                raise InvalidArgument("handle and topk_idx or do_cpu_sync=True are given, expected one kind")
            self.require_open()
            send = partial(self._send_along, handle, x, topk_weights, use_tma_aligned_col_major_sf)
            (tokens, scales, weights), event = self.run(send, (*parts_of(x), topk_weights), before, apart)
            rows = tokens if scales is None else (tokens, scales)
            return _given((rows, None, weights, handle, event), defer_epilogue)
        if topk_idx is None or num_experts is None:
            raise InvalidArgument("topk_idx or num_experts is None, expected (T, K) and E, or a handle")
        alignment = require_integer("expert_alignment", expert_alignment or 1, 1)
        require_integer("num_experts", num_experts, 1)
        require_integer("num_sms", num_sms, 0)
        ids_TK, top_k = topk_idx, top_k_of(topk_idx)
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        require_integer("num_max_tokens_per_rank", most, 0)
        waits = do_cpu_sync is None or do_cpu_sync
        capacity = None if waits else self._rows(most, top_k, num_experts, alignment, do_expand)
        # Room for the largest batch: if the host does not wait, ranks cannot agree on a larger one later.
        every = 0 if waits else most
        shared = self.communicator(x, num_experts, top_k, num_sms or None, every=every)
        tokens = len(parts_of(x)[0])
        try:
            require_counts(cumulative_local_expert_recv_stats, num_experts // self.num_ranks)
            if capacity is not None and tokens > most:
                text = f"x has {tokens} tokens, expected at most num_max_tokens_per_rank = {most}"
                raise InvalidArgument(f"{text} with do_cpu_sync=False")
        except InvalidArgument as error:
            shared.refuse(error, topk_idx, capacity)
        options: dict[str, Any] = {"capacity": capacity, "layout": "rank"}
        if do_expand:
            options |= {"layout": "expert", "alignment": alignment}
        asked = {"host_counts": capacity is None, "dequantize": not isinstance(x, tuple)}

        def bring() -> tuple[Any, ...]:
            comm, out = shared.dispatch(x, ids_TK, topk_weights, **options, **asked)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(out.tokens_per_expert)
            counts = all_rounded_up(out.host_counts or [], alignment)
            ids = ids_TK.clone() if do_handle_copy else unchanging(ids_TK)
            sizes = (num_experts, alignment, most, num_sms)
            handle = EPHandle(comm, out, do_expand, *sizes, ids, counts, options)
            scales = out.scales
            if scales is not None and use_tma_aligned_col_major_sf:
                scales = by_columns(scales)
            return out.tokens, scales, out.topk_idx, out.weights, handle

        inputs = (*parts_of(x), ids_TK, topk_weights)
        (tokens, scales, *others), event = self.run(bring, inputs, before, apart)
        rows = tokens if scales is None else (tokens, scales)
        return _given((rows, *others, event), defer_epilogue)

    @checked
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Returns rows to the ranks of their tokens, and sums them there, without weights.

        x, handle, topk_weights (expanded (P,)), bias, results and errors are those of `Buffer.combine`; the
        other arguments are as in `dispatch`, but num_sms is that of the dispatch. A rank sums its rows of a
        token in the order of k, then the token's rank adds these sums by ascending rank; both in float32,
        rounded once (with a bias once more).
        """
        _require_apart(defer_epilogue, async_with_compute_stream)
        before = self._before(previous_event, previous_event_before_epilogue)
        found = self.bring_back(handle, x, topk_weights, bias, before, async_with_compute_stream)
        return _given(found, defer_epilogue)

    def _send_along(
        self, handle: EPHandle, x: Any, topk_weights: Tensor | None, columns: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the rows, the scales of fp8 rows, by columns if `columns`, and the weights, as they arrive
        along the handle. Weights travel with fp8 rows, or else in a dispatch of their own."""
        comm, plan = plan_of(handle, EPHandle)
        if isinstance(x, tuple):
            _, out = self.send_again(handle, x, topk_weights, handle.num_sms or None)
            assert out.scales is not None
            return out.tokens, by_columns(out.scales) if columns else out.scales, out.weights
        tokens = comm.redispatch(x, plan)
        return tokens, None, None if topk_weights is None else self._carry(handle, topk_weights)

    def _carry(self, handle: EPHandle, topk_weights: Tensor) -> Tensor:
        """Returns the weights, as they arrive along the handle, by a small dispatch of their own."""
        ids_TK = handle.ids_TK
        options: dict[str, Any] = {}
        if most := handle.num_max_tokens_per_rank:  # a capacity can be given, and the host does not wait
            if handle.options["capacity"] is None:  # the handle's batch may have had more tokens
                most = max(most, handle.comm.max_tokens)
            sizes = (most, ids_TK.shape[1], handle.num_experts, handle.expert_alignment, handle.do_expand)
            options["capacity"] = self._rows(*sizes)
        _, out = self.send_again(
            handle, carriers(ids_TK, handle.comm), topk_weights, handle.num_sms or None, **options
        )
        assert out.weights is not None
        return out.weights[: handle.handle.num_rows]

    def _rows(self, most: int, top_k: int, experts: int, alignment: int, expands: bool) -> int:
        """Returns the most rows that can arrive if each rank has at most `most` tokens."""
        if most < 1:
            raise InvalidArgument(
                f"num_max_tokens_per_rank is {most}, expected at least 1 with do_cpu_sync=False"
            )
        if not expands:
            return self.num_ranks * most
        local = experts // self.num_ranks
        return self.num_ranks * most * min(top_k, local) + local * (alignment - 1)

    def _before(self, first: Any, epilogue: Any) -> list[EventHandle]:
        """Returns the events after which an operation begins: `first`, or else the current stream, and
        `epilogue`."""
        before = events_of(first)
        if epilogue is not None and not before:
            before.append(self.capture())
        return [*before, *events_of(epilogue)]


def _require_apart(defers: bool, apart: bool) -> None:
    if defers and not apart:
        raise InvalidArgument("defer_epilogue is True, expected False without async_with_compute_stream=True")


def _given(results: tuple[Any, ...], defers: bool) -> Any:
    """Returns the results of a call; if the call `defers`, its event alone, which holds the results."""
    if not defers:
        return results
    event: EventOverlap = results[-1]
    event.results = results
    return event


EPBuffer = ElasticBuffer
"""DeepEP's name of ElasticBuffer, from its version 2.5 on."""
