"""Losses that depend on other forwards, under torch.utils.checkpoint, which computes a forward again."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from moecomm.errors import InvalidArgument

_REENTRANT = {CheckpointFunction.forward.__code__: 1, CheckpointFunction.backward.__code__: -1}
"""The two passes of a checkpoint with use_reentrant=True. torch offers no other way to tell them."""


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, constants: Tensor) -> Tensor:
        ctx.constants = constants
        return torch.dot(values, constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.constants, None


def dot_with_constants(values: Tensor, constants: Tensor) -> Tensor:
    """Returns torch.dot(values, constants), differentiable in values. It does not save the constants for the
    backward as torch.dot does: torch.utils.checkpoint would replace them by those of the second pass."""
    return _Dot.apply(values, constants)  # type: ignore[no-untyped-call]


class RepeatedForwards:
    """Finds checkpoints with use_reentrant=True whose second pass has other counts than the first. Their
    gradients, unlike those with use_reentrant=False, are of the second pass."""

    def __init__(self) -> None:
        self._counted = 0  # calls of counted()
        self._left = Counter[int]()  # of each such number, forwards that are to be computed again

    def counted(self) -> None:
        """Call this when the counts change."""
        self._counted += 1

    def require_same_counts(self) -> None:
        """Call this in each forward. Raises InvalidArgument in a second pass, if the counts have changed."""
        frame = None if torch.compiler.is_compiling() else sys._getframe()
        while frame is not None and frame.f_code not in _REENTRANT:
            frame = frame.f_back
        if frame is None:
            return
        self._left[self._counted] += _REENTRANT[frame.f_code]
        left = self._left[self._counted]
        if left <= 0:
            del self._left[self._counted]
        if left < 0:
            raise InvalidArgument(
                "aux_loss='global': a checkpoint with use_reentrant=True computes a forward again after the "
                "backward of another one of the layer, whose choices now count, too: pass use_reentrant=False"
            )
