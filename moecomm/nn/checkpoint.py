"""State for torch.distributed.checkpoint that can be loaded at another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moecomm.errors import InvalidArgument
from moecomm.kernels.activation import INTERLEAVED
from moecomm.nn.expert_parts import splits_of
from moecomm.nn.experts import GroupedExperts, SharedExperts
from moecomm.nn.gradients import ep_group_of
from moecomm.nn.part_state import part_of_all
from moecomm.nn.replicas import expert_owners, layers_of, replicas_of_shards
from moecomm.types import AnyGroup, Group, as_group

Place = DeviceMesh | Callable[[Tensor], Tensor]


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, ep_group: AnyGroup | None = None
) -> dict[str, Any]:
    """Returns the state dict for `torch.distributed.checkpoint.save` and `.load`: {"model": ..., "optimizer":
    ..., "param_groups": ...}.

    Expert parameters, and the optimizer's tensors of their shape, are DTensors sharded by expert (dimension
    0) over the ranks of their layer's communicator, and where `fully_shard_experts` has sharded them further
    over those that hold the same experts. So a checkpoint holds (E, ...) tensors and loads at any EP size,
    sharded or not. All others are what they are in `state_dict()`: plain tensors, the same on every rank, or
    shards of FSDP2. Records of which experts a rank's state_dict holds are left out. Pass the model that was
    built, not a wrapper (`ddp.module`), so that names stay the same.

    Under a folding with ETP > 1 expert parameters, and the optimizer's tensors of their shape, are the pieces
    of these (E, ...) tensors that the rank holds, as tensors that save, async_save and load take and nothing
    else does. The checkpoint is the same as at any other ETP and EP size.

    ep_group: the ranks that share out the experts, a process group or a DeviceMesh of one dimension. For
    MoELayers it need not be given, and InvalidArgument is raised for another than the layers' own. For
    parameters marked outside of MoELayers the default is all ranks. InvalidArgument is raised, too, for an
    optimizer with several numbers of an expert parameter in another shape (Adafactor).

    The w_in of experts whose activation interleaves gates and up values has the name w_in.interleaved, so
    that a model with another order of columns finds it missing.

    Every tensor shares storage with the live one: `load` writes into model and optimizer in place.
    "param_groups" (learning rates and the like) is a Stateful that sets them on the optimizer when loaded;
    add keys of your own beside these, but keep these at the top level of what you pass to `load`. An
    optimizer that has not stepped is given its state tensors first, as before a step, and behaves as before,
    but for SGD with dampening, whose first step then dampens too.
    """
    all_tensors = model.state_dict()  # first: it makes FSDP put its shards in place
    places = _find_places(model, as_group(ep_group, "ep_group"))
    # What two modules share has a name in each.
    modules = model.named_modules(remove_duplicate=False)
    experts = (name for name, module in modules if isinstance(module, GroupedExperts))
    records = {f"{name}._extra_state".lstrip(".") for name in experts}
    tensors = {name: value for name, value in all_tensors.items() if name not in records}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved_as = _names_of_interleaved(model)
    shards = {saved_as.get(n, n): _shard(t, places.get(parameters.get(n))) for n, t in tensors.items()}
    state: dict[str, Any] = {"model": shards}
    if optimizer is not None:
        _ensure_state(optimizer)
        state["optimizer"] = {
            saved_as.get(name, name): {
                key: _shard(value, _place_of_state(places, parameter, name, key, value))
                for key, value in optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            }
            for name, parameter in model.named_parameters()
            if parameter in optimizer.state
        }
        state["param_groups"] = _ParamGroups(optimizer)
    return state


def _place_of_state(
    places: dict[Any, Place], parameter: Tensor, name: str, key: str, value: Tensor
) -> Place | None:
    """Returns the place of a tensor of the optimizer's: the parameter's, or None for a number that all ranks
    have. Raises InvalidArgument for what is of this rank's experts and has another shape than they."""
    place = places.get(parameter)
    if place is None or value.shape == parameter.shape:
        return place
    if value.numel() > 1:
        raise InvalidArgument(
            f"the optimizer's {key} of {name} is {tuple(value.shape)}, and the experts' weight "
            f"{tuple(parameter.shape)}: a checkpoint would take it for the same on all ranks. Use an "
            "optimizer whose state has the weights' shape"
        )
    return None


def _names_of_interleaved(model: nn.Module) -> dict[str, str]:
    """Returns other names for weights whose gates and up values are interleaved, so that a checkpoint of them
    cannot be loaded into halves, nor the other way round."""
    return {
        f"{name}.w_in".lstrip("."): f"{name}.w_in.interleaved".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (GroupedExperts, SharedExperts)) and module.config.activation in INTERLEAVED
    }


def _find_places(model: nn.Module, ep_group: Group | None) -> dict[Any, Place]:
    """Returns the place of each expert parameter in the tensors of all experts: the mesh over which it is a
    shard, of its EP group and for a parameter that is sharded already the holders of the same experts as a
    second dimension; or what makes it pieces of them, where experts are split."""
    if not dist.is_initialized():
        return {}
    owners = expert_owners(model)
    meshes: dict[tuple[Any, Any], DeviceMesh] = {}
    places: dict[Any, Place] = {}
    for layer in layers_of(model):
        if layer.folding is not None and layer.folding.etp > 1:
            ep_group_of(layer, ep_group)
            splits = splits_of(layer.config.activation)
            for name, of_part in layer.experts.named_parameters():
                owners.pop(of_part, None)
                places[of_part] = partial(part_of_all, experts=layer.experts, split=splits[name])
    for parameter, owner in owners.items():
        kind, over = parameter.device.type, getattr(parameter, "device_mesh", None)
        key = (None if owner is None else owner.comm, over)
        if key not in meshes:
            if owner is not None and over is not None:
                meshes[key] = replicas_of_shards(owner.comm, over).mesh(owner.comm, kind)
            else:
                group = ep_group_of(owner, ep_group)
                assert group is not None
                meshes[key] = DeviceMesh.from_group(group, kind)
        places[parameter] = meshes[key]
    return places


def _shard(tensor: Any, place: Place | None) -> Any:
    """Returns this rank's experts as a shard of all experts; without a place the tensor is returned as it
    is."""
    if place is None:
        return tensor
    if not isinstance(place, DeviceMesh):
        return place(tensor)
    mesh = place
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor.detach(), mesh, [Shard(0)], run_check=False)
    shape = torch.Size((tensor.shape[0] * mesh.size(0), *tensor.shape[1:]))
    placements = [Shard(0), *tensor.placements]
    stride = torch.empty(shape, device="meta").stride()
    local = tensor.to_local().detach()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _before_steps(name: str, rate: float | Tensor) -> float | Tensor:
    """Returns what a state tensor of torch's optimizers holds before their first step."""
    if name in ("eta", "step_size"):  # ASGD, Rprop
        return rate
    return 1.0 if name in ("mu", "mu_product") else 0.0  # ASGD, NAdam


@torch.no_grad()
def _ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state tensors of an optimizer that has none, by a step of zero gradients at rate zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if optimizer.state or not parameters:
        return
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    # This calls the step of the plain class: a scheduler wraps the instance's and would count this one.
    type(optimizer).step(optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    value.fill_(_before_steps(name, group["lr"]))


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
