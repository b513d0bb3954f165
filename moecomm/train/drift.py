"""Detects when weights that all ranks share drift apart, because each rank clips gradients by the norm of its
own experts or one rank skips a step.

A checksum of a router's weight (its bits, added up) stands for all weights that ranks share. It is that of an
earlier step, so that no host waits for its device. `sync_gradients` compares it between ranks. Under
DistributedDataParallel it is added to the layer's number, which every dispatch compares between ranks anyway,
so that no rank waits for another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from moecomm.backends.base import MOST_CALLERS, caller_of
from moecomm.nn.config import values_that_agree
from moecomm.nn.layer import MoELayer
from moecomm.parallel.grid import Ranks
from moecomm.parallel.spread import built_layers
from moecomm.train.replicas import ranks_of

_Taken = tuple[Tensor, torch.cuda.Event | None]
"""A checksum in host memory, and the event after which it is there (None: at once)."""
_FIRST, _EVERY = 8, 64
"""The checksum is taken in the first 8 steps, and afterwards in two of every 64 steps."""


class Drift:
    """A checksum of one router's weight, renewed at steps of its optimizer."""

    def __init__(self) -> None:
        self._steps = 0
        self._taken: _Taken | None = None

    def note_step(self, layer: MoELayer, weight: Tensor) -> None:
        """Counts an optimizer step. In the steps that `_EVERY` names, adds the checksum taken before to the
        number that the layer's dispatches compare between ranks, and takes a new checksum."""
        self._steps += 1
        if self._steps > _FIRST and self._steps % _EVERY > 1:
            return
        if self._taken is not None:
            number = layer._number + int(_arrived(self._taken)) % MOST_CALLERS
            layer._caller = caller_of(number, values_that_agree(layer.config))
        self._taken = _on_host(bits_of(weight))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a layer's copy is watched after its own `prepare_ddp`. Events cannot be copied."""


def watch_drift(layers: Iterable[MoELayer]) -> None:
    """Gives a Drift to one layer for each EP group of two or more: its first one with a `router_weight`."""
    watched: set[Ranks] = set()
    for layer in layers:
        ranks = ranks_of(layer.comm.group)
        if len(ranks) > 1 and ranks not in watched and router_weight(layer) is not None:
            watched.add(ranks)
            layer._drift = Drift()


def router_weight(layer: MoELayer) -> nn.Parameter | None:
    """Returns the weight of the layer's router, if it is trained and not sharded."""
    weight = layer.router._parameters.get("weight")
    if weight is None or not weight.requires_grad or isinstance(weight, DTensor):
        return None
    return weight


@torch.no_grad()
def bits_of(weight: Tensor) -> Tensor:
    """Returns a checksum as a 0-d int64 tensor: the sum of the elements' bits, read as integers."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return weight.detach().contiguous().view(kinds[weight.element_size()]).sum()


def _on_host(bits: Tensor) -> _Taken:
    """Returns host memory for the checksum, and the event after which it is there (None: at once)."""
    if bits.device.type != "cuda":
        return bits, None
    there = torch.empty((), dtype=bits.dtype, device="cpu", pin_memory=True)
    there.copy_(bits, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(bits.device))
    return there, event


def _arrived(taken: _Taken) -> Tensor:
    """Waits for a checksum of `_on_host`, and returns it."""
    bits, event = taken
    if event is not None:
        event.synchronize()
    return bits


def router_bits(layers: Iterable[MoELayer], place: torch.device) -> tuple[Tensor, bool] | None:
    """Returns a checksum of the first `router_weight` among `layers`, on the device `place`, and whether the
    previous call for that layer computed it; None if no layer has such a weight.

    With weights on a GPU and `place` on the host it is the previous call's, so that the host need not wait
    for the GPU. The first call has no such checksum: it computes one and waits."""
    for layer in layers:
        if (weight := router_weight(layer)) is not None:
            break
    else:
        return None
    bits = bits_of(weight)
    if not bits.is_cuda or place.type != "cpu":
        return bits.to(place), False
    before = _taken.get(layer)
    now = _taken[layer] = _on_host(bits)
    return _arrived(before or now), before is not None


def forget_bits(layers: Iterable[MoELayer]) -> None:
    """Makes the next call of `router_bits` a first one. Weights that drifted apart may be equal by then."""
    for layer in layers:
        _taken.pop(layer, None)


_taken: weakref.WeakKeyDictionary[MoELayer, _Taken] = weakref.WeakKeyDictionary()
"""The checksum that `router_bits` took for a layer last."""


def _after_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    watched = [layer for layer in built_layers if layer._drift is not None]
    if not watched or torch.compiler.is_compiling():
        return
    for layer in watched:
        weight = router_weight(layer)
        if weight is None or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            continue
        if any(weight is each for group in optimizer.param_groups for each in group["params"]):
            layer._drift.note_step(layer, weight)


register_optimizer_step_post_hook(_after_step)
