"""Losses that get a gradient without being part of the model's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("moecomm::scale_in_backward", mutates_args=())
def _scale_in_backward(grad_y: Tensor, scale: Tensor) -> Tensor:
    """Returns a copy of `scale`. `grad_y` is not used: as an argument it keeps torch.compile from moving this
    read of the scale into the forward."""
    return scale.clone()


@_scale_in_backward.register_fake
def _(grad_y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scale)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss: Tensor, scale: float | Tensor, on_backward: Callable[[], None] | None
    ) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale, ctx.on_backward = scale, on_backward
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (loss,) = ctx.saved_tensors
        if ctx.on_backward is not None:
            ctx.on_backward()
            ctx.on_backward = None  # a graph may have several backwards
        if not isinstance(ctx.scale, Tensor):
            grad_loss = torch.full_like(loss, ctx.scale)
        elif torch.compiler.is_compiling():
            grad_loss = _scale_in_backward(grad_y, ctx.scale).to(loss.dtype).expand_as(loss)
        else:
            grad_loss = torch.empty_like(loss).copy_(ctx.scale)
        return grad_y, grad_loss, None, None


def attach_loss(
    y: Tensor, loss: Tensor, scale: float | Tensor = 1.0, on_backward: Callable[[], None] | None = None
) -> Tensor:
    """Returns y, unchanged in value. When the backward of y runs, `loss` gets the gradient `scale`, as if
    scale * loss were part of the model's loss (like Megatron-Core's MoEAuxLossAutoScaler).

    If `scale` is a 0-d tensor (without gradient), its value is read in that backward. `on_backward` is called
    there too, once: under torch.utils.checkpoint a forward runs twice, but a backward once.
    """
    return _AttachLoss.apply(y, loss, scale, on_backward)  # type: ignore[no-untyped-call]
