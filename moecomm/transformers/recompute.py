"""Gradient checkpointing along the plans of the first forward.

A layer that torch.utils.checkpoint recomputes then makes no second plan and exchanges no counts: its rows are
sent again along the kept plan. Routing weights are recomputed, and their gradients follow that plan too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moecomm.autograd.functions import dispatch
from moecomm.backends.base import RawDispatch
from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.nn.expert_pass import DispatchState
from moecomm.types import DispatchOutput, build


class Kept(NamedTuple):
    """A dispatch of the first forward: the state of moecomm's pass, or for other experts the output. Neither
    has the rows."""

    ids_TK: Tensor
    comm: Communicator
    state: DispatchState | DispatchOutput


class _Current(threading.local):
    """The state of this thread. region: in a checkpointed region's forward, its kept dispatches in order, or
    None. left: in the region's recomputation, the kept dispatches that no layer has followed yet."""

    region: list[Kept] | None = None
    left: Iterator[Kept] | None = None


_current = _Current()
Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]


def keep_plans() -> Contexts:
    """A context_fn of torch.utils.checkpoint: recomputed layers follow the plans of their first forward.

        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={
                "use_reentrant": False,
                "context_fn": moecomm.transformers.keep_plans,
            }
        )

    Plans take some hundred bytes per token and layer (docs/memory.md). A router must choose the same experts
    both times; otherwise all ranks raise InvalidArgument.
    """
    region: list[Kept] = []
    return _Within(region, again=False), _Within(region, again=True)


class _Within(contextlib.AbstractContextManager[None]):
    """The context of a region's forward, or (`again`) of its recomputation. It may be entered twice: a graph
    whose backward runs twice is recomputed twice."""

    def __init__(self, region: list[Kept], *, again: bool) -> None:
        self._region, self._again = region, again
        self._before: list[tuple[list[Kept] | None, Iterator[Kept] | None]] = []

    def __enter__(self) -> None:
        self._before.append((_current.region, _current.left))
        _current.region = None if self._again else self._region
        _current.left = iter(self._region) if self._again else None

    def __exit__(self, *_: object) -> None:
        _current.region, _current.left = self._before.pop()


def keep_dispatch(ids_TK: Tensor, comm: Communicator, state: DispatchState | DispatchOutput) -> None:
    """Keeps a dispatch for the recomputation, if this thread runs a region's first forward."""
    if _current.region is not None:
        if isinstance(state, DispatchOutput):
            state = _with_tensors(state, None, None if state.weights is None else state.weights.detach())
        _current.region.append(Kept(ids_TK, comm, state))


def kept_dispatch(ids_TK: Tensor) -> Kept | None:
    """Returns the kept dispatch that a recomputed layer has to follow, None if there is none. Raises
    InvalidArgument on all ranks if the router has now chosen other experts."""
    kept = None if _current.left is None else next(_current.left, None)
    if kept is not None and ids_TK.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "keep_plans within a CUDA graph, as the host compares the experts that a router chose: "
            "checkpoint without it, and with preserve_rng_state=False"
        )
    if kept is not None and not torch.equal(ids_TK, kept.ids_TK):
        kept.comm.refuse(
            InvalidArgument(
                "the router chose other experts when its layer was computed again: it must choose the same "
                "both times"
            )
        )
    return kept


def dispatch_again(kept: Kept, x_TH: Tensor, weights_TK: Tensor) -> DispatchOutput:
    """Returns the output of a kept dispatch with the rows of `x_TH`. Its weights are those of the first
    forward; their gradient goes to `weights_TK`."""
    comm, first = kept.comm, kept.state
    assert isinstance(first, DispatchOutput) and first.plan_views is not None
    with torch.no_grad():
        rows_PH = comm.redispatch(x_TH, first.handle)
    raw = RawDispatch(rows_PH, first.weights, None, first.plan_views, first.handle.plan)
    raw = dispatch(x_TH, weights_TK, raw, comm._open())
    return _with_tensors(first, raw.tokens_PH, raw.weights)


def _with_tensors(out: DispatchOutput, tokens: Tensor | None, weights: Tensor | None) -> DispatchOutput:
    return build(DispatchOutput, **{**out.__dict__, "tokens": tokens, "weights": weights})
