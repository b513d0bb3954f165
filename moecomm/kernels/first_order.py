"""Backwards that have no second derivatives, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.errors import Unsupported


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes of the backward of a torch.autograd.Function one that raises Unsupported where autograd records
    it (create_graph=True). torch's once_differentiable raises only when a second backward gets there, which
    it does not where the gradient that arrives has no graph: what goes through the backward itself would be
    left out without a word."""

    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "create_graph=True in a backward through moecomm, expected False: its operations and layers "
                "have no second derivatives, and what goes through them would be left out"
            )
        return backward(ctx, *gradients)

    return run
