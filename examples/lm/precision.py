"""Arithmetic in float32, or in bfloat16 on weights that stay float32.

In bfloat16 torch.autocast sees to the dense layers. Experts, the shared ones too, compute in the type of
their weights, in which rows also travel; so these are cast once a forward pass, and the gradients of the
casts reach the float32 ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moecomm.nn import SharedExperts, is_expert_parameter


def compute(module: nn.Module, dtype: torch.dtype, *tokens_BS: Tensor) -> Tensor:
    """`module(*tokens_BS)`, computed in `dtype`, that of its communicator."""
    if dtype == torch.float32:
        return module(*tokens_BS)
    shared = {
        parameter
        for part in module.modules()
        if isinstance(part, SharedExperts)
        for parameter in part.parameters()
    }
    with torch.autocast(tokens_BS[0].device.type, dtype):
        weights = {
            name: parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if is_expert_parameter(parameter) or parameter in shared
        }
        return functional_call(module, weights, tokens_BS)
