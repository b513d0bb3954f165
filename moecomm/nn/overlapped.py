"""The experts of a layer with their communication, forward and backward, as the stages of two schedules.

For rows x, routing weights w and the gradient dy of the result, per row p of expert e and its token t:
    h = x W_in[e]    z = w act(h)    y_t = sum over p of z W_out[e]
    dz = dy_t W_out[e]^T    dh = w dz act'(h)    dw = <dz, act(h)>    dx_t = sum over p of dh W_in[e]^T
    dW_out[e] = sum of z^T dy_t    dW_in[e] = sum of x^T dh
Applying w before the second product leaves that product's result to nobody's backward, and dy travels as it
is.

To autograd a pass is two functions. The first keeps what the backward needs and has the backward; the second
hands out the result. So where torch.utils.checkpoint computes again what was kept, it can stop before the
result; and with `keep_plans` it goes along the plan of the first time.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecomm.nn.backward_pass import BackwardPass
from moecomm.nn.forward_pass import ForwardPass, Known
from moecomm.nn.passes import Call, Weights, without_autocast

_NO_TABLE = torch.empty(0, dtype=torch.int32)


class _Plans(NamedTuple):
    """Dispatch outcomes of the passes within one checkpoint, in their order."""

    found: list[Known]
    again: bool
    """True while the passes are computed again."""


_plans: ContextVar[_Plans | None] = ContextVar("moecomm plans", default=None)


def keep_plans() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Makes torch.utils.checkpoint recompute with the plans of the first time.

        y = checkpoint(block, x, use_reentrant=False, context_fn=moecomm.nn.keep_plans)

    The MoELayers in `block` then make no second plan and exchange no counts; rows travel again, as far as the
    layer's `keep` wants them, and nothing is combined where the layer is the last thing in the block that
    keeps anything. Plans take some KB a token, whatever the hidden size (docs/memory.md). The routing has to
    be the same both times, as torch.utils.checkpoint sees to (preserve_rng_state).
    """
    found: list[Known] = []
    return _Within(found, again=False), _Within(found, again=True)


class _Within(contextlib.AbstractContextManager[None]):
    """A context in which passes keep or reuse their plans. It may be entered several times: a graph whose
    backward runs twice is computed again twice."""

    def __init__(self, found: list[Known], again: bool) -> None:
        self._found, self._again = found, again
        self._tokens: list[Token[_Plans | None]] = []

    def __enter__(self) -> None:
        # Each recomputation begins with the first plan.
        plans = _Plans(list(self._found) if self._again else self._found, self._again)
        self._tokens.append(_plans.set(plans))

    def __exit__(self, *_: object) -> None:
        _plans.reset(self._tokens.pop())


def run_experts(call: Call, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights) -> Tensor:
    """Returns (T, H): the sum over a token's experts of weight * expert(x), plus the shared experts' result.

    x_TH: (T, H) of the weights' dtype; topk_weights_TK: (T, K) float32 (float64 for float64 rows).
    Differentiable once in both and in the weights.
    """
    plans = _plans.get()
    first = plans is not None and not plans.again
    inputs = (x_TH, topk_weights_TK, *weights)
    wanted = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
    if call.capacity is None or call.keep == "nothing" or not wanted:
        call = call._replace(pool=None)
    known = plans.found.pop(0) if plans is not None and plans.again and plans.found else None
    passing = _Pass(call, known, first)
    placeholder_TH = _Keep.apply(passing, x_TH, topk_weights_TK, *weights)  # type: ignore[no-untyped-call]
    if plans is not None and first:
        assert passing.forward is not None
        plans.found.append(passing.forward.known)
    y_TH: Tensor = _Finish.apply(passing, placeholder_TH)  # type: ignore[no-untyped-call]
    return y_TH


class _Pass:
    """The state that the two autograd functions of one pass share."""

    def __init__(self, call: Call, known: Known | None, is_first: bool) -> None:
        """`is_first`: tensors kept in this pass are thrown away, and made again by a second pass."""
        self.call, self.known, self.is_first = call, known, is_first
        self.forward: ForwardPass | None = None
        self.y_TH: Tensor | None = None

    def start(self, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights) -> ForwardPass:
        """Computes the whole forward, or, along a known plan, only the tensors that a backward needs."""
        forward = ForwardPass(self.call, x_TH, topk_weights_TK, weights, self.known)
        self.forward, forward.keeps = forward, not self.is_first
        if self.known is None:
            self.y_TH = forward.run()
        else:
            forward.prepare()
        return forward

    def result(self) -> Tensor:
        """Returns y (T, H), computing it if that was not done yet; may be called once."""
        assert self.forward is not None
        y_TH, self.y_TH = self.y_TH, None
        if y_TH is None:
            y_TH = self.forward.finish()
        self.forward = None
        return y_TH


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passing: _Pass, x_TH: Tensor, topk_weights_TK: Tensor, *weights: Tensor | None
    ) -> Tensor:
        w_in, w_out, shared_in, shared_out = weights
        assert w_in is not None and w_out is not None
        found = passing.start(x_TH, topk_weights_TK, Weights(w_in, w_out, shared_in, shared_out))
        ctx.call, ctx.handle = passing.call, found.known.handle
        # The handle in ctx has no table, so that autograd alone holds it: a checkpoint's hook, for example,
        # throws away what the first pass would keep, and with the table its pages are freed
        # (ActivationPool.owned).
        ctx.ticket = None if found.ticket is None else found.ticket._replace(table=_NO_TABLE)
        ctx.save_for_backward(w_in, w_out, shared_in, shared_out, *found.kept(ctx.needs_input_grad[3]))
        found.ticket = None
        return x_TH.new_empty(()).expand(x_TH.shape)  # nobody reads this value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(grad_y_TH.device.type):
            return BackwardPass(ctx, grad_y_TH).run()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passing: _Pass, placeholder_TH: Tensor) -> Tensor:
        return passing.result()

    @staticmethod
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[None, Tensor]:
        return None, grad_y_TH
