"""Gradients over ranks: averaging, and the norm, when expert parameters are sharded and all others
replicated.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecomm.nn.parameters import is_expert_parameter

_BUCKET_BYTES = 64 << 20


@torch.no_grad()
def sync_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
) -> None:
    """Turns each rank's gradients, after backward of its own loss, into those of the mean of all ranks'
    losses.

    group: all ranks that hold tokens of this step (default: all). Dense gradients are summed over it and
    divided by its size. An expert's gradient already holds what the tokens of its communicator's ranks
    contributed, because dispatch brought them there; it is summed over expert_group, the ranks that hold the
    same experts (default: no other rank does), and divided by the size of `group` as well.

    A parameter without a gradient counts as zero, so that ranks without tokens take part. Call it on every
    rank, once a step. With unequal token counts, scale each rank's loss so that the mean over ranks is the
    loss you mean.
    """
    if not dist.is_initialized():
        return
    size = dist.get_world_size(group)
    dense, experts = _split(model)
    if size > 1:
        _all_reduce([_gradient(p) for p in dense], group)
    expert_gradients = [_gradient(p) for p in experts]
    if expert_group is not None and dist.get_world_size(expert_group) > 1:
        _all_reduce(expert_gradients, expert_group)
    for gradient in [*(_gradient(p) for p in dense), *expert_gradients]:
        gradient.div_(size)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, ep_group: dist.ProcessGroup | None = None) -> Tensor:
    """Scales all gradients so that their global 2-norm is at most max_norm; returns the norm before, 0-d
    float32.

    Call it after `sync_gradients`. ep_group: the ranks that share out the experts (default: all ranks); each
    shard is counted once and a replicated parameter once. float64 gradients give a float64 norm. All ranks
    get the same number, and a norm that is not finite makes the gradients so too, as
    torch.nn.utils.clip_grad_norm_ does.
    """
    dense, experts = _split(model)
    expert_square = _sum_of_squares(experts)
    if dist.is_initialized():
        dist.all_reduce(expert_square, group=ep_group)
    norm = (_sum_of_squares(dense) + expert_square).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in [*dense, *experts]:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
    wide = any(p.dtype == torch.float64 for p in [*dense, *experts])
    return norm if wide else norm.float()


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if not is_expert_parameter(p)], [p for p in trained if is_expert_parameter(p)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _sum_of_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """float64, so that the order in which shards are added does not show in the norm."""
    parameters = list(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += (
                torch.linalg.vector_norm(parameter.grad, dtype=_at_least_float32(parameter.dtype))
                .double()
                .square()
            )
    return total


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _all_reduce(gradients: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums in place over the group, in buckets: many small all-reduces cost a round trip each."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view(gradient.shape))


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    filled = 0
    for gradient in sorted(gradients, key=lambda g: (str(g.dtype), str(g.device))):
        same = buckets and (buckets[-1][0].dtype, buckets[-1][0].device) == (gradient.dtype, gradient.device)
        if not same or filled + gradient.nbytes > _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += gradient.nbytes
    return buckets
