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

from moecomm.activation import weighted_activation, weighted_activation_backward
from moecomm.communicator import Communicator
from moecomm.nn.grouped import rows_by_rows, rows_by_weights
from moecomm.overlap import Executor, Keep, Results, Timeline, backward_schedule, forward_schedule


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
        comm = call.comm
        shared_inner_TI: Tensor | None = None

        def publish(_: Results) -> Any:
            return comm.dispatch(
                x_TH, call.topk_idx_TK, topk_weights_TK, capacity=call.capacity, async_op=True
            )

        def share(_: Results) -> Tensor:
            nonlocal shared_inner_TI
            assert shared_in is not None and shared_out is not None
            shared_inner_TI = x_TH @ shared_in
            return weighted_activation(shared_inner_TI, activation=call.activation) @ shared_out

        def up(results: Results) -> Tensor:
            out = results["dispatch"]
            return rows_by_weights(out.tokens, w_in, out.offsets)

        def activation(results: Results) -> Tensor:
            out = results["dispatch"]
            return weighted_activation(results["up"], out.weights, out.offsets, activation=call.activation)

        def down(results: Results) -> Tensor:
            rows_PH = rows_by_weights(results["activation"], w_out, results["dispatch"].offsets)
            results.drop("activation")
            return rows_PH

        work: dict[str, Callable[[Results], Any]] = {
            "publish": publish,
            "dispatch": lambda results: results["publish"].wait(),
            "up": up,
            "activation": activation,
            "down": down,
            "combine": lambda results: comm.combine(results["down"], results["dispatch"].handle),
        }
        if shared_in is not None:
            work |= {
                "shared experts": share,
                "sum": lambda results: results["combine"].add_(results["shared experts"]),
            }
        schedule = forward_schedule(shared=shared_in is not None)
        with torch.autocast(x_TH.device.type, enabled=False):
            results = call.executor.run(schedule, work, record=call.runs is not None)
        if call.runs is not None:
            call.runs.forward = results
        out = results["dispatch"]
        keep_rows = call.keep != "nothing" and (ctx.needs_input_grad[3] or call.keep == "rows")
        ctx.call, ctx.handle = call, out.handle
        ctx.save_for_backward(
            x_TH if shared_in is not None or call.keep == "nothing" else None,
            out.tokens if keep_rows else None,
            results["up"] if call.keep == "all" else None,
            out.weights,
            out.offsets,
            w_in,
            w_out,
            shared_in,
            shared_out,
            shared_inner_TI,
        )
        y_TH: Tensor = results["combine" if shared_in is None else "sum"]
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
        self.handle = ctx.handle
        self.grad_y_TH = grad_y_TH
        (
            self.x_TH,
            self.rows_PH,
            self.inner_PI,
            self.weights_P,
            self.offsets_L,
            self.w_in,
            self.w_out,
            self.shared_in,
            self.shared_out,
            self.shared_inner_TI,
        ) = ctx.saved_tensors
        _, self.need_x, self.need_weights, *self.need = ctx.needs_input_grad

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients in the order of the forward's inputs."""
        call, (need_in, need_out, *need_shared) = self.call, self.need
        shared = self.shared_in is not None and (self.need_x or any(need_shared))
        home = self.need_x or self.need_weights
        now = (need_in or need_out) and call.deferred is None
        work: dict[str, Callable[[Results], Any]] = {
            "gradient rows": lambda _: call.comm.redispatch(self.grad_y_TH, self.handle),
            "down backward": self._down_backward,
            "activation backward": self._activation_backward,
        }
        if call.keep == "nothing":
            work["rows again"] = lambda _: call.comm.redispatch(self.x_TH, self.handle)
        if call.keep != "all":
            work["up again"] = lambda results: rows_by_weights(self._rows(results), self.w_in, self.offsets_L)
        if shared:
            work["shared backward"] = self._shared_backward
        if home:
            work |= {"up backward": self._up_backward, "home": self._home}
        if now:
            work |= {
                "down weights": lambda results: self._down_weights(results) if need_out else None,
                "up weights": lambda results: self._up_weights(results) if need_in else None,
            }
        if shared and home:
            work["sum"] = self._sum
        schedule = backward_schedule(shared=shared, keep=call.keep, home=home, weights=now)
        results = call.executor.run(schedule, work, record=call.runs is not None)
        if call.runs is not None:
            call.runs.backward = results
        if call.deferred is not None:
            self._defer(call.deferred, results)
        grad_x_TH = grad_weights_TK = grad_in = grad_out = None
        if home:
            grad_x_TH, grad_weights_TK = results["home"]
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

    def _rows(self, results: Results) -> Tensor:
        rows_PH: Tensor = results["rows again"] if self.call.keep == "nothing" else self.rows_PH
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

    def _down_backward(self, results: Results) -> Tensor:
        return rows_by_weights(results["gradient rows"], self.w_out.transpose(1, 2), self.offsets_L)

    def _activation_backward(self, results: Results) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the first product and of the routing weights, and z."""
        inner_PI = self.inner_PI if self.call.keep == "all" else results["up again"]
        return weighted_activation_backward(
            results["down backward"],
            inner_PI,
            self.weights_P,
            self.offsets_L,
            activation=self.call.activation,
            need_weights=self.need_weights,
            need_z=self.need[1],
        )

    def _up_backward(self, results: Results) -> Tensor:
        grad_inner_PI = results["activation backward"][0]
        return rows_by_weights(grad_inner_PI, self.w_in.transpose(1, 2), self.offsets_L)

    def _home(self, results: Results) -> tuple[Tensor, Tensor | None]:
        grad_weights_P = results["activation backward"][1]
        return self.call.comm.dispatch_backward(
            results["up backward"], self.handle, grad_weights=grad_weights_P
        )

    def _down_weights(self, results: Results) -> Tensor:
        z_PF = results["activation backward"][2]
        return rows_by_rows(z_PF, results["gradient rows"], self.offsets_L)

    def _up_weights(self, results: Results) -> Tensor:
        return rows_by_rows(self._rows(results), results["activation backward"][0], self.offsets_L)

    def _sum(self, results: Results) -> Tensor | None:
        grad_x_TH, _ = results["home"]
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
