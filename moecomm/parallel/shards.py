"""Refuses experts that fully_shard has sharded as if all ranks held the same experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor

from moecomm.errors import InvalidArgument
from moecomm.kernels.parameters import (
    is_expert_parameter,
    mark_expert_parameter,
    mixed_shards_error,
    ranks_of_shards,
)
from moecomm.parallel.records import grouped_in, record_of

_PLACED = "moecomm_placed"
"""The attribute of a parameter that was found whole, or sharded over ranks that are allowed."""


def refuse_mixed_shards(experts: nn.Module) -> None:
    """Raises InvalidArgument if fully_shard has sharded a parametrized weight of experts with main_grad, or a
    parameter that differs between ranks. The latter may be sharded over exactly the ranks in
    `experts.sharded_over`, which `fully_shard_experts` sets.

    Each parameter is checked once; later calls only look at its attributes. In GroupedExperts only child
    modules are checked, since GroupedExperts refuses FSDP on itself. New parameters of custom experts are
    marked as parameters of experts."""
    grouped, prefix = grouped_in(experts)
    if grouped is None:
        new = [p for p in experts.parameters() if not (is_expert_parameter(p) or hasattr(p, _PLACED))]
    elif not grouped._modules:
        return
    else:
        new = [p for p in _parameters(grouped) if not hasattr(p, _PLACED)]
    if new:
        _place(experts, grouped, prefix, new)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module in a fifth of the time of `parameters()`: each forward calls this."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _parameters(child)


@_disable_dynamo
def _place(experts: nn.Module, grouped: Any, prefix: str, new: Sequence[nn.Parameter]) -> None:
    allowed: frozenset[int] = getattr(experts, "sharded_over", frozenset())
    sharded: set[int] = set()
    for name, parameter, shard in _shards(experts):
        if grouped is not None and grouped.config.main_grad and name.endswith(".original"):
            raise InvalidArgument(
                f"main_grad is True, must be False under fully_shard, which has sharded {name} of the "
                "experts: it averages and shards `grad` alone"
            )
        within = name.removeprefix(prefix)
        if grouped is not None and (grouped.has_all or grouped.is_per_expert(within, shard) is False):
            continue  # all ranks have the same parameter
        if allowed != set(ranks := ranks_of_shards(shard)):
            held = record_of(experts) if grouped is None else grouped.held
            raise mixed_shards_error(f"{name} of the experts", ranks, held)
        sharded.add(id(parameter))
    for parameter in new:
        if grouped is not None or id(parameter) in sharded:
            setattr(parameter, _PLACED, True)
        else:
            mark_expert_parameter(parameter)


def _shards(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter | None, DTensor]]:
    """Yields name, parameter and shard of each sharded parameter. During the forward of a module around the
    experts, FSDP has replaced shards by whole parameters; then only FSDP's own states have the shards."""
    for name, parameter in experts.named_parameters():
        if isinstance(parameter, DTensor):
            yield name, parameter, parameter
    paths = {module: f"{path}." if path else "" for path, module in experts.named_modules()}
    states = [reference() for reference in list(_module_state_mapping.values())]
    for each in (each for state in states for group in _groups(state) for each in group.fsdp_params):
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
