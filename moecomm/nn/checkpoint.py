"""State for torch.distributed.checkpoint that can be loaded at another number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moecomm.nn.parameters import is_expert_parameter


def sharded_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    ep_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> dict[str, Any]:
    """What `torch.distributed.checkpoint.save` and `.load` take: {"model": ..., "optimizer": ...,
    "param_groups": ...}.

    Expert parameters, and the optimizer's tensors of their shape, are DTensors sharded by expert (dimension
    0) over ep_group, the ranks that share out the experts (default: all ranks; a 1-d mesh is taken too). So a
    checkpoint holds (E, ...) tensors and loads at any EP size. All others are plain tensors, the same on
    every rank.

    Every tensor shares storage with the live one: `load` writes into model and optimizer in place.
    "param_groups" (learning rates and the like) is a Stateful that sets them on the optimizer when loaded;
    add keys of your own beside these, but keep these at the top level of what you pass to `load`. An
    optimizer that has not stepped is given its state tensors first, all zero, and behaves as before.
    """
    mesh = _ep_mesh(model, ep_group)
    experts = {name for name, parameter in model.named_parameters() if is_expert_parameter(parameter)}
    tensors = model.state_dict()
    state: dict[str, Any] = {"model": {n: _shard(t, mesh) if n in experts else t for n, t in tensors.items()}}
    if optimizer is not None:
        _ensure_state(optimizer)
        state["optimizer"] = _optimizer_tensors(model, optimizer, mesh)
        state["param_groups"] = _ParamGroups(optimizer)
    return state


def _ep_mesh(model: nn.Module, ep_group: dist.ProcessGroup | DeviceMesh | None) -> DeviceMesh | None:
    if isinstance(ep_group, DeviceMesh) or not dist.is_initialized():
        return ep_group if isinstance(ep_group, DeviceMesh) else None
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    group = dist.group.WORLD if ep_group is None else ep_group
    assert group is not None
    return DeviceMesh.from_group(group, device_type)


def _shard(local: Tensor, mesh: DeviceMesh | None) -> Tensor:
    return local if mesh is None else DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)


def _optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None
) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter not in optimizer.state:
            continue
        sharded = is_expert_parameter(parameter)
        tensors[name] = {
            key: _shard(value, mesh) if sharded and value.shape == parameter.shape else value
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
    return tensors


@torch.no_grad()
def _ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state tensors of an optimizer that has none: a step of zero gradients at rate zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if optimizer.state or not parameters:
        return
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    # The plain class's step: a scheduler wraps the instance's and would count this one.
    type(optimizer).step(optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


class _ParamGroups:
    """The optimizer's settings as a Stateful of distributed checkpoint: numbers cannot load in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {
            str(index): {key: value for key, value in group.items() if key != "params"}
            for index, group in enumerate(self._groups)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, group in enumerate(self._groups):
            group.update(state[str(index)])
