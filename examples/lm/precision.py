"""Arithmetic in float32, or in bfloat16 with weights of either dtype.

In bfloat16 torch.autocast handles the dense layers. Experts, also shared ones, compute in the dtype of their
weights, in which rows also travel. So float32 weights are cast once per forward pass, and the gradients of
the casts reach the float32 weights. FSDP2 itself casts the weights that it has sharded (`lm.sharding`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moecomm.nn import GroupedExperts, SharedExperts

EXPERTS = (GroupedExperts, SharedExperts)


def compute(module: nn.Module, dtype: torch.dtype, *tokens_BS: Tensor) -> Tensor:
    """Returns `module(*tokens_BS)`, computed in `dtype`, that of its communicator."""
    if dtype == torch.float32:
        return module(*tokens_BS)
    with torch.autocast(tokens_BS[0].device.type, dtype):
        weights = {
            f"{name}.{key}".lstrip("."): parameter.to(dtype)
            for name, part in module.named_modules()
            if isinstance(part, EXPERTS)
            for key, parameter in part.named_parameters()
            if parameter.dtype != dtype and not isinstance(parameter, DTensor)
        }
        return functional_call(module, weights, tokens_BS, tie_weights=False)
