"""Dispatch and combine as torch.compile sees them: operators moecomm::dispatch and moecomm::combine.

Each is a single node of a graph, which takes tensors and numbers and returns tensors. The plan is one of the
tensors; a number identifies the backend. The capacity must be fixed, so that all shapes are known. Rows are
in the expert layout and in the communicator's dtype. Gradients are those of functions.py.

All ranks have to run the operators in one order. Operators in a graph may be independent of each other; then
their data does not say which comes first, and compilers do move them. (torch's own "effects" do not help:
versions 2.11 to 2.13 lose them when Inductor schedules.) So a graph really holds `*_in_order` operators: each
takes a token, here an empty tensor, and returns the next token. A traced graph thus has one chain of tokens,
from the forward into the backward, for all communicators.

A rank with T = 0 has results without elements; compilers would replace the operators by empty tensors, and
the other ranks would wait for this rank. So the operators are marked as having side effects, which keeps them
in a graph, and the operators of a backward as belonging to the backward. (torch.compile's
partitioner leaves operators of the forward in the forward. functorch's default_partition, of other compilers,
copies some of them into the backward, where these run once more, the same on all ranks.)

    moecomm::dispatch(comm, x, ...)  ->  t1, rows, ..., plan = moecomm::dispatch_in_order(t0, comm, x, ...)
    moecomm::combine(comm, rows, ...)  ->  t2, y = moecomm::combine_in_order(t1, comm, rows, ...)

Absent results of a call, such as weights, are empty tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect

from moecomm.arguments import weight_dtype
from moecomm.autograd.functions import combine_backward, dispatch_backward
from moecomm.backends.base import Backend, DispatchCall, TensorPlan
from moecomm.errors import CommunicatorClosed
from moecomm.kernels import operators

Tensors = tuple[Tensor, ...]

_numbers = itertools.count()
_TOLD = 2
"""Part of a backend's number. Increase it if operators change and compilers' caches cannot notice that."""
_backends: WeakValueDictionary[int, Backend] = WeakValueDictionary()
_last_tokens: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # the last token in each graph


def register(backend: Backend) -> int:
    """Returns a new number by which operators find `backend` during its lifetime. The number includes the
    size of a plan: inductor's cache, which outlives the process, finds compiled graphs by the arguments of
    operators, and a plan's size is the only size that does not follow from these."""
    number = next(_numbers) << 48 | _TOLD << 40 | backend.plan_fields.words
    _backends[number] = backend
    return number


def _backend(number: int) -> Backend:
    backend = _backends.get(number)
    if backend is None:
        raise CommunicatorClosed("the communicator that a compiled function uses is closed")
    return backend


# -- what runs -------------------------------------------------------------------------------------------


def _plan(blob: Tensor, tokens: int, rows: int) -> TensorPlan:
    return TensorPlan(blob, "expert", tokens, rows)


def _dispatch(
    token: Tensor,
    comm: int,
    x_TH: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor | None,
    alignment: int,
    capacity: int,
) -> Tensors:
    backend = _backend(comm)
    call = DispatchCall(x_TH, None, topk_idx_TK, topk_weights_TK, "expert", alignment, capacity, -1, True)

    def operation() -> Tensors:
        backend.ready()
        raw = backend.dispatch(call)
        return _all_there(x_TH, raw.tokens_PH, raw.weights, backend.tensor_plan(raw.plan).blob)

    return backend.run("moecomm dispatch", operation)


def _combine(token: Tensor, comm: int, rows_PH: Tensor, weights_P: Tensor | None, *plan: Any) -> Tensors:
    backend = _backend(comm)
    y_TH, _ = backend.run(
        "moecomm combine", lambda: backend.combine(_plan(*plan), rows_PH, weights_P, None, forward=True)
    )
    return _all_there(rows_PH, y_TH)


def _dispatch_backward(
    token: Tensor, comm: int, grad_tokens_PH: Tensor | None, grad_weights: Tensor | None, *plan: Any
) -> Tensors:
    found = dispatch_backward(_backend(comm), _plan(*plan), grad_tokens_PH, grad_weights)
    return _all_there(plan[0], *found)


def _combine_backward(token: Tensor, comm: int, grad_y_TH: Tensor, *given: Any) -> Tensors:
    weights_P, rows_PH, *plan = given
    found = combine_backward(_backend(comm), _plan(*plan), grad_y_TH, weights_P, rows_PH)
    return _all_there(grad_y_TH, *found)


def _new_token(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


def _all_there(like: Tensor, *results: Tensor | None) -> Tensors:
    """Returns a new token and the results, with empty tensors for absent ones."""
    return _new_token(like), *(like.new_empty(0) if each is None else each for each in results)


# -- what a compiler is told -----------------------------------------------------------------------------


def _fake_dispatch(token: Tensor, comm: int, x_TH: Tensor, *given: Any) -> Tensors:
    _, topk_weights_TK, _, capacity = given
    backend, weights_P = _backend(comm), None
    if topk_weights_TK is not None:
        weights_P = x_TH.new_empty(capacity, dtype=weight_dtype(backend.dtype))
    blob = x_TH.new_empty(backend.plan_fields.words, dtype=torch.int32)
    return _all_there(x_TH, x_TH.new_empty(capacity, backend.hidden), weights_P, blob)


def _fake_combine(token: Tensor, comm: int, rows_PH: Tensor, weights_P: Tensor | None, *plan: Any) -> Tensors:
    return _all_there(rows_PH, rows_PH.new_empty(_plan(*plan).tokens, _backend(comm).hidden))


def _fake_dispatch_backward(
    token: Tensor, comm: int, grad_tokens_PH: Tensor | None, grad_weights: Tensor | None, *plan: Any
) -> Tensors:
    backend, (blob, tokens, _) = _backend(comm), plan
    grad_x_TH = grad_weights_TK = None
    if grad_tokens_PH is not None:
        grad_x_TH = blob.new_empty(tokens, backend.hidden, dtype=backend.dtype)
    if grad_weights is not None:
        grad_weights_TK = blob.new_empty(tokens, backend.top_k, dtype=weight_dtype(backend.dtype))
    return _all_there(blob, grad_x_TH, grad_weights_TK)


def _fake_combine_backward(token: Tensor, comm: int, grad_y_TH: Tensor, *given: Any) -> Tensors:
    backend, (_, rows_PH, *plan) = _backend(comm), given
    rows = _plan(*plan).rows
    grad_weights_P = None
    if rows_PH is not None:
        grad_weights_P = grad_y_TH.new_empty(rows, dtype=weight_dtype(backend.dtype))
    grad_rows_PH = grad_y_TH.new_empty(rows, backend.hidden, dtype=backend.dtype)
    return _all_there(grad_y_TH, grad_rows_PH, grad_weights_P)


# -- gradients -------------------------------------------------------------------------------------------


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _, ctx.comm, x_TH, *_, capacity = inputs
    ctx.plan = (x_TH.shape[0], capacity)
    token, _, _, blob = output
    ctx.mark_non_differentiable(token, blob)
    ctx.save_for_backward(blob)


def _dispatch_gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    _, grad_tokens_PH, grad_weights_P, _ = grads
    need_x, need_weights = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
    grad_x_TH, grad_weights_TK = torch.ops.moecomm.dispatch_backward(
        ctx.comm,
        grad_tokens_PH if need_x else None,
        grad_weights_P if need_weights else None,
        *ctx.saved_tensors,
        *ctx.plan,
    )
    grad_x_TH = grad_x_TH if need_x else None
    return None, None, grad_x_TH, None, grad_weights_TK if need_weights else None, None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _, ctx.comm, rows_PH, weights_P, blob, *ctx.plan = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(rows_PH if ctx.needs_input_grad[3] else None, weights_P, blob)


def _combine_gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    rows_PH, weights_P, blob = ctx.saved_tensors
    grad_rows_PH, grad_weights_P = torch.ops.moecomm.combine_backward(
        ctx.comm, grads[1], weights_P, rows_PH, blob, *ctx.plan
    )
    grad_rows_PH = grad_rows_PH if ctx.needs_input_grad[2] else None
    return None, None, grad_rows_PH, None if rows_PH is None else grad_weights_P, None, None, None


# -- registration ----------------------------------------------------------------------------------------

_PLAN = "Tensor plan, SymInt num_tokens, SymInt num_rows"
_PLACE = "partitioner_tag"
"""The key under which a traced node says whether it belongs to a forward or a backward."""


@contextlib.contextmanager
def _in_backward() -> Iterator[None]:
    """Marks nodes traced in this context as backward, even if all their inputs come from the forward, as with
    gradients that are zero or empty."""
    meta = traceback.current_meta
    before = meta.get(_PLACE)
    if before is None or not traceback.has_preserved_node_meta():
        yield  # the tracing mode does not split graphs into forward and backward
        return
    meta[_PLACE] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[_PLACE] = before


def _define(
    name: str, arguments: str, results: int, run: Callable[..., Tensors], fake: Callable[..., Tensors]
) -> None:
    """Defines `name` and `name`_in_order; a call of `name`, traced or not, calls `name`_in_order."""
    tensors = ", ".join(["Tensor"] * results)
    ordered = f"{name}_in_order"
    operators.define(f"{ordered}(Tensor token, {arguments}) -> (Tensor, {tensors})", run, fake)
    operator = has_side_effect(getattr(torch.ops.moecomm, ordered).default)

    def in_order(*values: Any) -> Any:
        mode = get_proxy_mode()
        last = None if mode is None else _last_tokens.get(mode.tracer)
        if last is None:
            last = _new_token(next(each for each in values if isinstance(each, Tensor)))
        with _in_backward() if name.endswith("_backward") else contextlib.nullcontext():
            token, *found = operator(last, *values)
        if mode is not None:
            _last_tokens[mode.tracer] = token
        return found[0] if results == 1 else tuple(found)

    operators.LIBRARY.define(f"{name}({arguments}) -> {tensors if results == 1 else f'({tensors})'}")
    operators.LIBRARY.impl(name, in_order, "CompositeImplicitAutograd")


_define(
    "dispatch",
    "int comm, Tensor x, Tensor topk_idx, Tensor? topk_weights, int alignment, int capacity",
    3,
    _dispatch,
    _fake_dispatch,
)
_define("combine", f"int comm, Tensor rows, Tensor? weights, {_PLAN}", 1, _combine, _fake_combine)
_define(
    "dispatch_backward",
    f"int comm, Tensor? grad_tokens, Tensor? grad_weights, {_PLAN}",
    2,
    _dispatch_backward,
    _fake_dispatch_backward,
)
_define(
    "combine_backward",
    f"int comm, Tensor grad_y, Tensor? weights, Tensor? rows, {_PLAN}",
    2,
    _combine_backward,
    _fake_combine_backward,
)
torch.library.register_autograd(
    "moecomm::dispatch_in_order", _dispatch_gradients, setup_context=_keep_for_dispatch, lib=operators.LIBRARY
)
torch.library.register_autograd(
    "moecomm::combine_in_order", _combine_gradients, setup_context=_keep_for_combine, lib=operators.LIBRARY
)
