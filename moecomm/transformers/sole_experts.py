"""Keeps FSDP2 away from experts that no other rank has a copy of.

Where an EP group has all ranks, transformers shards each module of experts by FSDP2 over a mesh of one rank.
FSDP2 has nothing to gather or to reduce there. It still copies the weights twice in a step, and the gradients
once. This file makes FSDP2 leave such modules out. Their gradients are divided by the number of batches, as
FSDP2 would do (transformers/distributed/fsdp.py says why this number).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh


@contract()
def replicate(module: nn.Module) -> nn.Module:
    """Enters `module` in torch's registry as one whose gradients another API handles. `fully_shard` leaves
    out modules that have an entry of this name."""
    return module


def leave_out_of_fsdp(experts: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Makes FSDP2 leave out `experts` if no other rank has a copy of them. Does nothing if FSDP2 has to cast
    (fsdp_mixed_precision) or to offload (fsdp_cpu_offload)."""
    config: Any = getattr(getattr(experts, "config", None), "distributed_config", None)
    if config is None or config.fsdp_mixed_precision or config.fsdp_cpu_offload:
        return
    if ep_mesh.size() == dist.get_world_size():
        replicate(experts)


def batches_to_divide_by(experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> int:
    """Returns the number of batches by which this rank divides its experts' gradients: 1 if FSDP2 divides."""
    if getattr(experts, "_is_fsdp_managed_module", False):
        return 1
    return ep_mesh.size() // tp_mesh.size()


class DividedGradient(autograd.Function):
    """Returns a weight unchanged; divides its gradient by the number `by` in the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: int) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.by, None
