"""The baseline: a layer as a plain framework builds it, torch index permutes around all_to_all_single, over
gloo on the CPU and over NCCL on GPUs, everything differentiated by autograd.

Forward, in the order of an all-to-all token dispatcher: sort the (token, expert) pairs by expert, exchange
counts (the one wait of the host), gather rows, exchange them, gather them into expert-major order; two
grouped products around an activation of separate operations; the same ways back, then the weighted sum at
home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moecomm.nn import MoELayer

Experts = Callable[[Tensor, Tensor], Tensor]
"""Maps (P, H) rows by local expert, and the (L,) int32 ends of their groups, to (P, H) rows."""


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows; its backward is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _exchanged(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.send, ctx.receive, ctx.group), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order. autograd's own backward of index_select adds rows up, which takes six times as
    long."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


def _exchanged(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send), group=group)
    return arrived


def swiglu_experts(rows_PH: Tensor, w_in: Tensor, w_out: Tensor, offsets_L: Tensor) -> Tensor:
    """The experts in torch alone: (P, H) rows by local expert, whose ends are offsets_L (int32)."""
    inner_PI = functional.grouped_mm(rows_PH, w_in, offs=offsets_L)
    gate_PF, up_PF = inner_PI.chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate_PF) * up_PF, w_out, offs=offsets_L)


class PlainLayer:
    """An MoE layer in torch alone over a process group (None: the default one). `experts` counts those of all
    its ranks; every token has its full number of experts.
    """

    def __init__(self, experts: int, group: Any = None) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.experts, self.local = experts, experts // self.ranks

    def forward(self, x_TH: Tensor, topk_idx_TK: Tensor, weights_TK: Tensor, compute: Experts) -> Tensor:
        """(T, H): the weighted sum of the token's experts. Differentiable in all but the ids."""
        topk = topk_idx_TK.shape[1]
        pairs = topk_idx_TK.reshape(-1).long()
        order_S = torch.argsort(pairs, stable=True)
        token_S = order_S // topk
        sent_E = torch.zeros(self.experts, dtype=torch.int64, device=x_TH.device)
        sent_E.scatter_add_(0, pairs, torch.ones_like(pairs))
        received_E = torch.empty_like(sent_E)
        dist.all_to_all_single(received_E, sent_E, group=self.group)
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
        arrived_PH: Tensor = _Exchange.apply(sent_SH, receive, send, self.group)  # type: ignore[no-untyped-call]
        rows_PH: Tensor = _Permute.apply(arrived_PH, order_P, inverse_P)  # type: ignore[no-untyped-call]
        out_PH = compute(rows_PH, offsets_L)
        back_PH: Tensor = _Permute.apply(out_PH, inverse_P, order_P)  # type: ignore[no-untyped-call]
        home_SH: Tensor = _Exchange.apply(back_PH, send, receive, self.group)  # type: ignore[no-untyped-call]
        scaled_SH = home_SH * weights_TK.reshape(-1).index_select(0, order_S).unsqueeze(1)
        total_TH = scaled_SH.new_zeros(x_TH.shape).index_add(0, token_S, scaled_SH)
        return total_TH.to(x_TH.dtype)


class PlainFfn(nn.Module):
    """A layer of a model in torch alone: the router, shared experts and weights of a MoELayer, and PlainLayer
    between them. Gates that are interleaved in the weights are put in halves, as a plain framework has them,
    which changes the layer's weights, not its results."""

    def __init__(self, layer: MoELayer) -> None:
        """layer: with GroupedExperts, each whole, and every choice of a token kept."""
        super().__init__()
        self.layer, config = layer, layer.config
        group = None if layer.folding is None else layer.folding.group("ep")
        self.plain = PlainLayer(config.num_experts, group)
        experts = layer.experts
        if config.activation != "swiglu":
            with torch.no_grad():
                for each in [experts.w_in] if experts.b_in is None else [experts.w_in, experts.b_in]:
                    each.copy_(torch.cat((each[..., ::2], each[..., 1::2]), dim=-1))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Maps (B, S, H) to the same."""
        layer, x_TH = self.layer, x_BSH.flatten(0, 1)
        routing = layer.router(x_TH, x_BSH.shape[1])
        layer.last_tokens_per_expert = routing.tokens_per_expert_E
        weights_TK = layer._attach(routing.topk_weights_TK, routing)
        rows_TH = x_TH.to(layer.config.dtype)

        def run(x_TH: Tensor) -> Tensor:
            with torch.autocast(x_TH.device.type, enabled=False):
                return self.plain.forward(x_TH, routing.topk_idx_TK, weights_TK, self._compute)

        y_TH: Tensor = layer.experts(rows_TH, run=run)
        if layer.shared is not None:
            y_TH = y_TH + layer.shared(rows_TH)
        return y_TH.to(x_BSH.dtype).view(x_BSH.shape)

    def _compute(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        experts = self.layer.experts
        if self.layer.config.activation != "swiglu_clamped":
            return swiglu_experts(rows_PH, experts.w_in, experts.w_out, offsets_L)
        # The activation of gpt-oss, whose experts have biases.
        rows_L = offsets_L.diff(prepend=offsets_L.new_zeros(1))

        def biased(rows: Tensor, bias: Tensor | None) -> Tensor:
            return rows if bias is None else rows + bias.repeat_interleave(rows_L, 0, output_size=len(rows))

        inner_PI = functional.grouped_mm(rows_PH, experts.w_in, offs=offsets_L)
        gate_PF, up_PF = biased(inner_PI, experts.b_in).chunk(2, dim=-1)
        gate_PF, up_PF = gate_PF.clamp(max=7.0), up_PF.clamp(-7.0, 7.0)
        z_PF = gate_PF * (1.702 * gate_PF).sigmoid() * (up_PF + 1)
        return biased(functional.grouped_mm(z_PF, experts.w_out, offs=offsets_L), experts.b_out)
