"""Looks at each optimizer before its step for what would go wrong, without an error, with experts that are
spread over ranks. Importing moecomm.nn sets the hook; a step in which nothing is wrong looks at no parameter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecomm.errors import InvalidArgument
from moecomm.nn.layer import built_layers


def _check_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Raises InvalidArgument before the step of an optimizer that has experts' weights whose gradients are
    still put off, or that would send one rank's experts to all ranks."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    shares = zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)
    found = [layer for layer in built_layers if layer.has_pending_weights or (shares and layer.comm.size > 1)]
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
        raise InvalidArgument(
            "the optimizer is a ZeroRedundancyOptimizer, which would send one rank's experts to all ranks: "
            "use it for the other parameters (moecomm.nn.is_expert_parameter tells) and a plain optimizer "
            "for the experts, or FSDP2 (moecomm.nn.fully_shard_experts)"
        )


register_optimizer_step_pre_hook(_check_step)
