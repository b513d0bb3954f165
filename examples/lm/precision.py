"""Arithmetic in float32, or in bfloat16 on weights that stay float32.

In bfloat16 torch.autocast sees to the dense layers. Experts compute in the type of their weights, in which
rows also travel; so these are cast once a forward pass, and the gradients of the casts reach the float32
ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from lm.model import Transformer
from moecomm.nn import is_expert_parameter


def logits(model: Transformer, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """The model's float32 logits (B, S, V), computed in `dtype`, that of its communicator."""
    if dtype == torch.float32:
        return model(tokens_BS)
    with torch.autocast(tokens_BS.device.type, dtype):
        weights = {
            name: parameter.to(dtype)
            for name, parameter in model.named_parameters()
            if is_expert_parameter(parameter)
        }
        logits_BSV: Tensor = functional_call(model, weights, (tokens_BS,))
    return logits_BSV.float()
