"""The baseline: a layer as a plain framework builds it, torch index permutes around all_to_all_single, over
gloo on the CPU and over NCCL on GPUs, everything differentiated by autograd.

Forward, in the order of an all-to-all token dispatcher: sort the (token, expert) pairs by expert, exchange
counts (the one wait of the host), gather rows, exchange them, gather them into expert-major order; two
grouped products around SwiGLU of separate operations; the same ways back, then the weighted sum at home.
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


def swiglu_experts(rows_PH: Tensor, w_in: Tensor, w_out: Tensor, offsets_L: Tensor) -> Tensor:
    """The experts in torch alone: (P, H) rows by local expert, whose ends are offsets_L (int32)."""
    inner_PI = functional.grouped_mm(rows_PH, w_in, offs=offsets_L)
    gate_PF, up_PF = inner_PI.chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate_PF) * up_PF, w_out, offs=offsets_L)


class PlainLayer:
    """An MoE layer in torch alone over the default process group. `experts` counts those of all ranks; every
    token has its full number of experts.
    """

    def __init__(self, experts: int) -> None:
        self.ranks = dist.get_world_size()
        self.experts, self.local = experts, experts // self.ranks

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
        inverse_P = torch.empty_like(order_P)
        inverse_P[order_P] = torch.arange(order_P.numel(), device=x_TH.device)
        offsets_L = counts[1].sum(0).cumsum(0).to(torch.int32)
        sent_SH = x_TH.index_select(0, token_S)
        arrived_PH: Tensor = _Exchange.apply(sent_SH, receive, send)  # type: ignore[no-untyped-call]
        rows_PH = arrived_PH.index_select(0, order_P)
        out_PH = swiglu_experts(rows_PH, w_in, w_out, offsets_L)
        back_PH = out_PH.index_select(0, inverse_P)
        home_SH: Tensor = _Exchange.apply(back_PH, send, receive)  # type: ignore[no-untyped-call]
        scaled_SH = home_SH * weights_TK.reshape(-1).index_select(0, order_S).unsqueeze(1)
        total_TH = scaled_SH.new_zeros(x_TH.shape).index_add(0, token_S, scaled_SH)
        return total_TH.to(x_TH.dtype)
