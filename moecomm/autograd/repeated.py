"""Losses that depend on other forwards, under torch.utils.checkpoint, which computes a forward again."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from moecomm.errors import InvalidArgument

_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
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


def refuse_reentrant() -> None:
    """Raises InvalidArgument within a checkpoint with use_reentrant=True, whose gradients are of the second
    pass: the backward of another forward may have changed the counts by then."""
    frame = None if torch.compiler.is_compiling() else sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            raise InvalidArgument(
                "aux_loss='global' within a checkpoint with use_reentrant=True, which computes a forward "
                "again after the backward of others, whose choices would count, too: pass use_reentrant=False"
            )
        frame = frame.f_back
