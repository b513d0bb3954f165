"""The end of a language model: a norm, the product with the output matrix, and the loss.

Logits of all tokens would be the largest tensor of a step: 65 536 tokens and 151 936 entries of a vocabulary
take 40 GB in float32, and their gradient as much. So the loss makes those of some tokens at a time, and goes
on from them to the gradients at once: backward only multiplies these by the gradient of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLICE_BYTES = 1 << 30
"""Bytes of the float32 logits that there are at a time. With their gradient in bfloat16 it is half as much
again; products of a thousand tokens and more are as fast as larger ones."""


class Head(nn.Module):
    """Norm and output matrix. A tied one is the embedding's, which belongs to the embedding, and is given to
    each call."""

    def __init__(self, dim: int, vocab: int, eps: float, tied: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.output = None if tied else nn.Linear(dim, vocab, bias=False)

    def forward(
        self, x_BSH: Tensor, targets_BS: Tensor | None = None, tied_VH: Tensor | None = None
    ) -> Tensor:
        """Returns logits (B, S, V) of the last block's result, or with targets, int64, the mean cross-entropy
        of all tokens, in nats, as one float32 number."""
        x_BSH = self.norm(x_BSH)
        weight_VH = tied_VH if self.output is None else self.output.weight
        assert weight_VH is not None, "a tied head needs the embedding's matrix"
        if targets_BS is None:
            return F.linear(x_BSH, weight_VH)
        device = x_BSH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BSH.dtype
        return linear_cross_entropy(x_BSH.flatten(0, -2), weight_VH, targets_BS.flatten(), dtype)


def linear_cross_entropy(x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mean cross-entropy of the logits x_TH @ weight_VH.T, a number in float32 or, of float64, in
    float64.

    Products are of `dtype`, softmax and sums float32. A slice's part of the weight's gradient is rounded to
    `dtype` and added in float32.
    """
    need_grads = torch.is_grad_enabled() and (x_TH.requires_grad or weight_VH.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(x_TH, weight_VH, targets_T, dtype, need_grads)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, dtype: torch.dtype, need_grads: bool
    ) -> Tensor:
        with torch.autocast(x_TH.device.type, enabled=False):
            losses_T, grads = _by_slices(x_TH.to(dtype), weight_VH.to(dtype), targets_T, need_grads)
        ctx.grads, ctx.dtypes = grads, (x_TH.dtype, weight_VH.dtype)
        return losses_T.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of this loss have been given away by a backward before")
        (dx_TH, dweight_VH), ctx.grads = ctx.grads, None
        scale = grad / len(dx_TH)
        # In place, since the weight's gradient is as large as the weight.
        dx_TH, dweight_VH = dx_TH.mul_(scale), dweight_VH.mul_(scale)
        return dx_TH.to(ctx.dtypes[0]), dweight_VH.to(ctx.dtypes[1]), None, None, None


def _by_slices(
    x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, need_grads: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Returns the tokens' cross-entropies and, if needed, the gradients of their sum: of x in its dtype, of
    the weight in that of the sums."""
    summed = torch.promote_types(x_TH.dtype, torch.float32)
    losses_T = x_TH.new_empty(len(x_TH), dtype=summed)
    dx_TH = torch.empty_like(x_TH)
    dweight_VH = torch.zeros_like(weight_VH, dtype=summed) if need_grads else weight_VH
    size = max(1, SLICE_BYTES // (weight_VH.shape[0] * summed.itemsize))
    for start in range(0, len(x_TH), size):
        part = slice(start, start + size)
        logits_TV = x_TH[part] @ weight_VH.T
        log_shares_TV = logits_TV.log_softmax(dim=-1, dtype=summed)
        said_T1 = targets_T[part].unsqueeze(1)
        log_share_T1 = log_shares_TV.gather(1, said_T1)
        losses_T[part] = -log_share_T1.squeeze(1)
        if not need_grads:
            continue
        # The gradient of a token's logits is its softmax, less one where the target is.
        dlogits_TV = torch.exp(log_shares_TV, out=logits_TV)
        del log_shares_TV
        dlogits_TV.scatter_(1, said_T1, log_share_T1.expm1().to(x_TH.dtype))
        torch.mm(dlogits_TV, weight_VH, out=dx_TH[part])
        _add_product(dweight_VH, dlogits_TV, x_TH[part])
    return losses_T, (dx_TH, dweight_VH) if need_grads else None


def _add_product(sum_VH: Tensor, dlogits_TV: Tensor, x_TH: Tensor) -> None:
    """Adds dlogits_TV.T @ x_TH, of fewer bits some columns at a time: their product takes memory beside the
    sum."""
    if sum_VH.dtype == x_TH.dtype:
        sum_VH.addmm_(dlogits_TV.T, x_TH)
        return
    for sum_part_VH, part_TV in zip(sum_VH.chunk(8), dlogits_TV.chunk(8, dim=1), strict=True):
        sum_part_VH += part_TV.T @ x_TH
