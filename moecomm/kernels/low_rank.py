"""The experts' products with weights that have low-rank adapters (LoRA, arXiv 2106.09685).

For a row x of group l:  x (W[l] + scale * left[l] right[l]) = x W[l] + scale * (x left[l]) right[l]

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

from moecomm.kernels.activation import activate, activate_backward
from moecomm.kernels.first_order import first_order
from moecomm.kernels.grouped_mm import grouped_mm, grouped_mm_wgrad
from moecomm.kernels.outside_autocast import without_autocast
from moecomm.kernels.products import Products


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


class Groups(NamedTuple):
    """Groups of rows: their cumulative ends, (L,), and the form in which `products` takes them."""

    offsets_L: Tensor
    ends: Tensor
    products: Products


def adapted_ffn(
    rows_PH: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    adapters: tuple[LowRank | None, LowRank | None],
    weights_P: Tensor | None,
    groups: Groups,
    activation: str,
) -> Tensor:
    """Returns (P, H): `expert_ffn` with adapters of the two weights. `weights`: w_in (L, H, I), w_out (L, F,
    H) and the biases b_in, b_out, all of the rows' dtype. Differentiable once in all tensors."""
    (*in_LR, in_scale), (*out_LR, out_scale) = (each or (None, None, 1.0) for each in adapters)
    with without_autocast(rows_PH.device.type):
        return _AdaptedFfn.apply(  # type: ignore[no-untyped-call]
            rows_PH, *weights, weights_P, *in_LR, *out_LR, (in_scale, out_scale), groups, activation
        )


def _add(
    rows_PA: Tensor,
    left_LAR: Tensor | None,
    right_LRB: Tensor | None,
    scale: float,
    groups: Groups,
    into_PB: Tensor,
) -> Tensor | None:
    """Adds scale * rows left right to `into_PB`. Returns scale * rows left, (P, R); None without adapter."""
    if left_LAR is None or right_LRB is None:
        return None
    inner_PR = grouped_mm(rows_PA, left_LAR, groups.offsets_L)
    if scale != 1:
        inner_PR.mul_(scale)
    groups.products.add_mm(inner_PR, right_LRB, groups.ends, into_PB)
    return inner_PR


def _add_dgrad(
    grad_PB: Tensor,
    left_LAR: Tensor | None,
    right_LRB: Tensor | None,
    scale: float,
    groups: Groups,
    into_PA: Tensor,
) -> Tensor | None:
    """Adds scale * grad right^T left^T to `into_PA`. Returns scale * grad right^T."""
    if left_LAR is None or right_LRB is None:
        return None
    return _add(grad_PB, right_LRB.mT, left_LAR.mT, scale, groups, into_PA)


class _AdaptedFfn(torch.autograd.Function):
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
        inner_PI = products.grouped_mm(rows_PH, w_in, ends, bias_LB=b_in)
        in_PR = _add(rows_PH, in_left, in_right, scales[0], groups, inner_PI)
        z_PF = activate(inner_PI, weights_P, ends, activation)
        y_PH = products.grouped_mm(z_PF, w_out, ends, bias_LB=b_out, weights_P=weights_P)
        out_PR = _add(z_PF, out_left, out_right, scales[1], groups, y_PH)
        ctx.save_for_backward(
            *(rows_PH, w_in, w_out, b_out, weights_P, inner_PI, in_PR, out_PR),
            *(in_left, in_right, out_left, out_right, offsets_L, ends),
        )
        ctx.scales, ctx.products, ctx.activation = scales, products, activation
        return y_PH

    @staticmethod
    @_disable_dynamo  # kernels take addresses
    @first_order
    def backward(ctx: Any, grad_y_PH: Tensor) -> tuple[Tensor | None, ...]:
        rows_PH, w_in, w_out, b_out, weights_P, inner_PI, in_PR, out_PR, *others = ctx.saved_tensors
        in_left, in_right, out_left, out_right, offsets_L, ends = others
        products, (in_scale, out_scale) = ctx.products, ctx.scales
        groups = Groups(offsets_L, ends, products)
        _, need_in, need_out, need_b_in, need_b_out, need_weights, *_ = ctx.needs_input_grad
        grads: dict[str, Tensor | None] = {}

        grad_z_PF = products.grouped_mm_dgrad(grad_y_PH, w_out, ends)
        grad_out_PR = _add_dgrad(grad_y_PH, out_left, out_right, out_scale, groups, grad_z_PF)
        need_z = need_out or out_left is not None
        grad_inner_PI, grad_weights_P, z_PF = activate_backward(
            grad_z_PF, inner_PI, weights_P, ends, ctx.activation, need_weights, need_z
        )
        del grad_z_PF
        if need_weights and b_out is not None:
            grad_weights_P.add_(products.bias_weights_grad(grad_y_PH, b_out, ends))
        if need_out:
            grads["w_out"] = products.grouped_mm_wgrad(z_PF, grad_y_PH, ends)
        if need_b_out:
            grads["b_out"] = products.bias_grad(grad_y_PH, ends, weights_P)
        if grad_out_PR is not None:
            grads["out_left"] = grouped_mm_wgrad(z_PF, grad_out_PR, offsets_L)
            grads["out_right"] = grouped_mm_wgrad(out_PR, grad_y_PH, offsets_L)
        del z_PF
        grads["rows"] = grad_rows_PH = products.grouped_mm_dgrad(grad_inner_PI, w_in, ends)
        grad_in_PR = _add_dgrad(grad_inner_PI, in_left, in_right, in_scale, groups, grad_rows_PH)
        if need_in:
            grads["w_in"] = products.grouped_mm_wgrad(rows_PH, grad_inner_PI, ends)
        if need_b_in:
            grads["b_in"] = products.bias_grad(grad_inner_PI, ends)
        if grad_in_PR is not None:
            grads["in_left"] = grouped_mm_wgrad(rows_PH, grad_in_PR, offsets_L)
            grads["in_right"] = grouped_mm_wgrad(in_PR, grad_inner_PI, offsets_L)
        names = "rows", "w_in", "w_out", "b_in", "b_out"
        factors = "in_left", "in_right", "out_left", "out_right"
        weights = grad_weights_P if need_weights else None
        return *map(grads.get, names), weights, *map(grads.get, factors), None, None, None
