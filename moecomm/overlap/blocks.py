"""Blocks cut into nodes where their transfers are, for merged microbatches (moecomm/overlap/merged.py)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.overlap.beside import Beside, Turns

Result = TypeVar("Result")
Values = tuple[Any, ...]
"""Tensors, and other objects, that go from node to node. Those that are no tensors, or need no gradient, are
handed on as they are."""
Turned = Generator[None, None, Result]
"""Work that pauses at the end of each turn, and returns a result."""


def run_through(work: Turned[Result]) -> Result:
    """Runs work in turns to its end and returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: Result = stop.value
            return result


class Segment:
    """A part of a microbatch's forward with an autograd graph of its own.

    Attributes:
        inputs: the values that it was made of, tensors cut from their graphs. They may be let go of.
        names: its nodes, for errors.
    """

    def __init__(self, *values: Any) -> None:
        self._grads: list[Tensor | None] = []
        self._ends: list[Any] = []
        self.names: list[str] = []
        needing = tuple(each for each in values if needs_gradient(each))
        entered: Iterator[Tensor] = iter(())
        if needing:
            anchor = needing[0].new_empty(0).requires_grad_()
            entered = iter(_Enter.apply(self._grads, needing, anchor))  # type: ignore[no-untyped-call]
        self._needs = [needs_gradient(each) for each in values]
        self.inputs: Values = tuple(
            next(entered) if needs else each for each, needs in zip(values, self._needs, strict=True)
        )

    def end(self, *values: Any) -> None:
        """Sets the results. Only their places in the graph are kept."""
        self._ends = [get_gradient_edge(each) if needs_gradient(each) else None for each in values]
        self.inputs = ()

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Takes the gradients of the results, adds the gradients of parameters to their `grad`, and returns
        those of the inputs. The graph is gone then."""
        ends, self._ends = self._ends, []
        pairs = zip(ends, grads, strict=True)
        wanted = [(end, grad) for end, grad in pairs if end is not None and grad is not None]
        del ends
        if wanted:
            kind = wanted[0][1].device.type
            # As a backward outside the caller's autocast; a checkpoint's recompute turns it on again.
            cast = torch.is_autocast_enabled(kind)
            with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
                _run_backward([end for end, _ in wanted], [grad for _, grad in wanted])
        found = iter(self._grads or [None] * sum(self._needs))
        return tuple(next(found) if needs else None for needs in self._needs)


def _run_backward(ends: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Runs autograd's backward from these results or places in graphs, on this thread. On GPUs autograd has a
    thread for each device, which the host would wake, and wait for, once for each segment."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(ends, grads)


class _Enter(torch.autograd.Function):
    """The begin of a segment's graph, which collects the gradients that arrive there. It holds no tensor, as
    leaves with a `grad` would."""

    @staticmethod
    def forward(
        ctx: Any, grads: list[Tensor | None], values: tuple[Tensor, ...], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in values)

    @staticmethod
    @_disable_dynamo
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.grads.extend(grads)
        return None, None, None


def needs_gradient(value: Any) -> bool:
    """Returns True for a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def detached(value: Any) -> Any:
    """Returns a tensor cut from its graph, which still says whether it requires a gradient."""
    return value.detach().requires_grad_() if needs_gradient(value) else value


class Operations(NamedTuple):
    """The operations of a communicator that one transfer of a node consists of."""

    comm: Communicator
    number: int
    waits: bool = False
    """True: the host waits for it, and so learns of errors of other ranks."""


class CutBlock(ABC):
    """A block with experts on other ranks, cut into nodes: its attention, with the router; dispatch, experts
    and combine; and what comes after."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Computes the block by itself, differentiated by autograd."""

    @abstractmethod
    def _to_experts(self, x: Tensor) -> tuple[Values, Values]:
        """Returns the values that stay here until `_from_experts`, and those that go to the experts. Autograd
        differentiates it."""

    @abstractmethod
    def _forward_experts(self, inputs: Values, turns: Turns) -> Turned[tuple[Values, Any]]:
        """Computes dispatch, experts and combine of values without a graph. It pauses with the dispatch under
        way, and the combine, and returns the results, which require gradients if they have any, and what
        `_backward_experts` needs."""

    @abstractmethod
    def _backward_experts(
        self, kept: Any, grads: Sequence[Tensor | None], turns: Turns
    ) -> Turned[Sequence[Tensor | None]]:
        """Takes the gradients of the results and returns those of the inputs. It pauses with the gradients of
        the combine under way, and those of the dispatch, and adds to those of parameters."""

    @abstractmethod
    def _from_experts(self, home: Values, results: Values) -> Tensor:
        """Returns the block's result. Autograd differentiates it."""

    @abstractmethod
    def _operations(self, kept: Any) -> Sequence[Operations]:
        """Returns the operations of the forward's two transfers (kept is None), or of the backward's two."""


class Block(CutBlock):
    """A block given as callables for its nodes, which autograd differentiates.

        block = Block(comm, attention, dispatch, experts, combine)

        attention(x)      -> (residual, *values)   everything before the dispatch, the router too
        dispatch(*values) -> values                transfers of comm
        experts(*values)  -> values
        combine(*values)  -> y                     transfers of comm
        after(residual, y) -> x of the next block  by default their sum

    Values are tensors or other objects (a dispatch's handle, say), several of them as a tuple. dispatch and
    combine run on comm.stream, and so do their backwards; what they do besides transfers is not beside
    anything of this microbatch. Each rank calls one operation of `comm` in each of them.

    `block(x)` computes the block in order, as a plain function would.

    Attributes:
        comm: the communicator of its transfers.
    """

    def __init__(
        self,
        comm: Communicator,
        attention: Callable[[Tensor], tuple[Any, ...]],
        dispatch: Callable[..., Any],
        experts: Callable[..., Any],
        combine: Callable[..., Any],
        after: Callable[[Any, Any], Tensor] = torch.add,
    ) -> None:
        self.comm = comm
        self._attention, self._after = attention, after
        self._nodes = {"dispatch": dispatch, "experts": experts, "combine": combine}
        for name, node in {"attention": attention, **self._nodes, "after": after}.items():
            if not callable(node):
                raise InvalidArgument(f"{name} is {type(node).__name__}, must be callable")

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the block in order."""
        home, values = self._to_experts(x)
        for node in self._nodes.values():
            values = _as_tuple(node(*values))
        return self._from_experts(home, values)

    def _to_experts(self, x: Tensor) -> tuple[Values, Values]:
        """Returns (residual,) and the values for the dispatch."""
        found = self._attention(x)
        if not isinstance(found, tuple) or len(found) < 2:
            raise InvalidArgument(
                f"attention returned {described(found)}, must return a tuple (residual, *values)"
            )
        return found[:1], found[1:]

    def _forward_experts(self, inputs: Values, turns: Turns) -> Turned[tuple[Values, Any]]:
        """Computes the three nodes, each in a segment of its own."""
        segments: list[Segment] = []
        for name, node in self._nodes.items():
            segment = Segment(*inputs)
            segments.append(segment)
            beside = contextlib.nullcontext() if name == "experts" else Beside(self.comm, turns=turns)
            with beside as side:
                read = segment.inputs  # by the transfer, until it is joined
                inputs = _as_tuple(node(*read))
            segment.end(*inputs)
            if side is not None:
                yield
                side.join(*(each for each in inputs if isinstance(each, Tensor)))
            del read
        return tuple(map(detached, inputs)), segments

    def _backward_experts(
        self, kept: Any, grads: Sequence[Tensor | None], turns: Turns
    ) -> Turned[Sequence[Tensor | None]]:
        """Goes back through the segments."""
        combine, experts, dispatch = reversed(kept)
        with (side := Beside(self.comm, turns=turns)):
            read, grads = grads, combine.backward(grads)  # read by the transfer, until it is joined
        yield
        side.join(*grads)
        del read
        grads = experts.backward(grads)
        with (side := Beside(self.comm, turns=turns)):
            read, grads = grads, dispatch.backward(grads)
        yield
        side.join(*grads)
        del read
        return grads

    def _from_experts(self, home: Values, results: Values) -> Tensor:
        """Returns after(residual, y)."""
        if len(results) != 1:
            raise InvalidArgument(f"combine returned {len(results)} values, must return one tensor")
        return self._after(home[0], results[0])

    def _operations(self, kept: Any) -> Sequence[Operations]:
        """Returns one operation a transfer."""
        return (Operations(self.comm, 1, waits=kept is None), Operations(self.comm, 1))


def _as_tuple(values: Any) -> Values:
    return values if isinstance(values, tuple) else (values,)


def described(value: Any) -> str:
    """Returns words for a value that does not fit."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__


AnyBlock = CutBlock | Callable[[Tensor], Tensor]
"""A block cut into nodes, or a callable without transfers, which is one node (a dense layer, say)."""
