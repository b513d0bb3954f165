"""Backwards without second derivatives, which raise an error for create_graph=True, and outside autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.kernels.outside_autocast import without_autocast


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of a torch.autograd.Function run outside autocast, and raise Unsupported where
    autograd records it (create_graph=True). torch's once_differentiable raises only when a second backward
    reaches it: if the incoming gradient has no graph, derivatives would be missing silently."""

    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "create_graph=True in a backward through moecomm, expected False: its operations and layers "
                "have no second derivatives, and what goes through them would be left out"
            )
        with without_autocast(next((each.device.type for each in gradients if each is not None), "cpu")):
            return backward(ctx, *gradients)

    return run
