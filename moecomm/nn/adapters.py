"""Parameters that are added to GroupedExperts, by torch.nn.utils.parametrize for example: which have a part
for each of a rank's experts, and which are one for the experts of all ranks.

The first dimension tells, unless it is the number of the rank's experts by chance: an adapter A (r, H) of all
experts with r = L. So the parametrization is tried with random numbers: a part for each expert changes the
weight of its own expert alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moecomm.nn.parameters import unmark_expert_parameter

_SAID = "_moecomm_per_expert"
"""The attribute of a module that has what is known of its parameters, by name."""


def mark_adapter(module: nn.Module, *, per_expert: bool) -> None:
    """Says of the parameters of a module within a layer's experts, a parametrization for example, whose first
    dimension is the number of this rank's experts, whether they have a part for each expert there, or are the
    same on all ranks. It is needed where moecomm cannot see that by itself, which raises InvalidArgument, and
    goes along with copies of the module."""
    for each in module.modules():
        setattr(each, _SAID, dict.fromkeys(each._parameters, per_expert))
        for parameter in each._parameters.values():
            if parameter is not None and not per_expert:
                unmark_expert_parameter(parameter)


def has_part_for_each(experts: nn.Module, local: int, name: str, parameter: Tensor) -> bool | None:
    """Returns whether a parameter that was added to experts, with this name in them, has a part for each of
    the `local` ones; None where that cannot be told."""
    if parameter.dim() == 0 or parameter.shape[0] != local:
        return False
    path, _, leaf = name.rpartition(".")
    module = experts.get_submodule(path)
    known: dict[str, bool] = getattr(module, _SAID, {})
    if leaf in known:
        return known[leaf]
    if isinstance(parameter, DTensor):  # `fully_shard_experts` has asked before; other shards are refused
        return True
    found = None
    if path.startswith("parametrizations.") and local > 1:
        _, weight, *inner = name.split(".")
        found = _changes_own_alone(experts.get_submodule(f"parametrizations.{weight}"), ".".join(inner))
    if found is not None:
        setattr(module, _SAID, {**known, leaf: found})
    return found


def _changes_own_alone(parametrization: nn.Module, name: str) -> bool | None:
    """Returns whether part 0 of a parameter is the only one that the weight of expert 0 depends on; None if
    it cannot be computed, or depends on none."""
    values: dict[str, Any] = dict(parametrization.named_parameters())
    device = values[name].device
    if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(0)
            for each, value in values.items():
                if value.is_floating_point():
                    values[each] = torch.randn_like(value).requires_grad_(each == name)
            first = functional_call(parametrization, values, ())[0]
            (found,) = torch.autograd.grad(first, values[name], torch.randn_like(first), allow_unused=True)
    except Exception:  # whatever a module of the user's does not take
        return None
    used = [] if found is None else found.reshape(len(found), -1).any(1).tolist()
    return not any(used[1:]) if any(used) else None
