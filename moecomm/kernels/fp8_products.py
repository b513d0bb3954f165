"""The experts' products in fp8.

Operands are in e4m3 (moecomm.kernels.quantize), results in bfloat16 (docs/fp8.md). One scale belongs to each
row or column that is named here:
    h  = x W_in      rows of x by columns of W_in         dx = dh W_in^T    rows of dh by rows of W_in
    y  = z W_out     rows of z by columns of W_out        dz = dy W_out^T   rows of dy by rows of W_out
    dW_in = x^T dh   columns of x by columns of dh        dW_out = z^T dy   columns of z by columns of dy
A column of x, dh, z or dy has a scale for each expert's group of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from moecomm.kernels.parameters import is_expert_parameter
from moecomm.kernels.products import Products
from moecomm.kernels.quantize import Quantized, quantize_columns, quantize_rows, quantize_transposed
from moecomm.kernels.scaled_mm import scaled_grouped_mm, scaled_grouped_mm_wgrad


class Fp8Products(Products):
    """Grouped products in e4m3. The quantised copy of a parameter of experts is kept until the parameter
    changes. A change shows in its version counter, its address, or a step of any torch.optim.Optimizer (fused
    optimizers leave the counter alone); call `forget` after other changes. While a CUDA graph is captured
    nothing is kept, since each replay has to quantise the current weights."""

    name = "fp8"

    def __init__(self) -> None:
        super().__init__()
        self._kept: MutableMapping[Tensor, dict[str, _Kept]] = WeakTensorKeyDictionary()
        _count_optimizer_steps()

    def __reduce__(self) -> tuple[type[Fp8Products], tuple[()]]:
        return Fp8Products, ()

    def forget(self) -> None:
        self._kept.clear()

    def kept_bytes(self) -> int:
        """Returns the bytes of kept quantised weights, with their scales."""
        kept = [each.quantized for forms in self._kept.values() for each in forms.values()]
        return sum(part.nbytes for each in kept for part in each)

    def _mm(self, rows_PA: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        weights = self._weights(weight_LAB, quantize_transposed)
        return scaled_grouped_mm(quantize_rows(rows_PA, groups), weights, groups).to(rows_PA.dtype)

    def grouped_mm_dgrad(self, rows_PB: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        weights = self._weights(weight_LAB, quantize_rows)
        return scaled_grouped_mm(quantize_rows(rows_PB, groups), weights, groups).to(rows_PB.dtype)

    def _wgrad(self, rows_PA: Tensor, grad_PB: Tensor, groups: Tensor) -> Tensor:
        left, right = quantize_columns(rows_PA, groups), quantize_columns(grad_PB, groups)
        return scaled_grouped_mm_wgrad(left, right).to(rows_PA.dtype)

    def _weights(self, weight_LAB: Tensor, quantize: Callable[[Tensor], Quantized]) -> Quantized:
        """Returns the quantised weight, kept or made now, in which the summed dimension is contiguous."""
        if not _may_keep(weight_LAB):
            return quantize(weight_LAB.detach())
        forms = self._kept.setdefault(weight_LAB, {})
        kept = forms.get(quantize.__name__)
        state = weight_LAB._version, weight_LAB.data_ptr(), _Steps.count
        if kept is None or kept.state != state:
            # Frees the old copy first: the new one may reuse its memory.
            forms.pop(quantize.__name__, None)
            quantized, made = quantize(weight_LAB.detach()), None
            if weight_LAB.is_cuda:
                stream = torch.cuda.current_stream(weight_LAB.device)
                made = stream, stream.record_event()
            kept = forms[quantize.__name__] = _Kept(quantized, state, made)
        elif kept.made is not None:
            made_on, event = kept.made
            stream = torch.cuda.current_stream(weight_LAB.device)
            if stream != made_on:
                stream.wait_event(event)
                for part in kept.quantized:
                    part.record_stream(stream)
        return kept.quantized


# -- weights that are kept ---------------------------------------------------------------------------------


class _Kept(NamedTuple):
    quantized: Quantized
    state: tuple[int, int, int]
    made: tuple[torch.cuda.Stream, torch.cuda.Event] | None
    """The stream and event of the quantisation on a GPU; None on the CPU."""


class _Steps:
    """Counts the steps of all optimizers of this process."""

    count = 0


@functools.cache
def _count_optimizer_steps() -> None:
    def step(*_: Any) -> None:
        _Steps.count += 1

    register_optimizer_step_post_hook(step)


def _may_keep(weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or not is_expert_parameter(weight) or weight.is_inference():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())
