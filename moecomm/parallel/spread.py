"""Finds the parameters of a layer's experts that belong to this rank's experts alone. Importing moecomm.nn
also installs a check, before each step of an optimizer, that their gradients are averaged. It costs little:
after sync_gradients it looks at no parameter, under DDP and FSDP2 at one of each layer's experts."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecomm.errors import InvalidArgument
from moecomm.kernels.parameters import AVERAGED_BY_DDP, DIVIDED, is_expert_parameter
from moecomm.parallel.records import grouped_in

built_layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The MoELayers of this process."""


def spread_parameters(layer: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters of a layer's experts that are of this rank's experts alone, by their names in
    `layer.experts`: in a custom module all, in GroupedExperts those with a part for each expert, and marked
    ones. Raises InvalidArgument for others if experts are spread over ranks: nothing would average those."""
    (experts, prefix), found = grouped_in(layer.experts), {}
    for name, parameter in layer.experts.named_parameters():
        of_each: bool | None = True
        if experts is not None and not is_expert_parameter(parameter):
            of_each = experts.is_per_expert(name.removeprefix(prefix), parameter)
        if not of_each and layer.comm.size > 1:
            raise _not_of_each(name, parameter, experts.num_local_experts, known=of_each is not None)
        if of_each is not False:
            found[name] = parameter
    return found


def _not_of_each(name: str, parameter: Tensor, local: int, known: bool) -> InvalidArgument:
    shape = f"experts.{name} has shape {tuple(parameter.shape)}"
    if known:
        return InvalidArgument(
            f"{shape}, and counts as one for the experts of all ranks, must have a part for each of the "
            f"{local} experts of this rank, in a first dimension of that size"
        )
    return InvalidArgument(
        f"{shape}, whose first dimension is the {local} experts of this rank, and could be a part for each "
        "of them or one for the experts of all ranks: say it, moecomm.nn.mark_adapter(module, "
        "per_expert=...) with the module that has it"
    )


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
    in the backward."""
    trained = (each for each in layer.experts.parameters() if each.requires_grad)
    marks = (AVERAGED_BY_DDP, DIVIDED)
    if any(isinstance(each, DTensor) or any(hasattr(each, mark) for mark in marks) for each in trained):
        return False
    return any(each.requires_grad for each in spread_parameters(layer).values())


register_optimizer_step_pre_hook(_check_step)
