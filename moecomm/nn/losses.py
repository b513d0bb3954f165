"""Auxiliary losses of the router, and how their gradient flows although the model's loss lacks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument


def load_balancing_loss(probs_TE: Tensor, topk_idx_TK: Tensor, sequence_len: int | None = None) -> Tensor:
    """Switch Transformer's load-balancing loss (arXiv 2101.03961, eq. 4-6; for top-k as in Megatron-Core).

    E * sum over e of f_e * P_e, where f_e is the share of the (token, k) pairs that chose expert e and P_e
    the mean probability of e; 1 when both are uniform. Gradient flows through P only. probs_TE: (T, E), rows
    sum to 1; topk_idx_TK: (T, K), every entry a global expert id, or -1 for a choice that was dropped, which
    counts in the number of pairs alone. With sequence_len, which must divide T, the loss is taken over each
    run of sequence_len tokens and averaged. Returns a 0-d tensor; 0 when T is 0. Other shapes and a
    sequence_len that does not divide T raise InvalidArgument.
    """
    if probs_TE.dim() != 2 or topk_idx_TK.dim() != 2 or probs_TE.shape[0] != topk_idx_TK.shape[0]:
        raise InvalidArgument(
            f"probs_TE has shape {tuple(probs_TE.shape)}, topk_idx_TK {tuple(topk_idx_TK.shape)}, must be "
            "(T, E) and (T, K)"
        )
    num_tokens, num_experts = probs_TE.shape
    length = num_tokens if sequence_len is None else require_integer("sequence_len", sequence_len, 1)
    if num_tokens == 0:
        return probs_TE.sum()
    sequences = num_tokens // length
    if sequences * length != num_tokens:
        raise InvalidArgument(f"sequence_len is {length}, must divide the number of tokens {num_tokens}")
    probs_SE = probs_TE.view(sequences, length, num_experts).mean(dim=1)
    chosen_SN = topk_idx_TK.reshape(sequences, -1).to(torch.int64)
    ones_SN = (chosen_SN >= 0).to(probs_TE.dtype)
    share_SE = torch.zeros_like(probs_SE).scatter_add(1, chosen_SN.clamp(min=0), ones_SN) / chosen_SN.shape[1]
    return num_experts * (probs_SE * share_SE).sum(dim=1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Returns the mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5). 0-d; 0 when T is
    0."""
    return logits_TE.logsumexp(dim=-1).square().sum() / max(logits_TE.shape[0], 1)


@torch.library.custom_op("moecomm::scale_in_backward", mutates_args=())
def _scale_in_backward(grad_y: Tensor, scale: Tensor) -> Tensor:
    """Returns a copy of the scale. The gradient, which is not looked at, keeps torch.compile from reading the
    scale in the forward."""
    return scale.clone()


@_scale_in_backward.register_fake
def _(grad_y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scale)


def _gradient_of_loss(grad_y: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
    if not isinstance(scale, Tensor):
        return torch.full_like(loss, scale)
    if torch.compiler.is_compiling():
        return _scale_in_backward(grad_y, scale).to(loss.dtype).expand_as(loss)
    return torch.empty_like(loss).copy_(scale)


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
        return grad_y, _gradient_of_loss(grad_y, loss, ctx.scale), None, None


def attach_loss(
    y: Tensor, loss: Tensor, scale: float | Tensor = 1.0, on_backward: Callable[[], None] | None = None
) -> Tensor:
    """Returns y, unchanged in value; when its backward runs, `loss` gets the gradient `scale` beside it. A
    scale that is a 0-d tensor without gradient is read then, not before.

    The manner of Megatron-Core's MoEAuxLossAutoScaler: the gradient is that of (the model's loss + scale *
    loss), and no one has to carry the loss out of the model. Right under torch.utils.checkpoint too: there
    the first forward is thrown away and only the recomputed one has a backward. For the same reason
    `on_backward`, called once when the gradient arrives, is the place to count a step's tokens: a forward may
    run twice, a backward does not.
    """
    attached: Tensor = _AttachLoss.apply(y, loss, scale, on_backward)  # type: ignore[no-untyped-call]
    return attached
