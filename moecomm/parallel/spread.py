"""Finds the parameters of a layer's experts that belong to this rank's experts alone. Importing moecomm.nn
also installs a check, before each step of an optimizer, that their gradients are averaged. It costs little:
after sync_gradients it looks at no parameter, under DDP and FSDP2 at one of each layer's experts."""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecomm.errors import InvalidArgument
from moecomm.kernels.parameters import AVERAGED_BY_DDP, DIVIDED, is_expert_parameter
from moecomm.parallel.records import grouped_in

built_layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The MoELayers of this process."""


class Shares(NamedTuple):
    """The parameters of a layer's experts, by their names in `layer.experts`."""

    spread: dict[str, nn.Parameter]
    """Those of this rank's experts alone: in a custom module all, in GroupedExperts those with a part for
    each expert, and marked parameters."""
    common: dict[str, nn.Parameter]
    """The others, which all ranks share, such as one adapter of all experts."""


def shares_of(layer: Any) -> Shares:
    """Returns the Shares of a layer's experts."""
    (experts, prefix), shares = grouped_in(layer.experts), Shares({}, {})
    for name, parameter in layer.experts.named_parameters():
        of_each: bool | None = True
        if experts is not None and not is_expert_parameter(parameter):
            of_each = experts.is_per_expert(name.removeprefix(prefix), parameter)
        if of_each is None and layer.comm.size > 1:
            raise InvalidArgument(
                f"experts.{name} has shape {tuple(parameter.shape)}, whose first dimension is the "
                f"{experts.num_local_experts} experts of this rank, and could be a part for each of them or "
                "one for the experts of all ranks: say it, moecomm.nn.mark_adapter(module, per_expert=...) "
                "with the module that has it"
            )
        shares[0 if of_each else 1][name] = parameter
    return shares


# -- the check before an optimizer's step ------------------------------------------------------------------


def _check_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Raises InvalidArgument before an optimizer's step on experts' weights whose gradients are still
    deferred or not averaged, or with an optimizer that is not for such weights."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    shares = zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)
    found = [layer for layer in built_layers if _looks_wrong(layer, shares)]
    if not found:
        return
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for layer in found:
        if own.isdisjoint(layer.experts.parameters()):
            continue
        if layer.has_pending_weights:
            raise InvalidArgument(
                "the optimizer has experts' weights whose gradients are still put off "
                "(OverlapConfig(defer_weights=True)), and the next step would have them: call "
                "moecomm.nn.backward_weights(model) before, or with drop=True for a step that is left out"
            )
        if shares:
            raise InvalidArgument(
                "the optimizer is a ZeroRedundancyOptimizer, which would send one rank's experts to all "
                "ranks: use it for the other parameters (moecomm.nn.is_expert_parameter tells) and a plain "
                "optimizer for the experts, or FSDP2 (moecomm.nn.fully_shard_experts)"
            )
        raise InvalidArgument(
            f"the optimizer has weights of experts that {layer.comm.size} ranks share out, with gradients "
            "that moecomm.nn.sync_gradients has not averaged since the last backward: each rank would step "
            "by those of its own loss. Call sync_gradients(model) before the step, or wrap the model "
            "(prepare_ddp, fully_shard_experts); code that averages them itself calls "
            "moecomm.nn.mark_synchronized(model)"
        )


def _looks_wrong(layer: Any, shares: bool) -> bool:
    """True if an optimizer must not step on these experts now. `shares`: it sends parameters to all ranks."""
    if layer.has_pending_weights:
        return True
    if layer.comm.size == 1:
        return False
    return shares or (layer._unsynchronized and _averages_nothing(layer))


def _averages_nothing(layer: Any) -> bool:
    """True if this rank trains weights of its own experts, and neither DDP nor FSDP2 averages their gradients
    in the backward. An adapter that all ranks share is averaged like a dense weight."""
    trained = (each for each in layer.experts.parameters() if each.requires_grad)
    marks = (AVERAGED_BY_DDP, DIVIDED)
    if any(isinstance(each, DTensor) or any(hasattr(each, mark) for mark in marks) for each in trained):
        return False
    return any(each.requires_grad for each in shares_of(layer).spread.values())


register_optimizer_step_pre_hook(_check_step)
