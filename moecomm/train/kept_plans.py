"""Recomputation with torch.utils.checkpoint along the plans of the first forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import nn

from moecomm.errors import InvalidArgument
from moecomm.nn.expert_pass import Plans
from moecomm.nn.layer import MoELayer, layers_of

Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]


def keep_plans(*modules: nn.Module) -> Callable[[], Contexts]:
    """Makes torch.utils.checkpoint recompute along the plans of the first forward.

        y = checkpoint(block, x, use_reentrant=False, context_fn=moecomm.nn.keep_plans(block))

    The MoELayers in `modules` then make no second plan and exchange no counts. Tokens go to the experts of
    the first forward, with the same drops, while scores, weights and losses are recomputed (docs/layer.md).
    Plans take some hundred bytes per token (docs/memory.md). A graph of torch.compile ends before such a
    layer. A router of your own must make the same choices both times; otherwise all ranks raise
    InvalidArgument. Raises InvalidArgument for modules without a MoELayer.
    """
    layers = [layer for module in modules for layer in layers_of(module)]
    if not layers:
        raise InvalidArgument("modules have no MoELayer, must be those with the layers that are recomputed")

    def contexts() -> Contexts:
        first = [Plans([], [], again=False) for _ in layers]
        return _Within(layers, first, again=False), _Within(layers, first, again=True)

    return contexts


class _Within(contextlib.AbstractContextManager[None]):
    """A context in which layers keep or reuse their plans. It may be entered several times, since a graph
    whose backward runs twice is recomputed twice."""

    def __init__(self, layers: Sequence[MoELayer], first: Sequence[Plans], again: bool) -> None:
        self._layers, self._first, self._again = layers, first, again
        self._before: list[list[Plans | None]] = []

    def __enter__(self) -> None:
        self._before.append([layer._plans for layer in self._layers])
        for layer, plans in zip(self._layers, self._first, strict=True):
            # Each recomputation starts from the first plan.
            layer._plans = Plans([*plans.states], [*plans.choices], again=True) if self._again else plans

    def __exit__(self, *_: object) -> None:
        for layer, before in zip(self._layers, self._before.pop(), strict=True):
            layer._plans = before
