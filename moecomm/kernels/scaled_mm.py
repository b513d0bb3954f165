"""Products of quantised operands (moecomm.kernels.quantize), for groups of rows with one weight each:

    product[p, n] = scale[p] * scale[l, n] * sum over k of rows[p, k] * weights[l, n, k]

and products of the columns of two tensors, summed over the rows of each group. Results are bfloat16, as
torch's grouped e4m3 product returns.

On CUDA tensors torch's product computes them: it needs compute capability 9.0, its sums have fewer bits than
float32 (docs/fp8.md), and the host does not wait. Elsewhere values are summed in float32, multiplied by the
scales, and rounded once. All are torch operators, which torch.compile keeps whole, without gradients.

Shape letters here: P rows, L groups, K what is summed over, N columns of the product, A and B columns, Q rows
of groups that are padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moecomm.arguments import require_ends
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import operators
from moecomm.kernels.quantize import E4M3, QUANTUM, Quantized, QuantizedColumns

RESULT = torch.bfloat16


def scaled_grouped_mm(rows: Quantized, weights: Quantized, ends_L: Tensor) -> Tensor:
    """Returns the product (P, N) in bfloat16.

    rows: values (P, K) and scales (P,), of `quantize_rows`. weights: values (L, N, K) and scales (L, N), from
    `quantize_transposed` for weights (L, K, N), or from `quantize_rows` for weights that are used transposed.
    ends: (L,) int32 cumulative ends of groups, ascending, at most P. Result rows from ends[-1] on are
    unspecified.

    Raises InvalidArgument; Unsupported for CUDA tensors on a GPU without such a product (`missing_on`).
    """
    return torch.ops.moecomm.scaled_grouped_mm(*rows, *weights, ends_L)


def scaled_grouped_mm_wgrad(left: QuantizedColumns, right: QuantizedColumns) -> Tensor:
    """Returns (L, A, B) in bfloat16: for each group the sum over its rows of left^T right, zero for an empty
    group. left, right: values (A, Q) and (B, Q), of `quantize_columns` with the same ends."""
    return torch.ops.moecomm.scaled_grouped_mm_wgrad(
        left.values_CQ, left.scales_LC, right.values_CQ, right.scales_LC, left.padded_ends_L
    )


def missing_on(device: torch.device) -> str | None:
    """Returns why torch has no e4m3 product for CUDA tensors on `device`; None if it has one."""
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return None
    return (
        f"{device} has compute capability {major}.{minor}: torch's grouped product of e4m3 with a scale a "
        "row needs 9.0 (H100, H200)"
    )


# -- arguments ---------------------------------------------------------------------------------------------


def _check(name: str, values: Tensor, scales: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if values.dtype != E4M3 or scales.dtype != torch.float32:
        raise InvalidArgument(
            f"{name} are {values.dtype} with {scales.dtype} scales, expected {E4M3} with {torch.float32}"
        )
    if tuple(scales.shape) != shape:
        raise InvalidArgument(f"scales of {name} have shape {tuple(scales.shape)}, expected {shape}")
    if values.device != device or scales.device != device:
        raise InvalidArgument(f"{name} are on {values.device}, expected {device}, where ends is")


def _check_multiple(name: str, value: int) -> None:
    if value < QUANTUM or value % QUANTUM:
        raise InvalidArgument(f"{name} is {value}, expected a multiple of {QUANTUM}, at least {QUANTUM}")


def _weights_product(
    rows_PK: Tensor, scales_P: Tensor, weights_LNK: Tensor, scales_LN: Tensor, ends_L: Tensor
) -> tuple[int, int]:
    """Checks the arguments and returns the product's shape (P, N)."""
    require_ends(ends_L, ends_L.device, "ends")
    if rows_PK.dim() != 2 or weights_LNK.dim() != 3 or weights_LNK.shape[2] != rows_PK.shape[1]:
        raise InvalidArgument(
            f"rows have shape {tuple(rows_PK.shape)} and weights {tuple(weights_LNK.shape)}, expected (P, K) "
            "and (L, N, K)"
        )
    groups, width, summed = weights_LNK.shape
    if groups != ends_L.shape[0]:
        raise InvalidArgument(f"there are weights of {groups} groups and ends of {ends_L.shape[0]}")
    _check_multiple("K", summed)
    _check_multiple("N", width)
    _check("rows", rows_PK, scales_P, (rows_PK.shape[0],), ends_L.device)
    _check("weights", weights_LNK, scales_LN, (groups, width), ends_L.device)
    return rows_PK.shape[0], width


def _columns_product(
    left_AQ: Tensor, scales_LA: Tensor, right_BQ: Tensor, scales_LB: Tensor, ends_L: Tensor
) -> tuple[int, int, int]:
    """Checks the arguments and returns the product's shape (L, A, B)."""
    require_ends(ends_L, ends_L.device, "ends")
    if left_AQ.dim() != 2 or right_BQ.dim() != 2 or left_AQ.shape[1] != right_BQ.shape[1]:
        raise InvalidArgument(
            f"columns have shapes {tuple(left_AQ.shape)} and {tuple(right_BQ.shape)}, expected (A, Q) and "
            "(B, Q)"
        )
    groups, a, b = ends_L.shape[0], left_AQ.shape[0], right_BQ.shape[0]
    _check_multiple("A", a)
    _check_multiple("B", b)
    _check("left columns", left_AQ, scales_LA, (groups, a), ends_L.device)
    _check("right columns", right_BQ, scales_LB, (groups, b), ends_L.device)
    return groups, a, b


# -- what runs ---------------------------------------------------------------------------------------------


def _grouped_mm(
    rows_PK: Tensor, scales_P: Tensor, weights_LNK: Tensor, scales_LN: Tensor, ends_L: Tensor
) -> Tensor:
    count, width = _weights_product(rows_PK, scales_P, weights_LNK, scales_LN, ends_L)
    if count == 0:
        return rows_PK.new_empty((0, width), dtype=RESULT)
    if rows_PK.is_cuda:
        return _on_tensor_cores(rows_PK, weights_LNK.transpose(1, 2), scales_P, scales_LN, ends_L)
    sums_PN = functional.grouped_mm(rows_PK.float(), weights_LNK.transpose(1, 2).float(), offs=ends_L)
    numbers_P = torch.arange(count, dtype=torch.int32, device=ends_L.device)
    group_P = torch.searchsorted(ends_L, numbers_P, right=True)
    scales_PN = scales_LN[group_P.clamp_max(len(ends_L) - 1)]
    return (sums_PN * scales_P.unsqueeze(1) * scales_PN).to(RESULT)


def _grouped_mm_wgrad(
    left_AQ: Tensor, scales_LA: Tensor, right_BQ: Tensor, scales_LB: Tensor, ends_L: Tensor
) -> Tensor:
    _columns_product(left_AQ, scales_LA, right_BQ, scales_LB, ends_L)
    if left_AQ.is_cuda:
        return _on_tensor_cores(left_AQ, right_BQ.t(), scales_LA.flatten(), scales_LB.flatten(), ends_L)
    sums_LAB = functional.grouped_mm(left_AQ.float(), right_BQ.t().float(), offs=ends_L)
    return (sums_LAB * scales_LA.unsqueeze(2) * scales_LB.unsqueeze(1)).to(RESULT)


def _on_tensor_cores(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends_L: Tensor) -> Tensor:
    if missing_on(a.device) is not None:
        raise Unsupported(f"a product in fp8: {missing_on(a.device)}")
    by_row = functional.ScalingType.RowWise
    return functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b, scale_a, by_row, scale_b, by_row, offs=ends_L, output_dtype=RESULT, use_fast_accum=True
    )


def _fake(shape: Callable[..., tuple[int, ...]], *operands: Tensor) -> Tensor:
    return operands[0].new_empty(shape(*operands), dtype=RESULT)


operators.define(
    "scaled_grouped_mm(Tensor rows, Tensor row_scales, Tensor weights, Tensor weight_scales, Tensor ends) "
    "-> Tensor",
    _grouped_mm,
    functools.partial(_fake, _weights_product),
)
operators.define(
    "scaled_grouped_mm_wgrad(Tensor left, Tensor left_scales, Tensor right, Tensor right_scales, "
    "Tensor ends) -> Tensor",
    _grouped_mm_wgrad,
    functools.partial(_fake, _columns_product),
)
