"""Communicators that all layers of one shape share. If one is too small for a batch, a larger replaces it.

They live while a layer uses them, or a graph of autograd contains them. Garbage collectors free a deleted
model at different moments on each rank. So before a layer first uses a communicator, ranks find out whether
every rank still has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, MismatchedArguments, known_to_all
from moecomm.setup.checks import absence_seconds, timeout_seconds
from moecomm.setup.rendezvous import Rendezvous
from moecomm.types import ALONE, DispatchOutput

Result = TypeVar("Result")


class Shape(NamedTuple):
    """The properties that layers must have in common to share a communicator."""

    num_experts: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    wire: str | None = None
    num_sms: int | None = None


class SharedCommunicator:
    """A communicator of a group, large enough for the most tokens of any rank so far. serial: its number, the
    same on all ranks, among those built over the group; alone: whether the group is ALONE."""

    def __init__(self, group: Any, shape: Shape, serial: int, tokens: int) -> None:
        self.serial, self._group, self._shape = serial, group, shape
        self.alone = group is ALONE
        self._comm = self._build(tokens)

    def dispatch(
        self, x_TH: Any, ids_TK: Tensor, weights_TK: Tensor | None, **options: Any
    ) -> tuple[Communicator, DispatchOutput]:
        """Dispatches like `Communicator.dispatch`, and also returns the communicator for the combine. On GPUs
        ranks do not wait in a dispatch with a capacity, so they cannot agree on a larger communicator then: a
        batch that is too large raises InvalidArgument on its rank. `require` makes room beforehand."""
        if torch.compiler.is_dynamo_compiling():
            return self._dispatch_outside_graph(x_TH, ids_TK, weights_TK, **options)
        if ids_TK.is_cuda and options.get("capacity") is not None:
            return self._comm, self._comm.dispatch(x_TH, ids_TK, weights_TK, **options)
        return self.run(
            ids_TK.shape[0], lambda comm: (comm, comm.dispatch(x_TH, ids_TK, weights_TK, **options))
        )

    _dispatch_outside_graph = _disable_dynamo(dispatch)

    def known_rows(self, ids_TK: Tensor) -> int | None:
        """Returns a capacity that the rows of these tokens need at most, None if it depends on other ranks.
        With a capacity the host does not wait for the number of rows."""
        return (ids_TK.numel() or None) if self.alone else None

    def require(self, tokens: int) -> None:
        """Makes room for batches of `tokens` tokens, the same number on all ranks, which call it together."""
        if tokens > self._comm.max_tokens:
            self._comm = self._build(tokens)

    def run(
        self,
        tokens: int,
        call: Callable[[Communicator], Result],
        dispatched: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Returns the result of `call`, which begins with a dispatch of `tokens` tokens. All ranks call it
        together. If a rank has more tokens than the communicator takes, the dispatch fails on all ranks. Then
        all build a larger communicator and call again; other calls have no extra cost. dispatched: a function
        that returns True once `call` is past its dispatch, since a later error has another cause."""
        try:
            return call(self._comm)
        except InvalidArgument as error:
            if dispatched() or not self._is_enlarged(error, tokens):
                raise
        return call(self._comm)

    def refuse(self, error: InvalidArgument, ids_TK: Tensor, capacity: int | None) -> NoReturn:
        """Raises `error`, which this rank has found in its arguments, on all ranks in place of `dispatch`."""
        if not ids_TK.is_cuda or capacity is None:  # the others agree on a size, as `dispatch` does
            self.run(ids_TK.shape[0], lambda comm: comm.refuse(error))
        self._comm.refuse(error)

    def has_ended(self) -> bool:
        """Returns whether this rank has closed the communicator, or an error has ended it."""
        backend = self._comm._backend
        return backend is None or backend.has_ended

    def _is_enlarged(self, error: InvalidArgument, tokens: int) -> bool:
        """Builds a communicator for the most tokens of any rank, if a dispatch failed with `error` because a
        rank had too many. Returns whether it has built one; all ranks return the same."""
        if not may_be_too_large(error):
            return False
        (most,) = largest(self._group, tokens)
        if most <= self._comm.max_tokens:  # all ranks have another error
            return False
        # Graphs of autograd keep the old, smaller communicator alive while they need it.
        self._comm = self._build(most)
        return True

    def _build(self, tokens: int) -> Communicator:
        return Communicator(self._group, max_tokens=round_up(tokens), **self._shape._asdict())


def may_be_too_large(error: InvalidArgument) -> bool:
    """Returns, alike on all ranks, whether a dispatch may have raised `error` because a batch is too large.
    Ranks in different operations (MismatchedArguments) cannot agree on a size."""
    return known_to_all(error) and not isinstance(error, MismatchedArguments)


def largest(group: Any, *values: int) -> list[int]:
    """Returns for each value the largest over all ranks, which call this together. Raises PeerTimeout for a
    rank that does not come before the deadline of an operation."""
    if group is ALONE:
        return list(values)
    rendezvous = Rendezvous(group, timeout_seconds(None))
    patience = max(1.0, absence_seconds(None) / rendezvous.timeout)
    with rendezvous:
        told = rendezvous.exchange(f"construction: {len(values)} sizes", {"sizes": values}, patience)
    return [max(sizes) for sizes in zip(*(each["sizes"] for each in told), strict=True)]


def round_up(tokens: int) -> int:
    """Returns `tokens` rounded up to a multiple of 16, or of the largest power of 2 up to a quarter of
    `tokens` if that is more. So a communicator for this number also serves slowly growing batches."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return max(step, -(-tokens // step) * step)


class _OfGroup:
    """The communicators of a process group, and how many were built."""

    def __init__(self) -> None:
        self.built = 0
        self.alive: weakref.WeakValueDictionary[Shape, SharedCommunicator] = weakref.WeakValueDictionary()


_groups: weakref.WeakKeyDictionary[Any, _OfGroup] = weakref.WeakKeyDictionary()


@_disable_dynamo
def shared_communicator(group: Any, shape: Shape, tokens: int) -> SharedCommunicator:
    """Returns the communicator of a group and shape, and builds it unless all ranks have the same, and no
    error has ended it on any. All ranks call this before a layer's first dispatch; `tokens` may differ."""
    known = _groups.setdefault(group, _OfGroup())
    found = known.alive.get(shape)
    if found is not None and found.has_ended():
        found = None
    serial = 0 if found is None else found.serial
    newest, oldest, built, most = largest(group, serial, -serial, known.built, tokens)
    if found is None or newest != -oldest:
        known.built = built + 1
        found = known.alive[shape] = SharedCommunicator(group, shape, known.built, most)
    return found


class LayerCommunicators:
    """Keeps alive the communicators that one layer uses: one for each Shape of its batches."""

    def __init__(self, group: Any, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts
        self._found: dict[tuple[Any, ...], SharedCommunicator] = {}

    def of(
        self,
        x_TH: Tensor,
        top_k: int,
        dtype: torch.dtype | None = None,
        wire: str | None = None,
        num_sms: int | None = None,
        tokens: int | None = None,
        every: int = 0,
    ) -> SharedCommunicator:
        """Returns the communicator for a batch, with arguments like Communicator's. All ranks call it
        together. tokens: those that a communicator has room for if this call builds it; None: as many as
        `x_TH` has. every: the same on all ranks, the tokens that it has room for in any case."""
        sizes = (self._num_experts, x_TH.shape[1], top_k)
        shape = (*sizes, dtype or x_TH.dtype, x_TH.device, wire, num_sms)
        found = self._found.get(shape)
        if found is None:
            most = max(tokens or x_TH.shape[0], every)
            found = self._found[shape] = shared_communicator(self._group, Shape(*shape), most)
        found.require(x_TH.shape[0] if found.alone else every)
        return found
