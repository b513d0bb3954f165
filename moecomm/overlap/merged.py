"""Merged microbatches: one thread issues the nodes of one beside the transfers of another, in a fixed order.

A pass (the forward or the backward of a microbatch through all blocks) goes on in turns. A turn waits for the
pass's last transfer, issues what computes until the next one, and that transfer. Two passes take turns, so
beside each transfer lies a turn of the other pass. With the backward of microbatch A first and the forward of
B second, for blocks with experts:

    turn   transfer, on the communicator's stream     beside it, on the caller's stream
    A      gradients of the combine of A              attention and router of B
    B      dispatch of B                              experts backward of A
    A      gradients of the dispatch of A             experts of B
    B      combine of B                               attention backward of A

Between two transfers of a microbatch lies one autograd graph, a segment: what computes there, be it of one
block or of several, on detached tensors. The backward goes from segment to segment, and hands each the
gradients of its results. So gradients are summed as without cuts, and weights' gradients add up in the order
of the microbatches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from moecomm.errors import CommunicatorClosed, InvalidArgument, MoecommError, PeerLost, PeerTimeout
from moecomm.overlap.beside import Beside, Turns
from moecomm.overlap.blocks import AnyBlock, CutBlock, Operations, Segment, Turned, described, detached
from moecomm.overlap.stages import Stages

Result = TypeVar("Result")


class _Experts(NamedTuple):
    """A block whose forward has been computed."""

    before: Segment
    """The segment that ends with the block's attention."""
    number: int
    block: CutBlock
    kept: Any
    home: int
    """The number of values that stayed here."""


class Microbatch:
    """A microbatch whose forward has been computed, by `forward_backward`.

    Attributes:
        output: the last block's result, cut from its graph: a loss computed from it leaves the gradient for
            this microbatch's backward in `output.grad`.
        input_grad: the gradient of the input, after the backward; None if the input needs none.
    """

    output: Tensor
    input_grad: Tensor | None = None

    def __init__(self, blocks: Sequence[AnyBlock]) -> None:
        self._blocks = tuple(blocks)
        self._experts: list[_Experts] = []
        self._last: Segment | None = None
        self._merged = False
        """True: autograd leaves the gradient of the output there (moecomm/overlap/pipelining.py)."""


class _Pass:
    """The forward or the backward of a microbatch.

    Attributes:
        name: for records.
        place: the block and node that it is at.
        work: what is left of it.
        transfers: its transfers, each with the operations that it consists of.
    """

    def __init__(self, microbatch: Microbatch, turns: Turns, name: str = "") -> None:
        self._microbatch, self._turns, self.name = microbatch, turns, name
        self.place = "blocks"
        self.work: Turned[None]
        self.transfers: list[Operations]

    def forward(self, x: Tensor, loss: Callable[[Tensor], Tensor] | None) -> _Pass:
        """Makes this the forward of x; with `loss`, the microbatch's output is the loss."""
        cut = [each for each in self._microbatch._blocks if isinstance(each, CutBlock)]
        self.transfers = [each for block in cut for each in block._operations(None)]
        self.work = self._forward(x, loss)
        return self

    def backward(self, grad: Tensor | None) -> _Pass:
        """Makes this the backward from the gradient of the output."""
        done = reversed(self._microbatch._experts)
        self.transfers = [each for entry in done for each in entry.block._operations(entry.kept)]
        self.work = self._backward(grad)
        return self

    def _forward(self, x: Tensor, loss: Callable[[Tensor], Tensor] | None) -> Turned[None]:
        microbatch = self._microbatch
        segment = Segment(x)
        (value,) = segment.inputs
        for number, block in enumerate(microbatch._blocks):
            if not isinstance(block, CutBlock):
                self._turns.finish()  # there may be transfers in the callable
                with self._node(segment, f"blocks[{number}]"):
                    value = _one_tensor(block(value))
                continue
            with self._node(segment, f"blocks[{number}] attention"):
                home, inputs = block._to_experts(value)
            segment.end(*home, *inputs)
            before, home = segment, tuple(map(detached, home))
            inputs = tuple(map(detached, inputs))
            del value
            work = block._forward_experts(inputs, self._turns)
            results, kept = yield from self._through(work, number, _FORWARD)
            microbatch._experts.append(_Experts(before, number, block, kept, len(home)))
            segment = Segment(*home, *results)
            home, results = segment.inputs[: len(home)], segment.inputs[len(home) :]
            with self._node(segment, f"blocks[{number}] after"):
                value = _one_tensor(block._from_experts(home, results))
            del home, inputs, results
        if loss is not None:
            with self._node(segment, "loss"):
                value = _one_tensor(loss(value))
            if value.numel() != 1:
                raise InvalidArgument(f"it returned {described(value)}, must return one number")
        segment.end(value)
        microbatch._last, microbatch.output = segment, detached(value)
        if loss is not None and value.requires_grad:
            microbatch.output.grad = torch.ones_like(value)

    def _backward(self, grad: Tensor | None) -> Turned[None]:
        microbatch = self._microbatch
        segment, microbatch._last = microbatch._last, None
        if segment is None:
            raise InvalidArgument("earlier has had its backward, must be a microbatch without one")
        grads: Sequence[Tensor | None] = (_require_grad(grad, microbatch.output),)
        del grad
        while True:
            self.place = f"{', '.join(segment.names)} (backward)"
            self._turns.finish()  # as in the forward
            with self._turns.stage(segment.names[0]):
                grads = segment.backward(grads)
            if not microbatch._experts:
                break
            segment, number, block, kept, home = microbatch._experts.pop()
            home_grads, work = grads[:home], block._backward_experts(kept, grads[home:], self._turns)
            del grads, kept
            grads = (*home_grads, *(yield from self._through(work, number, _BACKWARD)))
            del home_grads, work
        (microbatch.input_grad,) = grads

    def _node(self, segment: Segment, name: str) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a node that computes."""
        self.place = f"{name} (forward)"
        segment.names.append(name)
        return self._turns.stage(name)

    def _through(self, work: Turned[Result], number: int, nodes: tuple[str, ...]) -> Turned[Result]:
        """Does the work of a block's nodes, one a turn."""
        for node in nodes:
            self.place = f"blocks[{number}] {node}"
            try:
                next(work)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            yield
        raise AssertionError(f"the nodes of blocks[{number}] have more than two transfers")


_FORWARD = ("dispatch (forward)", "experts (forward)", "combine (forward)")
_BACKWARD = ("combine (backward)", "experts (backward)", "dispatch (backward)")


def _require_grad(grad: Tensor | None, output: Tensor) -> Tensor | None:
    """Returns the gradient of a microbatch's output."""
    if not output.requires_grad:
        return None
    found = output.grad if grad is None else grad
    if found is None:
        raise InvalidArgument("grad is None, and so is earlier.output.grad: one of them must be a gradient")
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (output.shape, output.dtype):
        raise InvalidArgument(f"grad is {described(found)}, must be like the output, {described(output)}")
    return found


def _require_grad_mode() -> None:
    if not torch.is_grad_enabled():
        raise InvalidArgument(
            "gradients are disabled (torch.no_grad), must be enabled: call the blocks in order"
        )


def _one_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"it returned {described(value)}, must return one tensor")
    return value


# -- turns ---------------------------------------------------------------------------------------------------


Later = Callable[[], Sequence[Operations]]
"""Returns the transfers that come after those of the passes."""


def _take_turns(turns: Turns, passes: Sequence[_Pass], later: Later = tuple) -> None:
    """Runs passes to their ends, one turn of each after the other."""
    running = list(passes)
    while running:
        for each in tuple(running):
            turns.whose = each.name
            try:
                next(each.work)
            except StopIteration:
                running.remove(each)
            except Exception as error:
                _give_up(turns, passes, later, each.place, error)


def _in_turn(passes: Sequence[_Pass]) -> list[Operations]:
    """Returns the transfers of passes in the order of their issue."""
    turns = itertools.zip_longest(*(each.transfers for each in passes))
    return [each for turn in turns for each in turn if each is not None and each.number]


def _give_up(turns: Turns, passes: Sequence[_Pass], later: Later, place: str, error: Exception) -> NoReturn:
    """Ends all passes after an error in a turn of one, with every stream and communicator usable, and raises
    the error with its place, on all ranks if transfers are left."""
    if isinstance(error, MoecommError):
        error.args = (f"{place}: {error}", *error.args[1:])
    failed = turns.failed
    with contextlib.suppress(MoecommError):
        turns.finish()  # as the other ranks do
    transfers = _in_turn(passes)
    for comm in {id(each.comm): each.comm for each in transfers}.values():
        with contextlib.suppress(MoecommError):
            with (side := Beside(comm)):
                pass
            side.join()  # transfers may still read what the passes hold
    for each in passes:
        each.work.close()
    if isinstance(error, (PeerTimeout, PeerLost, CommunicatorClosed)):
        raise error
    left = [*transfers[turns.issued :], *later()]
    if isinstance(error, MoecommError) and failed is not None:
        # The operation has told the other ranks, who know of it by now if their hosts wait for it.
        all_know = failed == "receive" or not left or left[0].waits or left[0].comm.stream is None
        left = [] if all_know else left[1:]
    if isinstance(error, InvalidArgument):
        told = error
    else:
        told = InvalidArgument(f"{place}: {type(error).__name__}: {error}")
        told.__cause__ = error
    for transfer in left:
        on_host = transfer.comm.stream is None
        for _ in range(1 if on_host else transfer.number):
            with contextlib.suppress(MoecommError):
                transfer.comm.refuse(told)  # on this rank it is raised below
        if transfer.waits or on_host:
            break
    raise error if isinstance(error, MoecommError) else told


# -- for users -----------------------------------------------------------------------------------------------


def forward_backward(
    blocks: Sequence[AnyBlock],
    x: Tensor | None,
    earlier: Microbatch | None = None,
    grad: Tensor | None = None,
    *,
    stages: Stages | None = None,
) -> Microbatch | None:
    """Computes the forward of one microbatch beside the backward of an earlier one.

        first = forward_backward(blocks, x0)                  # nothing beside it yet
        second = forward_backward(blocks, x1, first, grad0)   # grad0: the gradient of first.output
        forward_backward(blocks, None, second, grad1)

    Args:
        blocks: what the microbatch goes through: blocks cut into nodes (`moecomm.nn.MoEBlock`, `Block`), and
            callables that map a tensor to a tensor (a dense layer, an embedding, a head), which have no
            transfers, or none that lie beside anything. The backward goes through those of its forward.
        x: input of the first block; None: the backward alone.
        earlier: a microbatch whose backward was not computed yet; None: the forward alone.
        grad: the gradient of `earlier.output`; None: `earlier.output.grad`.
        stages: records when each node and each stage of the layers ran, "of F" (forward) and "of B".

    Returns:
        the new microbatch, or None without x. Gradients of parameters are added to their `grad`, and that of
        the earlier microbatch's input is its `input_grad`.

    Outputs and gradients have the same bits as forward and backward one after the other; so have dropout
    masks, since forwards draw random numbers in their order.

    Raises:
        InvalidArgument: on all ranks, with the number of the block and the name of its node, for an
            exception in a node on any rank (`__cause__`, on that rank) and for values that do not fit; after
            the last transfer on that rank alone. The communicators stay usable; both microbatches are lost,
            and gradients are unspecified.
        MoecommError: as operations of the communicator.
    """
    if x is not None:
        _require_grad_mode()
    turns = Turns(stages)
    new = None if x is None else Microbatch(blocks)
    passes = []
    if earlier is not None:
        passes.append(_Pass(earlier, turns, "of B").backward(grad))
    if x is not None and new is not None:
        passes.append(_Pass(new, turns, "of F").forward(x, None))
    _take_turns(turns, passes)
    return new


def run_microbatches(
    blocks: Sequence[AnyBlock],
    microbatches: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    *,
    merge_ends: bool = False,
    stages: Stages | None = None,
) -> list[Tensor]:
    """Computes forward and backward of all microbatches of a step; their gradients add up in `grad`.

        losses = run_microbatches(blocks, tokens.chunk(4), lambda y, i: cross_entropy(y, targets[i]) / 4)
        optimizer.step()

    The forward of each microbatch is beside the backward of the one before; the first forward and the last
    backward have nothing beside them. With merge_ends the first two forwards are merged as well, and the last
    two backwards, which takes the memory of one microbatch more; with one microbatch in halves
    (`[*x.chunk(2)]`) nothing is left alone then. Forwards that are merged draw random numbers in turns, so
    dropout masks are others than one after the other; all else has the same bits.

    Args:
        blocks: as in `forward_backward`.
        microbatches: inputs of the first block. Gradients of those that require one go on into the graphs
            that they come from, at the end.
        loss: gives the loss of a microbatch, one number, from the last block's result and the microbatch's
            number. Divide by the number of microbatches there for their mean, and set the layers' loss_scale
            to as much (`moecomm.nn.set_loss_scale`).
        merge_ends: also merge first forwards and last backwards.
        stages: records when each node and each stage of the layers ran, "of F0" for the first forward.

    Returns:
        the losses, detached.

    Raises:
        as `forward_backward`.
    """
    _require_grad_mode()
    done = [Microbatch(blocks) for _ in microbatches]
    steps = _order(len(microbatches), merge_ends)

    def passes_of(step: list[tuple[int, bool]], turns: Turns) -> list[_Pass]:
        passes = []
        for number, is_forward in step:
            each = _Pass(done[number], turns, f"of {'F' if is_forward else 'B'}{number}")
            if is_forward:
                passes.append(each.forward(microbatches[number], partial(_loss_of, loss, number)))
            else:
                passes.append(each.backward(None))
        return passes

    def transfers_of_next(place: int) -> list[Operations]:
        return [each for step in steps[place + 1 :][:1] for each in _in_turn(passes_of(step, Turns()))]

    for place, step in enumerate(steps):
        turns = Turns(stages)
        _take_turns(turns, passes_of(step, turns), partial(transfers_of_next, place))
    pairs = zip(microbatches, done, strict=True)
    arrived = [(x, each.input_grad) for x, each in pairs if each.input_grad is not None]
    if arrived:
        torch.autograd.backward([x for x, _ in arrived], [grad for _, grad in arrived])
    return [each.output.detach() for each in done]


def _loss_of(loss: Callable[[Tensor, int], Tensor], number: int, output: Tensor) -> Tensor:
    value = loss(output, number)
    if isinstance(value, Tensor) and not value.requires_grad:
        raise InvalidArgument("the loss requires no gradient, must be computed from what the blocks return")
    return value


def _order(count: int, merge_ends: bool) -> list[list[tuple[int, bool]]]:
    """Returns the passes that are merged, step for step: each a microbatch's number, and True for its
    forward. Backwards come first in a step, and in the order of the microbatches."""
    ahead = 2 if merge_ends else 1
    forwards = [[(number, True)] for number in range(ahead, count)]
    backwards = [[(number, False)] for number in range(count)]
    middle = [back + front for back, front in zip(backwards, forwards, strict=False)]
    first = [(number, True) for number in range(min(ahead, count))]
    last = list(itertools.chain(*backwards[len(middle) :]))
    return [first, *middle, last] if count else []
