"""The low-latency calls of DeepEP's `Buffer`: rows by expert at fixed positions; the host waits for nothing.

Shape letters as in buffer.py, and C num_max_dispatch_tokens_per_rank, S scales of a row, H / 128.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deep_ep.checks import INTEGERS, checked, require_counts, require_shape, top_k_of
from deep_ep.handle import TupleHandle
from deep_ep.operations import Operations, by_columns, carriers
from deep_ep.utils import EventOverlap
from moecomm import Communicator, DispatchOutput
from moecomm.arguments import require_integer
from moecomm.backends.opened import call_or_tell
from moecomm.errors import InvalidArgument

_BLOCK = 128
"""Columns of a row in fp8 that share a scale."""
Hook = Callable[[], None]


class SlotHandle(TupleHandle):
    """The handle of a low-latency dispatch, for its combine.

    As a sequence it has DeepEP's five elements: [2] C, [3] H, [4] E. The others serve DeepEP's kernels alone
    and are None.
    """

    def __init__(
        self, comm: Communicator, carrying: Communicator | None, out: DispatchOutput, ids_TK: Tensor
    ) -> None:
        self.comm, self.carrying = comm, carrying
        # A combine that sends weights by these ids needs a copy: the caller may have changed its tensor then.
        self.keep(out, ids_TK if carrying is None else ids_TK.clone())
        self.rows_LNH: Tensor | None = None  # what get_next_low_latency_combine_buffer has returned

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the rows, (L, R * C, H)."""
        return self.comm.num_local_experts, self.comm.size * self.comm.max_tokens, self.comm.hidden

    def _elements(self) -> tuple[Any, ...]:
        return None, None, self.comm.max_tokens, self.comm.hidden, self.comm.num_experts


class LowLatency(Operations):
    """A base of `Buffer` that has its low-latency calls."""

    _chosen_sms: int | None = None
    """The number of `set_num_sms`, or None."""

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        super().__init__(group, explicitly_destroy)
        self._exact: dict[tuple[Any, ...], Communicator] = {}

    def destroy(self) -> None:
        super().destroy()
        self._exact.clear()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns 0: moecomm makes memory by the largest batch."""
        return 0

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: signals count epochs, and are never cleaned."""

    @checked
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, SlotHandle, EventOverlap, Hook | None]:
        """Brings each token to its experts, a row for each, at fixed positions. The host waits for nothing.

        The first call of a shape (E, H, K, C, dtype, use_fp8) builds a communicator on all ranks together,
        and cannot be captured in a CUDA graph.

        Args:
            x: (T, H) rows of bfloat16, float16 or float32, T at most C.
            topk_idx: (T, K) expert ids, -1 for none.
            num_max_dispatch_tokens_per_rank: C, the same on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: (L,) int32 or int64, to which the returned counts are added.
            dispatch_wait_recv_cost_stats: ignored with a warning.
            use_fp8: rows travel and arrive in float8_e4m3fn, with a scale for 128 columns. On GPUs alone; H
                is a multiple of 128.
            round_scale: scales are powers of two.
            use_ue8m0: needs round_scale; scales arrive as exponents of eight bits, four in an int32; H is a
                multiple of 512.
            async_finish: the current stream does not wait for the operation; the returned event is for it.
            return_recv_hook: the current stream does not wait before the returned hook is called.

        Returns:
            (L, R * C, H) rows: of expert l as many as its count, by source rank, then token; further rows are
            unspecified. With use_fp8 a pair of rows and (L, R * C, S) float32 scales, or (L, R * C, S / 4)
            int32, whose second dimension is contiguous; (L,) int32 counts; the handle; an event; the hook, or
            None.

        Raises:
            InvalidArgument: arguments that do not go together, or more than C tokens.
            Unsupported: use_fp8 on CPU ranks.
            What `Buffer.dispatch` raises.
        """
        require_shape("x", x, "(T, H)", None, None)
        if use_ue8m0 and not (round_scale and use_fp8):
            raise InvalidArgument("use_ue8m0 is True, expected False unless use_fp8 and round_scale are True")
        if use_fp8 and x.shape[1] % (4 * _BLOCK if use_ue8m0 else _BLOCK):
            least = 4 * _BLOCK if use_ue8m0 else _BLOCK
            raise InvalidArgument(f"x has {x.shape[1]} columns, expected a multiple of {least} with use_fp8")
        _refuse_both(async_finish, return_recv_hook)
        _ignore("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        tokens = require_integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        comm = self._of(x, num_experts, top_k_of(topk_idx), tokens, "fp8" if use_fp8 else None)
        call_or_tell(comm, require_counts, cumulative_local_expert_recv_stats, comm.num_local_experts)
        carrying = None  # brings the weights of a combine, unless the combine itself does
        if not comm.weighs_tokens:
            carrying = self._of(carriers(topk_idx, comm), num_experts, comm.top_k, tokens, None)
        local, slots = comm.num_local_experts, comm.size * tokens

        def bring() -> tuple[Any, ...]:
            rows = _with_rounded_scales(x) if round_scale and use_fp8 else x
            out = comm.dispatch(rows, topk_idx, expert_capacity=slots, dequantize=not use_fp8)
            counts_L = out.tokens_per_expert
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts_L)
            handle, scales = SlotHandle(comm, carrying, out, topk_idx), out.scales
            if scales is not None:
                scales = scales.view(local, slots, -1)
                scales = by_columns(_as_exponents(scales) if use_ue8m0 else scales)
            return out.tokens.view(local, slots, -1), scales, counts_L, handle

        inputs = (x, topk_idx, cumulative_local_expert_recv_stats)
        found, event, hook = self._issue(bring, inputs, async_finish, return_recv_hook)
        rows, scales, counts_L, handle = found
        return rows if scales is None else (rows, scales), counts_L, handle, event, hook

    @checked
    def low_latency_combine(
        self,
        x: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: SlotHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Returns rows to the ranks of their tokens, and sums them there with weights.

        If `Communicator.weighs_tokens` is True, on GPUs of one node for few tokens, the combine itself brings
        the weights. Elsewhere a small dispatch before it brings them to the experts' ranks.

        Args:
            x: (L, R * C, H) rows in the order of the dispatch.
            topk_idx: (T, K) of the dispatch; where an id is -1 now, its row does not count.
            topk_weights: (T, K) float32, with float64 rows float64.
            handle: of the dispatch.
            use_logfmt: ignored; rows travel in their dtype.
            zero_copy: the rows are in the tensor of `get_next_low_latency_combine_buffer`, and x is not read.
            out: (T, H), into which the sums are written too.
            combine_wait_recv_cost_stats: ignored with a warning.
            The others are as in `low_latency_dispatch`.

        Returns:
            (T, H) sums, in the order of `ElasticBuffer.combine`; an event; the hook, or None.

        Raises:
            InvalidArgument: a handle of another call, or zero_copy without that tensor.
            What `moecomm.Communicator.combine` raises, on all ranks.
        """
        if not isinstance(handle, SlotHandle):
            kind = type(handle).__name__
            raise InvalidArgument(f"handle is {kind}, expected that of a low_latency_dispatch")
        _ignore("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)

        def sum_slots() -> tuple[Tensor, EventOverlap, Hook | None]:
            if zero_copy and handle.rows_LNH is None:
                raise InvalidArgument(
                    "zero_copy is True, expected False: get_next_low_latency_combine_buffer was not called "
                    "with this handle"
                )
            _refuse_both(async_finish, return_recv_hook)
            rows = handle.rows_LNH if zero_copy else x
            comm, carrying, shape = handle.comm, handle.carrying, handle.shape
            if rows is None or tuple(rows.shape) != shape:
                found = "is None" if rows is None else f"has shape {tuple(rows.shape)}"
                raise InvalidArgument(f"x {found}, expected that of the dispatch, {shape}")
            require_shape("topk_idx", topk_idx, "(T, K)", None, None, dtypes=INTEGERS)
            sums = (handle.handle.num_tokens, shape[2])
            if out is not None and (
                out.shape != sums or out.dtype != comm.dtype or out.device != comm.device
            ):
                found = f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
                raise InvalidArgument(
                    f"out is {found}, expected {comm.dtype} of shape {sums} on {comm.device}"
                )
            ids_TK = None if carrying is None else handle.ids_TK
            if topk_weights.shape != topk_idx.shape:
                sizes = f"{tuple(topk_weights.shape)}, expected that of topk_idx, {tuple(topk_idx.shape)}"
                raise InvalidArgument(f"topk_weights has shape {sizes}")

            def bring_back() -> tuple[Tensor | None, ...]:
                counted_TK, rows_PH = topk_weights, rows.reshape(-1, shape[2])
                if not handle.is_of(topk_idx):
                    counted_TK = topk_weights.masked_fill(topk_idx < 0, 0.0)
                if ids_TK is None or carrying is None:
                    sums_TH = comm.combine_weighted(rows_PH, handle.handle, counted_TK)
                else:
                    sent = carrying.dispatch(
                        carriers(ids_TK, comm), ids_TK, counted_TK, expert_capacity=shape[1]
                    )
                    sums_TH = comm.combine(rows_PH, handle.handle, weights=sent.weights)
                return (sums_TH if out is None else out.copy_(sums_TH),)

            inputs = (rows, ids_TK, topk_idx, topk_weights, out)
            (sums_TH,), event, hook = self._issue(bring_back, inputs, async_finish, return_recv_hook)
            assert sums_TH is not None
            return sums_TH, event, hook

        return call_or_tell(handle.carrying or handle.comm, sum_slots)

    def get_next_low_latency_combine_buffer(self, handle: SlotHandle) -> Tensor:
        """Returns an uninitialised tensor (L, R * C, H), into which the caller writes the rows of a combine
        with zero_copy=True."""
        if handle.rows_LNH is None:
            handle.rows_LNH = torch.empty(handle.shape, dtype=handle.comm.dtype, device=handle.comm.device)
        return handle.rows_LNH

    # -- masks: a lost rank raises PeerLost on all others -----------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Does nothing without `mask`; with it raises NotImplementedError."""
        if mask:
            raise NotImplementedError("no rank is masked: a lost rank raises PeerLost on all others")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Fills (R,) int32 with zeros: no rank is masked."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing: no rank is masked."""

    # ---------------------------------------------------------------------------------------------------

    def _of(self, x: Tensor, experts: int, top_k: int, tokens: int, wire: str | None) -> Communicator:
        """Returns the communicator for rows like x and exactly `tokens` as C. All ranks call it."""
        self.require_open()
        sms = self._chosen_sms if x.is_cuda else None
        sizes: dict[str, Any] = {
            "num_experts": experts,
            "hidden": x.shape[1],
            "top_k": top_k,
            "max_tokens": tokens,
        }
        key = (*sizes.values(), x.dtype, x.device, wire, sms)
        if key not in self._exact:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise InvalidArgument(
                    "a CUDA graph captures the first low-latency call of a shape, which builds a "
                    "communicator: call it once before the capture"
                )
            made = Communicator(self.group, **sizes, dtype=x.dtype, device=x.device, wire=wire, num_sms=sms)
            self._exact[key] = made
        return self._exact[key]

    def _issue(
        self, work: Callable[[], tuple[Any, ...]], inputs: Any, apart: bool, hooked: bool
    ) -> tuple[tuple[Any, ...], EventOverlap, Hook | None]:
        """Runs work; returns its tensors, an event, and a hook if `hooked`."""
        found, event = self.run(work, inputs, (), apart or hooked)
        if not hooked:
            return found, event, None
        return found, EventOverlap(), partial(event.current_stream_wait)


def _refuse_both(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InvalidArgument("async_finish and return_recv_hook are True, expected one at most")


def _ignore(name: str, value: Tensor | None) -> None:
    if value is not None:
        text = f"{name} is ignored: moecomm.Communicator.stats() tells who was waited for"
        warnings.warn(text, stacklevel=3)


def _with_rounded_scales(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in float8_e4m3fn and (T, S) float32 scales that are powers of two, the least with which
    every value of 128 columns is at most 448."""
    blocks_TSB = x_TH.float().unflatten(1, (-1, _BLOCK))
    mantissa_TS, exponent_TS = torch.frexp(blocks_TSB.abs().amax(2).clamp(min=1e-4) / 448)
    scales_TS = torch.ldexp(torch.ones_like(mantissa_TS), exponent_TS - (mantissa_TS == 0.5).int())
    values_TSB = (blocks_TSB / scales_TS.unsqueeze(2)).to(torch.float8_e4m3fn)
    return values_TSB.flatten(1), scales_TS


def _as_exponents(scales_LNS: Tensor) -> Tensor:
    """Returns powers of two as their exponents, four in an int32."""
    return (scales_LNS.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
