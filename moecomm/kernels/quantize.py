"""Operands of products in fp8: values in e4m3, with a float32 scale for each row or column.

A product on the tensor cores sums over one dimension of both operands, and multiplies the sum by the scales
of its row and its column. So an operand has one scale for all values of one sum, which are contiguous in
memory:

    quantize_rows        (P, C) -> (P, C), a scale a row                 for sums over columns
    quantize_columns     (P, C) -> (C, Q), a scale a group and column    for sums over the rows of a group
    quantize_transposed  (L, A, B) -> (L, B, A), a scale a column        for sums over A

The arithmetic, and the bound of its errors, are those of the wire format "fp8" (docs/data_formats.md), for
whole rows or columns instead of blocks of 128. CPU and GPU give the same bits (except the sign of a NaN).

On CUDA tensors the kernels of csrc/kernels/experts/quantize.cu run, and the host does not wait. All three
functions are torch operators, which torch.compile keeps whole, without gradients.

Shape letters here: P rows, C columns, L groups, Q rows of groups that are padded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import moecomm._C as _C
from moecomm.arguments import require_ends
from moecomm.errors import InvalidArgument
from moecomm.kernels import operators
from moecomm.setup.memory_plan import CUDA_DTYPES, NATIVE_DTYPES

QUANTUM = 16
"""Columns, and rows of a group in transposed results, come in multiples of this, as torch's products require.
"""

E4M3 = torch.float8_e4m3fn
_LARGEST, _LEAST = 448.0, 2.0**-126
_ALIGNMENT = 16


class Quantized(NamedTuple):
    """A quantised tensor: `values` times `scales`; `scales` has the shape without the summed dimension."""

    values: Tensor
    """torch.float8_e4m3fn, contiguous."""
    scales: Tensor
    """float32, contiguous."""


class QuantizedColumns(NamedTuple):
    """The quantised columns of groups of rows."""

    values_CQ: Tensor
    """torch.float8_e4m3fn, contiguous. Row c holds column c of x: group l ends before padded_ends[l], and
    begins where the previous group ends."""
    scales_LC: Tensor
    """float32."""
    padded_ends_L: Tensor
    """int32: cumulative ends, all multiples of 16. If a group's number of rows is no multiple of 16, its last
    values are zero; an empty group has 16 values."""


def quantize_rows(x: Tensor, ends_L: Tensor | None = None) -> Quantized:
    """Quantises rows: returns values of x's shape (..., C) and scales of shape (...).

    x: bfloat16, float16 or float32 of at least two dimensions, C a multiple of 16. ends: int32 cumulative
    ends of groups of rows, on the same device, for x of two dimensions. Rows from ends[-1] on are ignored;
    their results are unspecified on CUDA tensors, and elsewhere zero with scale 2^-126.

    Raises InvalidArgument; Unsupported for CUDA tensors, where this build has no CUDA part.
    """
    return Quantized(*torch.ops.moecomm.quantize_rows(x.detach(), ends_L))


def quantize_columns(x_PC: Tensor, ends_L: Tensor) -> QuantizedColumns:
    """Quantises the columns of each group of rows; column c of x becomes row c of the result (C, Q). Q is
    16 * (P // 16 + L), enough for groups of any sizes.

    x: bfloat16, float16 or float32, C a multiple of 16. ends: (L,) int32 ends of groups, ascending, at most
    P, on the same device; rows from ends[-1] on are not read. Values from padded_ends[-1] on are
    unspecified on CUDA tensors and zero elsewhere.

    Example, C = 16 and groups of 3, 0 and 17 rows: padded_ends is 16, 32, 64, and Q is 64. Errors are those
    of `quantize_rows`.
    """
    return QuantizedColumns(*torch.ops.moecomm.quantize_columns(x_PC.detach(), ends_L))


def quantize_transposed(x_LAB: Tensor) -> Quantized:
    """Quantises each matrix transposed: returns values (L, B, A) and scales (L, B), one for each column of x.

    x: bfloat16, float16 or float32, A and B multiples of 16. Errors are those of `quantize_rows`.
    """
    return Quantized(*torch.ops.moecomm.quantize_transposed(x_LAB.detach()))


# -- arguments and results ---------------------------------------------------------------------------------


def _check(x: Tensor, dimensions: str, *multiples: int) -> None:
    """Checks x's dtype, and that the dimensions in `multiples` are multiples of 16."""
    if x.dtype not in CUDA_DTYPES:
        raise InvalidArgument(f"x is {x.dtype}, expected one of {', '.join(map(str, CUDA_DTYPES))}")
    if any(x.shape[at] < QUANTUM or x.shape[at] % QUANTUM for at in multiples):
        raise InvalidArgument(
            f"x has shape {tuple(x.shape)}, expected {dimensions} multiples of {QUANTUM}, at least {QUANTUM}"
        )


def _check_dimensions(x: Tensor, count: int, shape: str) -> None:
    if x.dim() != count:
        raise InvalidArgument(f"x has shape {tuple(x.shape)}, expected {shape}")


def _new_rows(x: Tensor, ends_L: Tensor | None) -> tuple[Tensor, Tensor]:
    """Checks the arguments of quantize_rows and returns its uninitialised results; a trace runs only this."""
    if x.dim() < 2 or (ends_L is not None and x.dim() != 2):
        _check_dimensions(x, 2, "(P, C)" if ends_L is not None else "at least two dimensions")
    _check(x, "columns in", -1)
    if ends_L is not None:
        require_ends(ends_L, x.device, "x")
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _new_columns(x_PC: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments of quantize_columns and returns its uninitialised results."""
    _check_dimensions(x_PC, 2, "(P, C)")
    _check(x_PC, "columns in", -1)
    require_ends(ends_L, x_PC.device, "x")
    groups, (rows, columns) = ends_L.shape[0], x_PC.shape
    return (
        x_PC.new_empty((columns, QUANTUM * (rows // QUANTUM + groups)), dtype=E4M3),
        x_PC.new_empty((groups, columns), dtype=torch.float32),
        ends_L.new_empty(groups),
    )


def _new_transposed(x_LAB: Tensor) -> tuple[Tensor, Tensor]:
    """Checks the argument of quantize_transposed and returns its uninitialised results."""
    _check_dimensions(x_LAB, 3, "(L, A, B)")
    if x_LAB.shape[0] < 1:
        raise InvalidArgument(f"x has shape {tuple(x_LAB.shape)}, expected (L, A, B) with L at least 1")
    _check(x_LAB, "A and B", -2, -1)
    groups, rows, columns = x_LAB.shape
    return (
        x_LAB.new_empty((groups, columns, rows), dtype=E4M3),
        x_LAB.new_empty((groups, columns), dtype=torch.float32),
    )


# -- what runs ---------------------------------------------------------------------------------------------


def _rows(x: Tensor, ends_L: Tensor | None) -> tuple[Tensor, Tensor]:
    values, scales = _new_rows(x, ends_L)
    if not x.is_cuda:
        x32 = x.contiguous().float()
        if ends_L is not None:  # rows past the last group may hold anything
            x32 = x32.where((torch.arange(x.shape[0], device=x.device) < ends_L[-1]).unsqueeze(1), 0.0)
        scales = _scales(x32, -1)
        return _values(x32, scales.unsqueeze(-1)), scales
    ends_L = None if ends_L is None else ends_L.contiguous()
    groups, dtype = 0 if ends_L is None else ends_L.shape[0], NATIVE_DTYPES[x.dtype]
    _launch("quantize_rows", x, ends_L, groups, scales.numel(), x.shape[-1], dtype, values, scales)
    return values, scales


def _columns(x_PC: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values_CQ, scales_LC, padded_ends_L = _new_columns(x_PC, ends_L)
    if not x_PC.is_cuda:
        values_CQ.view(torch.uint8).zero_()
        begin = at = 0
        for group, end in enumerate(ends_L.tolist()):
            group_NC = x_PC[begin:end].float()
            count = group_NC.shape[0]
            if count:
                scales_LC[group] = _scales(group_NC, 0)
                values_CQ[:, at : at + count] = _values(group_NC, scales_LC[group]).t()
            else:
                scales_LC[group] = _LEAST
            at += max(QUANTUM, -(-count // QUANTUM) * QUANTUM)
            padded_ends_L[group], begin = at, end
        return values_CQ, scales_LC, padded_ends_L
    sizes = (ends_L.shape[0], *x_PC.shape, values_CQ.shape[1], NATIVE_DTYPES[x_PC.dtype])
    _launch("quantize_columns", x_PC, ends_L.contiguous(), *sizes, values_CQ, scales_LC, padded_ends_L)
    return values_CQ, scales_LC, padded_ends_L


def _transposed(x_LAB: Tensor) -> tuple[Tensor, Tensor]:
    values_LBA, scales_LB = _new_transposed(x_LAB)
    if not x_LAB.is_cuda:
        x32_LBA = x_LAB.transpose(1, 2).float().contiguous()
        scales_LB = _scales(x32_LBA, -1)
        return _values(x32_LBA, scales_LB.unsqueeze(-1)), scales_LB
    sizes = (*x_LAB.shape, 0, NATIVE_DTYPES[x_LAB.dtype])
    _launch("quantize_columns", x_LAB, None, *sizes, values_LBA, scales_LB, None)
    return values_LBA, scales_LB


# -- on CUDA tensors ---------------------------------------------------------------------------------------


def _launch(name: str, x: Tensor, *arguments: Any) -> None:
    """Launches a kernel on x, copied unless contiguous and aligned, on the current stream of x's device."""
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % _ALIGNMENT else x
    operators.loaded("quantize", x.device.index, x.dtype).launch(getattr(_C, name), x, *arguments)


# -- elsewhere ---------------------------------------------------------------------------------------------


def _scales(x32: Tensor, dim: int) -> Tensor:
    return (x32.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim) / _LARGEST).clamp_min(_LEAST)


def _values(x32: Tensor, scales: Tensor) -> Tensor:
    # The conversion does not saturate, so values are clamped first.
    return (x32 * (1.0 / scales)).clamp(-_LARGEST, _LARGEST).to(E4M3)


operators.define("quantize_rows(Tensor x, Tensor? ends) -> (Tensor, Tensor)", _rows, _new_rows)
operators.define(
    "quantize_columns(Tensor x, Tensor ends) -> (Tensor, Tensor, Tensor)", _columns, _new_columns
)
operators.define("quantize_transposed(Tensor x) -> (Tensor, Tensor)", _transposed, _new_transposed)
