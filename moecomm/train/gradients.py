"""Averages and clips gradients over ranks, where experts are spread and all other parameters replicated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moecomm.arguments import require_number
from moecomm.autograd.in_place import has_main_grad, main_grad_of
from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, MismatchedArguments, Unsupported
from moecomm.kernels.parameters import AVERAGED_BY_DDP, DIVIDED, ranks_of_shards
from moecomm.nn.layer import MoELayer, layers_of
from moecomm.parallel import ParallelFolding
from moecomm.parallel.spread import spread_parameters
from moecomm.train.agreement import agree, agree_by_holders
from moecomm.train.drift import bits_of, router_weight
from moecomm.train.replicas import (
    Replicas,
    expert_owners,
    find_replicas,
    model_group,
    ranks_of,
    require_equal,
)
from moecomm.types import AnyGroup, Group, as_group

_BUCKET_BYTES = 64 << 20


@torch.no_grad()
def sync_gradients(
    model: nn.Module,
    group: AnyGroup | None = None,
    expert_group: AnyGroup | None = None,
    *,
    folding: ParallelFolding | None = None,
) -> None:
    """Turns gradients of each rank's own loss, after backward, into gradients of the mean of all ranks'
    losses, with equal bits on all ranks that hold a parameter. Every rank of `group` calls it once per step.

    Dense gradients are averaged over `group`. An expert's gradient already includes the tokens of its
    communicator's ranks, so it is summed over the ranks that hold the expert and divided by the size of
    `group` (docs/training.md). With MoEConfig(main_grad=True) an expert's gradient is its `main_grad`. A
    parameter without a gradient counts as zero. Gradients that FSDP2 has averaged do not change. Gradients of
    DTensors on the folding's TP mesh (torch's tensor parallelism) are summed over folding.group("dp-cp") and
    divided by the size of `group`.

    Args:
        model: has the MoELayers, and all parameters to average.
        group: all ranks that hold the model and bring tokens to a step, a process group or a DeviceMesh of
            one dimension; None: all ranks, or those of the pipeline stage where layers have a folding.
        expert_group: the ranks that hold the same experts; only for parameters that `mark_expert_parameter`
            marked outside of MoELayers (None: no other rank holds the same experts).
        folding: the job's ParallelFolding, for a pipeline stage without MoELayers.

    Ranks compare their parameters at each call, for which the host waits. All ranks raise MismatchedArguments
    if parameters differ, or some ranks have frozen them, or a router's weights differ. They raise
    InvalidArgument for groups that do not fit the layers, parameters that fully_shard has sharded over a part
    of `group`, a parameter shared by experts and another part of the model, a parameter that all experts
    share and that starts different on some ranks, a model under DistributedDataParallel, deferred gradients
    (`backward_weights`), and plain tensors marked as split by tensor parallelism (`tensor_model_parallel`). A
    sparse gradient raises Unsupported, and InvalidArgument on ranks that have none.
    """
    owners: dict[nn.Parameter, MoELayer | None] = {}

    def check() -> list[str]:
        _require_gradients(model)
        _refuse_sparse(model)
        owners.update(expert_owners(model))
        if dist.is_initialized():
            _refuse_ddp(model, owners)
        experts = {each for layer in layers_of(model) for each in spread_parameters(layer).values()}
        experts |= owners.keys()
        return [_words(name, each) for name, each in model.named_parameters() if each not in experts]

    if not dist.is_initialized():
        check()
        mark_synchronized(model)
        return
    group, expert_group = model_group(model, group, folding), as_group(expert_group, "expert_group")
    device = _device_of(model)
    about = "ranks average different parameters"
    if not agree(group, device, about, check, lambda: _bits_of_router(model)):
        raise MismatchedArguments(
            "a router's weights differ between ranks, and so will other parameters that all ranks share: "
            "these must start the same (torch.manual_seed alike, or load one state) and change by the same. "
            "Clip by moecomm.nn.clip_grad_norm, not torch.nn.utils.clip_grad_norm_; scale by "
            "ShardedGradScaler (torch.distributed.fsdp.sharded_grad_scaler), not GradScaler; leave a step "
            "out on all ranks or none"
        )
    replicas = find_replicas(model, group)
    require_equal(model, group)
    size, ranks = dist.get_world_size(group), ranks_of(group)
    _require_same_experts(model, group, device, replicas)
    given = None if expert_group is None else ranks_of(expert_group)
    for found in replicas.values():
        if given not in (None, found.ranks):
            raise InvalidArgument(
                f"expert_group has ranks {given}, must have {found.ranks}, which hold the same experts; "
                "leave it out, the layers know"
            )
    sums: dict[Group | None, list[Tensor]] = {}
    folding = next((layer.folding for layer in layers_of(model) if layer.folding is not None), folding)
    tensor_parallel = folding is not None and folding.tp > 1
    for parameter in _trained(model):
        if folding is not None and isinstance(parameter, DTensor) and _is_tensor_parallel(parameter, folding):
            sums.setdefault(folding.group("dp-cp"), []).append(_local(_placed_gradient(parameter)))
            continue
        if isinstance(parameter, DTensor):
            if parameter not in owners and ranks_of_shards(parameter) != tuple(sorted(ranks)):
                raise _sharded_over_too_few(parameter, f"all ranks {ranks} of the group")
            continue
        if hasattr(parameter, DIVIDED):
            continue
        if getattr(parameter, "tensor_model_parallel", False) and tensor_parallel:
            raise InvalidArgument(
                f"a parameter of shape {tuple(parameter.shape)} is split by tensor parallelism "
                "(tensor_model_parallel), must not be averaged over ranks that hold other parts: sum its "
                "gradient over folding.group('dp-cp'), divide it by the ranks of the stage, and pass the "
                "other modules here"
            )
        over = dist.group.WORLD if group is None else group
        if parameter in owners:
            layer, over = owners[parameter], expert_group
            if expert_group is None and layer is not None and len(replicas[layer.comm].ranks) > 1:
                over = replicas[layer.comm].group
        sums.setdefault(over, []).append(_gradient(parameter))
    for over, gradients in sums.items():
        if over is not None and dist.get_world_size(over) > 1:
            _all_reduce(gradients, over)
        for gradient in gradients:
            gradient.div_(size)
    mark_synchronized(model)


def mark_synchronized(model: nn.Module) -> None:
    """Declares that your own code has averaged the gradients of `model` since the last backward, as
    `sync_gradients` does. Otherwise an optimizer's step on spread experts raises InvalidArgument."""
    for layer in layers_of(model):
        layer._unsynchronized = False


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    ep_group: AnyGroup | None = None,
    pp_group: AnyGroup | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that their global norm is at most max_norm. Returns the norm before scaling,
    0-d float32 (float64 for float64 gradients), the same on all ranks.

    Every rank calls it after gradients are synchronised. Each expert and each replicated parameter is counted
    once; shards are added up. As in torch.nn.utils.clip_grad_norm_, a norm of NaN makes all gradients NaN,
    and an infinite norm makes finite gradients zero.

    Args:
        model: as in `sync_gradients`.
        max_norm: the largest allowed norm.
        ep_group: the ranks that share out the experts; only for parameters marked outside of MoELayers
            (None: all ranks).
        pp_group: the ranks of this rank's pipeline, over which the norm is summed; all of them call this.
            Layers whose folding has several stages need it.
        norm_type: the order p of the norm, more than 0; math.inf for the largest absolute value.
        error_if_nonfinite: raise InvalidArgument on all ranks, before anything is scaled, if the norm is not
            finite. The host waits for the norm.

    Raises InvalidArgument for other groups than the layers', deferred gradients, and a parameter of experts
    that another part of the model shares. If one rank alone raises, the others wait until the process group's
    deadline; `sync_gradients`, which comes before, raises these errors on all ranks.
    """
    pp_group, norm_type = as_group(pp_group, "pp_group"), _order(norm_type)
    require_number("max_norm", max_norm, lambda number: number >= 0, "at least 0")
    staged = [layer for layer in layers_of(model) if layer.folding is not None and layer.folding.pp > 1]
    if staged and pp_group is None:
        raise InvalidArgument(
            "pp_group is None, must be the ranks of this rank's pipeline, folding.group('pp'), for a norm "
            "over all stages"
        )
    trained, parts = _trained(model), [_zero(model)]
    for groups, powers in _powers(model, ep_group, norm_type).items():
        parts.append(_all_ranks(_sum(list(powers.values()), norm_type), groups, norm_type))
    total = _sum(parts, norm_type)
    if pp_group is not None:
        total = _all_ranks(total, (pp_group,), norm_type)
    norm = total if norm_type == math.inf else total.pow(1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise InvalidArgument(
            f"the norm of order {norm_type} of all gradients is {norm.item()}, must be finite with "
            "error_if_nonfinite: leave this step out, on all ranks; nothing was scaled"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    narrow = scale.float()
    for local in [_local(each) for each in map(_found_gradient, trained) if each is not None]:
        # GPUs cast a 0-d scale to float16, whose least number is 6e-8, but not a scale with dimensions.
        short = local.dtype is torch.float16 and local.layout is torch.strided
        local.mul_((narrow.view([1] * local.dim()) if short else scale).to(local.device))
    return norm if any(p.dtype == torch.float64 for p in trained) else norm.float()


@torch.no_grad()
def grad_norms(
    model: nn.Module, ep_group: AnyGroup | None = None, *, norm_type: float = 2.0
) -> dict[str, Tensor]:
    """Returns the norm of each trained parameter's gradient by name, 0-d float64, for logs. The norm of an
    experts' parameter covers all ranks' experts. Parameters of other pipeline stages are left out.

    Every rank calls it at a point where `clip_grad_norm` may be called; arguments and errors are explained
    there. Ranks exchange names at each call.
    """
    norm_type = _order(norm_type)
    found: dict[str, Tensor] = {}
    for groups, powers in _powers(model, ep_group, norm_type).items():
        names = list(powers)
        for over in groups:  # ranks may have other names: only part 0 of split experts has b_out
            told: list[Any] = [None] * dist.get_world_size(over)
            dist.all_gather_object(told, names, group=over)
            names = list(dict.fromkeys(name for each in told for name in each))
        zero = _zero(model)
        values = torch.stack([powers.get(name, zero) for name in names])
        values = _all_ranks(values, groups, norm_type)
        norms = values if norm_type == math.inf else values.pow(1 / norm_type)
        found |= dict(zip(names, norms.unbind(), strict=True))
    return {name: found[name] for name, each in model.named_parameters() if each.requires_grad}


def backward_weights(model: nn.Module, *, drop: bool = False) -> None:
    """Calls `MoELayer.backward_weights` of every MoELayer in the model. Call it before gradients are
    synchronised, clipped or used; with `drop` for a step that is skipped."""
    for layer in layers_of(model):
        layer.backward_weights(drop=drop)


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Sets loss_scale of every MoELayer in the model: the factor by which the model's loss is multiplied
    before backward. It applies to all later backwards, also of earlier forwards and of replayed graphs.
    Raises InvalidArgument unless it is a finite number."""
    for layer in layers_of(model):
        layer.loss_scale = scale


def _order(norm_type: Any) -> float:
    return require_number("norm_type", norm_type, lambda order: order > 0, "more than 0, or math.inf")


def _powers(
    model: nn.Module, ep_group: AnyGroup | None, order: float
) -> dict[tuple[Group, ...], dict[str, Tensor]]:
    """Returns this rank's float64 sum of |gradient|^order (order inf: the largest |gradient|) by parameter
    name. The outer keys are the groups over which these sums must still be reduced. Frozen parameters count
    as zero: ranks may have frozen different experts, and must reduce the same names."""
    _require_gradients(model)
    owners, ep_group = expert_owners(model), as_group(ep_group, "ep_group")
    _require_dense_ranks(model, [each for each in _trained(model) if each not in owners])
    zero = _zero(model)
    powers: dict[tuple[Group, ...], dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups: tuple[Group, ...] = ()
        if isinstance(parameter, DTensor):
            # FSDP2 wraps a tensor-parallel placement in a kind of shard whose is_shard() is False.
            parts = [n for n, place in enumerate(parameter.placements) if not place.is_replicate()]
            groups = tuple(parameter.device_mesh.get_group(number) for number in parts)
        if parameter in owners and dist.is_initialized():
            over = ep_group_of(owners[parameter], ep_group)
            assert over is not None
            groups = (*groups, over)
        value, gradient = zero, _found_gradient(parameter) if parameter.requires_grad else None
        if gradient is not None and _local(gradient).numel():
            # On a CPU torch adds one number after another: in float32 the norm would depend on the sharding.
            own = _local(gradient)
            # DDP allows sparse gradients. Made dense, they have a norm with the bits of a dense gradient's.
            own = own if own.layout is torch.strided else own.to_dense()
            own = torch.view_as_real(own) if own.is_complex() else own
            on_cpu = own.device.type == "cpu"
            dtype = torch.float64 if on_cpu else torch.promote_types(own.dtype, torch.float32)
            norm = torch.linalg.vector_norm(own, order, dtype=dtype).to(zero)
            value = norm if order == math.inf else norm.pow(order)
        powers.setdefault(groups, {})[name] = value
    return powers


def _sum(powers: list[Tensor], order: float) -> Tensor:
    return torch.stack(powers).amax(0) if order == math.inf else torch.stack(powers).sum(0)


def _all_ranks(powers: Tensor, groups: Sequence[Group], order: float) -> Tensor:
    """Returns the sums of powers over groups; `powers` may change. For order inf it returns the largest, or
    NaN if a rank has NaN, since a maximum over ranks may lose a NaN."""
    for over in groups:
        if order != math.inf:
            dist.all_reduce(powers, group=over)
            continue
        both = torch.stack((powers.nan_to_num(0.0, posinf=math.inf), powers.isnan().double()))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=over)
        powers = both[0].where(both[1] == 0, math.nan)
    return powers


def _bits_of_router(model: nn.Module) -> Tensor | None:
    """Returns a checksum of the first `router_weight`, which stands for all parameters that ranks share."""
    weights = (router_weight(layer) for layer in layers_of(model))
    return next((bits_of(weight) for weight in weights if weight is not None), None)


def _words(name: str, parameter: nn.Parameter) -> str:
    """Describes the properties of a parameter that must be equal on all ranks that average its gradient."""
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}"


def _require_same_experts(
    model: nn.Module, group: Group | None, device: torch.device, replicas: Mapping[Communicator, Replicas]
) -> None:
    """Raises MismatchedArguments, on all ranks of `group`, if ranks that hold the same experts of a layer
    train different parameters of them."""
    layers = [layer for layer in layers_of(model) if len(replicas[layer.comm].blocks) > 1]
    if layers:
        words = [[_words(*each) for each in spread_parameters(layer).items()] for layer in layers]
        about = "ranks that hold the same experts average different parameters of these"
        agree_by_holders(group, device, about, [layer.comm.rank for layer in layers], words)


def _require_gradients(model: nn.Module) -> None:
    """Refuses deferred gradients, and parameters used in experts and elsewhere. Copies expanded gradients."""
    if any(layer.has_pending_weights for layer in layers_of(model)):
        raise InvalidArgument(
            "model has layers with OverlapConfig(defer_weights=True), whose experts' weights have gradients "
            "that are still put off: call moecomm.nn.backward_weights(model) before"
        )
    refuse_shared_with_experts(model)
    for each in model.parameters():  # a grad set by hand may be expanded, and nothing can write to it
        if each.grad is not None and each.grad.layout is torch.strided and 0 in each.grad.stride():
            each.grad = each.grad.clone(memory_format=torch.contiguous_format)


def _refuse_sparse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise Unsupported(
                f"the gradient of {name} is sparse ({parameter.grad.layout}), must be dense for "
                "sync_gradients: build its module with sparse=False"
            )


def refuse_shared_with_experts(model: nn.Module) -> None:
    """Raises InvalidArgument if a parameter of experts that are spread over ranks is used outside them too:
    its gradient would need averages over different ranks. The experts module itself may have two names."""
    spread = {layer.experts: layer for layer in layers_of(model) if layer.comm.size > 1}
    if not spread:
        return
    every = model.named_modules(remove_duplicate=False)
    paths = [(f"{path}.", spread[module]) for path, module in every if module in spread]
    within = tuple(path for path, _ in paths)
    named = model.named_parameters(remove_duplicate=False)
    outside = {parameter: name for name, parameter in named if not name.startswith(within)}
    for path, layer in paths:
        for name, parameter in spread_parameters(layer).items():
            if parameter in outside:
                raise InvalidArgument(
                    f"{path}{name} is the same parameter as {outside[parameter]}: one of experts, which "
                    "other ranks do not have, must be in no other part of the model. Give each a parameter "
                    "of its own"
                )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def ep_group_of(layer: MoELayer | None, given: Group | None) -> Group | None:
    """Returns the process group that shares out the experts of a layer; without a layer the given group, or
    the default group. Raises InvalidArgument if `given` has other ranks than the layer."""
    if layer is None:
        return dist.group.WORLD if given is None else given
    own = layer.comm.group
    if given is not None and ranks_of(given) != ranks_of(own):
        raise InvalidArgument(
            f"ep_group has ranks {ranks_of(given)}, must have {ranks_of(own)}, those of the layer's "
            "communicator; leave it out, the layers know"
        )
    return own


def _refuse_ddp(model: nn.Module, owners: dict[nn.Parameter, MoELayer | None]) -> None:
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if wrapped or any(hasattr(parameter, AVERAGED_BY_DDP) for parameter in owners):
        raise InvalidArgument(
            "model is under DistributedDataParallel, whose backward averages gradients: sync_gradients would "
            "divide them once more. Leave the call out"
        )


def _is_tensor_parallel(parameter: DTensor, folding: ParallelFolding) -> bool:
    """Returns whether this parameter is on the TP mesh of a folding. FSDP2 may shard over the same ranks, but
    its mesh has another name."""
    mesh = parameter.device_mesh
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    return mesh.mesh_dim_names == ("tp",) and ranks == folding.group_of("tp", dist.get_rank())


def _placed_gradient(parameter: DTensor) -> DTensor:
    """Redistributes a tensor-parallel parameter's .grad to the parameter's placements, which may sum it over
    ranks, and returns it. A missing .grad becomes zeros."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    assert isinstance(gradient, DTensor)
    parameter.grad = placed = gradient.redistribute(placements=parameter.placements)
    return placed


def _sharded_over_too_few(parameter: DTensor, needed: str) -> InvalidArgument:
    return InvalidArgument(
        f"a parameter of shape {tuple(parameter.shape)} is sharded over ranks {ranks_of_shards(parameter)}, "
        f"must be so over {needed}: its gradient is averaged there alone. Call fully_shard(model) for all of "
        "them, after fully_shard_experts(model)"
    )


def _require_dense_ranks(model: nn.Module, dense: Sequence[nn.Parameter]) -> None:
    """Raises InvalidArgument unless each sharded dense parameter is sharded over all ranks of every layer's
    communicator and their replicas. Does nothing without FSDP2; ignores layers with a folding."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    layers = [layer for layer in layers_of(model) if layer.folding is None]
    needed: set[int] = set()
    for layer in layers:
        needed |= {*ranks_of(layer.comm.group), *getattr(layer.experts, "sharded_over", ())}
    # One parameter of each mesh suffices, and there are few meshes.
    for parameter in {each.device_mesh: each for each in dense if isinstance(each, DTensor)}.values():
        if not needed <= set(ranks_of_shards(parameter)):
            among = f"all ranks that hold the model, {sorted(needed)} among them"
            raise _sharded_over_too_few(parameter, among)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zero(model: nn.Module) -> Tensor:
    """Returns a float64 zero: in float64 the order in which shards are added does not affect the norm."""
    return torch.zeros((), dtype=torch.float64, device=_device_of(model))


def _device_of(model: nn.Module) -> torch.device:
    return next((_local(each).device for each in model.parameters()), torch.device("cpu"))


def _found_gradient(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "main_grad", None) if has_main_grad(parameter) else parameter.grad


def _gradient(parameter: nn.Parameter) -> Tensor:
    if has_main_grad(parameter):
        return main_grad_of(parameter)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _all_reduce(gradients: list[Tensor], group: Group) -> None:
    """Sums gradients in place over the group, in buckets: many small all-reduces cost a round trip each."""
    for bucket in _take_tensors(gradients, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(total.view(gradient.shape))  # for an empty gradient torch returns another shape
