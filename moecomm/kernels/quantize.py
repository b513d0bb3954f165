"""Operands of products in fp8: values in e4m3, with a float32 scale for each row or column.

A product on the tensor cores sums over one dimension of both operands, and multiplies what it has summed by
the scales of its row and its column. So an operand has one scale for all that one sum runs over, and lies in
memory along it:

    quantize_rows        (P, C) -> (P, C), a scale a row                 for sums over columns
    quantize_columns     (P, C) -> (C, Q), a scale a group and column    for sums over the rows of a group
    quantize_transposed  (L, A, B) -> (L, B, A), a scale a column        for sums over A

The arithmetic is that of rows on the wire (docs/data_formats.md), here for whole rows or columns instead of
blocks of 128, with every operation in float32 and rounded to nearest even:

    scale = max(largest |x| / 448, 2^-126)      NaN does not count
    value = e4m3(x * (1 / scale))               to nearest even, at most 448 in magnitude; NaN stays NaN

x comes back as value * scale, within max(|x| / 16, scale / 1024) + |x| / 2^21. Zeros stay zeros, NaN touches
no other value, and an infinity makes all NaN that shares its scale. CPU and GPU give the same bits (the sign
of a NaN excepted).

On CUDA tensors rows are one pass over memory, and columns as well where groups have up to 768 rows; what a
group has beyond that is read twice (csrc/kernels/experts/quantize.cu). The host waits for nothing. All are
torch operators, which torch.compile takes as they are, and have no gradient.

Shape letters here: P rows, C columns, L groups, Q rows of groups that are padded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

import moecomm._C as _C
from moecomm.arguments import require_ends
from moecomm.device.cuda_device import CudaDevice, no_kernels
from moecomm.errors import InvalidArgument
from moecomm.setup.memory_plan import CUDA_DTYPES, NATIVE_DTYPES

Tensor = torch.Tensor

QUANTUM = 16
"""Columns, and rows of a group among columns, come in multiples of this number, as torch's products require.
"""

E4M3 = torch.float8_e4m3fn
_LARGEST, _LEAST = 448.0, 2.0**-126
_ALIGNMENT = 16


class Quantized(NamedTuple):
    """A quantised tensor: `values` times `scales`, which have one dimension less."""

    values: Tensor
    """torch.float8_e4m3fn, contiguous."""
    scales: Tensor
    """float32, contiguous."""


class QuantizedColumns(NamedTuple):
    """The quantised columns of groups of rows."""

    values_CQ: Tensor
    """torch.float8_e4m3fn, contiguous: group l of a line ends before padded_ends[l] and begins where the one
    before ends."""
    scales_LC: Tensor
    """float32."""
    padded_ends_L: Tensor
    """int32: inclusive ends, all multiples of 16. A group's last values are zero, where its rows are no
    multiple; an empty group has 16 of them."""


def quantize_rows(x: Tensor, ends_L: Tensor | None = None) -> Quantized:
    """Quantises rows: returns values of x's shape (..., C) and scales of shape (...).

    x: bfloat16, float16 or float32 of at least two dimensions, C a multiple of 16. ends: int32 inclusive
    ends of groups of rows, on the same device, for x of two dimensions; rows from ends[-1] on are not real.
    On CUDA tensors these are neither read nor written, so that they come out unspecified; elsewhere they are
    zero with the least scale. The host does not wait for `ends`.

    Raises InvalidArgument; Unsupported for CUDA tensors, where this build has no CUDA part.
    """
    return Quantized(*torch.ops.moecomm.quantize_rows(x.detach(), ends_L))


def quantize_columns(x_PC: Tensor, ends_L: Tensor) -> QuantizedColumns:
    """Quantises the columns of each group of rows as lines: Q is 16 * (P // 16 + L), enough for groups of any
    sizes.

    x: bfloat16, float16 or float32, C a multiple of 16. ends: (L,) int32 inclusive ends of groups, ascending,
    at most P, on the same device; rows from ends[-1] on are not read. Values from padded_ends[-1] on are
    unspecified on CUDA tensors and zero elsewhere. The host does not wait for `ends`.

    Example, C = 16 and groups of 3, 0 and 17 rows: padded_ends is 16, 32, 64, and Q is 64. Errors are those
    of `quantize_rows`.
    """
    return QuantizedColumns(*torch.ops.moecomm.quantize_columns(x_PC.detach(), ends_L))


def quantize_transposed(x_LAB: Tensor) -> Quantized:
    """Quantises each matrix transposed: returns values (L, B, A) and scales (L, B), one for each column of x.

    x: bfloat16, float16 or float32, A and B multiples of 16. Errors are those of `quantize_rows`.
    """
    return Quantized(*torch.ops.moecomm.quantize_transposed(x_LAB.detach()))


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Loads the kernels for a dtype onto a CUDA device; does nothing elsewhere, nor a second time.
    moecomm.kernels.activation.prepare says why to call it."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        _prepare(index, dtype)


# -- arguments and results ---------------------------------------------------------------------------------


def _check(x: Tensor, dimensions: str, *multiples: int) -> None:
    """Checks x's dtype, and that the dimensions `multiples` are multiples of 16."""
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
    """Checks the arguments of quantize_rows and returns its uninitialised results; this is all that a trace
    sees of it."""
    if x.dim() < 2 or (ends_L is not None and x.dim() != 2):
        _check_dimensions(x, 2, "(P, C)" if ends_L is not None else "at least two dimensions")
    _check(x, "columns in", -1)
    if ends_L is not None:
        require_ends(ends_L, x.device, "x")
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _new_columns(x_PC: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Does the same for quantize_columns."""
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
    """Does the same for quantize_transposed."""
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
    if not _has_kernel(x):
        x32 = _real(x.contiguous().float(), ends_L)
        scales = _scales(x32, -1)
        return _values(x32, scales.unsqueeze(-1)), scales
    gpu, x, dtype = _gpu_of(x)
    ends_L = None if ends_L is None else ends_L.contiguous()
    gpu.launch(
        _C.quantize_rows,
        x.data_ptr(),
        0 if ends_L is None else ends_L.data_ptr(),
        0 if ends_L is None else ends_L.shape[0],
        scales.numel(),
        x.shape[-1],
        dtype,
        values.data_ptr(),
        scales.data_ptr(),
    )
    return values, scales


def _columns(x_PC: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values_CQ, scales_LC, padded_ends_L = _new_columns(x_PC, ends_L)
    if not _has_kernel(x_PC):
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
    gpu, x_PC, dtype = _gpu_of(x_PC)
    ends_L = ends_L.contiguous()
    gpu.launch(
        _C.quantize_columns,
        x_PC.data_ptr(),
        ends_L.data_ptr(),
        ends_L.shape[0],
        x_PC.shape[0],
        x_PC.shape[1],
        values_CQ.shape[1],
        dtype,
        values_CQ.data_ptr(),
        scales_LC.data_ptr(),
        padded_ends_L.data_ptr(),
    )
    return values_CQ, scales_LC, padded_ends_L


def _transposed(x_LAB: Tensor) -> tuple[Tensor, Tensor]:
    values_LBA, scales_LB = _new_transposed(x_LAB)
    if not _has_kernel(x_LAB):
        x32_LBA = x_LAB.transpose(1, 2).float().contiguous()
        scales_LB = _scales(x32_LBA, -1)
        return _values(x32_LBA, scales_LB.unsqueeze(-1)), scales_LB
    gpu, x_LAB, dtype = _gpu_of(x_LAB)
    groups, rows, columns = x_LAB.shape
    gpu.launch(
        _C.quantize_columns,
        x_LAB.data_ptr(),
        0,
        groups,
        rows,
        columns,
        0,
        dtype,
        values_LBA.data_ptr(),
        scales_LB.data_ptr(),
        0,
    )
    return values_LBA, scales_LB


# -- on CUDA tensors ---------------------------------------------------------------------------------------


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda


@functools.cache
def _gpu(index: int) -> CudaDevice:
    if not hasattr(_C, "quantize_rows"):
        raise no_kernels(f"x is on cuda:{index}")
    return CudaDevice(index)


@functools.cache
def _prepare(index: int, dtype: torch.dtype) -> None:
    with _gpu(index).current():
        _C.prepare_quantize(NATIVE_DTYPES[dtype])


def _gpu_of(x: Tensor) -> tuple[CudaDevice, Tensor, _C.DType]:
    """Returns x's device with kernels loaded, x as the kernels take it, and its dtype."""
    gpu = _gpu(x.device.index)
    _prepare(gpu.index, x.dtype)
    x = x.contiguous()
    return gpu, x.clone() if x.data_ptr() % _ALIGNMENT else x, NATIVE_DTYPES[x.dtype]


# -- elsewhere ---------------------------------------------------------------------------------------------


def _scales(x32: Tensor, dim: int) -> Tensor:
    return (x32.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim) / _LARGEST).clamp_min(_LEAST)


def _values(x32: Tensor, scales: Tensor) -> Tensor:
    # The conversion does not saturate, so values are clamped first.
    return (x32 * (1.0 / scales)).clamp(-_LARGEST, _LARGEST).to(E4M3)


def _real(x: Tensor, ends_L: Tensor | None) -> Tensor:
    """Returns `x` with rows that are not real set to zero, whatever they hold."""
    if ends_L is None:
        return x
    return x.where((torch.arange(x.shape[0], device=x.device) < ends_L[-1]).unsqueeze(1), 0.0)


_library = torch.library.Library("moecomm", "FRAGMENT")
_library.define("quantize_rows(Tensor x, Tensor? ends) -> (Tensor, Tensor)")
_library.define("quantize_columns(Tensor x, Tensor ends) -> (Tensor, Tensor, Tensor)")
_library.define("quantize_transposed(Tensor x) -> (Tensor, Tensor)")
for _name, _run, _fake in (
    ("quantize_rows", _rows, _new_rows),
    ("quantize_columns", _columns, _new_columns),
    ("quantize_transposed", _transposed, _new_transposed),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moecomm::{_name}", _fake, lib=_library)
