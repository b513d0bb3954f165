"""Products outside autocast, also if their backward runs within autocast.

A `backward()` called within autocast computes products in autocast's dtype, even those whose forward ran with
autocast turned off. torch.compile traces a whole backward within the autocast of its forward. So the products
here are an autograd function, whose own backward turns autocast off.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast, so that products are in the dtype of their operands."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # the real context would take some ten microseconds to do nothing
    return torch.autocast(device_type, enabled=False)


def matmul(x_TA: Tensor, weight: Tensor, care: bool) -> Tensor:
    """Returns x @ weight, for a weight (A, B) or (A,), in the dtype of its operands. Call it with autocast
    turned off; `care`: whether it was on before, so that the backward may run within autocast too."""
    if not care:
        return x_TA @ weight
    if weight.dim() == 1:
        return matmul(x_TA, weight.unsqueeze(1), care).squeeze(1)
    return _Matmul.apply(x_TA, weight)  # type: ignore[no-untyped-call]


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TA: Tensor, weight_AB: Tensor) -> Tensor:
        ctx.save_for_backward(x_TA, weight_AB)
        return x_TA @ weight_AB

    @staticmethod
    def backward(ctx: Any, grad_TB: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TA, weight_AB = ctx.saved_tensors
        grad_x_TA = grad_weight_AB = None
        with torch.autocast(grad_TB.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x_TA = grad_TB @ weight_AB.t()
            if ctx.needs_input_grad[1]:
                grad_weight_AB = x_TA.t() @ grad_TB
        return grad_x_TA, grad_weight_AB
