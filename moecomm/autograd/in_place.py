"""Gradients that are accumulated in place: in the `grad` of a parameter, or in a float32 `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecomm.errors import InvalidArgument


def has_main_grad(parameter: Tensor) -> bool:
    """Returns True for a parameter that accumulates its gradients in `main_grad`."""
    # The hook marks such a parameter because, unlike an attribute, it does not survive pickling.
    return to_main_grad in (parameter._post_accumulate_grad_hooks or {}).values()


def main_grad_of(parameter: Tensor) -> Tensor:
    """Returns the `main_grad` of a parameter; if it is missing or None, sets it to zeros first. Raises
    InvalidArgument for an unsuitable tensor, and if it would have to set zeros in a CUDA graph capture."""
    found: Tensor | None = getattr(parameter, "main_grad", None)
    if found is None:
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "main_grad is missing in the capture of a CUDA graph, must be there before: run a step first "
                "or set it to zeros"
            )
        found = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        parameter.main_grad = found  # type: ignore[attr-defined]
    expected = (torch.float32, parameter.device, parameter.shape)
    if (found.dtype, found.device, found.shape) != expected or not found.is_contiguous():
        raise InvalidArgument(
            f"main_grad is {found.dtype} of shape {tuple(found.shape)} on {found.device} with strides "
            f"{found.stride()}, must be contiguous float32 of shape {tuple(parameter.shape)} on "
            f"{parameter.device}, or None"
        )
    return found


@torch.no_grad()
def to_main_grad(parameter: Tensor) -> None:
    """Adds the `grad` of a parameter, if there is one, to its `main_grad`, and sets `grad` to None. As a hook
    after accumulation it makes a parameter accumulate gradients in `main_grad`, float32 of its shape."""
    if parameter.grad is not None:
        main_grad_of(parameter).add_(parameter.grad)
        parameter.grad = None


def add_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Adds a gradient to the `grad` of a parameter, or its `main_grad`, without running hooks. Does nothing
    for None, which a product returns if it has added the gradient itself. If `parameter` is a cast, its graph
    brings the gradient to the parameter behind it, and is kept for other microbatches."""
    if gradient is None:
        return
    if not parameter.is_leaf:
        parameter.backward(gradient, retain_graph=True)
        return
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    if has_main_grad(parameter):
        to_main_grad(parameter)


def grad_in_place(parameter: Tensor) -> Tensor | None:
    """Returns `main_grad` if the parameter accumulates there, else `grad`; None if unsuited for products."""
    if has_main_grad(parameter):
        return None if isinstance(parameter, DTensor) else main_grad_of(parameter)
    grad = parameter.grad
    if grad is None or isinstance(parameter, DTensor) or grad.requires_grad or not grad.is_contiguous():
        return None
    return grad if grad.dtype is parameter.dtype and grad.shape == parameter.shape else None


def has_hooks(parameter: Tensor) -> bool:
    """Returns True for a parameter with hooks on its gradient, besides `to_main_grad`."""
    own = int(has_main_grad(parameter))
    return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > own


def parameter_of(ctx: Any, number: int, saved: Tensor) -> Tensor:
    """Returns input `number` of the autograd function of `ctx` if it is a leaf, else `saved`, which was saved
    for it. For a leaf `saved` may be a copy, by a checkpoint or hooks of saved tensors (save_on_cpu)."""
    found: Tensor = getattr(ctx.next_functions[number][0], "variable", saved)
    return found


def is_wanted(ctx: Any, number: int) -> bool:
    """Returns whether the running backward needs the gradient of input `number` of the
    torch.autograd.Function with this `ctx`. A backward with `inputs`, or torch.autograd.grad, may need
    other gradients only."""
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # raised during torch.autograd.grad
        return False


def gradient_to_add_to(ctx: Any, number: int) -> Tensor | None:
    """Returns `grad_in_place` of the parameter that is input `number`. Returns None where autograd has to add
    the gradient: if there is no grad yet, for torch.autograd.grad, and for parameters that are sharded or
    have hooks on the gradient."""
    node = ctx.next_functions[number][0]
    if type(node).__name__ != "AccumulateGrad" or has_hooks(node.variable):
        return None
    grad = grad_in_place(node.variable)
    return grad if grad is not None and is_wanted(ctx, number) else None
