"""Load balancing without auxiliary loss: the biases that steer the choice of experts."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from moecomm.arguments import require_module, require_number
from moecomm.nn.router import TopKRouter
from moecomm.train.replicas import model_group
from moecomm.types import AnyGroup


@torch.no_grad()
def update_expert_bias(model: nn.Module, group: AnyGroup | None = None, *, rate: float | None = None) -> None:
    """Raises the balancing biases of underloaded experts and lowers those of overloaded ones. Every rank of
    the group calls it once after each optimizer step.

    bias_e += rate * sign(mean load - load_e) (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, sec. 2.1.2).
    load_e: tokens of expert e on all ranks of `group` since the last call, counted when their backward runs.
    With bias_update="centered" the mean of these changes is subtracted. Then load_E of all routers is zeroed.

    Args:
        model: has the routers; if none has balancing biases or aux_loss="global", the call does nothing.
        group: all ranks that bring tokens to a step; None: all ranks, or those of the pipeline stage if
            layers have a folding.
        rate: replaces config.bias_update_rate; the same on all ranks. Raises InvalidArgument unless it is
            None or a finite number of at least 0.
    """
    if rate is not None:
        bound = "None or a finite number of at least 0"
        rate = require_number("rate", rate, lambda number: 0 <= number < math.inf, bound)
    require_module(model)
    every = [m for m in model.modules() if isinstance(m, TopKRouter)]
    for router in every:
        if router.expert_bias_E is None and router.load_E is not None:
            router.load_E.zero_()
    routers = [router for router in every if router.expert_bias_E is not None]
    loads = [router.load_E for router in routers if router.load_E is not None]
    if not loads:
        return
    flat = torch.cat(loads)
    if dist.is_initialized():
        dist.all_reduce(flat, group=model_group(model, group))
    for router, load_E in zip(routers, torch.split(flat, [load.numel() for load in loads]), strict=True):
        assert router.expert_bias_E is not None
        assert router.load_E is not None
        above_E = load_E.sum() - load_E * load_E.numel()
        step_E = above_E.sign().to(router.expert_bias_E.dtype)
        if router.config.bias_update == "centered":
            step_E -= step_E.mean()
        router.expert_bias_E += (router.config.bias_update_rate if rate is None else rate) * step_E
        router.load_E.zero_()
