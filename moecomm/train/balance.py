"""Load balancing without auxiliary loss: the biases that steer the choice of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecomm.arguments import require_number
from moecomm.errors import InvalidArgument
from moecomm.nn.router import TopKRouter
from moecomm.train.model_parts import ModelParts
from moecomm.train.replicas import model_group, ranks_of
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
            layers have a folding. Raises InvalidArgument for one that lacks ranks of a layer's communicator.
        rate: replaces config.bias_update_rate; the same on all ranks. Raises InvalidArgument unless it is
            None or a finite number of at least 0.
    """
    if rate is not None:
        bound = "None or a finite number of at least 0"
        rate = require_number("rate", rate, lambda number: 0 <= number < math.inf, bound)
    parts = ModelParts(model)
    loads: list[Tensor] = []
    # Biases that change alike, with their loads, are changed together: each operation costs the host time.
    alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for router in parts.modules:
        if not isinstance(router, TopKRouter) or (load_E := router.load_E) is None:
            continue
        loads.append(load_E)
        if (bias_E := router.expert_bias_E) is not None:
            own_rate = router.config.bias_update_rate if rate is None else rate
            key = (bias_E.numel(), bias_E.dtype, bias_E.device, own_rate, router.config.bias_update)
            alike.setdefault(key, []).append((bias_E, load_E))
    if alike:
        flat = torch.cat([load_E for pairs in alike.values() for _, load_E in pairs])
        if dist.is_initialized():
            over = model_group(parts.layers, group)
            for layer in parts.spread_layers if over is not None else ():
                if not (needed := set(ranks_of(layer.comm.group))) <= set(found := ranks_of(over)):
                    raise InvalidArgument(
                        f"group has ranks {found}, must have {sorted(needed)} among them, which share out a "
                        "layer's experts and route by the same biases; None for all ranks"
                    )
            dist.all_reduce(flat, group=over)
        sizes = [experts * len(pairs) for (experts, *_), pairs in alike.items()]
        for (key, pairs), totals in zip(alike.items(), flat.split(sizes), strict=True):
            experts, dtype, _, own_rate, update = key
            load_RE = totals.view(-1, experts)
            above_RE = load_RE.sum(1, keepdim=True) - load_RE * experts
            step_RE = above_RE.sign().to(dtype)
            if update == "centered":
                step_RE -= step_RE.mean(1, keepdim=True)
            torch._foreach_add_([bias_E for bias_E, _ in pairs], list((own_rate * step_RE).unbind()))
    if loads:
        torch._foreach_zero_(loads)
