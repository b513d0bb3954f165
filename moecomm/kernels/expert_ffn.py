"""The experts' two products on rows that are grouped by expert, with adapters of their weights (LoRA).

For a row x of group l and an adapter (arXiv 2106.09685):
    x (W[l] + scale * left[l] right[l]) = x W[l] + scale * (x left[l]) right[l]

The sum of a weight and its adapter is never made, and a frozen weight needs no gradient: both would take as
much memory as the weight, and as much time as its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional

from moecomm.compiled import outside_graph
from moecomm.kernels.activation import activate, activate_backward
from moecomm.kernels.first_order import first_order
from moecomm.kernels.grouped_mm import grouped_mm, grouped_mm_wgrad
from moecomm.kernels.outside_autocast import without_autocast
from moecomm.kernels.products import Products, without_tail


class LowRank(NamedTuple):
    """An adapter: scale * left @ right, of (L, A, R) and (L, R, B)."""

    left_LAR: Tensor
    right_LRB: Tensor
    scale: float


_RANKS = 8
"""R is a multiple of this: 16 bytes in the narrowest dtype, as grouped products require."""


def join_adapters(adapters: Sequence[LowRank]) -> LowRank | None:
    """Returns an adapter that is the sum of `adapters`, None for none; differentiable in their factors."""
    if not adapters:
        return None
    left_LAR, right_LRB, scale = adapters[0]
    if len(adapters) > 1:
        left_LAR = torch.cat([left * scale for left, _, scale in adapters], dim=2)
        right_LRB, scale = torch.cat([right for _, right, _ in adapters], dim=1), 1.0
    if lacks := -left_LAR.shape[2] % _RANKS:
        left_LAR = functional.pad(left_LAR, (0, lacks))
        right_LRB = functional.pad(right_LRB, (0, 0, 0, lacks))
    return LowRank(left_LAR, right_LRB.contiguous(), scale)


@outside_graph
def expert_ffn(
    rows_PH: Tensor,
    w_in_LHI: Tensor,
    w_out_LFH: Tensor,
    offsets_L: Tensor,
    weights_P: Tensor | None,
    *,
    activation: str,
    products: Products,
    b_in_LI: Tensor | None = None,
    b_out_LH: Tensor | None = None,
    adapters: tuple[LowRank | None, LowRank | None] = (None, None),
    groups: Tensor | None = None,
) -> Tensor:
    """Returns (P, H): the experts' two products on grouped rows, each with its bias if given. In between come
    the activation and the rows' routing weights (None: 1). Differentiable in rows, weights, routing weights
    and biases. Rows past offsets[-1] and their gradients are unspecified.

    adapters: those of the two weights, of the rows' dtype. groups: those of `products` for the offsets, if
    they are known. A graph of torch.compile ends before a call."""
    groups = products.groups(offsets_L) if groups is None else groups
    (*of_in, in_scale), (*of_out, out_scale) = (each or (None, None, 1.0) for each in adapters)
    weights, rows = (w_in_LHI, w_out_LFH, b_in_LI, b_out_LH), Groups(offsets_L, groups, products)
    with without_autocast(rows_PH.device.type):
        return _ExpertFfn.apply(  # type: ignore[no-untyped-call]
            rows_PH, *weights, weights_P, *of_in, *of_out, (in_scale, out_scale), rows, activation
        )


class Groups(NamedTuple):
    """Groups of rows: their cumulative ends, (L,), and the form in which `products` takes them."""

    offsets_L: Tensor
    ends: Tensor
    products: Products


def _add(
    rows_PA: Tensor, left_LAR: Tensor, right_LRB: Tensor, scale: float, groups: Groups, into_PB: Tensor
) -> Tensor:
    """Adds scale * rows left right to `into_PB`. Returns scale * rows left, (P, R)."""
    inner_PR = grouped_mm(rows_PA, left_LAR, groups.offsets_L)
    if scale != 1:
        inner_PR.mul_(scale)
    groups.products.add_mm(inner_PR, right_LRB, groups.ends, into_PB)
    return inner_PR


class _ExpertFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_PH: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        b_in: Tensor | None,
        b_out: Tensor | None,
        weights_P: Tensor | None,
        in_left: Tensor | None,
        in_right: Tensor | None,
        out_left: Tensor | None,
        out_right: Tensor | None,
        scales: tuple[float, float],
        groups: Groups,
        activation: str,
    ) -> Tensor:
        offsets_L, ends, products = groups
        in_PR = out_PR = None
        if in_left is None or in_right is None:
            inner_PI, z_PF = products.gated_mm(
                rows_PH, w_in, ends, weights_P, activation=activation, bias_LI=b_in
            )
        else:
            inner_PI = products.grouped_mm(rows_PH, w_in, ends, bias_LB=b_in)
            in_PR = _add(rows_PH, in_left, in_right, scales[0], groups, inner_PI)
            z_PF = activate(inner_PI, weights_P, ends, activation)
        y_PH = products.grouped_mm(z_PF, w_out, ends, bias_LB=b_out, weights_P=weights_P)
        if out_left is not None and out_right is not None:
            out_PR = _add(z_PF, out_left, out_right, scales[1], groups, y_PH)
        ctx.save_for_backward(
            *(rows_PH, w_in, w_out, b_out, weights_P, inner_PI, in_PR, out_PR),
            *(in_left, in_right, out_left, out_right, offsets_L, ends),
        )
        ctx.scales, ctx.products, ctx.activation = scales, products, activation
        return without_tail(y_PH, ends)

    @staticmethod
    @_disable_dynamo  # kernels take addresses
    @first_order
    def backward(ctx: Any, grad_y_PH: Tensor) -> tuple[Tensor | None, ...]:
        rows_PH, w_in, w_out, b_out, weights_P, inner_PI, in_PR, out_PR, *others = ctx.saved_tensors
        in_left, in_right, out_left, out_right, offsets_L, ends = others
        products, (in_scale, out_scale) = ctx.products, ctx.scales
        groups = Groups(offsets_L, ends, products)
        need_rows, need_in, need_out, need_b_in, need_b_out, need_weights, *_ = ctx.needs_input_grad
        grads: dict[str, Tensor | None] = {}

        need_z = need_out or out_left is not None
        if out_left is None:
            grad_inner_PI, grad_weights_P, z_PF = products.gated_mm_dgrad(
                grad_y_PH,
                w_out,
                ends,
                inner_PI,
                weights_P,
                activation=ctx.activation,
                need_weights=need_weights,
                need_z=need_z,
            )
        else:
            grad_z_PF = products.grouped_mm_dgrad(grad_y_PH, w_out, ends)
            grad_out_PR = _add(grad_y_PH, out_right.mT, out_left.mT, out_scale, groups, grad_z_PF)
            grad_inner_PI, grad_weights_P, z_PF = activate_backward(
                grad_z_PF, inner_PI, weights_P, ends, ctx.activation, need_weights, need_z
            )
            del grad_z_PF
            grads["out_left"] = grouped_mm_wgrad(z_PF, grad_out_PR, offsets_L)
            grads["out_right"] = grouped_mm_wgrad(out_PR, grad_y_PH, offsets_L)
        if need_weights:
            if b_out is not None:
                of_bias_P = products.bias_weights_grad(grad_y_PH, b_out, ends)
                grad_weights_P.add_(without_tail(of_bias_P, ends))
            grads["weights"] = grad_weights_P
        if need_out:
            grads["w_out"] = products.grouped_mm_wgrad(z_PF, grad_y_PH, ends)
        if need_b_out:
            grads["b_out"] = products.bias_grad(grad_y_PH, ends, weights_P)
        del z_PF
        if need_rows or in_left is not None:
            grad_rows_PH = products.grouped_mm_dgrad(grad_inner_PI, w_in, ends)
            grads["rows"] = grad_rows_PH
            if in_left is not None:
                grad_in_PR = _add(grad_inner_PI, in_right.mT, in_left.mT, in_scale, groups, grad_rows_PH)
                grads["in_left"] = grouped_mm_wgrad(rows_PH, grad_in_PR, offsets_L)
                grads["in_right"] = grouped_mm_wgrad(in_PR, grad_inner_PI, offsets_L)
            without_tail(grad_rows_PH, ends)
        if need_in:
            grads["w_in"] = products.grouped_mm_wgrad(rows_PH, grad_inner_PI, ends)
        if need_b_in:
            grads["b_in"] = products.bias_grad(grad_inner_PI, ends)
        names = "rows", "w_in", "w_out", "b_in", "b_out", "weights"
        factors = "in_left", "in_right", "out_left", "out_right"
        return *map(grads.get, names), *map(grads.get, factors), None, None, None
