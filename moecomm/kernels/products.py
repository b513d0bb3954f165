"""The products of the experts, as the layer asks for them: one interface, and the engine that is torch.

Shape letters: P rows in groups of L experts, H hidden columns, F columns of the activation's result ("ffn
width"), I columns of the first product (2F for swiglu), A and B any widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecomm.arguments import weight_dtype
from moecomm.device.cuda_device import CudaDevice
from moecomm.kernels.activation import (
    INPUTS,
    weighted_activation_backward_into,
    weighted_activation_into,
)
from moecomm.kernels.grouped_mm import grouped_mm, grouped_mm_wgrad


class Products:
    """The experts' grouped products by torch, in the dtype of the operands; other engines override them.

    None of them is differentiable. Groups, offsets and unspecified rows are as in `grouped_matmul`; results
    have the rows' dtype.

    Attributes:
        name: the name of the engine, for people.
    """

    name = "torch"

    def grouped_mm(self, rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor) -> Tensor:
        """Returns (P, B): rows of each group times its weight."""
        return grouped_mm(rows_PA, weight_LAB, offsets_L)

    def grouped_mm_dgrad(self, rows_PB: Tensor, weight_LAB: Tensor, offsets_L: Tensor) -> Tensor:
        """Returns (P, A): rows of each group times its weight, transposed."""
        return grouped_mm(rows_PB, weight_LAB.transpose(1, 2), offsets_L)

    def grouped_mm_wgrad(
        self, rows_PA: Tensor, grad_PB: Tensor, offsets_L: Tensor, *, leave_sms: int = 0
    ) -> Tensor:
        """Returns (L, A, B): for each group the sum over its rows of rows^T grad, zero for an empty one. On a
        GPU the product leaves `leave_sms` SMs to what runs beside it, if its kernel can."""
        if leave_sms == 0:
            return grouped_mm_wgrad(rows_PA, grad_PB, offsets_L)
        gpu = CudaDevice(rows_PA.device.index)
        before = gpu.leave_sms(leave_sms)
        try:
            return grouped_mm_wgrad(rows_PA, grad_PB, offsets_L)
        finally:
            gpu.leave_sms(before)

    def gated_mm(
        self,
        rows_PH: Tensor,
        weight_LHI: Tensor,
        offsets_L: Tensor,
        weights_P: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor]:
        """Returns the first product (P, I), and (P, F): its activation times the rows' routing weights."""
        inner_PI = self.grouped_mm(rows_PH, weight_LHI, offsets_L)
        z_PF = inner_PI.new_empty(inner_PI.shape[0], inner_PI.shape[1] // INPUTS[activation])
        weighted_activation_into(z_PF, inner_PI, weights_P, offsets_L, activation=activation)
        return inner_PI, z_PF

    def gated_mm_dgrad(
        self,
        grad_rows_PH: Tensor,
        weight_LFH: Tensor,
        offsets_L: Tensor,
        inner_PI: Tensor,
        weights_P: Tensor,
        *,
        activation: str,
        need_weights: bool,
        need_z: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Takes the gradient of the second product's result back through that product and the activation.

        Returns (grad_inner_PI, grad_weights_P, z_PF): the gradients of the first product and of the routing
        weights, and the activation's result again; None for what is not needed.
        """
        grad_z_PF = self.grouped_mm_dgrad(grad_rows_PH, weight_LFH, offsets_L)
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
            offsets_L,
            activation=activation,
        )
        return grad_inner_PI, grad_weights_P, z_PF

    def forget(self) -> None:
        """Throws away what is kept of weights (quantised copies), if anything."""


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
        ctx.save_for_backward(rows_PA, weight_LAB, offsets_L)
        ctx.products = products
        return products.grouped_mm(rows_PA, weight_LAB, offsets_L)

    @staticmethod
    def backward(ctx: Any, grad_PB: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_PA, weight_LAB, offsets_L = ctx.saved_tensors
        grad_rows_PA = grad_weight_LAB = None
        if ctx.needs_input_grad[0]:
            grad_rows_PA = ctx.products.grouped_mm_dgrad(grad_PB, weight_LAB, offsets_L)
        if ctx.needs_input_grad[1]:
            grad_weight_LAB = ctx.products.grouped_mm_wgrad(rows_PA, grad_PB, offsets_L)
        return grad_rows_PA, grad_weight_LAB, None, None
