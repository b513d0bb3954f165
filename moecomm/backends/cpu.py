"""CPU tensors: over POSIX shared memory between the ranks of a node, over libfabric between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

import moecomm._C as _C
from moecomm.arguments import weight_dtype
from moecomm.backends.base import (
    Backend,
    DispatchCall,
    ExpertIndex,
    RawDispatch,
    address_of,
    warn_of_thread,
)
from moecomm.backends.order import InOrder
from moecomm.errors import CapacityExceeded, InvalidArgument, MoecommError, OutOfMemory, Unsupported
from moecomm.setup.devices import default_threads
from moecomm.setup.handshake import check_host_room, connect, handshake
from moecomm.setup.memory_plan import plan_memory, window_shape
from moecomm.setup.rendezvous import Rendezvous
from moecomm.types import Work

Result = TypeVar("Result")
Finished = TypeVar("Finished")
Given = TypeVar("Given", Tensor, Tensor | None)

# Smaller outputs come from torch's allocator: reusing pages pays only from this size on.
_POOLED_BYTES = 1 << 16


def _plan_view(plan: _C.Plan, name: str) -> Tensor:
    """Returns the view of that name, one of PLAN_VIEWS, as a tensor with memory of its own."""
    by_expert = plan.by_expert or plan
    if name == "overflow":
        exceeded = (each for each in (plan, plan.by_expert) if each and each.needed_rows > each.rows)
        values: Any = next((each.needed_rows for each in exceeded), 0)
    elif name == "tokens_per_expert":
        values = plan.expert_rows
    elif name == "offsets":
        values = plan.offsets
    else:
        values = [0, *by_expert.offsets] if name == "expert_starts" else by_expert.offsets
    return torch.from_numpy(np.array(values, dtype=np.int32))


class CpuBackend(Backend):
    """Owns the native communicator, which checks what the methods pass to it."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        arguments: dict[str, Any],
        argument_error: MoecommError | None,
        dtype: torch.dtype,
        threads: int | None,
    ) -> None:
        """Builds the native communicator together with the other ranks. `arguments`, `argument_error`: as in
        `setup.handshake.handshake`."""
        self.device = torch.device("cpu")
        self.dtype = dtype
        self._pool = _C.HostPool()
        group_info = handshake(rendezvous, arguments, argument_error)
        self.nodes = group_info.nodes

        self.top_k, self.hidden = arguments["top_k"], arguments["hidden"]
        shape = window_shape(
            ranks=rendezvous.size,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=arguments["max_tokens"],
            dtype=dtype,
            ranks_per_node=self.nodes.ranks_per_node,
        )
        self.memory = plan_memory(shape, self.nodes.ranks_per_node)
        check_host_room(rendezvous, group_info, self.memory.committed_bytes)
        host_ranks = group_info.host_ranks(rendezvous.rank)
        self.num_sms = threads or default_threads(host_ranks)
        self._native: _C.Communicator = connect(
            rendezvous,
            group_info,
            lambda: _C.Communicator(
                shape=shape,
                rank=rendezvous.rank,
                num_experts=arguments["num_experts"],
                threads=self.num_sms,
                timeout=rendezvous.timeout,
                absence=rendezvous.absence,
                host_ranks=host_ranks,
                first_epoch=arguments["MOECOMM_FIRST_EPOCH"],
            ),
        )
        self.network_lanes = self._native.network()[1]
        self._order = InOrder(self._native.give_up)
        # The runtime's destructor also closes, but it holds the GIL while it waits.
        finalize(self, self._native.close).atexit = False

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if torch.is_anomaly_enabled():  # anomaly mode also reads rows past the last group
            return torch.zeros(shape, dtype=dtype, device="cpu")
        if count * dtype.itemsize < _POOLED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = self._pool.take(count * dtype.itemsize)
        # Not view(): autograd refuses changes in place of a view that a Function returns.
        return torch.frombuffer(buffer, dtype=dtype, count=count).resize_(shape)

    def run(self, name: str, operation: Callable[[], Result]) -> Result:
        """Runs `operation` after all earlier ones and returns its result; torch.compile does not trace it."""
        if torch.compiler.is_compiling():
            return _run_outside_graph(self, name, operation)
        return self._order.run(self._whole, operation)

    def launch(
        self,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
        inputs: tuple[Any, ...],
    ) -> Work[Finished]:
        """Runs both halves of an operation in the communicator's own thread, after all earlier operations."""
        future = self._order.submit(self._whole, begin if complete is None else lambda: complete(begin()))
        return Work(partial(_finished, self._order, finish, future), future.done)

    def ready(self) -> None:
        """Raises the pending error, if any. All ranks are told of CapacityExceeded, though each sees the
        overflow: a rank whose `check` has already raised the error would otherwise go on alone."""
        self._announced = True
        try:
            self._native.check()
        except CapacityExceeded:
            self._announced = False
            raise
        self._announced = False

    def begin_dispatch(self, call: DispatchCall) -> tuple[_C.Plan, DispatchCall, Tensor]:
        x_TH, ids_TK = _dense(call.x_TH), _dense(call.topk_idx_TK)
        weights_TK = _dense(call.topk_weights_TK)
        x, ids, weights = _address(x_TH), _address(ids_TK), _address(weights_TK)
        self._announced = True
        plan = self._native.begin_dispatch(
            x=x,
            ids=ids,
            wide_ids=ids_TK.dtype == torch.int64,
            weights=weights,
            tokens=x_TH.shape[0],
            layout=getattr(_C.RowLayout, call.layout),
            alignment=call.alignment,
            capacity=call.capacity,
            positions=call.expert_capacity,
            caller=call.caller,
        )
        return plan, call, x_TH  # x_TH stays alive: this rank's own rows are read from it

    def finish_dispatch(
        self, begun: tuple[_C.Plan, DispatchCall, Tensor], directly: bool = True
    ) -> RawDispatch:
        self._announced = True
        plan, call, _ = begun
        by_rank, has_weights = call.layout == "rank", call.topk_weights_TK is not None
        weights = topk_idx_PK = index = None
        try:
            tokens_PH = self._empty((plan.rows, self.hidden), self.dtype)
            if has_weights:
                weights = self._empty(
                    (plan.rows, self.top_k) if by_rank else (plan.rows,), weight_dtype(self.dtype)
                )
            if by_rank:
                topk_idx_PK = self._empty((plan.rows, self.top_k), torch.int32)
                assert plan.by_expert is not None
                positions = plan.by_expert.rows
                weights_Q = self._empty((positions,), weight_dtype(self.dtype)) if has_weights else None
                index = ExpertIndex(self._empty((positions,), torch.int32), weights_Q, plan.by_expert)
        except OutOfMemory as error:
            error._is_known_to_all = False  # the other ranks have their rows and go on
            raise
        of_index = (None, None) if index is None else index[:2]
        self._native.pull(
            tokens_PH.data_ptr(), _address(weights), _address(topk_idx_PK), *map(_address, of_index)
        )
        return RawDispatch(
            tokens_PH=tokens_PH,
            weights=weights,
            topk_idx_PK=None if topk_idx_PK is None else topk_idx_PK.to(call.topk_idx_TK.dtype),
            plan_views=partial(_plan_view, plan),
            plan=plan,
            expert_index=index,
            host_counts=plan.expert_rows if call.host_counts else None,
        )

    def redispatch(
        self,
        plan: _C.Plan,
        rows_TH: Tensor,
        scales_P: Tensor | None,
        other_PH: Tensor | None,
        gradients: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rows_TH, scales_P, other_PH = _dense(rows_TH), _dense(scales_P), _dense(other_PH)
        out_PH = self._empty((plan.rows, self.hidden), self.dtype)
        dots_P = (
            None if other_PH is None else torch.zeros(plan.rows, dtype=weight_dtype(self.dtype), device="cpu")
        )
        addresses = [_address(each) for each in (rows_TH, out_PH, scales_P, other_PH, dots_P)]
        self._announced = True
        self._native.redispatch(plan, *addresses)
        return out_PH, dots_P

    def combine(
        self,
        plan: _C.Plan,
        rows_PH: Tensor | None,
        weights_P: Tensor | None,
        weight_grads: Tensor | None,
        forward: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        rows_PH, weights_P = _dense(rows_PH), _dense(weights_P)
        weight_grads = _dense(weight_grads)
        y_TH = None if rows_PH is None else self._empty((plan.tokens, self.hidden), self.dtype)
        grads_TK = None
        if weight_grads is not None:
            grads_TK = torch.empty((plan.tokens, self.top_k), dtype=weight_dtype(self.dtype), device="cpu")
        addresses = [_address(each) for each in (rows_PH, weights_P, y_TH, weight_grads, grads_TK)]
        self._announced = True
        self._native.combine(plan, *addresses)
        return y_TH, grads_TK

    def empty_input(self, num_tokens: int) -> Tensor:
        self._announced = True  # errors stay on this rank: the others do not call this
        if num_tokens == 0:
            return torch.empty((0, self.hidden), dtype=self.dtype, device="cpu")
        buffer = self._native.take_input(num_tokens)
        return torch.frombuffer(buffer, dtype=self.dtype).view(num_tokens, self.hidden)

    def _announce(self, kind: str, text: str) -> None:
        with suppress(InvalidArgument, OutOfMemory, Unsupported):
            self._native.fail(getattr(_C.ErrorKind, kind), text)

    def check(self) -> None:
        self._order.run(self._native.check)

    def close(self) -> None:
        if not self._order.finish(self._native.close):
            warn_of_thread()


def _finished(order: InOrder, finish: Callable[[Result], Finished], future: Future[Result]) -> Finished:
    """Waits for a submitted operation, and returns what `finish` makes of its result."""
    try:
        return finish(order.result(future))
    finally:
        del future  # as in `InOrder.result`


# Not traced: a trace frees a tensor of which later code uses only the address.
_run_outside_graph = _disable_dynamo(CpuBackend.run)


def _dense(tensor: Given) -> Given:
    return None if tensor is None else tensor.detach().resolve_neg().contiguous()


_NOWHERE = torch.empty(1, dtype=torch.float64, device="cpu")
_address = partial(address_of, nowhere=_NOWHERE.data_ptr())
