"""The end of a language model: a norm, the product with the output matrix, and the loss.

The logits of all tokens would be the largest tensor of a step: with 65 536 tokens and a vocabulary of 151 936
they take 40 GB in float32, and so does their gradient. So the loss computes the logits of some tokens at a
time, and the gradients from them right away: backward only multiplies these by the gradient of the loss.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLICE_BYTES = 1 << 30
"""Bytes of the float32 logits that exist at a time. Their bfloat16 gradient takes half as much again.
Products of at least a thousand tokens are as fast as larger ones."""

QUACK_MOST, QUACK_MULTIPLE = 1 << 18, 8
"""The vocabularies for which quack's kernel is used: it loads eight logits at a time, and its blocks share a
token's."""

SLICE_MULTIPLE = 128
"""Larger slices are a multiple of this many tokens, like the tiles of a product."""


class Head(nn.Module):
    """Norm and output matrix. A tied matrix belongs to the embedding, and is passed to each call."""

    def __init__(self, dim: int, vocab: int, eps: float, tied: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.output = None if tied else nn.Linear(dim, vocab, bias=False)

    def forward(
        self, x_BSH: Tensor, targets_BS: Tensor | None = None, tied_VH: Tensor | None = None
    ) -> Tensor:
        """Returns logits (B, S, V) for the last block's result; with targets, int64, the mean cross-entropy
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
    """Returns the mean cross-entropy of the logits x_TH @ weight_VH.T: a float32 number, or float64 for
    float64 inputs.

    Products are in `dtype`, softmax and sums in float32. A slice's part of the weight's gradient is rounded
    to `dtype` and added in float32.
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
        # In place, since this gradient is as large as the weight.
        dx_TH, dweight_VH = dx_TH.mul_(scale), dweight_VH.mul_(scale)
        return dx_TH.to(ctx.dtypes[0]), dweight_VH.to(ctx.dtypes[1]), None, None, None


def _by_slices(
    x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, need_grads: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Returns the tokens' cross-entropies and, if needed, the gradients of their sum: for x in its dtype, for
    the weight in that of the sums."""
    summed = torch.promote_types(x_TH.dtype, torch.float32)
    losses_T = x_TH.new_empty(len(x_TH), dtype=summed)
    dx_TH = torch.empty_like(x_TH)
    dweight_VH = torch.zeros_like(weight_VH, dtype=summed) if need_grads else weight_VH
    size = max(1, SLICE_BYTES // (weight_VH.shape[0] * summed.itemsize))
    if size > SLICE_MULTIPLE:
        size -= size % SLICE_MULTIPLE
    softmax = _softmax_on(x_TH.device, x_TH.dtype, weight_VH.shape[0])
    for start in range(0, len(x_TH), size):
        part = slice(start, start + size)
        logits_TV = x_TH[part] @ weight_VH.T
        losses_T[part] = softmax(logits_TV, targets_T[part], summed, need_grads)
        if need_grads:
            torch.mm(logits_TV, weight_VH, out=dx_TH[part])
            _add_product(dweight_VH, logits_TV, x_TH[part])
    return losses_T, (dx_TH, dweight_VH) if need_grads else None


def _softmax(logits_TV: Tensor, targets_T: Tensor, summed: torch.dtype, need_grads: bool) -> Tensor:
    """Returns the tokens' cross-entropies in the dtype `summed`. If needed, it turns the logits into the
    gradient of their sum: the softmax, minus one at the target."""
    log_shares_TV = logits_TV.log_softmax(dim=-1, dtype=summed)
    said_T1 = targets_T.unsqueeze(1)
    log_share_T1 = log_shares_TV.gather(1, said_T1)
    if need_grads and torch.compiler.is_compiling():  # one kernel; after a scatter_ it would copy the result
        is_said_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == said_T1
        logits_TV.copy_(log_shares_TV.exp_() - is_said_TV.to(summed))
    elif need_grads:
        logits_TV.copy_(log_shares_TV.exp_())
        logits_TV.scatter_(1, said_T1, log_share_T1.expm1().to(logits_TV.dtype))
    return -log_share_T1.squeeze(1)


def _softmax_on(device: torch.device, dtype: torch.dtype, vocab: int) -> Callable[..., Tensor]:
    """Returns the fastest `_softmax` for logits of `dtype`. On Hopper GPUs it is quack's kernel if quack is
    installed: that reads and writes the logits once. On others it is two kernels that torch.compile makes
    instead of five. Neither writes logits in float32."""
    if device.type != "cuda":
        return _softmax
    suits = vocab <= QUACK_MOST and vocab % QUACK_MULTIPLE == 0 and dtype in (torch.bfloat16, torch.float16)
    by_quack = (
        _quack_cross_entropy() if suits and torch.cuda.get_device_capability(device) == (9, 0) else None
    )
    return _compiled_softmax() if by_quack is None else functools.partial(_softmax_by_quack, by_quack)


def _softmax_by_quack(
    cross_entropy: Callable[..., None],
    logits_TV: Tensor,
    targets_T: Tensor,
    summed: torch.dtype,
    need_grads: bool,
) -> Tensor:
    """Does what `_softmax` does, by quack's function, on logits in bfloat16 or float16."""
    losses_T = torch.empty(len(logits_TV), dtype=summed, device=logits_TV.device)
    cross_entropy(logits_TV, targets_T, None, losses_T, None, logits_TV if need_grads else None, None)
    return losses_T


@functools.cache
def _quack_cross_entropy() -> Callable[..., None] | None:
    """Returns quack's function, or None if quack is not installed, or cannot be imported. Of that moecomm
    warns, where its layers look for quack."""
    try:
        found: Callable[..., None] = importlib.import_module("quack.cross_entropy").cross_entropy_fwd_out
    except Exception:  # a mismatched package may raise any error
        return None
    return found


@functools.cache
def _compiled_softmax() -> Callable[..., Tensor]:
    return torch.compile(_softmax)


def _add_product(sum_VH: Tensor, dlogits_TV: Tensor, x_TH: Tensor) -> None:
    """Adds dlogits_TV.T @ x_TH. The CPU has no product that accumulates into a wider type than its operands;
    there some columns are added at a time, since the product needs memory besides the sum."""
    if sum_VH.dtype == x_TH.dtype:
        sum_VH.addmm_(dlogits_TV.T, x_TH)
    elif sum_VH.is_cuda:
        torch.addmm(sum_VH, dlogits_TV.T, x_TH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:
        for sum_part_VH, part_TV in zip(sum_VH.chunk(8), dlogits_TV.chunk(8, dim=1), strict=True):
            sum_part_VH += part_TV.T @ x_TH
