"""What the buffers of both versions share: communicators by shape, and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils import EventHandle, EventOverlap
from moecomm.errors import CommunicatorClosed, InvalidArgument
from moecomm.shared import LayerCommunicators, SharedCommunicator


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

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the stream of operations for which the current stream does not wait."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def communicator(self, x: Any, experts: int, top_k: int, num_sms: int | None) -> SharedCommunicator:
        """Returns the communicator for rows, or for a pair of fp8 rows and scales. All ranks call it."""
        if self._by_experts is None:
            raise CommunicatorClosed("the buffer was destroyed")
        comms = self._by_experts.setdefault(experts, LayerCommunicators(self.group, experts))
        rows = x[0] if isinstance(x, tuple) else x
        sms = num_sms if rows.is_cuda else None
        if isinstance(x, tuple):
            return comms.of(rows, top_k, torch.bfloat16, "fp8", sms)
        return comms.of(rows, top_k, num_sms=sms)

    def run(
        self,
        work: Callable[[], tuple[Any, ...]],
        inputs: tuple[Any, ...],
        before: EventHandle | None,
        apart: bool,
    ) -> tuple[tuple[Any, ...], EventOverlap]:
        """Runs work, after the event `before`, on the current stream, or if `apart` on the stream of
        operations; returns its tensors and an event. Gradients are the caller's matter, as in DeepEP."""
        with torch.no_grad():
            if not inputs[0].is_cuda:
                return work(), EventOverlap(EventHandle() if apart else None)
            if not apart:
                if before is not None:
                    before.current_stream_wait()
                return work(), EventOverlap()
            current, stream = torch.cuda.current_stream(), self.get_comm_stream()
            if before is None:
                stream.wait_stream(current)
            with torch.cuda.stream(stream):
                if before is not None:
                    before.current_stream_wait()
                result = work()
            _record(inputs, stream)
            _record(result, current)
            return result, EventOverlap(EventHandle(stream))


def _record(tensors: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
    for each in tensors:
        if each is not None:
            each.record_stream(stream)


def received_ids(out: Any, fixed: bool) -> Tensor:
    """Returns (P, K) int64 local expert ids; with a fixed number of rows -1 behind the last."""
    idx_PK: Tensor = out.topk_idx.long()
    if fixed:
        behind_P = torch.arange(len(idx_PK), device=idx_PK.device) >= out.offsets[-1]
        idx_PK.masked_fill_(behind_P.unsqueeze(1), -1)
    return idx_PK


def send_along(comm: Any, handle: Any, x: Any) -> Tensor:
    """Returns the rows that tokens become along the plan of an earlier dispatch."""
    if isinstance(x, tuple):
        raise NotImplementedError(
            "fp8 rows with handle=: moecomm sends rows along a plan in the dtype of its communicator"
        )
    rows: Tensor = comm.redispatch(x, handle)
    return rows


def bring_back(comm: Any, handle: Any, x: Tensor, weights: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """Returns (T, H) sums of rows, plus one or two biases, and (T, K) weights or None."""
    if weights is None:
        sums_TH, weights_TK = comm.combine(x, handle), None
    else:
        sums_TH, weights_TK = comm.dispatch_backward(x, handle, grad_weights=weights)
    given = [each for each in biases_of(bias) if each is not None]
    if given:
        sums_TH = sum((each.float() for each in given), sums_TH.float()).to(x.dtype)
    return sums_TH, weights_TK


def biases_of(bias: Any) -> tuple[Any, ...]:
    return tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)


def rounded_up(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
