"""Checks before each forward of a layer: whether its modules have hooks or a changed forward, and whether its
settings are compatible.

A layer calls its experts and shared experts as modules, but with the layer's tokens as input and the sum of
all experts as result (MoELayer._run). Hooks of FSDP2, and hooks that prepare a weight (torch.nn.utils), work
with these inputs and results. Any other hook expects the module's own inputs and results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moecomm.autograd.deferred import leaf_of
from moecomm.autograd.in_place import has_main_grad, main_grad_of
from moecomm.errors import InvalidArgument
from moecomm.nn.config import IN_ORDER, OverlapConfig
from moecomm.nn.experts import GroupedExperts, SharedExperts
from moecomm.parallel.shards import refuse_mixed_shards

_PARTS = (("experts", GroupedExperts), ("shared", SharedExperts))
"""The modules of a layer that are checked for hooks, and their classes."""
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_WEIGHTS = ("moecomm.", "torch.distributed.", "torch.nn.utils.")
"""Packages whose hooks concern weights alone: the hooks gather or prepare weights, or average gradients."""


def watchers_of(layer: Any) -> str | None:
    """Names a hook or changed forward that needs the experts' or shared experts' own rows, so that the layer
    has to run in order (MoELayer._run_in_order). Returns None if there is none."""
    for name, kind in _PARTS:
        module = getattr(layer, name)
        if module is not None and (found := _watcher(module, kind)) is not None:
            return f"{name} has {found}"
    return None


def _watcher(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Names a hook of the module, or of a `kind` inside it, or a forward other than kind.forward; None: there
    is none. Hooks that concern weights alone do not count."""
    plain = type(module) is kind and not (module._modules or "forward" in module.__dict__)
    if plain and not any(getattr(module, hooks) for hooks in _KINDS):
        return None  # a fast path, since each forward of a layer calls this
    for each in module.modules():
        wrapped = isinstance(each, kind)
        if not (wrapped or each is module):
            continue
        for hook in [hook for hooks in _KINDS for hook in getattr(each, hooks).values()]:
            if not _package(hook).startswith(_OF_WEIGHTS):
                return f"a hook ({_name(hook)})"
        if wrapped and getattr(each.forward, "__func__", None) is not kind.forward:
            return f"another forward ({_name(each.forward)})"
    return None


def _package(function: Any) -> str:
    """Returns the name of the module that defines a function, or the class of a callable object."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def refuse_own_settings(overlap: OverlapConfig) -> None:
    """Raises InvalidArgument for settings that have no effect on custom experts."""
    if (found := _setting_without_effect(overlap)) is not None:
        raise InvalidArgument(f"{found} with experts of one's own, which autograd differentiates")


def _setting_without_effect(overlap: OverlapConfig) -> str | None:
    """Returns a text on a setting that has no effect if autograd does the backward; None: all have one."""
    for name, only in IN_ORDER.items():
        if (value := getattr(overlap, name)) != only:
            return f"OverlapConfig.{name} is {value!r}, must be {only!r}"
    return None


def check_settings(layer: Any, in_order: bool, watched: str | None) -> None:
    """Raises InvalidArgument for settings or weights with which a MoELayer's forward cannot run. in_order:
    the forward is MoELayer._run_in_order; watched: the result of `watchers_of`."""
    if watched is not None and (found := _setting_without_effect(layer.overlap)) is not None:
        raise InvalidArgument(
            f"{watched}, which is to see its own rows: the layer runs in order then, and {found}"
        )
    if not in_order:
        _require_parts(layer)
        if layer.overlap.defer_weights and torch.is_grad_enabled():
            _require_parameters(layer.experts)
    if layer._own_experts:
        refuse_own_settings(layer.overlap)
    if layer.comm.size > 1 or layer.config.main_grad:
        refuse_mixed_shards(layer.experts)
    if layer.config.main_grad and torch.is_grad_enabled():
        layer.experts.mark_parameters()  # some may have been frozen when they were marked
        for parameter in layer.experts.parameters():
            if parameter.requires_grad and has_main_grad(parameter):
                main_grad_of(parameter)  # refuses an unsuitable main_grad here, on all ranks
    parts = (("experts", None if layer._own_experts else layer.experts), ("shared", layer.shared))
    for name, module in [(name, module) for name, module in parts if module is not None]:
        for own in ("w_in", "w_out", "b_in", "b_out"):
            weight = getattr(module, own, None) if own == "w_in" else module._parameters.get(own)
            # FSDP's shards may have another dtype until their module is called.
            if weight is None or weight.dtype is layer.config.dtype or isinstance(weight, DTensor):
                continue
            raise InvalidArgument(
                f"{name}.{own} is {weight.dtype}, must be the config's dtype {layer.config.dtype}: build "
                f"the layer with MoEConfig(dtype={weight.dtype}) instead of converting it"
            )


def _require_parameters(experts: Any) -> None:
    """Raises InvalidArgument for weights that are computed from parameters by more than a cast: the gradients
    of `backward_weights` would not reach these parameters."""
    for name in ("w_in", "w_out"):
        if leaf_of(getattr(experts, name)) is None:
            raise InvalidArgument(
                f"defer_weights is True and experts.{name} is computed (by torch.nn.utils.parametrize, for "
                "example), must be a parameter or a cast of one: set defer_weights=False"
            )


def _require_parts(layer: Any) -> None:
    """Raises InvalidArgument for replaced experts without `products` or shared experts without `w_in`."""
    for (name, kind), needed in zip(_PARTS, ("products", "w_in"), strict=True):
        part = getattr(layer, name)
        if part is not None and not isinstance(part, kind) and not hasattr(part, needed):
            instead = ", or give MoELayer(experts=module) experts of one's own" * (name == "experts")
            raise InvalidArgument(
                f"layer.{name} is {type(part).__name__} without {needed!r}, must be the {kind.__name__} "
                "that the layer was built with: change its weights with torch.nn.utils.parametrize, and "
                f"its rows with hooks{instead}"
            )
