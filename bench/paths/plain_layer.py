"""The baseline: a layer as a plain framework builds it, torch index permutes around all_to_all_single, over
gloo on the CPU and over NCCL on GPUs, everything differentiated by autograd.

Forward, in the order of an all-to-all token dispatcher: sort the (token, expert) pairs by expert, exchange
counts (the one wait of the host), gather rows, exchange them, gather them into expert-major order; two
grouped products around SwiGLU of separate operations; the same ways back, then the weighted sum at home.

Two variants. Plain: index_select and index_add, with autograd's own backwards. Tuned: permutes whose
backward is the gather of the inverse order, and one batched product for the weighted sum, which a framework
gets by writing these functions by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows; its backward is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        ctx.receive, ctx.send = receive, send
        return _exchanged(rows, receive, send)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.send, ctx.receive), None, None


def _exchanged(rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send))
    return arrived


class _Permute(torch.autograd.Function):
    """rows[order]; `inverse` is the order back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Spread(torch.autograd.Function):
    """Copies each token's row once for each of its experts, in the order of experts; the backward gathers a
    token's rows and adds them up."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_S: Tensor, inverse_S: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.topk = topk
        return x_TH.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_S,) = ctx.saved_tensors
        rows_TKH = grad_SH.index_select(0, inverse_S).view(-1, ctx.topk, grad_SH.shape[1])
        return rows_TKH.sum(1), None, None, None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def swiglu_experts(rows_PH: Tensor, w_in: Tensor, w_out: Tensor, offsets_L: Tensor) -> Tensor:
    """The experts in torch alone: (P, H) rows by local expert, whose ends are offsets_L (int32)."""
    inner_PI = functional.grouped_mm(rows_PH, w_in, offs=offsets_L)
    gate_PF, up_PF = inner_PI.chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate_PF) * up_PF, w_out, offs=offsets_L)


class PlainLayer:
    """An MoE layer in torch alone over the default process group. `experts` counts those of all ranks; every
    token has its full number of experts.
    """

    def __init__(self, experts: int, *, tuned: bool) -> None:
        self.ranks = dist.get_world_size()
        self.experts, self.local = experts, experts // self.ranks
        self.tuned = tuned

    def forward(
        self, x_TH: Tensor, topk_idx_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor
    ) -> Tensor:
        """(T, H): the weighted sum of the token's experts. Differentiable in all but the ids."""
        topk = topk_idx_TK.shape[1]
        pairs = topk_idx_TK.reshape(-1).long()
        order_S = torch.argsort(pairs, stable=True)
        token_S = order_S // topk
        sent_E = torch.zeros(self.experts, dtype=torch.int64, device=x_TH.device)
        sent_E.scatter_add_(0, pairs, torch.ones_like(pairs))
        received_E = torch.empty_like(sent_E)
        dist.all_to_all_single(received_E, sent_E)
        counts = torch.stack([sent_E, received_E]).view(2, self.ranks, self.local)
        send, receive = counts.sum(2).tolist()  # the host waits, once
        # Rows arrive by (source rank, expert).
        expert_P = (
            torch.arange(self.local, device=x_TH.device)
            .repeat(self.ranks)
            .repeat_interleave(received_E, output_size=sum(receive))
        )
        order_P = torch.argsort(expert_P, stable=True)
        inverse_P = _inverse(order_P)
        offsets_L = counts[1].sum(0).cumsum(0).to(torch.int32)
        if self.tuned:
            inverse_S = _inverse(order_S)
            sent_SH: Tensor = _Spread.apply(x_TH, token_S, inverse_S, topk)  # type: ignore[no-untyped-call]
        else:
            sent_SH = x_TH.index_select(0, token_S)
        arrived_PH: Tensor = _Exchange.apply(sent_SH, receive, send)  # type: ignore[no-untyped-call]
        rows_PH = self._permuted(arrived_PH, order_P, inverse_P)
        out_PH = swiglu_experts(rows_PH, w_in, w_out, offsets_L)
        back_PH = self._permuted(out_PH, inverse_P, order_P)
        home_SH: Tensor = _Exchange.apply(back_PH, send, receive)  # type: ignore[no-untyped-call]
        if self.tuned:
            rows_TKH = self._permuted(home_SH, inverse_S, order_S).view(-1, topk, x_TH.shape[1])
            return torch.bmm(weights_TK.to(x_TH.dtype).unsqueeze(1), rows_TKH).squeeze(1)
        scaled_SH = home_SH * weights_TK.reshape(-1).index_select(0, order_S).unsqueeze(1)
        total_TH = scaled_SH.new_zeros(x_TH.shape).index_add(0, token_S, scaled_SH)
        return total_TH.to(x_TH.dtype)

    def _permuted(self, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        if not self.tuned:
            return rows.index_select(0, order)
        permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
        return permuted
