"""CUDA tensors over NVLink between GPUs of a node, over libfabric between nodes. Each rank has its own GPU.

Every operation is put on the caller's current stream and runs after the previous operation on the device,
even if that is on another stream. The host waits in one place, for the row count of a dropless dispatch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

import moecomm._C as _C
from moecomm.arguments import weight_dtype
from moecomm.backends.base import Backend, DispatchCall, ExpertIndex, RawDispatch, address_of
from moecomm.backends.cuda_outputs import Begun, Inputs, Outputs, out_of_memory
from moecomm.backends.cuda_plan import TensorPlan, plan_fields_of
from moecomm.backends.cuda_setup import check_room, connect_gpus, meet, release
from moecomm.backends.order import ProcessLock, within_another
from moecomm.backends.side_work import SideWork
from moecomm.device.cuda_device import CudaDevice, StreamOrder
from moecomm.errors import InvalidArgument, MoecommError, OutOfMemory, PeerLost, PeerTimeout
from moecomm.setup.memory_plan import device_shape, plan_device_memory
from moecomm.setup.rendezvous import Rendezvous
from moecomm.types import WIRE_FORMATS, Work

Result = TypeVar("Result")
Finished = TypeVar("Finished")
Given = TypeVar("Given", Tensor, Tensor | None)

# Bulk copies read rows from addresses that are multiples of this.
_ALIGNMENT = 16

_Sending = tuple[int, int, int, bool, int, int, _C.RowLayout, int, int, int, int, int]


class CudaBackend(Backend):
    """Owns the native communicator and the symmetric memory."""

    def __init__(
        self,
        device: torch.device,
        rendezvous: Rendezvous,
        arguments: dict[str, Any],
        argument_error: MoecommError | None,
        dtype: torch.dtype,
        num_sms: int | None,
    ) -> None:
        """Arguments as of CpuBackend; num_sms: None lets the runtime choose."""
        self.device, self.dtype = device, dtype
        self._weight_dtype = weight_dtype(dtype)
        self._layouts = {"expert": _C.RowLayout.expert, "rank": _C.RowLayout.rank}
        self._gpu = CudaDevice(device.index)
        self._lock = ProcessLock()
        self._capturing = False
        self._inside = False  # True while an operation runs
        self._raw_stream = 0
        self._order = StreamOrder(self._gpu)
        self._side: torch.cuda.Stream | None = None
        self._unfinished: SideWork[Any, Any] | None = None
        self._stats_before: dict[str, Any] = {}

        with self._gpu.current():
            group_info = meet(rendezvous, arguments, argument_error, self._gpu)
            self.nodes = group_info.nodes
            self.top_k, self.hidden = arguments["top_k"], arguments["hidden"]
            self.wire_format = WIRE_FORMATS.get(arguments["wire"])
            shape = device_shape(
                **{
                    name: arguments[name] for name in ("num_experts", "top_k", "hidden", "max_tokens", "wire")
                },
                dtype=dtype,
                ranks=rendezvous.size,
                ranks_per_node=self.nodes.ranks_per_node,
                whole_sources=arguments["MOECOMM_WHOLE_SOURCES"],
            )
            self.memory = plan_device_memory(shape, self.nodes.ranks_per_node)
            self._plan_fields = plan_fields_of(shape)
            check_room(rendezvous, group_info, self.memory, self._gpu)
            dtypes = [dtype, self._weight_dtype, torch.int32, torch.int64, torch.float32]
            if self.wire_format is not None:
                dtypes += [self.wire_format.values, self.wire_format.scales]
            # An empty tensor of each dtype, from which new tensors are made.
            self._kinds = {each: torch.empty(0, dtype=each, device=device) for each in dtypes}
            self._nowhere = torch.empty(_ALIGNMENT, dtype=torch.uint8, device=device)
            self._nowhere_address = self._nowhere.data_ptr()
            self._address = partial(address_of, nowhere=self._nowhere_address)
            self._native: _C.DeviceCommunicator
            self._native, window = connect_gpus(
                rendezvous, group_info, shape, self.memory, self._gpu.index, num_sms or 0
            )
            self.num_sms, self.weighs_tokens = self._native.num_sms, self._native.weighs_tokens
            self.network_lanes = self._native.network()[1]
        # release() also runs when the backend is garbage collected, and when the interpreter ends.
        self._release = weakref.finalize(self, release, self._gpu, self._native, window)

    # -- order -----------------------------------------------------------------------------------------

    @property
    def stream(self) -> torch.cuda.Stream:
        """The CUDA stream on which operations of `launch` run; it is created on first use."""
        if self._side is None:
            self._side = self._gpu.new_stream()
        return self._side

    def run(self, name: str, operation: Callable[[], Result]) -> Result:
        """Runs `operation` on the caller's current stream."""
        with self._lock:
            self._settle_begun()
            return self.run_now(name, operation)

    def run_now(self, name: str, operation: Callable[[], Result]) -> Result:
        """Does the work of `run`. The caller holds the lock, and no earlier operation is left half done.
        torch.compile does not trace this."""
        if torch.compiler.is_compiling():
            return _run_outside_graph(self, name, operation)
        gpu = self._gpu
        if not gpu.is_current():
            with gpu.current():
                return self.run_now(name, operation)
        if self._inside:
            raise within_another()
        gpu.push_range(name)
        try:
            self._inside = True
            self._raw_stream = gpu.raw_stream()
            self._capturing = gpu.capturing()
            self._order.follow(self._raw_stream, self._capturing)
            return self._whole(operation)
        finally:
            self._inside = False
            gpu.pop_range()

    def launch(
        self,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
        inputs: tuple[Any, ...],
    ) -> Work[Finished]:
        """Puts an operation on `stream`, after all work on the caller's current stream. `wait` or the next
        operation calls `complete`."""
        side = self.stream
        side.wait_stream(self._gpu.stream())
        work = SideWork(self, name, begin, complete, finish)
        with self._lock:
            self._settle_begun()
            began = work.begin()
            if complete is not None:
                self._unfinished = work
        for each in inputs if began else ():
            if isinstance(each, Tensor):
                each.record_stream(side)
        return Work(work.wait, work.is_completed, work.join)

    def _settle_begun(self) -> None:
        """Runs the second half of the operation that `launch` has only begun, if there is one."""
        if self._unfinished is not None:
            self._unfinished.complete()

    def settle(self, work: SideWork[Any, Any]) -> None:
        """Runs the second half of `work`, unless it has run."""
        with self._lock:
            work.complete()

    # -- operations ------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Does nothing: the runtime refuses work when it is closed or broken. All ranks learn of an exceeded
        capacity by `check`, or with the row count of a dropless dispatch."""

    def dispatch(self, call: DispatchCall) -> RawDispatch:
        """Sends rows and receives those that arrive. With a capacity it is one call of the runtime."""
        if call.capacity < 0:
            return self.finish_dispatch(self.begin_dispatch(call, offers=True))
        sending, blob, _inputs = self._sending(call)  # _inputs live until the output has memory
        rows = (call.capacity, call.expert_capacity)
        return self._receive(call, blob, rows, partial(self._native.dispatch, *sending))

    def begin_dispatch(self, call: DispatchCall, offers: bool = False) -> Begun:
        """Sends the rows of a dispatch: its first half. `offers`: the output of a dropless dispatch may be
        allocated before its number of rows is known, in the size that the runtime proposes. No earlier work
        on the stream can still read this memory, so rows may be received into it at once, if they fit."""
        offered, at_once = (0, 0), False
        if call.capacity < 0:
            if self._capturing:
                raise InvalidArgument(
                    "capacity is None within a CUDA graph capture, expected a number of rows: a dropless "
                    "dispatch waits for its row count on the host"
                )
            if offers:
                tokens, layout = call.x_TH.shape[0], self._layouts[call.layout]
                rows, positions, at_once = self._native.offered_rows(tokens, layout, call.alignment)
                offered = rows, positions
        sending, blob, inputs = self._sending(call)
        outputs: Outputs | None = None
        if offered[0] > 0:
            with suppress(OutOfMemory):  # memory may suffice once the number of rows is known
                outputs = self._outputs(call, offered)
        at_once = at_once and outputs is not None
        if at_once:
            self._start_receiving(outputs, offered, partial(self._native.dispatch, *sending))
        else:
            self._announced = True
            self._native.begin_dispatch(*sending, self._raw_stream)
        return Begun(call, blob, inputs, self._raw_stream, outputs, offered, at_once, offers)

    def splits(self, tokens: int) -> bool:
        return self._native.splits(tokens)

    def finish_dispatch(self, begun: Begun, directly: bool = True) -> RawDispatch:
        """Receives the rows; without a capacity the host waits for their number. An output that
        `begin_dispatch` has allocated is cut to that number, or replaced if it is too small."""
        self._announced = True
        call, blob, inputs, stream, outputs, offered, at_once, in_one_call = begun
        if stream != self._raw_stream:
            for each in (*inputs, blob, *(outputs or ())):
                if each is not None:
                    each.record_stream(self._gpu.stream())
        counts = (call.capacity, call.expert_capacity)
        if call.capacity < 0:
            counts = self._native.wait_rows(self._raw_stream)
        if outputs is not None and (counts[0] > offered[0] or counts[1] > offered[1]):
            outputs.free()
            outputs = None
        if outputs is None:
            # Rows must not be received directly in two cases. (1) `_outputs` or torch fills the outputs, so a
            # kernel runs between the halves. (2) The host waited for the number of rows. Meanwhile another
            # thread may have launched a kernel and freed memory that the kernel still reads; the output may
            # get this memory.
            filled = call.capacity >= 0 and call.layout == "rank"
            filled = filled or torch.are_deterministic_algorithms_enabled() or torch.is_anomaly_enabled()
            directly = directly and not filled and not (in_one_call and call.capacity < 0)
            return self._receive(call, blob, counts, partial(self._native.finish_dispatch, directly))
        outputs.cut(*counts)
        if at_once:
            self._native.accept_rows()
        else:
            self._start_receiving(outputs, counts, partial(self._native.finish_dispatch, directly))
        return self._received(call, blob, counts, outputs)

    def _sending(self, call: DispatchCall) -> tuple[_Sending, Tensor, Inputs]:
        """Returns the arguments of the runtime's `begin_dispatch` without the stream, the plan's memory, and
        the tensors that the kernels read. (Receiving kernels write while sending kernels read these tensors,
        so the output must not reuse their memory.)"""
        x_TH, x_address = self._readable(call.x_TH)
        x_scales, scales_address = self._readable(call.x_scales)
        ids_TK, ids_address = self._readable(call.topk_idx_TK)
        weights_TK, weights_address = self._readable(call.topk_weights_TK)
        blob = self._empty((self._plan_fields.words,), torch.int32)
        sending = (
            x_address,
            scales_address,
            ids_address,
            ids_TK.dtype is torch.int64,
            weights_address,
            x_TH.shape[0],
            self._layouts[call.layout],
            call.alignment,
            call.capacity,
            call.expert_capacity,
            call.caller,
            self._address(blob),
        )
        return sending, blob, (x_TH, x_scales, ids_TK, weights_TK)

    def _receive(
        self, call: DispatchCall, blob: Tensor, counts: tuple[int, int], receive: Callable[..., None]
    ) -> RawDispatch:
        """Receives the rows into new tensors by `receive`, a function of the runtime that takes `counts` (of
        rows and of expert-major positions), addresses, and the stream."""
        try:
            outputs = self._outputs(call, counts)
        except OutOfMemory as error:
            # Receives the rows and discards them, so that the peers do not wait for this rank.
            self._start_receiving(None, (0, 0), receive)
            error._is_known_to_all = False
            raise
        self._start_receiving(outputs, counts, receive)
        return self._received(call, blob, counts, outputs)

    def _outputs(self, call: DispatchCall, counts: tuple[int, int]) -> Outputs:
        """Returns the tensors of a dispatch's output. With a capacity `rows_Q` and `weights_Q` are filled
        with zeros, since not all positions are written."""
        by_rank, weighted = call.layout == "rank", call.topk_weights_TK is not None
        rows, positions = counts
        topk_idx_PK = scales = weights = rows_Q = weights_Q = None
        handed_on = None if call.dequantize else self.wire_format
        tokens_PH = self._empty((rows, self.hidden), self.dtype if handed_on is None else handed_on.values)
        if handed_on is not None:
            scales = self._empty(handed_on.scales_shape(rows, self.hidden), handed_on.scales)
        if weighted:
            weights = self._empty((rows, self.top_k) if by_rank else (rows,), self._weight_dtype)
        if by_rank:
            topk_idx_PK = self._empty((rows, self.top_k), call.topk_idx_TK.dtype)
            rows_Q = self._empty((positions,), torch.int32)
            if weighted:
                weights_Q = self._empty((positions,), self._weight_dtype)
            if call.capacity >= 0:
                for each in (rows_Q, weights_Q):
                    if each is not None:
                        each.zero_()
        return Outputs(tokens_PH, scales, weights, topk_idx_PK, rows_Q, weights_Q)

    def _start_receiving(
        self, outputs: Outputs | None, counts: tuple[int, int], receive: Callable[..., None]
    ) -> None:
        """Calls `receive`, a function of the runtime that receives rows (see `_receive`); without `outputs`
        it discards the rows."""
        rows, by_rank = counts[0], outputs is not None and outputs.rows_Q is not None
        if outputs is None:
            addresses = [self._nowhere_address, 0, 0, 0, 0, 0]
        else:
            addresses = [self._address(each) for each in outputs]
        self._announced = True
        receive(rows, counts[1] if by_rank else rows, *addresses, self._raw_stream)

    def _received(
        self, call: DispatchCall, blob: Tensor, counts: tuple[int, int], outputs: Outputs
    ) -> RawDispatch:
        """Returns the result of a dispatch whose rows arrive in `outputs`."""
        tokens = call.x_TH.shape[0]
        index = None
        if outputs.rows_Q is not None:
            positions = TensorPlan(blob, "expert", tokens, counts[1], self._raw_stream)
            index = ExpertIndex(outputs.rows_Q, outputs.weights_Q, positions)
        return RawDispatch(
            outputs.tokens_PH,
            outputs.weights,
            outputs.topk_idx_PK,
            partial(self._plan_fields.view, blob, call.layout),
            TensorPlan(blob, call.layout, tokens, counts[0], self._raw_stream),
            outputs.scales,
            index,
            self._native.host_counts() if call.host_counts else None,
        )

    def redispatch(
        self,
        plan: TensorPlan,
        rows_TH: Tensor,
        scales_P: Tensor | None,
        other_PH: Tensor | None,
        gradients: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rows_TH, rows_address = self._readable(rows_TH)
        scales_P, scales_address = self._readable(scales_P)
        other_PH, other_address = self._readable(other_PH)
        out_PH, dots_P = self._empty((plan.rows, self.hidden), self.dtype), None
        if other_PH is not None:
            dots_P = self._empty((plan.rows,), self._weight_dtype).zero_()
        plan_address, out_address = self._plan_address(plan), self._address(out_PH)
        dots_address = self._address(dots_P)
        self._announced = True  # after all that may raise on this rank alone
        self._native.redispatch(
            plan_address,
            self._layouts[plan.layout],
            rows_address,
            plan.tokens,
            plan.rows,
            out_address,
            scales_address,
            other_address,
            dots_address,
            gradients and scales_P is None and other_PH is None,
            self._raw_stream,
        )
        return out_PH, dots_P

    def combine(
        self,
        plan: TensorPlan,
        rows_PH: Tensor | None,
        weights_P: Tensor | None,
        weight_grads: Tensor | None,
        forward: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        return self._combine(plan, rows_PH, weights_P, weight_grads, forward, held=False)[:2]

    def combine_weighted(self, plan: TensorPlan, rows_PH: Tensor, weights_TK: Tensor) -> Tensor:
        if not self.weighs_tokens:
            return super().combine_weighted(plan, rows_PH, weights_TK)
        y_TH, *_ = self._combine(plan, rows_PH, None, None, True, held=False, weights_TK=weights_TK)
        assert y_TH is not None
        return y_TH

    def begin_combine(self, plan: TensorPlan, rows_PH: Tensor, weights_P: Tensor | None) -> tuple[Any, ...]:
        return self._combine(plan, rows_PH, weights_P, None, True, held=True)

    def finish_combine(self, begun: tuple[Any, ...]) -> Tensor:
        """Receives and adds sums. Raises InvalidArgument if a capture of the first half alone has ended."""
        self._announced = True  # the first half has announced the operation to all ranks
        if not self._native.complete(self._raw_stream):
            raise InvalidArgument(
                "the capture in which an operation was begun has ended without its second half, and nothing "
                "of it runs: wait for it within the capture"
            )
        return super().finish_combine(begun)

    def _combine(
        self,
        plan: TensorPlan,
        rows_PH: Tensor | None,
        weights_P: Tensor | None,
        weight_grads: Tensor | None,
        forward: bool,
        *,
        held: bool,
        weights_TK: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Any, Any, Any]:
        """Runs a combine, or only its first half if `held`. Returns the result of `combine`, and the rows,
        weights and plan that kernels read. weights_TK: this rank's tokens' weights, in place of weights_P."""
        y_TH = grads_TK = None
        weights_P, weights_address = self._readable(weights_P)
        weights_TK, token_weights = self._readable(weights_TK)
        rows_PH, rows_address = self._readable(rows_PH)
        weight_grads, grads_address = self._readable(weight_grads)
        if rows_PH is not None:
            y_TH = self._empty((plan.tokens, self.hidden), self.dtype)
        if weight_grads is not None:
            grads_TK = self._empty((plan.tokens, self.top_k), self._weight_dtype)
        plan_address = self._plan_address(plan)
        y_address, grads_to = self._address(y_TH), self._address(grads_TK)
        self._announced = True  # after all that may raise on this rank alone
        self._native.combine(
            plan_address,
            self._layouts[plan.layout],
            rows_address,
            weights_address,
            token_weights,
            plan.tokens,
            y_address,
            grads_address,
            grads_to,
            forward,
            held,
            self._raw_stream,
        )
        return y_TH, grads_TK, rows_PH, weights_P, plan

    def empty_input(self, num_tokens: int) -> Tensor:
        self._announced = True  # errors stay on this rank: the others do not call this
        return self._empty((num_tokens, self.hidden), self.dtype)

    # -- state -----------------------------------------------------------------------------------------

    def _announce(self, kind: str, text: str) -> None:
        if not self._capturing:  # a capture only records
            self._native.fail(getattr(_C.ErrorKind, kind), text, self._raw_stream)

    def check(self) -> None:
        with self._lock:
            try:
                self._native.check()
            except (PeerLost, PeerTimeout):
                self.has_ended = True  # found outside of an operation
                raise

    def stats(self) -> dict[str, Any]:
        """Device counters are never set to zero: their values at the last reset are subtracted."""
        with self._lock, self._gpu.current():
            before = self._stats_before
            found = {name: _less(value, before.get(name)) for name, value in self._native.stats().items()}
        return {"plans_reused": 0, "bytes_staged": 0, **found}

    def reset_stats(self) -> None:
        with self._lock, self._gpu.current():
            self._native.reset_stats()
            self._stats_before = dict(self._native.stats())

    def last_phases(self) -> dict[str, dict[str, float]]:
        with self._lock, self._gpu.current():
            return self._native.phases()

    def close(self) -> None:
        with self._lock:
            self._settle_begun()
            self._release()

    # -- tensors ---------------------------------------------------------------------------------------

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised tensor. torch.empty would take 1.5 times as long, as it parses dtype and
        device."""
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        try:
            found = self._kinds[dtype].new_empty_strided(shape, strides)
            return found.zero_() if torch.is_anomaly_enabled() else found  # anomaly mode reads every row
        except torch.OutOfMemoryError as error:
            raise out_of_memory(shape, dtype, error) from error

    def _plan_address(self, plan: TensorPlan) -> int:
        if plan.stream != self._raw_stream:
            # The caller keeps its own tensors alive across streams, but does not know of the plan's blob.
            plan.blob.record_stream(self._gpu.stream())
        return plan.blob.data_ptr()

    def _readable(self, tensor: Given) -> tuple[Given, int]:
        """Returns `tensor` and its address; (None, 0) for None. Copies a tensor that is not contiguous or not
        aligned for bulk copies."""
        if tensor is None:
            return tensor, 0
        address = tensor.data_ptr()
        if address % _ALIGNMENT or not tensor.is_contiguous():
            try:
                tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            except torch.OutOfMemoryError as error:
                raise out_of_memory(tuple(tensor.shape), tensor.dtype, error) from error
            address = self._address(tensor)
        return tensor, address or self._nowhere_address


# Not traced: a trace frees a tensor of which later code uses only the address.
_run_outside_graph = _disable_dynamo(CudaBackend.run_now)


def _less(value: Any, before: Any) -> Any:
    """Returns how much a counter, or each counter of a list, has grown."""
    if isinstance(value, list):
        return [_less(*each) for each in zip(value, before or [0] * len(value), strict=True)]
    return value - (before or 0)
