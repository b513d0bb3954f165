"""The products of the experts, as the layer asks for them: one interface, and the engine that is torch.

Shape letters: P rows in groups of L experts, R rows that they are gathered from, H hidden columns, F columns
of the activation's result ("ffn width"), I columns of the first product (2F for swiglu), A and B any widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecomm.arguments import weight_dtype
from moecomm.device.cuda_device import CudaDevice
from moecomm.kernels.activation import (
    INPUTS,
    weighted_activation,
    weighted_activation_backward_into,
    weighted_activation_into,
)
from moecomm.kernels.grouped_mm import grouped_mm, grouped_mm_wgrad


class Products:
    """The experts' grouped products by torch, in the dtype of the operands; other engines override them.

    None of them is differentiable. Groups and unspecified rows are as in `grouped_matmul`; `groups` is what
    `groups()` makes of the offsets; results have the rows' dtype.

    Every product takes rows as they are, P of them, or R others with an index of them, (P,) int32: its row p
    is then rows[index[p]], and a row may be in it any number of times. Positions past the last group may hold
    any row, 0 for example. The engine gathers within its kernel if it can, and with a copy otherwise.

    Attributes:
        name: the name of the engine, for people.
        adds: a product adds a weight gradient to what is there, in one kernel.
        traceable: torch.compile can trace the products; where it cannot, its graphs hold torch's.
    """

    name = "torch"
    adds = False
    traceable = True

    def groups(self, offsets_L: Tensor) -> Tensor:
        """Returns the groups of rows as the products take them; its last element is offsets[-1]."""
        return offsets_L

    def grouped_mm(
        self, rows_RA: Tensor, weight_LAB: Tensor, groups: Tensor, *, index_P: Tensor | None = None
    ) -> Tensor:
        """Returns (P, B): rows of each group times its weight."""
        return self._mm(gathered(rows_RA, index_P), weight_LAB, groups)

    def grouped_mm_dgrad(
        self, rows_RB: Tensor, weight_LAB: Tensor, groups: Tensor, *, index_P: Tensor | None = None
    ) -> Tensor:
        """Returns (P, A): rows of each group times its weight, transposed."""
        return self._mm_dgrad(gathered(rows_RB, index_P), weight_LAB, groups)

    def grouped_mm_wgrad(
        self,
        rows_RA: Tensor,
        grad_RB: Tensor,
        groups: Tensor,
        *,
        into: Tensor | None = None,
        leave_sms: int = 0,
        rows_index_P: Tensor | None = None,
        grad_index_P: Tensor | None = None,
    ) -> Tensor | None:
        """Returns (L, A, B): for each group the sum over its rows of rows^T grad, zero for an empty one; with
        `into`, a tensor of that shape, it is added to that and None is returned. Rows and gradients have an
        index each. On a GPU the product leaves `leave_sms` SMs to what runs beside it, if its kernel can."""
        rows_PA, grad_PB = gathered(rows_RA, rows_index_P), gathered(grad_RB, grad_index_P)
        gradient_LAB = self._wgrad(rows_PA, grad_PB, groups, leave_sms)
        if into is None:
            return gradient_LAB
        into.add_(gradient_LAB)
        return None

    def gated_mm(
        self,
        rows_RH: Tensor,
        weight_LHI: Tensor,
        groups: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        index_P: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the first product (P, I), and (P, F): its activation times the rows' routing weights."""
        inner_PI = self.grouped_mm(rows_RH, weight_LHI, groups, index_P=index_P)
        z_PF = inner_PI.new_empty(inner_PI.shape[0], inner_PI.shape[1] // INPUTS[activation])
        weighted_activation_into(z_PF, inner_PI, weights_P, groups, activation=activation)
        return inner_PI, z_PF

    def gated_mm_dgrad(
        self,
        grad_rows_RH: Tensor,
        weight_LFH: Tensor,
        groups: Tensor,
        inner_PI: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        need_weights: bool,
        need_z: bool,
        index_P: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Takes the gradient of the second product's result back through that product and the activation.

        Returns (grad_inner_PI, grad_weights_P, z_PF): the gradients of the first product and of the routing
        weights, and the activation's result again; None for what is not needed.
        """
        grad_z_PF = self.grouped_mm_dgrad(grad_rows_RH, weight_LFH, groups, index_P=index_P)
        rows, dtype = inner_PI.shape[0], inner_PI.dtype
        grad_inner_PI = inner_PI.new_empty(inner_PI.shape)
        grad_weights_P = inner_PI.new_empty(rows, dtype=weight_dtype(dtype)) if need_weights else None
        z_PF = inner_PI.new_empty(rows, grad_z_PF.shape[1]) if need_z else None
        weighted_activation_backward_into(
            grad_inner_PI,
            grad_weights_P,
            z_PF,
            grad_z_PF,
            inner_PI,
            weights_P,
            groups,
            activation=activation,
        )
        return grad_inner_PI, grad_weights_P, z_PF

    def _mm(self, rows_PA: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        return grouped_mm(rows_PA, weight_LAB, groups)

    def _mm_dgrad(self, rows_PB: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        return grouped_mm(rows_PB, weight_LAB.transpose(1, 2), groups)

    def _wgrad(self, rows_PA: Tensor, grad_PB: Tensor, groups: Tensor, leave_sms: int) -> Tensor:
        if leave_sms == 0:
            return grouped_mm_wgrad(rows_PA, grad_PB, groups)
        gpu = CudaDevice(rows_PA.device.index)
        before = gpu.leave_sms(leave_sms)
        try:
            return grouped_mm_wgrad(rows_PA, grad_PB, groups)
        finally:
            gpu.leave_sms(before)

    def forget(self) -> None:
        """Throws away what is kept of weights (quantised copies), if anything."""


def gathered(rows_RA: Tensor, index_P: Tensor | None) -> Tensor:
    """Returns (P, A): the rows of an index, copied; without one the rows themselves."""
    return rows_RA if index_P is None else rows_RA.index_select(0, index_P)


_TORCH = Products()


def grouped_matmul(
    rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor, products: Products = _TORCH
) -> Tensor:
    """Returns (P, B): rows of group l, offsets[l-1]..offsets[l]-1, times weight[l].

    rows: (P, A); weight: (L, A, B) of the same dtype; offsets: (L,) int32 inclusive ends, ascending, at most
    P; a group may be empty. Rows past offsets[-1] come out unspecified and get an unspecified gradient; the
    weights' gradient does not depend on them, even if they hold NaN, and is zero for an empty group.

    torch's products run torch.nn.functional.grouped_mm, with no padding and no host wait. That has no float64
    and wants A and B to be multiples of 16 bytes; elsewhere each group is one torch.mm, for which the host
    must know the offsets. A graph of torch.compile holds grouped_mm for bfloat16, the only dtype that it can
    be traced in, and the operators moecomm::grouped_mm and moecomm::grouped_mm_wgrad for the rest.
    """
    product: Tensor = _GroupedMatmul.apply(rows_PA, weight_LAB, offsets_L, products)  # type: ignore[no-untyped-call]
    return product


class _GroupedMatmul(torch.autograd.Function):
    # The backward of torch's grouped_mm refuses gradients that are not contiguous, such as the expanded one
    # of a sum.

    @staticmethod
    def forward(
        ctx: Any, rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor, products: Products
    ) -> Tensor:
        groups = products.groups(offsets_L)
        ctx.save_for_backward(rows_PA, weight_LAB, groups)
        ctx.products = products
        return products.grouped_mm(rows_PA, weight_LAB, groups)

    @staticmethod
    def backward(ctx: Any, grad_PB: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_PA, weight_LAB, groups = ctx.saved_tensors
        grad_rows_PA = grad_weight_LAB = None
        if ctx.needs_input_grad[0]:
            grad_rows_PA = ctx.products.grouped_mm_dgrad(grad_PB, weight_LAB, groups)
        if ctx.needs_input_grad[1]:
            grad_weight_LAB = ctx.products.grouped_mm_wgrad(rows_PA, grad_PB, groups)
        return grad_rows_PA, grad_weight_LAB, None, None


def expert_ffn(
    rows_PH: Tensor,
    w_in_LHI: Tensor,
    w_out_LFH: Tensor,
    offsets_L: Tensor,
    weights_P: Tensor | None,
    *,
    activation: str,
    products: Products,
) -> Tensor:
    """Returns (P, H): both products of the experts on grouped rows, with the activation and the rows' routing
    weights (None: 1) between them; differentiable in rows, weights and routing weights. Rows past offsets[-1]
    are unspecified, and so are their gradients."""
    if torch.compiler.is_compiling():
        products = products if products.traceable else _TORCH
        inner_PI = grouped_matmul(rows_PH, w_in_LHI, offsets_L, products)
        z_PF = weighted_activation(inner_PI, weights_P, offsets_L, activation=activation)
        return grouped_matmul(z_PF, w_out_LFH, offsets_L, products)
    y_PH: Tensor = _ExpertFfn.apply(  # type: ignore[no-untyped-call]
        rows_PH, w_in_LHI, w_out_LFH, products.groups(offsets_L), weights_P, activation, products
    )
    return y_PH


class _ExpertFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_PH: Tensor,
        w_in_LHI: Tensor,
        w_out_LFH: Tensor,
        groups: Tensor,
        weights_P: Tensor | None,
        activation: str,
        products: Products,
    ) -> Tensor:
        inner_PI, z_PF = products.gated_mm(rows_PH, w_in_LHI, groups, weights_P, activation=activation)
        ctx.save_for_backward(rows_PH, w_in_LHI, w_out_LFH, groups, weights_P, inner_PI)
        ctx.activation, ctx.products = activation, products
        return products.grouped_mm(z_PF, w_out_LFH, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_PH: Tensor) -> tuple[Tensor | None, ...]:
        rows_PH, w_in_LHI, w_out_LFH, groups, weights_P, inner_PI = ctx.saved_tensors
        products: Products = ctx.products
        need_rows, need_in, need_out, _, need_weights, _, _ = ctx.needs_input_grad
        grad_rows_PH = grad_in_LHI = grad_out_LFH = None
        grad_inner_PI, grad_weights_P, z_PF = products.gated_mm_dgrad(
            grad_y_PH,
            w_out_LFH,
            groups,
            inner_PI,
            weights_P,
            activation=ctx.activation,
            need_weights=need_weights,
            need_z=need_out,
        )
        if z_PF is not None:
            grad_out_LFH = products.grouped_mm_wgrad(z_PF, grad_y_PH, groups)
        if need_rows:
            grad_rows_PH = products.grouped_mm_dgrad(grad_inner_PI, w_in_LHI, groups)
        if need_in:
            grad_in_LHI = products.grouped_mm_wgrad(rows_PH, grad_inner_PI, groups)
        return grad_rows_PH, grad_in_LHI, grad_out_LFH, None, grad_weights_P, None, None
