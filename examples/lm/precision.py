"""Arithmetic in float32, or in bfloat16 on weights of either.

In bfloat16 torch.autocast sees to the dense layers. Experts, the shared ones too, compute in the type of
their weights, in which rows also travel; so float32 ones are cast once a forward pass, and the gradients of
the casts reach the float32 ones. Those that FSDP2 has sharded it casts itself (`lm.sharding`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moecomm.nn import GroupedExperts, SharedExperts

EXPERTS = (GroupedExperts, SharedExperts)


def compute(module: nn.Module, dtype: torch.dtype, *tokens_BS: Tensor) -> Tensor:
    """`module(*tokens_BS)`, computed in `dtype`, that of its communicator."""
    if dtype == torch.float32:
        return module(*tokens_BS)
    of_experts = {p for part in module.modules() if isinstance(part, EXPERTS) for p in part.parameters()}
    with torch.autocast(tokens_BS[0].device.type, dtype):
        weights = {
            name: parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if parameter in of_experts and parameter.dtype != dtype and not isinstance(parameter, DTensor)
        }
        return functional_call(module, weights, tokens_BS)
