"""What a layer looks at before each forward: whether somebody watches its modules by hooks, or has changed
their forward, or has sharded them as if all ranks held the same; and whether its settings go together.

A layer's shared experts and experts are called with other tensors than their own: tokens as they are, and the
sum of all experts (MoELayer._run). That is right for hooks of FSDP2 and for those that make a weight ready
(torch.nn.utils); any other one expects what the module itself computes.
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
"""The packages of hooks that have to do with weights alone: they gather them, average gradients, or make a
weight ready."""


def watcher(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Returns what expects the module's own result of its calls: a hook of it, or of the `kind` that it
    wraps, or another forward than that of `kind`. None: nothing does. Hooks for weights alone do not
    count."""
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
    """Returns the module in which a function, or the class of a callable, was defined."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# -- experts that fully_shard has sharded ------------------------------------------------------------------


_PLACED = "moecomm_placed"
"""The attribute of a parameter that is known to be sharded as it may be, or not at all."""


def refuse_mixed_shards(experts: nn.Module) -> None:
    """Raises InvalidArgument if fully_shard has sharded a parameter of spread experts, or of ones with
    main_grad, in another way than `fully_shard_experts`, which sets `sharded_over`. What was seen before
    costs a look at its attributes. What FSDP sets on GroupedExperts itself is refused there, so only modules
    within them are looked at. New parameters of experts of one's own are marked as experts'."""
    grouped = _grouped(experts)
    if grouped is None:
        new = [p for p in experts.parameters() if not (is_expert_parameter(p) or hasattr(p, _PLACED))]
    # FSDP's hooks end a graph of torch.compile; without them nothing here is to end one.
    elif not grouped._modules or (torch.compiler.is_compiling() and not _is_managed(grouped)):
        return
    else:
        new = [p for p in _parameters(grouped) if not hasattr(p, _PLACED)]
    if new:
        _place(experts, grouped, new)


def _grouped(experts: nn.Module) -> GroupedExperts | None:
    """Returns the GroupedExperts of a layer; None for experts of one's own."""
    if isinstance(experts, GroupedExperts):
        return experts
    if record_of(experts) is not None:
        return None
    return next((each for each in experts.modules() if isinstance(each, GroupedExperts)), None)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields what `module.parameters()` does, in a fifth of the time: each forward comes here."""
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
            continue  # all ranks have the same, one adapter of all experts for example
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
    """Has fully_shard come to a module of these?"""
    return any(getattr(module, "_is_fsdp_managed_module", False) for module in experts.modules())


def _shards(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter | None, DTensor]]:
    """Yields name, parameter and shard of what is sharded. In the forward of a module around the experts FSDP
    has put whole parameters in the place of shards, which only its own records know then."""
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
    """Returns the groups of parameters of a state of FSDP; earlier versions of torch have one at most."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    only = getattr(state, "_fsdp_param_group", None)
    return [] if only is None else [only]


# -- settings ----------------------------------------------------------------------------------------------


_PARTS = (("experts", GroupedExperts), ("shared", SharedExperts))
"""The modules whose calls a layer runs within, and their classes."""


def watchers_of(layer: Any) -> str | None:
    """Returns which hook or changed forward needs the rows of the experts or shared experts themselves, so
    that the layer has to run in order; None if there is none."""
    for name, kind in _PARTS:
        module = getattr(layer, name)
        if module is not None and (found := watcher(module, kind)) is not None:
            return f"{name} has {found}"
    return None


def refuse_own_settings(overlap: OverlapConfig) -> None:
    """Raises InvalidArgument for settings that have no effect on experts of one's own."""
    if (found := _setting_without_effect(overlap)) is not None:
        raise InvalidArgument(f"{found} with experts of one's own, which autograd differentiates")


def _setting_without_effect(overlap: OverlapConfig) -> str | None:
    """Returns the setting that has no effect where autograd does the backward, or None."""
    for name, only in IN_ORDER.items():
        if (value := getattr(overlap, name)) != only:
            return f"OverlapConfig.{name} is {value!r}, must be {only!r}"
    return None


def check_settings(layer: Any, in_order: bool, watched: str | None) -> None:
    """Raises InvalidArgument for settings or weights with which no forward of a MoELayer can run. `watched`:
    what `watchers_of` has returned."""
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
        layer.experts.mark_parameters()  # some may have been frozen before
        for parameter in layer.experts.parameters():
            if parameter.requires_grad and has_main_grad(parameter):
                main_grad_of(parameter)  # one that cannot be used is refused here, on all ranks
    parts = (("experts", None if layer._own_experts else layer.experts), ("shared", layer.shared))
    for name, module in [(name, module) for name, module in parts if module is not None]:
        for own in ("w_in", "w_out", "b_in", "b_out"):
            weight = getattr(module, own, None) if own == "w_in" else module._parameters.get(own)
            # FSDP's shards may have another dtype before the call of their module.
            if weight is None or weight.dtype is layer.config.dtype or isinstance(weight, DTensor):
                continue
            raise InvalidArgument(
                f"{name}.{own} is {weight.dtype}, must be the config's dtype {layer.config.dtype}: build "
                f"the layer with MoEConfig(dtype={weight.dtype}) instead of converting it"
            )


def _require_parameters(experts: Any) -> None:
    """Raises InvalidArgument for weights that were computed from parameters in another way than by a cast:
    `backward_weights` does not come to these."""
    for name in ("w_in", "w_out"):
        if leaf_of(getattr(experts, name)) is None:
            raise InvalidArgument(
                f"defer_weights is True and experts.{name} is computed from parameters (by "
                "torch.nn.utils.parametrize, for example), must be a parameter or a cast of one: set "
                "defer_weights=False"
            )


def _require_parts(layer: Any) -> None:
    """Raises InvalidArgument where a module that lacks their weights has replaced the experts or shared
    experts."""
    for (name, kind), needed in zip(_PARTS, ("products", "w_in"), strict=True):
        part = getattr(layer, name)
        if part is not None and not isinstance(part, kind) and not hasattr(part, needed):
            instead = ", or give MoELayer(experts=module) experts of one's own" * (name == "experts")
            raise InvalidArgument(
                f"layer.{name} is {type(part).__name__} without {needed!r}, must be the {kind.__name__} "
                "that the layer was built with: change its weights with torch.nn.utils.parametrize, and "
                f"its rows with hooks{instead}"
            )
