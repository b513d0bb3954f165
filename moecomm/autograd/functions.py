"""Dispatch and combine as autograd sees them: the backward of each is the other, on the kept plan.

With y = combine(rows, w): y_t = sum over the rows p of token t of w_p * rows_p, so
    d rows_p = w_p * dy_t(p)   a dispatch of dy along the kept plan, scaled on arrival
    d w_p    = <rows_p, dy_t(p)>   computed where the row arrives
and for out, v = dispatch(x, u): d x_t = sum of d out_p (a combine), d u_(t,k) = d v_p, sent back with rows.

A backward that autograd runs within a compiled function (`loss.backward()` in a compiled step) would be
traced as well, and a trace frees a tensor of which later code uses only the address. So backwards are not
traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from moecomm.backends.base import Backend, RawDispatch
from moecomm.kernels.first_order import first_order

Gradients = tuple[Tensor | None, Tensor | None]


def dispatch_backward(
    backend: Backend, plan: Any, grad_rows_PH: Tensor | None, grad_weights: Tensor | None
) -> Gradients:
    """Returns the gradients of a dispatch's tokens (T, H) and routing weights (T, K); None in, None out."""
    return backend.run(
        "moecomm dispatch backward", lambda: backend.combine(plan, grad_rows_PH, None, grad_weights)
    )


def combine_backward(
    backend: Backend, plan: Any, grad_y_TH: Tensor, weights_P: Tensor | None, rows_PH: Tensor | None
) -> Gradients:
    """Returns the gradients of a combine's rows (P, H) and, with `rows_PH`, of its weights (P,)."""
    return backend.run(
        "moecomm combine backward",
        lambda: backend.redispatch(plan, grad_y_TH, weights_P, rows_PH, gradients=True),
    )


def _as_result(tensor: Tensor | None) -> Any:
    """Returns a new tensor object with the same memory. If an autograd function returned one of its inputs,
    torch would make a view of that input and refuse to change the view in place."""
    return None if tensor is None else torch.ops.aten._unsafe_view(tensor, tensor.shape)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor | None,
        topk_weights_TK: Tensor | None,
        rows_PH: Tensor,
        weights: Tensor | None,
        plan: Any,
        index_weights_Q: Tensor | None,
        index_plan: Any,
        backend: Backend,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.plan, ctx.index_plan, ctx.backend = plan, index_plan, backend
        return _as_result(rows_PH), _as_result(weights), _as_result(index_weights_Q)

    @staticmethod
    @_disable_dynamo
    @first_order
    def backward(
        ctx: Any, grad_rows_PH: Tensor, grad_weights: Tensor | None, grad_index_weights_Q: Tensor | None
    ) -> tuple[Any, ...]:
        need_x, need_weights = ctx.needs_input_grad[:2]
        grad_x_TH, grad_weights_TK = dispatch_backward(
            ctx.backend, ctx.plan, grad_rows_PH if need_x else None, grad_weights if need_weights else None
        )
        if need_weights and grad_index_weights_Q is not None:
            _, grads_TK = dispatch_backward(ctx.backend, ctx.index_plan, None, grad_index_weights_Q)
            assert grad_weights_TK is not None and grads_TK is not None
            grad_weights_TK = grad_weights_TK + grads_TK
        return grad_x_TH, grad_weights_TK, *[None] * 6


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_PH: Tensor, weights_P: Tensor | None, y_TH: Tensor, plan: Any, backend: Backend
    ) -> Tensor:
        ctx.plan, ctx.backend = plan, backend
        need_weights = weights_P is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows_PH if need_weights else None, weights_P)
        return _as_result(y_TH)

    @staticmethod
    @_disable_dynamo
    @first_order
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[Any, ...]:
        rows_PH, weights_P = ctx.saved_tensors
        grad_rows_PH, grad_weights_P = combine_backward(ctx.backend, ctx.plan, grad_y_TH, weights_P, rows_PH)
        return grad_rows_PH if ctx.needs_input_grad[0] else None, grad_weights_P, None, None, None


def _wants_gradient(first: Tensor | None, second: Tensor | None) -> bool:
    """Returns False where no gradient can flow. Callers then make no autograd node: a node costs the host
    more time than the rest of a call."""
    return torch.is_grad_enabled() and (
        (first is not None and first.requires_grad) or (second is not None and second.requires_grad)
    )


def dispatch(
    x_TH: Tensor | None, topk_weights_TK: Tensor | None, raw: RawDispatch, backend: Backend
) -> RawDispatch:
    """Connects the rows and weights of a finished dispatch to its inputs, for autograd."""
    if not _wants_gradient(x_TH, topk_weights_TK):
        return raw
    index = raw.expert_index
    of_index = (None, None) if index is None else (index.weights_Q, index.plan)
    rows_PH, weights, weights_Q = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x_TH, topk_weights_TK, raw.tokens_PH, raw.weights, raw.plan, *of_index, backend
    )
    index = None if index is None else index._replace(weights_Q=weights_Q)
    return raw._replace(tokens_PH=rows_PH, weights=weights, expert_index=index)


def redispatch(x_TH: Tensor, rows_PH: Tensor, plan: Any, backend: Backend) -> Tensor:
    """Connects rows that were sent along a kept plan to their input, for autograd."""
    if not _wants_gradient(x_TH, None):
        return rows_PH
    found: tuple[Tensor, ...] = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x_TH, None, rows_PH, None, plan, None, None, backend
    )
    return found[0]


def combine(rows_PH: Tensor, weights_P: Tensor | None, y_TH: Tensor, plan: Any, backend: Backend) -> Tensor:
    """Connects the result of a finished combine to its rows and weights, for autograd."""
    if not _wants_gradient(rows_PH, weights_P):
        return y_TH
    return _Combine.apply(rows_PH, weights_P, y_TH, plan, backend)  # type: ignore[no-untyped-call]
