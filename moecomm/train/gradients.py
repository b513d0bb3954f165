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
from moecomm.train.agreement import agree, agree_by_holders
from moecomm.train.drift import forget_bits, router_bits
from moecomm.train.model_parts import ModelParts, local, zero_gradient
from moecomm.train.replicas import Replicas, find_replicas, model_group, ranks_of
from moecomm.types import AnyGroup, Group, as_group

_BUCKET_BYTES = 64 << 20


@torch.no_grad()
def sync_gradients(
    model: nn.Module,
    group: AnyGroup | None = None,
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
        folding: the job's ParallelFolding, for a pipeline stage without MoELayers.

    Ranks compare their parameters at each call. Hosts wait for each other then, but not for their GPUs if the
    group has a backend for CPU tensors, as torch.distributed.init_process_group() makes it. All ranks raise
    MismatchedArguments if parameters differ, or some ranks have frozen them, or a router's weights differ,
    which hosts that do not wait for GPUs find in the first call at once and later one call late. They raise
    InvalidArgument for groups that do not fit the layers, parameters that fully_shard has sharded over a part
    of `group`, a parameter shared by experts and another part of the model, a parameter that the experts
    of all ranks share, a model under DistributedDataParallel, deferred gradients
    (`backward_weights`), and plain tensors marked as split by tensor parallelism (`tensor_model_parallel`). A
    sparse gradient raises Unsupported, and InvalidArgument on ranks that have none.
    """
    parts = ModelParts(model)

    def check() -> list[str]:
        _require_gradients(parts)
        owners = parts.owners
        if dist.is_initialized():
            _refuse_ddp(parts)
        experts = {each for layer in parts.layers for each in parts.spread_of(layer).values()}
        experts |= owners.keys()
        return [_words(name, each) for name, each in parts.named.items() if each not in experts]

    if not dist.is_initialized():
        check()
        _mark_synchronized(parts.layers)
        return
    group = model_group(parts.layers, group, folding)
    about = "ranks average different parameters"
    if not agree(group, parts.device, about, check, lambda place: router_bits(parts.layers, place)):
        forget_bits(parts.layers)
        raise MismatchedArguments(
            "a router's weights differ between ranks, and so will other parameters that all ranks share: "
            "these must start the same (torch.manual_seed alike, or load one state) and change by the same. "
            "Clip by moecomm.nn.clip_grad_norm, not torch.nn.utils.clip_grad_norm_; scale by "
            "ShardedGradScaler (torch.distributed.fsdp.sharded_grad_scaler), not GradScaler; leave a step "
            "out on all ranks or none"
        )
    replicas = find_replicas(parts.layers, group)
    owners, size, ranks = parts.owners, dist.get_world_size(group), ranks_of(group)
    _require_same_experts(parts, group, replicas)
    sums: dict[Group | None, list[Tensor]] = {}
    folding = next((layer.folding for layer in parts.layers if layer.folding is not None), folding)
    tensor_parallel = folding is not None and folding.tp > 1
    for parameter in parts.trained:
        if folding is not None and isinstance(parameter, DTensor) and _is_tensor_parallel(parameter, folding):
            sums.setdefault(folding.group("dp-cp"), []).append(local(_placed_gradient(parameter)))
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
            held_by = replicas[owners[parameter].comm]
            over = held_by.group if len(held_by.ranks) > 1 else None
        sums.setdefault(over, []).append(_gradient(parameter))
    for over, gradients in sums.items():
        if over is not None and dist.get_world_size(over) > 1:
            _all_reduce(gradients, over, size)
        elif size > 1:
            for alike in _lists(gradients):
                torch._foreach_div_(alike, size)
    _mark_synchronized(parts.layers)


def mark_synchronized(model: nn.Module) -> None:
    """Declares that your own code has averaged the gradients of `model` since the last backward, as
    `sync_gradients` does. Otherwise an optimizer's step on spread experts raises InvalidArgument."""
    _mark_synchronized(layers_of(model))


def _mark_synchronized(layers: Sequence[MoELayer]) -> None:
    for layer in layers:
        layer._unsynchronized = False


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, *, pp_group: AnyGroup | None = None) -> Tensor:
    """Scales all gradients so that their global norm (2-norm) is at most max_norm. Returns the norm before
    scaling, 0-d float32 (float64 for float64 gradients), the same on all ranks.

    Every rank calls it after gradients are synchronised. Each expert and each replicated parameter is counted
    once; shards are added up. As in torch.nn.utils.clip_grad_norm_, a norm of NaN makes all gradients NaN,
    and an infinite norm makes finite gradients zero.

    Args:
        model: as in `sync_gradients`.
        max_norm: the largest allowed norm; math.inf: nothing is scaled.
        pp_group: the ranks of this rank's pipeline, over which the norm is summed; all of them call this.
            Layers whose folding has several stages need it.

    Raises InvalidArgument for deferred gradients, and a parameter of experts that another part of the model
    shares; Unsupported for sparse gradients. If one rank alone raises, the others wait until the process
    group's deadline; `sync_gradients`, which comes before, raises these errors on all ranks.
    """
    pp_group = as_group(pp_group, "pp_group")
    require_number("max_norm", max_norm, lambda number: number >= 0, "at least 0")
    parts = ModelParts(model)
    staged = [layer for layer in parts.layers if layer.folding is not None and layer.folding.pp > 1]
    if staged and pp_group is None:
        raise InvalidArgument(
            "pp_group is None, must be the ranks of this rank's pipeline, folding.group('pp'), for a norm "
            "over all stages"
        )
    total = parts.zero
    for groups, own in _squares(parts).items():
        for over in groups:
            dist.all_reduce(own, group=over)
        total = total + own
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    trained = parts.trained
    # Without a bound the factor is 1, which would take as long as any.
    scaled = trained if max_norm < math.inf else []
    gradients = [local(each) for each in map(_found_gradient, scaled) if each is not None]
    for alike in _lists(gradients):
        first, factor = alike[0], scale.to(alike[0].device)
        if first.dtype is torch.float16:
            # GPUs cast a 0-d scale to float16, whose least number is 6e-8, but not a scale with dimensions.
            for gradient in alike:
                gradient.mul_(factor.float().view([1] * gradient.dim()))
        else:
            torch._foreach_mul_(alike, factor.to(first.dtype) if first.is_cuda else factor)
    return norm if any(p.dtype == torch.float64 for p in trained) else norm.float()


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


def _squares(parts: ModelParts) -> dict[tuple[Group, ...], Tensor]:
    """Returns this rank's sums of squared gradients, 0-d float64. The keys are the groups over which these
    sums must still be added up. Frozen parameters count as zero: ranks may have frozen different experts, and
    must reduce over the same groups."""
    _require_gradients(parts)
    owners = parts.owners
    _require_dense_ranks(parts, [each for each in parts.trained if each not in owners])
    gradients: dict[tuple[Group, ...], list[Tensor]] = {}
    for parameter in parts.named.values():
        groups: tuple[Group, ...] = ()
        if isinstance(parameter, DTensor):
            # FSDP2 wraps a tensor-parallel placement in a kind of shard whose is_shard() is False.
            dims = [n for n, place in enumerate(parameter.placements) if not place.is_replicate()]
            groups = tuple(parameter.device_mesh.get_group(number) for number in dims)
        if parameter in owners:
            over = owners[parameter].comm.group
            assert over is not None
            groups = (*groups, over)
        of_groups = gradients.setdefault(groups, [])
        gradient = _found_gradient(parameter) if parameter.requires_grad else None
        if gradient is not None and (own := local(gradient)).numel():
            of_groups.append(torch.view_as_real(own) if own.is_complex() else own)
    return {groups: _square(each, parts.zero) for groups, each in gradients.items()}


def _square(gradients: list[Tensor], zero: Tensor) -> Tensor:
    """Returns the sum of squares of gradients with elements, on the device of `zero`, a float64 zero."""
    total = zero.clone()
    for alike in _lists(gradients):
        # On a CPU torch adds one number after another: in float32 the norm would depend on the sharding.
        sums = torch.promote_types(alike[0].dtype, torch.float32) if alike[0].is_cuda else torch.float64
        norms = torch.stack(torch._foreach_norm(alike, 2.0, dtype=sums)).to(zero)
        total += norms.square_().sum()
    return total


def _lists(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in lists of one type, dtype and device. torch's functions of a whole list
    of tensors take the host little longer than those of one."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((type(tensor), tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _words(name: str, parameter: nn.Parameter) -> str:
    """Describes the properties of a parameter that must be equal on all ranks that average its gradient."""
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}"


def _require_same_experts(
    parts: ModelParts, group: Group | None, replicas: Mapping[Communicator, Replicas]
) -> None:
    """Raises MismatchedArguments, on all ranks of `group`, if ranks that hold the same experts of a layer
    train different parameters of them."""
    layers = [layer for layer in parts.layers if len(replicas[layer.comm].blocks) > 1]
    if layers:
        words = [[_words(*each) for each in parts.spread_of(layer).items()] for layer in layers]
        about = "ranks that hold the same experts average different parameters of these"
        agree_by_holders(group, parts.device, about, [layer.comm.rank for layer in layers], words)


def _require_gradients(parts: ModelParts) -> None:
    """Refuses deferred and sparse gradients, and parameters used in experts and elsewhere. Copies expanded
    gradients."""
    if any(layer.has_pending_weights for layer in parts.layers):
        raise InvalidArgument(
            "model has layers with OverlapConfig(defer_weights=True), whose experts' weights have gradients "
            "that are still put off: call moecomm.nn.backward_weights(model) before"
        )
    parts.refuse_shared_with_experts()
    for name, each in parts.named.items():
        if each.grad is None:
            continue
        if each.grad.layout is not torch.strided:
            raise Unsupported(
                f"the gradient of {name} is sparse ({each.grad.layout}), must be dense: build its module "
                "with sparse=False"
            )
        if 0 in each.grad.stride():  # set by hand it may be expanded, and nothing can write to it
            each.grad = each.grad.clone(memory_format=torch.contiguous_format)


def _refuse_ddp(parts: ModelParts) -> None:
    wrapped = any(isinstance(module, DistributedDataParallel) for module in parts.modules)
    if wrapped or any(hasattr(parameter, AVERAGED_BY_DDP) for parameter in parts.owners):
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
        gradient = zero_gradient(parameter)
    assert isinstance(gradient, DTensor)
    parameter.grad = placed = gradient.redistribute(placements=parameter.placements)
    return placed


def _sharded_over_too_few(parameter: DTensor, needed: str) -> InvalidArgument:
    return InvalidArgument(
        f"a parameter of shape {tuple(parameter.shape)} is sharded over ranks {ranks_of_shards(parameter)}, "
        f"must be so over {needed}: its gradient is averaged there alone. Call fully_shard(model) for all of "
        "them, after fully_shard_experts(model)"
    )


def _require_dense_ranks(parts: ModelParts, dense: Sequence[nn.Parameter]) -> None:
    """Raises InvalidArgument unless each sharded dense parameter is sharded over all ranks of every layer's
    communicator and their replicas. Does nothing without FSDP2; ignores layers with a folding."""
    if not any(isinstance(module, FSDPModule) for module in parts.modules):
        return
    layers = [layer for layer in parts.layers if layer.folding is None]
    needed: set[int] = set()
    for layer in layers:
        needed |= {*ranks_of(layer.comm.group), *getattr(layer.experts, "sharded_over", ())}
    # One parameter of each mesh suffices, and there are few meshes.
    for parameter in {each.device_mesh: each for each in dense if isinstance(each, DTensor)}.values():
        if not needed <= set(ranks_of_shards(parameter)):
            among = f"all ranks that hold the model, {sorted(needed)} among them"
            raise _sharded_over_too_few(parameter, among)


def _found_gradient(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "main_grad", None) if has_main_grad(parameter) else parameter.grad


def _gradient(parameter: nn.Parameter) -> Tensor:
    if has_main_grad(parameter):
        return main_grad_of(parameter)
    if parameter.grad is None:
        parameter.grad = zero_gradient(parameter)
    return parameter.grad


def _all_reduce(gradients: list[Tensor], group: Group, size: int) -> None:
    """Sums gradients in place over the group and divides them by `size`, in buckets: many small all-reduces
    cost a round trip each."""
    for bucket in _take_tensors(gradients, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        flat.div_(size)
        means = zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True)
        # For an empty gradient torch returns another shape.
        torch._foreach_copy_(bucket, [mean.view(gradient.shape) for gradient, mean in means])
