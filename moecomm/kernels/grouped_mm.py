"""Matrix products of row groups, each with its own weight, computed by torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNMENT_BYTES = 16


def _row_major(rows_PA: Tensor) -> Tensor:
    """Returns the rows with strides (A, 1) exactly, as torch's grouped_mm requires, even if P is 1, where
    contiguous() may keep other strides."""
    if rows_PA.stride() == (rows_PA.shape[1], 1):
        return rows_PA  # views cost the host more than this check
    return rows_PA.contiguous().view(-1).view(rows_PA.shape)


def _with_usual_strides(weight_LAB: Tensor) -> Tensor:
    """Returns the weight, or a contiguous copy if torch's grouped_mm refuses its strides: the rows or the
    columns of each matrix must be contiguous and a multiple of 16 bytes apart."""
    _, rows, columns = weight_LAB.shape
    _, down, across = weight_LAB.stride()
    apart, least = (down, columns) if across == 1 else (across, rows)
    fits = (
        1 in (down, across) and apart >= least and apart * weight_LAB.element_size() % _ALIGNMENT_BYTES == 0
    )
    return weight_LAB if fits else weight_LAB.contiguous()


def grouped_mm(rows_PA: Tensor, weight_LAB: Tensor, offsets_L: Tensor) -> Tensor:
    """Returns (P, B): rows offsets[l-1]..offsets[l]-1 of each group l times weight[l]; see
    `moecomm.kernels.products.grouped_matmul`."""
    rows_PA = _row_major(rows_PA)
    if _has_grouped_kernel(rows_PA, weight_LAB.shape[2]):
        return functional.grouped_mm(rows_PA, _with_usual_strides(weight_LAB), offs=offsets_L)
    product_PB = rows_PA.new_zeros(rows_PA.shape[0], weight_LAB.shape[2])
    for weight_AB, (begin, end) in zip(weight_LAB, _groups(offsets_L), strict=True):
        torch.mm(rows_PA[begin:end], weight_AB, out=product_PB[begin:end])
    return product_PB


def grouped_mm_wgrad(rows_PA: Tensor, grad_PB: Tensor, offsets_L: Tensor) -> Tensor:
    """Returns (L, A, B): for each group the sum over its rows of rows^T grad, zero for an empty group; not
    differentiable."""
    rows_PA, grad_PB = _row_major(rows_PA), _row_major(grad_PB)
    if _has_grouped_kernel(rows_PA, grad_PB.shape[1]):
        return functional.grouped_mm(rows_PA.t(), grad_PB, offs=offsets_L)
    product_LAB = rows_PA.new_empty(offsets_L.numel(), rows_PA.shape[1], grad_PB.shape[1])
    for product_AB, (begin, end) in zip(product_LAB, _groups(offsets_L), strict=True):
        torch.mm(rows_PA[begin:end].t(), grad_PB[begin:end], out=product_AB)
    return product_LAB


def _has_grouped_kernel(rows_PA: Tensor, width: int) -> bool:
    item = rows_PA.element_size()
    aligned = (rows_PA.shape[1] * item) % _ALIGNMENT_BYTES == 0 and (width * item) % _ALIGNMENT_BYTES == 0
    return rows_PA.dtype != torch.float64 and aligned and rows_PA.shape[0] > 0


def _groups(offsets_L: Tensor) -> list[tuple[int, int]]:
    ends = offsets_L.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
