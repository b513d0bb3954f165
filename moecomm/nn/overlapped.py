"""The experts of a layer with their communication, forward and backward, as the stages of two schedules.

For rows x, routing weights w and the gradient dy of the result, per row p of expert e and its token t:
    h = x W_in[e]    z = w act(h)    y_t = sum over p of z W_out[e]
    dz = dy_t W_out[e]^T    dh = w dz act'(h)    dw = <dz, act(h)>    dx_t = sum over p of dh W_in[e]^T
    dW_out[e] = sum of z^T dy_t    dW_in[e] = sum of x^T dh
Applying w before the second product leaves that product's result to nobody's backward, and dy travels as it
is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moecomm.activation import (
    weighted_activation,
    weighted_activation_backward,
    weighted_activation_backward_into,
)
from moecomm.communicator import Communicator
from moecomm.nn.grouped import rows_by_rows, rows_by_weights
from moecomm.nn.routes import Slices, make_route
from moecomm.overlap import Executor, Keep, Results, Timeline, backward_schedule, forward_schedule
from moecomm.overlap.moe import stage_name
from moecomm.routing import weight_dtype


class Weights(NamedTuple):
    """Of the experts here, (L, H, I) and (L, F, H), and of the shared ones, (H, I') and (F', H), if any."""

    w_in: Tensor
    w_out: Tensor
    shared_in: Tensor | None
    shared_out: Tensor | None


@dataclass
class Deferred:
    """Gradients of the experts' weights that are still to be computed, oldest first: each makes those of
    w_in and of w_out, or None."""

    pending: list[Callable[[], tuple[Tensor | None, Tensor | None]]] = field(default_factory=list)

    def run(self, w_in: nn.Parameter, w_out: nn.Parameter) -> None:
        """Computes them all and adds them to the parameters' `grad`."""
        while self.pending:
            for parameter, gradient in zip((w_in, w_out), self.pending.pop(0)(), strict=True):
                if gradient is None:
                    continue
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@dataclass
class Runs:
    """The last forward and backward that were recorded."""

    forward: Results | None = None
    backward: Results | None = None

    def timelines(self) -> dict[str, Timeline]:
        """Of those that there were, by their names. Waits for them."""
        runs = {"forward": self.forward, "backward": self.backward}
        return {name: results.timeline() for name, results in runs.items() if results is not None}


class Call(NamedTuple):
    """What a pass of tokens through the experts needs beside the tensors that have gradients."""

    comm: Communicator
    executor: Executor
    topk_idx_TK: Tensor
    capacity: int | None
    activation: str
    keep: Keep
    parts: int
    """1 with a capacity."""
    deferred: Deferred | None
    """None: the weights' gradients are computed in the backward."""
    runs: Runs | None
    """None: nothing is recorded."""


def run_experts(call: Call, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights) -> Tensor:
    """(T, H): the sum over a token's experts of weight * expert(x), plus the shared experts' result.

    x_TH: (T, H) of the weights' dtype; topk_weights_TK: (T, K) float32 (float64 for float64 rows).
    Differentiable once in both and in the weights.
    """
    y_TH: Tensor = _Experts.apply(call, x_TH, topk_weights_TK, *weights)  # type: ignore[no-untyped-call]
    return y_TH


def _of_part(do: Callable[[Results, int], Any], part: int) -> Callable[[Results], Any]:
    return lambda results: do(results, part)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        x_TH: Tensor,
        topk_weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        shared_in: Tensor | None,
        shared_out: Tensor | None,
    ) -> Tensor:
        shared_inner_TI: Tensor | None = None
        parts = call.parts
        route = make_route(call.comm, call.capacity, parts)
        slices: Slices | None = None
        inners: list[Tensor] = []

        def name(stage: str, part: int) -> str:
            return stage_name(stage, part, parts)

        def share(_: Results) -> Tensor:
            nonlocal shared_inner_TI
            assert shared_in is not None and shared_out is not None
            shared_inner_TI = x_TH @ shared_in
            return weighted_activation(shared_inner_TI, activation=call.activation) @ shared_out

        def up(results: Results, part: int) -> Tensor:
            nonlocal slices
            out = results[name("dispatch", part)]
            if slices is None:
                slices = Slices(out, w_in.shape[0])
            rows = out.tokens[slices.rows(part)]
            return rows_by_weights(rows, w_in[slices.experts(part)], slices.offsets(part))

        def activation(results: Results, part: int) -> Tensor:
            assert slices is not None
            inner = results[name("up", part)]
            if call.keep == "all":
                inners.append(inner)
            weights = results[name("dispatch", part)].weights[slices.rows(part)]
            return weighted_activation(inner, weights, slices.ends(part), activation=call.activation)

        def down(results: Results, part: int) -> Tensor:
            assert slices is not None
            z = results[name("activation", part)]
            rows = rows_by_weights(z, w_out[slices.experts(part)], slices.offsets(part))
            for done in ("activation", "up"):
                results.drop(name(done, part))
            return rows

        work: dict[str, Callable[[Results], Any]] = {
            "publish": lambda _: route.publish(x_TH, call.topk_idx_TK, topk_weights_TK)
        }
        for part in range(parts):
            steps: dict[str, Callable[[Results, int], Any]] = {
                "dispatch": lambda _, part: route.receive(part),
                "up": up,
                "activation": activation,
                "down": down,
                "combine": lambda results, part: route.combine(part, results[name("down", part)]),
            }
            work |= {name(step, part): _of_part(do, part) for step, do in steps.items()}
        last = name("combine", parts - 1)
        if shared_in is not None:
            work |= {
                "shared experts": share,
                "sum": lambda results: results[last].add_(results["shared experts"]),
            }
        schedule = forward_schedule(shared=shared_in is not None, parts=parts)
        with torch.autocast(x_TH.device.type, enabled=False):
            results = call.executor.run(schedule, work, record=call.runs is not None)
        if call.runs is not None:
            call.runs.forward = results
        out = results[name("dispatch", 0)]
        keep_rows = call.keep != "nothing" and (ctx.needs_input_grad[3] or call.keep == "rows")
        ctx.call, ctx.route, ctx.handle, ctx.slices = call, route, out.handle, slices
        ctx.save_for_backward(
            x_TH if shared_in is not None or call.keep == "nothing" else None,
            out.tokens if keep_rows else None,
            out.weights,
            out.offsets,
            w_in,
            w_out,
            shared_in,
            shared_out,
            shared_inner_TI,
            *inners,
        )
        y_TH: Tensor = results[last if shared_in is None else "sum"]
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_y_TH.device.type, enabled=False):
            return _Backward(ctx, grad_y_TH).run()


class _Backward:
    """One backward: its stages take each other's results and what the forward has kept."""

    def __init__(self, ctx: Any, grad_y_TH: Tensor) -> None:
        self.call: Call = ctx.call
        self.route, self.handle, self.slices = ctx.route, ctx.handle, ctx.slices
        self.grad_y_TH = grad_y_TH
        (
            self.x_TH,
            self.rows_PH,
            self.weights_P,
            self.offsets_L,
            self.w_in,
            self.w_out,
            self.shared_in,
            self.shared_out,
            self.shared_inner_TI,
            *self.inners,
        ) = ctx.saved_tensors
        _, self.need_x, self.need_weights, *self.need = ctx.needs_input_grad
        # What the products of all parts write, as one for the weights' gradients.
        self.grad_inner_PI: Tensor | None = None
        self.grad_weights_P: Tensor | None = None
        self.z_PF: Tensor | None = None

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients in the order of the forward's inputs."""
        call, (need_in, need_out, *need_shared) = self.call, self.need
        parts = call.parts
        shared = self.shared_in is not None and (self.need_x or any(need_shared))
        home = self.need_x or self.need_weights
        now = (need_in or need_out) and call.deferred is None
        steps: dict[str, Callable[[Results, int], Any]] = {
            "gradient rows": lambda _, part: self._send(part, "gradients", self.grad_y_TH),
            "down backward": self._down_backward,
            "activation backward": self._activation_backward,
        }
        if call.keep == "nothing":
            steps["rows again"] = lambda _, part: self._send(part, "rows", self.x_TH)
        if call.keep != "all":
            steps["up again"] = self._up_again
        if home:
            steps |= {"up backward": self._up_backward, "home": self._home}
        work: dict[str, Callable[[Results], Any]] = {
            stage_name(step, part, parts): _of_part(do, part)
            for step, do in steps.items()
            for part in range(parts)
        }
        if shared:
            work["shared backward"] = self._shared_backward
        if now:
            work |= {
                "down weights": lambda results: self._down_weights(results) if need_out else None,
                "up weights": lambda results: self._up_weights(results) if need_in else None,
            }
        if shared and home:
            work["sum"] = self._sum
        schedule = backward_schedule(shared=shared, keep=call.keep, home=home, weights=now, parts=parts)
        results = call.executor.run(schedule, work, record=call.runs is not None)
        if call.runs is not None:
            call.runs.backward = results
        if call.deferred is not None:
            self._defer(call.deferred, results)
        grad_x_TH = grad_weights_TK = grad_in = grad_out = None
        if home:
            grad_x_TH, grad_weights_TK = results[self._name("home", parts - 1)]
            if shared:
                grad_x_TH = results["sum"]
        if now:
            grad_out, grad_in = results["down weights"], results["up weights"]
        _, *shared_grads = results["shared backward"] if shared else (None, None, None)
        return (
            None,
            grad_x_TH if self.need_x else None,
            grad_weights_TK,
            grad_in,
            grad_out,
            *shared_grads,
        )

    def _name(self, step: str, part: int) -> str:
        return stage_name(step, part, self.call.parts)

    def _send(self, part: int, kind: str, x_TH: Tensor) -> Tensor:
        rows_PH: Tensor = self.route.send_again(part, kind, x_TH, self.handle)
        return rows_PH

    def _rows(self, results: Results, part: int) -> Tensor:
        """All rows, of which those of the part are there."""
        again = self.call.keep == "nothing"
        rows_PH: Tensor = results[self._name("rows again", part)] if again else self.rows_PH
        return rows_PH

    def _shared_backward(self, results: Results) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, shared_in and shared_out."""
        *_, need_shared_in, need_shared_out = self.need
        grad_inner_TI, _, z_TF = weighted_activation_backward(
            self.grad_y_TH @ self.shared_out.t(),
            self.shared_inner_TI,
            None,
            None,
            activation=self.call.activation,
            need_weights=False,
            need_z=need_shared_out,
        )
        return (
            grad_inner_TI @ self.shared_in.t() if self.need_x else None,
            self.x_TH.t() @ grad_inner_TI if need_shared_in else None,
            z_TF.t() @ self.grad_y_TH if z_TF is not None else None,
        )

    def _up_again(self, results: Results, part: int) -> Tensor:
        slices = self.slices
        rows = self._rows(results, part)[slices.rows(part)]
        return rows_by_weights(rows, self.w_in[slices.experts(part)], slices.offsets(part))

    def _down_backward(self, results: Results, part: int) -> Tensor:
        slices = self.slices
        grads = results[self._name("gradient rows", part)][slices.rows(part)]
        weights = self.w_out[slices.experts(part)].transpose(1, 2)
        return rows_by_weights(grads, weights, slices.offsets(part))

    def _activation_backward(self, results: Results, part: int) -> Tensor:
        """The gradient of the first product; and, for all parts in one tensor each, that of the routing
        weights, and z."""
        inner = self.inners[part] if self.call.keep == "all" else results[self._name("up again", part)]
        grad_z = results[self._name("down backward", part)]
        if part == 0:
            count, like = self.handle.num_rows, inner
            self.grad_inner_PI = like.new_empty(count, inner.shape[1])
            if self.need_weights:
                self.grad_weights_P = like.new_empty(count, dtype=weight_dtype(like.dtype))
            if self.need[1]:
                self.z_PF = like.new_empty(count, grad_z.shape[1])
        assert self.grad_inner_PI is not None
        rows = self.slices.rows(part)
        grad_inner = self.grad_inner_PI[rows]
        weighted_activation_backward_into(
            grad_inner,
            None if self.grad_weights_P is None else self.grad_weights_P[rows],
            None if self.z_PF is None else self.z_PF[rows],
            grad_z,
            inner,
            self.weights_P[rows],
            self.slices.ends(part),
            activation=self.call.activation,
        )
        for done in ("down backward", *(("up again",) if self.call.keep != "all" else ())):
            results.drop(self._name(done, part))
        return grad_inner

    def _up_backward(self, results: Results, part: int) -> Tensor:
        slices = self.slices
        grad_inner = results[self._name("activation backward", part)]
        weights = self.w_in[slices.experts(part)].transpose(1, 2)
        return rows_by_weights(grad_inner, weights, slices.offsets(part))

    def _home(self, results: Results, part: int) -> tuple[Tensor, Tensor | None] | None:
        results[self._name("activation backward", part)]  # the weights' gradients were made there
        grads = results[self._name("up backward", part)]
        found: tuple[Tensor, Tensor | None] | None = self.route.home(
            part, grads, self.handle, self.grad_weights_P
        )
        return found

    def _down_weights(self, results: Results) -> Tensor:
        assert self.z_PF is not None
        grads_PH = results[self._name("gradient rows", self.call.parts - 1)]
        return rows_by_rows(self.z_PF, grads_PH, self.offsets_L)

    def _up_weights(self, results: Results) -> Tensor:
        assert self.grad_inner_PI is not None
        return rows_by_rows(self._rows(results, self.call.parts - 1), self.grad_inner_PI, self.offsets_L)

    def _sum(self, results: Results) -> Tensor | None:
        grad_x_TH, _ = results[self._name("home", self.call.parts - 1)]
        shared_x_TH = results["shared backward"][0]
        return grad_x_TH if shared_x_TH is None else grad_x_TH.add_(shared_x_TH)

    def _defer(self, deferred: Deferred, results: Results) -> None:
        need_in, need_out, *_ = self.need

        def compute() -> tuple[Tensor | None, Tensor | None]:
            with torch.no_grad(), torch.autocast(self.grad_y_TH.device.type, enabled=False):
                grad_out = self._down_weights(results) if need_out else None
                return self._up_weights(results) if need_in else None, grad_out

        if need_in or need_out:
            deferred.pending.append(compute)
