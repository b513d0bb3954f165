"""The experts' products: the interface that the layer uses, and its implementation with torch.

Shape letters: P rows in groups of L experts, H hidden columns, F columns of the activation's result ("ffn
width"), I columns of the first product (2F for swiglu), A and B any widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from moecomm.arguments import weight_dtype
from moecomm.kernels.activation import activate, activate_backward
from moecomm.kernels.grouped_mm import grouped_mm, grouped_mm_wgrad
from moecomm.types import DispatchOutput


class Products:
    """The experts' grouped products by torch, in the operands' dtype; other engines override the methods.

    They are not differentiable. Groups and unspecified rows are as in `grouped_matmul`; `groups` is the
    result of `groups()` for the offsets; results have the rows' dtype.

    A bias, (L, B), acts as one more row of each group's weight, and the routing weights (1 if there are none)
    as one more column of the rows. So each row gets its group's bias times the row's routing weight.

    Attributes:
        name: the name of the engine, for display.
        adds: whether one kernel computes a weight gradient and adds it to an existing tensor.
        columns_first: whether weights are views of (L, B, A) tensors. Weight gradients get this layout
            too, so that a parameter takes its gradient without a copy.
    """

    name = "torch"
    adds = False

    def __init__(self, *, columns_first: bool = False) -> None:
        self.columns_first = columns_first

    def groups(self, offsets_L: Tensor) -> Tensor:
        """Returns the groups of rows in the form that the products take; the last element is offsets[-1]."""
        return offsets_L

    def groups_of(self, out: DispatchOutput) -> Tensor:
        """Returns the groups of a dispatch's rows in expert-major order, without device work."""
        return out.expert_offsets

    def grouped_mm(
        self,
        rows_PA: Tensor,
        weight_LAB: Tensor,
        groups: Tensor,
        *,
        bias_LB: Tensor | None = None,
        weights_P: Tensor | None = None,
    ) -> Tensor:
        """Returns (P, B): each group's rows times its weight, plus `weights_P` (None: 1) times its bias."""
        product_PB = grouped_mm(rows_PA, weight_LAB, groups)
        if bias_LB is not None:
            factors_PN = bias_factors(weights_P, product_PB.shape[0], product_PB)
            added_PB = grouped_mm(factors_PN, bias_weight(bias_LB), groups)
            # A torch dispatch mode (selective checkpointing) may keep the product: do not change it then.
            return product_PB + added_PB if is_in_torch_dispatch_mode() else product_PB.add_(added_PB)
        return product_PB

    def add_mm(self, rows_PA: Tensor, weight_LAB: Tensor, groups: Tensor, into_PB: Tensor) -> None:
        """Adds each group's rows times its weight to `into_PB`, whose dtype is the rows'."""
        into_PB.add_(grouped_mm(rows_PA, weight_LAB, groups))

    def grouped_mm_dgrad(self, rows_PB: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        """Returns (P, A): the rows of each group times the group's transposed weight."""
        return grouped_mm(rows_PB, weight_LAB.transpose(1, 2), groups)

    def grouped_mm_wgrad(
        self,
        rows_PA: Tensor,
        grad_PB: Tensor,
        groups: Tensor,
        *,
        into: Tensor | None = None,
        scale: float = 1,
    ) -> Tensor | None:
        """Returns (L, A, B): for each group the sum over its rows of rows^T grad, times `scale`; zero for an
        empty group. With `into`, a tensor of that shape, adds the sums to it and returns None."""
        # The default scale is an int: torch.compile(dynamic=True) would treat a float as an unknown number.
        if not self.columns_first:
            return self._wgrad_into(rows_PA, grad_PB, groups, into, scale)
        made_LBA = self._wgrad_into(grad_PB, rows_PA, groups, None if into is None else into.mT, scale)
        return None if made_LBA is None else made_LBA.mT

    def bias_grad(
        self, grad_PB: Tensor, groups: Tensor, weights_P: Tensor | None = None, *, scale: float = 1
    ) -> Tensor:
        """Returns (L, B), a bias's gradient: for each group the sum over its rows of weights_P * grad, times
        `scale`."""
        factors_PN = bias_factors(weights_P, grad_PB.shape[0], grad_PB)
        gradient_LNB = self.grouped_mm_wgrad(factors_PN, grad_PB, groups, scale=scale)
        assert gradient_LNB is not None
        return gradient_LNB[:, 0] + gradient_LNB[:, 1]

    def bias_weights_grad(self, grad_PB: Tensor, bias_LB: Tensor, groups: Tensor) -> Tensor:
        """Returns (P,): what the bias adds to the gradient of the routing weights."""
        grad_PN = self.grouped_mm_dgrad(grad_PB, bias_weight(bias_LB), groups)
        return grad_PN[:, 0].to(weight_dtype(grad_PN.dtype))

    def gated_mm(
        self,
        rows_PH: Tensor,
        weight_LHI: Tensor,
        groups: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        bias_LI: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the first product (P, I), with the bias if there is one, and (P, F): its activation times
        the rows' routing weights."""
        inner_PI = self.grouped_mm(rows_PH, weight_LHI, groups, bias_LB=bias_LI)
        return inner_PI, activate(inner_PI, weights_P, groups, activation)

    def gated_mm_dgrad(
        self,
        grad_rows_PH: Tensor,
        weight_LFH: Tensor,
        groups: Tensor,
        inner_PI: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        need_weights: bool,
        need_z: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns (grad_inner_PI, grad_weights_P, z_PF) by the gradient of the second product's result: the
        gradients of the first product and of the routing weights, and the recomputed activation; None for
        results that are not needed."""
        grad_z_PF = self.grouped_mm_dgrad(grad_rows_PH, weight_LFH, groups)
        grad_inner_PI, grad_weights_P, z_PF = activate_backward(
            grad_z_PF, inner_PI, weights_P, groups, activation, need_weights, need_z
        )
        return grad_inner_PI, grad_weights_P if need_weights else None, z_PF if need_z else None

    def _wgrad_into(
        self, rows_PA: Tensor, grad_PB: Tensor, groups: Tensor, into: Tensor | None, scale: float
    ) -> Tensor | None:
        gradient_LAB = grouped_mm_wgrad(rows_PA, grad_PB, groups)
        if into is None:
            return gradient_LAB if scale == 1 else gradient_LAB.mul_(scale)
        into.add_(gradient_LAB, alpha=scale)
        return None


_FACTORS = 8
"""Columns of `bias_factors`: 16 bytes in the narrowest dtype, as grouped products require."""


def bias_factors(weights_P: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Returns (P, N), the columns that multiply a bias, in the dtype of `like`: the routing weights (None: 1)
    rounded to that dtype, the remainder of the rounding, and zeros."""
    if weights_P is None:
        weights_P = like.new_ones(rows)
    whole_P = weights_P.to(like.dtype)
    rest_P = (weights_P - whole_P).to(like.dtype)
    return functional.pad(torch.stack((whole_P, rest_P), dim=1), (0, _FACTORS - 2))


def bias_weight(bias_LB: Tensor) -> Tensor:
    """Returns (L, N, B): the bias twice, for the first two columns of `bias_factors`, then zeros."""
    both_L2B = bias_LB.unsqueeze(1).expand(-1, 2, -1)
    return functional.pad(both_L2B, (0, 0, 0, _FACTORS - 2))


TORCH = Products()


def grouped_matmul(
    rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor, products: Products = TORCH
) -> Tensor:
    """Returns (P, B): rows offsets[l-1]..offsets[l]-1 of each group l times weight[l].

    rows: (P, A); weight: (L, A, B) of the same dtype; offsets: (L,) int32 cumulative ends, ascending, at most
    P; a group may be empty. Rows past offsets[-1] and their gradient are unspecified; the weights' gradient
    does not depend on them, even if they hold NaN, and is zero for an empty group.

    By default torch.nn.functional.grouped_mm runs. For float64, and if A or B are not multiples of 16 bytes,
    it is one torch.mm per group, for which the host must know the offsets. On CUDA the host waits for the
    offsets unless the dtype is bfloat16: torch has a grouped kernel for no other dtype (docs/layer.md).
    """
    return _GroupedMatmul.apply(rows_PA, weight_LAB, offsets_L, products)  # type: ignore[no-untyped-call]


def grouped_linear(
    rows_PA: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None, offsets_L: Tensor, products: Products
) -> Tensor:
    """Returns (P, B): `grouped_matmul`, plus the group's bias, if given. Differentiable in rows, weight and
    bias."""
    product_PB = grouped_matmul(rows_PA, weight_LAB, offsets_L, products)
    if bias_LB is None:
        return product_PB
    factors_PN = bias_factors(None, rows_PA.shape[0], rows_PA)
    return product_PB + grouped_matmul(factors_PN, bias_weight(bias_LB), offsets_L, products)


def without_tail(rows_P: Tensor, groups: Tensor) -> Tensor:
    """Returns rows (P, ...). While torch looks for NaN (torch.autograd.detect_anomaly), rows past the last
    group are set to zero, since nothing has written them and torch might find NaN there."""
    if not torch.is_anomaly_enabled():
        return rows_P
    past_P = torch.arange(rows_P.shape[0], device=rows_P.device) >= groups[-1]
    return rows_P.masked_fill_(past_P.view(-1, *[1] * (rows_P.ndim - 1)), 0)


class _GroupedMatmul(torch.autograd.Function):
    # Replaces autograd of torch's grouped_mm, whose backward refuses gradients that are not contiguous, such
    # as the expanded gradient of a sum.

    @staticmethod
    def forward(
        ctx: Any, rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor, products: Products
    ) -> Tensor:
        groups = products.groups(offsets_L)
        ctx.save_for_backward(rows_PA, weight_LAB, groups)
        ctx.products = products
        return without_tail(products.grouped_mm(rows_PA, weight_LAB, groups), groups)

    @staticmethod
    def backward(ctx: Any, grad_PB: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_PA, weight_LAB, groups = ctx.saved_tensors
        grad_rows_PA = grad_weight_LAB = None
        if ctx.needs_input_grad[0]:
            made_PA = ctx.products.grouped_mm_dgrad(grad_PB, weight_LAB, groups)
            grad_rows_PA = without_tail(made_PA, groups)
        if ctx.needs_input_grad[1]:
            grad_weight_LAB = ctx.products.grouped_mm_wgrad(rows_PA, grad_PB, groups)
        return grad_rows_PA, grad_weight_LAB, None, None
