"""DistributedDataParallel and FSDP2 around models whose experts are spread over ranks.

Both assume that all ranks hold equal parameters, but the ranks of an EP group hold different experts.
After `prepare_ddp` an expert's gradient is averaged, and after `fully_shard_experts` the expert is sharded,
only over the ranks that hold it (its replicas); gradients are those of the mean of all ranks' losses. The
constructor of DistributedDataParallel refuses an unprepared model, before it overwrites a weight.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from moecomm.autograd.in_place import has_main_grad
from moecomm.errors import InvalidArgument
from moecomm.kernels.parameters import AVERAGED_BY_DDP, DIVIDED, mark_expert_parameter
from moecomm.nn.layer import MoELayer, layers_of
from moecomm.parallel.grid import Ranks
from moecomm.parallel.spread import spread_parameters
from moecomm.train.drift import watch_drift
from moecomm.train.model_parts import ModelParts
from moecomm.train.replicas import (
    Replicas,
    find_replicas,
    model_group,
    ranks_of,
    shard_over,
)
from moecomm.types import AnyGroup

Model = TypeVar("Model", bound=nn.Module)


def prepare_ddp(model: Model, group: AnyGroup | None = None) -> Model:
    """Prepares a model with MoELayers for `DistributedDataParallel(model)`, and returns the model.

        model = DistributedDataParallel(prepare_ddp(model))

    After a backward every gradient is that of the mean of all ranks' losses (except under `no_sync()`);
    replicas of experts keep equal bits. Do not call `sync_gradients` (docs/training.md).

    Args:
        model: the module that will be wrapped, once it is complete; a copy has to be prepared again.
        group: the ranks over which DistributedDataParallel averages, a process group or a DeviceMesh of one
            dimension; None: all ranks, or those of the pipeline stage where layers have a folding.

    All ranks call it together. Raises InvalidArgument, on all ranks, for a group that lacks ranks of a
    layer's communicator, a model sharded by fully_shard, main_grad, and experts outside of MoELayers.
    """
    parts = ModelParts(model)
    group = model_group(parts.layers, group)
    owners, replicas = parts.owners, find_replicas(parts.layers, group)
    _refuse_main_grad(model, "DistributedDataParallel")
    parts.refuse_shared_with_experts()
    if any(isinstance(parameter, DTensor) for parameter in parts.named.values()):
        raise InvalidArgument("model is sharded by fully_shard, which averages gradients itself")
    # If two modules share an expert, its weights have a name in each.
    named = model.named_parameters(remove_duplicate=False)
    ignored = {name for name, parameter in named if parameter in owners}
    ignored |= {name for name, _ in model.named_buffers() if name.rpartition(".")[2] == "load_E"}
    ignored |= set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    for parameter, layer in owners.items():
        if hasattr(parameter, AVERAGED_BY_DDP):
            continue
        if len(replicas[layer.comm].ranks) > 1:
            _ = replicas[layer.comm].group  # makes the process group now, rather than within a backward
        average = _ReplicaAverage(ranks_of(group), replicas[layer.comm])
        setattr(parameter, AVERAGED_BY_DDP, average)
        with _trainable(parameter):
            parameter.register_hook(_Division(layer.comm.size))
            parameter.register_post_accumulate_grad_hook(average)
    watch_drift(parts.layers)
    return model


def fully_shard_experts(
    model: nn.Module, *, group: AnyGroup | None = None, routers: bool = True, **options: Any
) -> None:
    """Shards the experts of a model's MoELayers with FSDP2, each over the ranks that hold the same experts.

        fully_shard_experts(model)
        fully_shard(model)              # all other parameters, over all ranks

    Every rank of `group` calls it before fully_shard of the rest. All gradients are then those of the mean of
    all ranks' losses, and `sync_gradients` is not needed (docs/training.md).

    Args:
        model: has the MoELayers.
        group: all ranks that hold the model, as in `prepare_ddp`.
        routers: True: routers are FSDP units too, each of up to eight, over all ranks, without your
            `mp_policy`, which would round their weights. False: a router joins its outer unit; if that one's
            `mp_policy` has a param_dtype, a forward raises InvalidArgument.
        options: those of torch.distributed.fsdp.fully_shard except `mesh`, which the layers know; `mp_policy`
            does not change the experts' inputs.

    Experts without replicas stay whole; with `mp_policy` or `offload_policy` they become DTensors over one
    rank. Raises InvalidArgument, on all ranks, for `mesh`, main_grad, and a parameter that experts share with
    another part of the model or with the experts of all ranks.
    """
    if "mesh" in options:
        raise InvalidArgument(
            "mesh is given, must be left out: the layers know which ranks hold the same experts"
        )
    parts = ModelParts(model)
    parts.refuse_shared_with_experts()
    _refuse_main_grad(model, "fully_shard")
    if (policy := options.get("mp_policy")) is not None:
        options["mp_policy"] = dataclasses.replace(policy, cast_forward_inputs=False)
    group = model_group(parts.layers, group)
    everyone, replicas = group or dist.group.WORLD, find_replicas(parts.layers, group)
    assert everyone is not None
    of_router: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    of_router |= {n: options[n] for n in ("reshard_after_forward", "offload_policy") if n in options}
    whole = [layer for layer in parts.layers if not _has_dtensors(layer.router)]
    if routers:
        for first in range(0, len(whole), _ROUTERS):
            of_unit = whole[first : first + _ROUTERS]
            mesh_of_all = DeviceMesh.from_group(everyone, of_unit[0].comm.device.type)
            _shard([layer.router for layer in of_unit], mesh_of_all, **of_router)
    else:
        for layer in whole:
            if (weight := layer.router._parameters.get("weight")) is not None:
                layer.router.register_forward_pre_hook(partial(_refuse_rounded, weight.dtype))
    for layer in parts.layers:
        experts, comm = layer.experts, layer.comm
        held = replicas[comm].ranks
        if isinstance(experts, FSDPModule):
            continue
        own = DeviceMesh.from_group(replicas[comm].group, comm.device.type)
        if len(held) == 1 and not {"mp_policy", "offload_policy"} & options.keys():
            _leave_whole(experts, comm.size, own)
            continue
        shard_over(experts, replicas[comm])
        sharded = _shard(experts, own, **options)
        for parameter in experts.parameters():
            mark_expert_parameter(parameter)  # FSDP has made new ones
        # Without a factor FSDP divides by the number of replicas, as if each had seen its own tokens alone.
        if len(held) > 1:
            sharded.set_gradient_divide_factor(float(len(held) * comm.size))
        else:  # with a factor FSDP divides twice over a single rank, for some dtypes (seen with torch 2.13)
            division = _Division(comm.size)
            sharded.set_all_reduce_hook(division.in_place)
            sharded.set_gradient_divide_factor = division.set  # type: ignore[method-assign]


_ROUTERS = 8 if hasattr(FSDPState, "_force_complete_incomplete_states") else 1
"""Routers of one FSDP unit. A unit costs the host about as much as a block of a model. Where a forward leaves
out some of a unit's modules, older versions of torch would use their stale weights in the next one."""


def _refuse_rounded(dtype: torch.dtype, router: nn.Module, inputs: Any) -> None:
    """A hook of a router within an outer FSDP unit, in whose forward the weight must have its own dtype."""
    if (found := router.weight.dtype) is not dtype:
        raise InvalidArgument(
            f"the router's weight is {found} in its forward, must be {dtype}: the mp_policy of fully_shard "
            "has rounded it. Leave out routers=False, or the policy's param_dtype"
        )


def _has_dtensors(module: nn.Module) -> bool:
    return any(isinstance(each, DTensor) for each in module.parameters())


def _shard(module: Any, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    sharded: Any = fully_shard(module, mesh=mesh, **options)
    sharded = sharded[0] if isinstance(sharded, list) else sharded
    if mesh.device_type == "cpu":
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    return sharded


def _refuse_main_grad(model: nn.Module, wrapper: str) -> None:
    for path, parameter in model.named_parameters():
        if has_main_grad(parameter):
            raise InvalidArgument(
                f"{path} has its gradients in main_grad, which {wrapper} would not average: build the layer "
                "with MoEConfig(main_grad=False), or average by sync_gradients instead"
            )


def _leave_whole(experts: nn.Module, ep_size: int, mesh: DeviceMesh) -> None:
    """Keeps experts without replicas out of the outer fully_shard, and divides their gradients by `ep_size`.
    FSDP over one rank would copy them."""
    sharded = fully_shard(experts, mesh=mesh, ignored_params=set(experts.parameters()))
    division = _Division(ep_size)
    sharded.set_gradient_divide_factor = division.set  # type: ignore[method-assign]
    division.divide_gradients(experts)
    experts.register_forward_pre_hook(division.divide_gradients)  # for parameters that have replaced others


@contextmanager
def _trainable(parameter: nn.Parameter) -> Iterator[None]:
    """A context in which a frozen parameter accepts hooks, since it may be trained later."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(trains)


class _Division:
    """Divides gradients of experts by the number of ranks whose tokens they sum, or by the factor of
    `set_gradient_divide_factor`."""

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor

    def set(self, factor: float) -> None:
        """Sets the divisor. Replaces FSDPModule.set_gradient_divide_factor: FSDP would divide once more."""
        self.divisor = factor

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        """Returns the divided gradient, as a hook of a parameter; None if the layer defers the gradient
        (`OverlapConfig.defer_weights`)."""
        return None if gradient is None else gradient / self.divisor

    def in_place(self, gradients: Tensor) -> None:
        """Divides a gradient that FSDP has reduced."""
        gradients.div_(self.divisor)

    def divide_gradients(self, experts: nn.Module, *_: Any) -> None:
        """Makes this division a hook of those parameters of a module that have no division yet."""
        for parameter in experts.parameters():
            if hasattr(parameter, DIVIDED):
                continue
            setattr(parameter, DIVIDED, True)
            with _trainable(parameter):
                parameter.register_hook(self)


_SYNCHRONISES = "_moecomm_synchronises"
"""Attribute of a DistributedDataParallel: whether the backward of its last forward averages gradients. The
forward decides that, since `no_sync()` may surround the forward and not the backward."""


def _before_forward(layers: Sequence[MoELayer], wrapper: nn.Module, args: Any) -> None:
    """Stores, as a hook of a DistributedDataParallel's forward, whether the backward will average. Raises
    InvalidArgument for experts' parameters whose gradients nothing would average: replaced ones, and those in
    a copy of the wrapper; and for find_unused_parameters, with which replicas may use different layers."""
    if not torch.is_grad_enabled():
        return
    setattr(wrapper, _SYNCHRONISES, wrapper.require_backward_grad_sync)
    for layer in layers:
        for name, parameter in spread_parameters(layer).items():
            if not parameter.requires_grad:
                continue
            average: _ReplicaAverage | None = getattr(parameter, AVERAGED_BY_DDP, None)
            if average is None or average.wrapper is None or average.wrapper() is not wrapper:
                raise InvalidArgument(
                    f"the experts' {name} is not the parameter that DistributedDataParallel has wrapped "
                    "(after load_state_dict(assign=True), or in a copy of the wrapper), and its gradient "
                    "would not be averaged: wrap moecomm.nn.prepare_ddp(model) anew"
                )
            if wrapper.find_unused_parameters and len(average.replicas.ranks) > 1:
                raise InvalidArgument(
                    "find_unused_parameters is True, must be False: where ranks that hold the same experts "
                    "leave out different layers, they would wait for each other's gradients. A Trainer of "
                    "transformers takes ddp_find_unused_parameters=False. Where layers are left out, call "
                    "sync_gradients without DistributedDataParallel, or use FSDP2"
                )


class _ReplicaAverage:
    """Averages an expert's gradient over its replicas after each backward. `_Division` has divided it by the
    number of ranks of the EP group, whose tokens it sums. To average an average again changes nothing, so
    gradients may accumulate."""

    def __init__(self, ranks: Ranks, replicas: Replicas) -> None:
        self.ranks = ranks
        """The ranks over which DistributedDataParallel averages."""
        self.wrapper: weakref.ref[DistributedDataParallel] | None = None
        self.replicas = replicas

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        """Averages a gradient, as its parameter's hook; not in no_sync()."""
        wrapper = None if self.wrapper is None else self.wrapper()
        if len(self.replicas.ranks) == 1 or parameter.grad is None:
            return
        if wrapper is None or getattr(wrapper, _SYNCHRONISES, wrapper.require_backward_grad_sync):
            dist.all_reduce(parameter.grad, group=self.replicas.group)
            parameter.grad.div_(len(self.replicas.ranks))


def _check_wrapped(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    """Checks a model that DistributedDataParallel wraps, before any broadcast, and adds hooks to the wrapper.
    Refuses FullyShardedDataParallel around spread experts. torch calls this for each new submodule."""
    if name == "_fsdp_wrapped_module" and model is not None:
        if any(layer.comm.size > 1 for layer in layers_of(model)):
            raise InvalidArgument(
                "FullyShardedDataParallel takes all parameters for the same on all ranks, and has mixed "
                "those of different experts: build the model again, and use FSDP2, "
                "moecomm.nn.fully_shard_experts(model) and then torch.distributed.fsdp.fully_shard(model)"
            )
        return
    if name != "module" or not isinstance(wrapper, DistributedDataParallel) or model is None:
        return
    parts, ranks = ModelParts(model), ranks_of(wrapper.process_group)
    if len(ranks) == 1:
        return
    owners, ignored = parts.owners, wrapper.parameters_to_ignore
    _refuse_main_grad(model, "DistributedDataParallel")
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in owners:
            continue
        average = getattr(parameter, AVERAGED_BY_DDP, None)
        if path not in ignored or average is None:
            raise InvalidArgument(
                f"{path} holds other experts on other ranks, and DistributedDataParallel would overwrite "
                "them with rank 0's: wrap moecomm.nn.prepare_ddp(model) instead. Nothing was changed"
            )
        if average.ranks != ranks:
            raise InvalidArgument(
                f"DistributedDataParallel averages over ranks {ranks}, and the model was prepared for "
                f"{average.ranks}: pass prepare_ddp the same group"
            )
        average.wrapper = weakref.ref(wrapper)
    wrapper.register_forward_pre_hook(partial(_before_forward, parts.spread_layers))
    for path, _ in model.named_buffers():
        if path.rpartition(".")[2] == "load_E" and path not in ignored:
            raise InvalidArgument(
                f"{path} counts this rank's own tokens, and DistributedDataParallel would overwrite it with "
                "rank 0's: wrap moecomm.nn.prepare_ddp(model) instead of the model. Nothing was changed"
            )


register_module_module_registration_hook(_check_wrapped)
