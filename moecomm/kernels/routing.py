"""A router on CUDA tensors: logits, the choice of experts, their weights and counts, as one function for
autograd with one kernel forward and one backward besides the products (csrc/kernels/experts/routing.cu).

Otherwise a router is some twenty small operations of torch, two fifths of the host's time for a layer's
forward (docs/performance.md). moecomm/nn/router.py has these operations, and says what the numbers are.

Products of bfloat16 rows run on tensor cores: the router's weight, and the gradient of the logits, become the
sum of three bfloat16 numbers each. These hold 24 bits, as float32 does; each product is exact, and sums are
in float32. Only the gradient of the rows leaves out what its own rounding to bfloat16 would hide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

import moecomm._C as _C
from moecomm.kernels import activation, loading
from moecomm.kernels.choices import Rule, counts_of, scores_of, weights_of
from moecomm.kernels.first_order import first_order
from moecomm.kernels.outside_autocast import without_autocast

MOST_EXPERTS, MOST_CHOICES = 1024, 32
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


class Routed(NamedTuple):
    """The results of `route`. Differentiable in weights, scores and logits."""

    ids_TK: Tensor
    """(T, K) int32."""
    weights_TK: Tensor
    scores_TE: Tensor
    logits_TE: Tensor
    counts_E: Tensor
    """(E,) int64: how many tokens have chosen each expert."""


def routes_here(x_TH: Tensor, weight_EH: Tensor, top_k: int) -> bool:
    """Returns whether `route` takes these tensors: on CUDA, outside of torch.compile, both in float32,
    bfloat16 or float16, with at most 1024 experts and 32 choices."""
    return (
        x_TH.is_cuda
        and x_TH.dtype in _INPUTS
        and weight_EH.dtype in _INPUTS
        and type(weight_EH) in (Tensor, torch.nn.Parameter)
        and weight_EH.shape[0] <= MOST_EXPERTS
        and top_k <= MOST_CHOICES
        and hasattr(_C, "routes")
        and not torch.compiler.is_compiling()
    )


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    balancing_E: Tensor | None,
    rule: Rule,
    given_TK: Tensor | None = None,
) -> Routed:
    """Routes tokens, with tensors for which `routes_here` holds. bias: of the weight's dtype, added to the
    logits; balancing: float32, added to the numbers by which experts are chosen; given: int32, the experts of
    the first forward, if a checkpoint computes that forward again, which has to keep as many tensors."""
    weight_EH, bias_E = weight_EH.to(torch.float32), None if bias_E is None else bias_E.to(torch.float32)
    found: tuple[Tensor, ...] = _Route.apply(x_TH, weight_EH, bias_E, balancing_E, rule, given_TK)  # type: ignore[no-untyped-call]
    return Routed(*found)


def prepare_layer(device: torch.device, dtype: torch.dtype) -> None:
    """Loads the kernels of a layer's router, and of its activation in `dtype`, onto a CUDA device; see
    `loading.prepare`. Raises Unsupported for a dtype without kernels."""
    activation.prepare(device, dtype)
    loading.prepare("routes", device, torch.float32)


def _launch(name: str, logits_TE: Tensor, *arguments: Any) -> None:
    gpu = loading.loaded("routes", logits_TE.device.index, torch.float32)
    gpu.launch(getattr(_C, name), logits_TE, *arguments)


def _in_parts(x_TH: Tensor, weight_EH: Tensor) -> bool:
    """Returns whether the router's products with these rows can run on tensor cores, with the float32 weight
    split into bfloat16 parts (`_split`)."""
    experts, hidden = weight_EH.shape
    return (
        x_TH.is_cuda
        and x_TH.dtype is torch.bfloat16
        and x_TH.shape[0] > 0
        and experts % 8 == 0
        and hidden % 8 == 0
        and weight_EH.is_contiguous()
        and weight_EH.data_ptr() % 16 == 0
    )


def _split(weight_EH: Tensor, *, backward: bool) -> Tensor:
    """Returns the weight's bfloat16 parts, stacked: (3 E, H) high, middle and low, whose sum is the weight;
    if `backward`, (4 E, H) middle, and high three times."""
    experts, hidden = weight_EH.shape
    parts = weight_EH.new_empty((4 if backward else 3) * experts, hidden, dtype=torch.bfloat16)
    _launch("split_weight", weight_EH, experts * hidden, backward, parts)
    return parts


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_EH: Tensor,
        bias_E: Tensor | None,
        balancing_E: Tensor | None,
        rule: Rule,
        given_TK: Tensor | None,
    ) -> tuple[Tensor, ...]:
        (tokens, _), experts = x_TH.shape, weight_EH.shape[0]
        parts = 3 if _in_parts(x_TH, weight_EH) else 1
        addends_E: Tensor | None = None
        with without_autocast("cuda"):
            if parts == 1:
                logits_TE = made_TX = torch.nn.functional.linear(x_TH.to(torch.float32), weight_EH, bias_E)
            else:
                made_TX = torch.mm(x_TH, _split(weight_EH, backward=False).t(), out_dtype=torch.float32)
                logits_TE, addends_E = made_TX.new_empty(tokens, experts), bias_E
        sizes = tokens, experts, rule.top_k, getattr(_C.Scores, rule.scores), rule.normalize, rule.scale
        if given_TK is None:
            ids_TK = logits_TE.new_empty(tokens, rule.top_k, dtype=torch.int32)
            weights_TK = logits_TE.new_empty(tokens, rule.top_k)
            scores_TE = torch.empty_like(logits_TE)
            counts_E = logits_TE.new_empty(experts, dtype=torch.int64)
            biases_E = None if balancing_E is None else balancing_E.to(torch.float32)
            sums_TE = logits_TE if parts == 3 else None
            given = (parts, addends_E, biases_E, *sizes)
            _launch("routes", made_TX, *given, ids_TK, weights_TK, scores_TE, sums_TE, counts_E)
        else:
            if parts == 3:  # adds in the kernel's order, so that logits have the bits of the first time
                high_TE, middle_TE, low_TE = made_TX.chunk(3, dim=1)
                logits_TE = high_TE + (middle_TE + low_TE)
                logits_TE = logits_TE if bias_E is None else logits_TE + bias_E
            ids_TK, at_TK = given_TK.to(torch.int32, copy=True), given_TK.to(torch.int64)
            scores_TE = scores_of(logits_TE, rule)
            weights_TK = weights_of(logits_TE, scores_TE, at_TK, rule, gaps=False)
            counts_E = counts_of(at_TK, experts)
        ctx.sizes = sizes
        ctx.save_for_backward(x_TH, weight_EH, logits_TE, ids_TK)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_TK, counts_E)
        return ids_TK, weights_TK, scores_TE, logits_TE, counts_E

    @staticmethod
    @_disable_dynamo  # kernels take addresses
    @first_order
    def backward(
        ctx: Any,
        _ids: None,
        grad_weights_TK: Tensor | None,
        grad_scores_TE: Tensor | None,
        grad_logits_TE: Tensor | None,
        _counts: None,
    ) -> Any:
        x_TH, weight_EH, logits_TE, ids_TK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        (tokens, experts), parts_TX = logits_TE.shape, None
        if _in_parts(x_TH, weight_EH):
            parts_TX = logits_TE.new_empty(tokens, 4 * experts, dtype=torch.bfloat16)
        grad_TE = torch.empty_like(logits_TE) if parts_TX is None or needs_bias else None
        grads = (grad_weights_TK, grad_scores_TE, grad_logits_TE)
        given = (None if each is None else each.contiguous() for each in grads)
        _launch("routes_backward", logits_TE, *ctx.sizes, ids_TK, *given, grad_TE, parts_TX)
        grad_x_TH = grad_weight_EH = None
        if parts_TX is not None:
            if needs_x:  # grad's high part by weight's middle, all grad's parts by weight's high
                grad_x_TH = parts_TX @ _split(weight_EH, backward=True)
            if needs_weight:
                of_parts = torch.mm(parts_TX[:, experts:].t(), x_TH, out_dtype=torch.float32)
                grad_weight_EH = of_parts.view(3, experts, -1).sum(0)
        elif grad_TE is not None:
            grad_x_TH = (grad_TE @ weight_EH).to(x_TH.dtype) if needs_x else None
            grad_weight_EH = grad_TE.t() @ x_TH.to(torch.float32) if needs_weight else None
        grad_bias_E = grad_TE.sum(0) if needs_bias and grad_TE is not None else None
        return grad_x_TH, grad_weight_EH, grad_bias_E, None, None, None
