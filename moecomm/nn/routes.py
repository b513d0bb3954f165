"""How the rows of one pass through the experts travel: as one, or in parts by the experts of each rank.

Both ways have the same methods, so that the stages of a layer are written once. `part` counts from 0.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moecomm.communicator import Communicator
from moecomm.overlap import in_turns
from moecomm.parts import CombineInParts, DispatchInParts, RedispatchInParts
from moecomm.routing import part_experts
from moecomm.types import DispatchOutput, Handle, Work


class Slices:
    """Which rows and experts are a part's."""

    def __init__(self, out: DispatchOutput, local_experts: int) -> None:
        ends = out.handle.part_ends
        self.whole = len(ends) < 2
        self._rows = (0, *(ends or (out.handle.num_rows,)))
        self._experts = (0, *part_experts(local_experts, max(len(ends), 1)))
        self._offsets_L = out.offsets
        self._own_offsets: dict[int, Tensor] = {}

    def rows(self, part: int) -> slice:
        """Of the layer's rows."""
        return slice(self._rows[part], self._rows[part + 1])

    def experts(self, part: int) -> slice:
        """Of this rank's."""
        return slice(self._experts[part], self._experts[part + 1])

    def offsets(self, part: int) -> Tensor:
        """The ends of the part's experts among its rows. Made on the current stream when first asked for."""
        if self.whole:
            return self._offsets_L
        if part not in self._own_offsets:
            self._own_offsets[part] = self._offsets_L[self.experts(part)] - self._rows[part]
        return self._own_offsets[part]

    def ends(self, part: int) -> Tensor | None:
        """What says on the device how many rows are real; None: all."""
        return self._offsets_L if self.whole else None


class Route(Protocol):
    """There for the forward and the backward of one pass. Each is called on the communicator's stream."""

    def publish(self, x_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> None:
        """Brings the rows on their way."""

    def receive(self, part: int) -> DispatchOutput:
        """The rows of the next part are there then."""

    def combine(self, part: int, rows: Tensor) -> Tensor | None:
        """What the experts of the next part have made; with the last one the result, (T, H)."""

    def send_again(self, part: int, kind: str, x_TH: Tensor, handle: Handle) -> Tensor:
        """Other rows of the tokens along the way of the first: (P, H), of which the part's are there."""

    def home(
        self, part: int, rows: Tensor, handle: Handle, grad_weights_P: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Gradients of the next part's rows; with the last one those of tokens and of routing weights."""


class AsOne:
    """With a capacity, or without."""

    def __init__(self, comm: Communicator, capacity: int | None, handle: Handle | None) -> None:
        self._comm, self._capacity, self._handle = comm, capacity, handle
        self._begun: DispatchInParts | Work[DispatchOutput] | None = None
        self._out: DispatchOutput | None = None

    def publish(self, x_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> None:
        """Starts it; without a capacity the rest waits for the number of rows. In a program of `interleave`
        operations of others may come before that, and `receive` is called on the stream that needs them."""
        tokens = (x_TH, topk_idx_TK, topk_weights_TK)
        if self._capacity is not None:
            self._out = self._comm.dispatch(*tokens, capacity=self._capacity)
        elif in_turns():
            self._begun = self._comm.dispatch(*tokens, async_op=True)
        else:
            self._begun = self._comm.begin_dispatch(*tokens, parts=1)

    def receive(self, part: int) -> DispatchOutput:
        """All of it."""
        begun, self._begun = self._begun, None
        if isinstance(begun, Work):
            self._out = begun.wait()
        elif begun is not None:
            begun.receive()
            self._out = begun.output
        out, self._out = self._out, None
        assert out is not None
        self._handle = out.handle
        return out

    def combine(self, part: int, rows: Tensor) -> Tensor | None:
        """All of it."""
        assert self._handle is not None
        return self._comm.combine(rows, self._handle)

    def send_again(self, part: int, kind: str, x_TH: Tensor, handle: Handle) -> Tensor:
        """All of it."""
        return self._comm.redispatch(x_TH, handle)

    def home(
        self, part: int, rows: Tensor, handle: Handle, grad_weights_P: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """All of it."""
        return self._comm.dispatch_backward(rows, handle, grad_weights=grad_weights_P)


class InParts:
    """Without a capacity."""

    def __init__(self, comm: Communicator, parts: int, handle: Handle | None) -> None:
        self._comm, self._parts, self._handle = comm, parts, handle
        self._dispatch: DispatchInParts | None = None
        self._again: dict[str, RedispatchInParts] = {}
        self._combine: CombineInParts | None = None

    def publish(self, x_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> None:
        """Starts it."""
        self._dispatch = self._comm.begin_dispatch(x_TH, topk_idx_TK, topk_weights_TK, parts=self._parts)

    def receive(self, part: int) -> DispatchOutput:
        """The next part; the host waits for the number of rows with the first."""
        assert self._dispatch is not None
        self._dispatch.receive()
        self._handle = self._dispatch.output.handle
        return self._dispatch.output

    def combine(self, part: int, rows: Tensor) -> Tensor | None:
        """The next part."""
        if part == 0:
            assert self._handle is not None
            self._combine, self._dispatch = self._comm.begin_combine(self._handle), None
        return self._sent(part, rows)[0]

    def send_again(self, part: int, kind: str, x_TH: Tensor, handle: Handle) -> Tensor:
        """The next part of rows of one `kind`."""
        if part == 0:
            self._again[kind] = self._comm.begin_redispatch(x_TH, handle)
        begun = self._again[kind]
        begun.receive()
        if begun.done == begun.parts:
            del self._again[kind]
        return begun.rows

    def home(
        self, part: int, rows: Tensor, handle: Handle, grad_weights_P: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The next part."""
        if part == 0:
            self._combine = self._comm.begin_combine(handle, grad_weights=grad_weights_P)
        grad_x_TH, grads_TK = self._sent(part, rows)
        return None if grad_x_TH is None else (grad_x_TH, grads_TK)

    def _sent(self, part: int, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        assert self._combine is not None
        self._combine.send(rows)
        if part + 1 < self._parts:
            return None, None
        result, self._combine = self._combine.result, None
        return result


def make_route(comm: Communicator, capacity: int | None, parts: int, handle: Handle | None) -> Route:
    """In `parts`. `handle`: of a dispatch that has been, along which it goes."""
    return AsOne(comm, capacity, handle) if parts == 1 else InParts(comm, parts, handle)


def route_parts(comm: Communicator, capacity: int | None, parts: int) -> int:
    """As many as this communicator can have, and a call without a capacity."""
    return 1 if capacity is not None else min(parts, comm.most_parts)
