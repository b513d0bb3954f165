"""Operations of all buffers: their communicators, streams and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils import EventHandle, EventOverlap
from moecomm import Communicator, DispatchOutput, Handle
from moecomm.arguments import check_rows, check_weights_of_rows, weight_dtype
from moecomm.backends.opened import call_or_tell
from moecomm.errors import CommunicatorClosed, InvalidArgument
from moecomm.shared import LayerCommunicators, SharedCommunicator

Events = Sequence[EventHandle]


class PlanHandle:
    """A base of the handles of all buffers: the plan of a dispatch, and the communicator that has made the
    plan. A handle keeps the communicator alive, and may outlive many steps."""

    comm: Communicator
    handle: Handle
    options: dict[str, Any]
    """Layout, alignment and capacity of the dispatch."""

    def keep(self, out: DispatchOutput, ids_TK: Tensor) -> None:
        """Keeps the plan of a dispatch, the function `view` that makes views of it, and the ids, which are
        not copied. Does not keep the rows."""
        assert out.plan_views is not None
        self.handle, self.view, self._ids_TK = out.handle, out.plan_views, ids_TK
        self._version = _version(ids_TK)

    def is_of(self, ids_TK: Tensor) -> bool:
        """Returns whether these are the ids of the dispatch, unchanged since then."""
        return ids_TK is self._ids_TK and _version(ids_TK) == self._version

    @property
    def ids_TK(self) -> Tensor:
        """The ids of the dispatch. Raises InvalidArgument if they were changed since then."""
        if not self.is_of(self._ids_TK):
            raise InvalidArgument("topk_idx was changed after the dispatch of this handle: dispatch a copy")
        return self._ids_TK


def events_of(given: Any) -> list[EventHandle]:
    """Returns the event of an EventHandle or EventOverlap in a list, which is empty for None."""
    event = getattr(given, "event", given)
    return [] if event is None else [event]


class Operations:
    """Runs moecomm's operations between the ranks of `group` as DeepEP's callers expect them."""

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(f"group is {group!r}, expected a process group that this rank is in")
        self.group, self.explicitly_destroy = group, explicitly_destroy
        self._by_experts: dict[int, LayerCommunicators] | None = {}
        self._stream: torch.cuda.Stream | None = None

    def destroy(self) -> None:
        """Releases the communicators, except where handles keep them. Every later dispatch raises
        CommunicatorClosed. Raises InvalidArgument without `explicitly_destroy`."""
        if not self.explicitly_destroy:
            raise InvalidArgument("explicitly_destroy is False, expected True for a buffer that is destroyed")
        self._by_experts = None

    def require_open(self) -> dict[int, LayerCommunicators]:
        """Returns the communicators by their number of experts. Raises CommunicatorClosed after
        `destroy()`."""
        if self._by_experts is None:
            raise CommunicatorClosed("the buffer was destroyed")
        return self._by_experts

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the stream of operations for which the current stream does not wait."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def communicator(
        self,
        x: Any,
        experts: int,
        top_k: int,
        num_sms: int | None,
        tokens: int | None = None,
        every: int = 0,
    ) -> SharedCommunicator:
        """Returns the communicator for rows, or for a pair of fp8 rows and scales. All ranks call it.
        tokens, every: as in `LayerCommunicators.of`."""
        found = self.require_open()
        comms = found.get(experts)
        if comms is None:
            comms = found[experts] = LayerCommunicators(self.group, experts)
        rows, dtype, wire = (x[0], torch.bfloat16, "fp8") if isinstance(x, tuple) else (x, None, None)
        if rows.dim() != 2:
            raise InvalidArgument(f"x has shape {tuple(rows.shape)}, expected (T, H)")
        return comms.of(rows, top_k, dtype, wire, num_sms if rows.is_cuda else None, tokens, every)

    def run(
        self, work: Callable[[], tuple[Any, ...]], inputs: tuple[Any, ...], before: Events, apart: bool
    ) -> tuple[tuple[Any, ...], EventOverlap]:
        """Runs work on the current stream, or if `apart` on the stream of operations; returns its tensors and
        an event. Gradients are the caller's matter, as in DeepEP.

        Args:
            work: what to run; it may return other values among the tensors.
            inputs: the tensors that it reads, or None.
            before: events after which it begins; if `apart` and there are none, after the current stream.
        """
        if torch.is_grad_enabled():
            for each in inputs:
                if each is not None and each.requires_grad:
                    with torch.no_grad():  # takes the host 2 us, so only if a gradient is required
                        return self.run(work, inputs, before, apart)
        if not inputs[0].is_cuda:
            return work(), EventOverlap(EventHandle() if apart else None)
        if not apart:
            _wait_for(before)
            return work(), EventOverlap()
        current, stream = torch.cuda.current_stream(), self.get_comm_stream()
        if not before:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _wait_for(before)
            result = work()
        _record(inputs, stream)
        _record(result, current)
        return result, EventOverlap(EventHandle(stream))

    def send_along(
        self, handle: Any, x: Any, before: Events, apart: bool, num_sms: int | None = None
    ) -> tuple[Any, EventOverlap]:
        """Sends tokens along the plan of an earlier dispatch; returns the rows that arrive, and an event. A
        pair of fp8 rows and scales arrives as a pair."""
        self.require_open()
        comm, plan = plan_of(handle)
        if not isinstance(x, tuple):
            work = self.run, lambda: (comm.redispatch(x, plan),)
            (rows,), event = call_or_tell(comm, *work, (x,), before, apart)
            return rows, event

        def send() -> tuple[Any, ...]:
            _, out = self.send_again(handle, x, None, num_sms)
            return out.tokens, out.scales

        return self.run(send, x, before, apart)

    def send_again(
        self,
        handle: Any,
        x: Any,
        weights_TK: Tensor | None,
        num_sms: int | None,
        error: InvalidArgument | None = None,
        **options: Any,
    ) -> tuple[Communicator, DispatchOutput]:
        """Dispatches by the ids of an earlier dispatch, which make the same plan. This is for fp8 rows and
        weights, which cannot go along a kept plan. `options` replace those of the handle. All ranks raise
        `error`, if one gives it."""
        ids_TK = handle.ids_TK
        comm = handle.comm
        shared = self.communicator(x, comm.num_experts, ids_TK.shape[1], num_sms, every=comm.max_tokens)
        options = {**handle.options, "dequantize": not isinstance(x, tuple), **options}
        if error is not None:
            shared.refuse(error, ids_TK, options["capacity"])
        return shared.dispatch(x, ids_TK, weights_TK, **options)

    def bring_back(
        self,
        handle: Any,
        x: Tensor,
        weights: Tensor | None,
        bias: Any,
        before: Events,
        apart: bool,
        names: tuple[str, str] = ("x", "topk_weights"),
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns (T, H) sums of rows, plus one or two biases; (T, K) weights or None; and an event. names:
        of x and weights, for errors."""
        comm, plan = plan_of(handle)
        biases = [each for each in (bias if isinstance(bias, (tuple, list)) else (bias,)) if each is not None]

        def work() -> tuple[Tensor, Tensor | None]:
            if weights is None:
                sums_TH, weights_TK = comm.combine(x, plan), None
            else:
                sums_TH, weights_TK = comm.dispatch_backward(x, plan, grad_weights=weights)
            if biases:
                wide = weight_dtype(x.dtype)
                sums_TH = sum((each.to(wide) for each in biases), sums_TH.to(wide)).to(x.dtype)
            return sums_TH, weights_TK

        def checked() -> tuple[tuple[Any, ...], EventOverlap]:
            for each in biases:
                if each.shape != (plan.num_tokens, comm.hidden) or not each.is_floating_point():
                    found = f"{each.dtype} of shape {tuple(each.shape)}"
                    wanted = f"floating point of shape ({plan.num_tokens}, {comm.hidden})"
                    raise InvalidArgument(f"bias is {found}, expected {wanted}")
            if weights is not None:  # here, since the call in `work` has other names for them
                check_rows(names[0], x, plan.num_rows, comm.hidden, comm.dtype, comm.device)
                check_weights_of_rows(names[1], weights, plan, comm.top_k, comm.dtype, comm.device)
            return self.run(work, (x, weights, *biases), before, apart)

        (sums_TH, weights_TK), event = call_or_tell(comm, checked)
        return sums_TH, weights_TK, event


def parts_of(x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors of rows, or of a pair of fp8 rows and scales."""
    return x if isinstance(x, tuple) else (x,)


def plan_of(handle: Any, kind: type[PlanHandle] = PlanHandle) -> tuple[Communicator, Handle]:
    """Returns the communicator and the plan of a handle. Raises InvalidArgument for one of another kind."""
    if not isinstance(handle, kind):
        raise InvalidArgument(
            f"handle is {type(handle).__name__}, expected the {kind.__name__} of a dispatch"
        )
    return handle.comm, handle.handle


def _wait_for(events: Events) -> None:
    for each in events:
        each.current_stream_wait()


def _record(values: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
    for each in values:
        if isinstance(each, Tensor):
            each.record_stream(stream)


def _version(ids_TK: Tensor) -> int:
    return 0 if ids_TK.is_inference() else ids_TK._version


def unchanging(ids_TK: Tensor) -> Tensor:
    """Returns ids for a handle: in inference mode a copy, as changes of the caller's would not be noticed."""
    return ids_TK.clone() if ids_TK.is_inference() else ids_TK


def carriers(ids_TK: Tensor, comm: Communicator) -> Tensor:
    """Returns uninitialised rows of 16 bytes, the smallest size of a row. Dispatched by `ids_TK`, they bring
    the tokens' weights to the experts where the tokens' rows have gone along `comm` before."""
    dtype = weight_dtype(comm.dtype)
    return ids_TK.new_empty((len(ids_TK), 16 // dtype.itemsize), dtype=dtype)


def by_columns(scales: Tensor) -> Tensor:
    """Returns float32 scales (..., P, S) with the memory of each column contiguous, and padded to a multiple
    of 16 bytes, as DeepGEMM reads them."""
    rows, columns = scales.shape[-2:]
    made = scales.new_empty((*scales.shape[:-2], columns, rounded_up(rows, 4)))
    return made[..., :rows].transpose(-1, -2).copy_(scales)


def rounded_up(number: Any, alignment: int) -> Any:
    """Returns an integer, or integers in a tensor, rounded up to a multiple of `alignment`."""
    return -(-number // alignment) * alignment


def all_rounded_up(numbers: list[int], alignment: int) -> list[int]:
    """Returns the numbers, each rounded up to a multiple of `alignment`; the list itself if that is 1."""
    return numbers if alignment == 1 else [rounded_up(each, alignment) for each in numbers]
