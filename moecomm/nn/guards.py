"""Checks before each forward of a layer: whether its modules have hooks or a changed forward, or were sharded
as if all ranks held the same; and whether its settings are compatible.

A layer calls its shared experts and experts with other inputs and results than their own: its tokens, and the
sum of all experts (MoELayer._run). That is right for hooks of FSDP2 and hooks that prepare a weight
(torch.nn.utils); any other hook expects the module's own inputs and results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor

from moecomm.autograd.deferred import leaf_of
from moecomm.autograd.in_place import has_main_grad, main_grad_of
from moecomm.errors import InvalidArgument
from moecomm.kernels.marks import is_expert_parameter, mark_expert_parameter
from moecomm.kernels.parameters import (
    mixed_shards_error,
    ranks_of_shards,
)
from moecomm.nn.config import IN_ORDER, OverlapConfig
from moecomm.nn.experts import GroupedExperts, SharedExperts, record_of

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_WEIGHTS = ("moecomm.", "torch.distributed.", "torch.nn.utils.")
"""The packages of hooks that concern weights alone: they gather or prepare weights, or average gradients."""


def watcher(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Returns what depends on the module's own results: a hook of it, or of the `kind` that it wraps, or a
    forward other than that of `kind`. None: nothing does. Hooks that concern weights alone do not count."""
    for each in module.modules():
        wrapped = isinstance(each, kind)
        if not (wrapped or each is module):
            continue
        for hook in _hooks(each):
            if not _package(hook).startswith(_OF_WEIGHTS):
                return f"a hook ({_name(hook)})"
        if wrapped and getattr(each.forward, "__func__", None) is not kind.forward:
            return f"another forward ({_name(each.forward)})"
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    for kind in _KINDS:
        yield from getattr(module, kind).values()


def _package(function: Any) -> str:
    """Returns the module that defines a function, or the class of a callable."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# -- experts that fully_shard has sharded ------------------------------------------------------------------


_PLACED = "moecomm_placed"
"""The attribute of a parameter that is known to be whole, or sharded in an allowed way."""


def refuse_mixed_shards(experts: nn.Module) -> None:
    """Raises InvalidArgument if fully_shard has sharded a parameter of spread experts, or of experts with
    main_grad, in another way than `fully_shard_experts`, which sets `sharded_over`. A parameter that was
    checked before costs a look at its attributes. GroupedExperts itself refuses what FSDP sets on it, so only
    modules within it are checked here. New parameters of custom experts are marked as experts'."""
    grouped = _grouped(experts)
    if grouped is None:
        new = [p for p in experts.parameters() if not (is_expert_parameter(p) or hasattr(p, _PLACED))]
    # FSDP's hooks end a graph of torch.compile anyway; without them this check must not end one.
    elif not grouped._modules or (torch.compiler.is_compiling() and not _is_managed(grouped)):
        return
    else:
        new = [p for p in _parameters(grouped) if not hasattr(p, _PLACED)]
    if new:
        _place(experts, grouped, new)


def _grouped(experts: nn.Module) -> GroupedExperts | None:
    """Returns the GroupedExperts of a layer; None for custom experts."""
    if isinstance(experts, GroupedExperts):
        return experts
    if record_of(experts) is not None:
        return None
    return next((each for each in experts.modules() if isinstance(each, GroupedExperts)), None)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields what `module.parameters()` does in a fifth of the time, since each forward calls it."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _parameters(child)


@_disable_dynamo
def _place(experts: nn.Module, grouped: GroupedExperts | None, new: Sequence[nn.Parameter]) -> None:
    allowed: frozenset[int] = getattr(experts, "sharded_over", frozenset())
    sharded: set[int] = set()
    prefix = next((f"{path}." for path, each in experts.named_modules() if path and each is grouped), "")
    for name, parameter, shard in _shards(experts):
        if grouped is not None and grouped.config.main_grad and name.endswith(".original"):
            raise InvalidArgument(
                f"main_grad is True, must be False under fully_shard, which has sharded {name} of the "
                "experts: it averages and shards `grad` alone"
            )
        within = name.removeprefix(prefix)
        if grouped is not None and (grouped.has_all or grouped.is_per_expert(within, shard) is False):
            continue  # all ranks have the same parameter, for example one adapter of all experts
        if allowed != set(ranks := ranks_of_shards(shard)):
            held = record_of(experts) if grouped is None else grouped.held
            raise mixed_shards_error(f"{name} of the experts", ranks, held)
        sharded.add(id(parameter))
    for parameter in new:
        if grouped is not None or id(parameter) in sharded:
            setattr(parameter, _PLACED, True)
        else:
            mark_expert_parameter(parameter)


def _is_managed(experts: GroupedExperts) -> bool:
    """Returns whether fully_shard has been applied to one of these modules."""
    return any(getattr(module, "_is_fsdp_managed_module", False) for module in experts.modules())


def _shards(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter | None, DTensor]]:
    """Yields name, parameter and shard of each sharded parameter. During the forward of a module around the
    experts FSDP has replaced shards by whole parameters, so that only its own records know the shards."""
    for name, parameter in experts.named_parameters():
        if isinstance(parameter, DTensor):
            yield name, parameter, parameter
    paths = {module: f"{path}." if path else "" for path, module in experts.named_modules()}
    states = [reference() for reference in list(_module_state_mapping.values())]
    for each in [each for state in states for group in _groups(state) for each in group.fsdp_params]:
        info = each._module_info
        modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
        for module, name in zip(modules, names, strict=True):
            if module in paths:
                yield f"{paths[module]}{name}", module._parameters.get(name), each.sharded_param


def _groups(state: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP state; earlier versions of torch have at most one."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    only = getattr(state, "_fsdp_param_group", None)
    return [] if only is None else [only]


# -- settings ----------------------------------------------------------------------------------------------


_PARTS = (("experts", GroupedExperts), ("shared", SharedExperts))
"""The modules within whose calls a layer runs, and their classes."""


def watchers_of(layer: Any) -> str | None:
    """Returns the hook or changed forward that needs the rows of the experts or shared experts themselves, so
    that the layer has to run in order; None if there is none."""
    for name, kind in _PARTS:
        module = getattr(layer, name)
        if module is not None and (found := watcher(module, kind)) is not None:
            return f"{name} has {found}"
    return None


def refuse_own_settings(overlap: OverlapConfig) -> None:
    """Raises InvalidArgument for settings that have no effect on custom experts."""
    if (found := _setting_without_effect(overlap)) is not None:
        raise InvalidArgument(f"{found} with experts of one's own, which autograd differentiates")


def _setting_without_effect(overlap: OverlapConfig) -> str | None:
    """Returns a setting that has no effect where autograd does the backward, or None."""
    for name, only in IN_ORDER.items():
        if (value := getattr(overlap, name)) != only:
            return f"OverlapConfig.{name} is {value!r}, must be {only!r}"
    return None


def check_settings(layer: Any, in_order: bool, watched: str | None) -> None:
    """Raises InvalidArgument for settings or weights with which a MoELayer's forward cannot run. `watched`:
    the result of `watchers_of`."""
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
    if layer.config.main_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        layer.experts.mark_parameters()  # some may have been frozen when they were marked
        for parameter in layer.experts.parameters():
            if parameter.requires_grad and has_main_grad(parameter):
                main_grad_of(parameter)  # refuses an unsuitable one here, on all ranks
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
    """Raises InvalidArgument for weights computed from parameters otherwise than by a cast:
    `backward_weights` does not reach their parameters."""
    for name in ("w_in", "w_out"):
        if leaf_of(getattr(experts, name)) is None:
            raise InvalidArgument(
                f"defer_weights is True and experts.{name} is computed from parameters (by "
                "torch.nn.utils.parametrize, for example), must be a parameter or a cast of one: set "
                "defer_weights=False"
            )


def _require_parts(layer: Any) -> None:
    """Raises InvalidArgument if the experts or shared experts were replaced by a module without their
    weights."""
    for (name, kind), needed in zip(_PARTS, ("products", "w_in"), strict=True):
        part = getattr(layer, name)
        if part is not None and not isinstance(part, kind) and not hasattr(part, needed):
            instead = ", or give MoELayer(experts=module) experts of one's own" * (name == "experts")
            raise InvalidArgument(
                f"layer.{name} is {type(part).__name__} without {needed!r}, must be the {kind.__name__} "
                "that the layer was built with: change its weights with torch.nn.utils.parametrize, and "
                f"its rows with hooks{instead}"
            )
