"""The backward of tokens through the experts, as the stages of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecomm.arguments import weight_dtype
from moecomm.kernels.activation import weighted_activation_backward, weighted_activation_backward_into
from moecomm.nn.passes import Call, Deferred, without_autocast
from moecomm.nn.pool import PoolHandle
from moecomm.overlap import Results, backward_schedule, in_turns
from moecomm.types import Handle


class BackwardPass:
    """One backward: each stage takes the results of others and the tensors that the forward has kept."""

    def __init__(self, ctx: Any, grad_y_TH: Tensor) -> None:
        self.call: Call = ctx.call
        self.products = self.call.products
        self.handle: Handle = ctx.handle
        self.grad_y_TH = grad_y_TH
        (
            self.w_in,
            self.w_out,
            self.shared_in,
            self.shared_out,
            self.x_TH,
            self.rows_PH,
            self.weights_P,
            self.offsets_L,
            self.shared_inner_TI,
            inner_or_table,
        ) = ctx.saved_tensors
        self.ticket: PoolHandle | None = ctx.ticket
        if self.ticket is not None:
            # A checkpoint has thrown the first table away and made another.
            self.ticket = self.ticket._replace(table=inner_or_table)
        _, self.need_x, self.need_weights, *self.need = ctx.needs_input_grad
        self.inner_PI = inner_or_table if self.ticket is None else None
        self.grad_weights_P: Tensor | None = None
        self.z_PF: Tensor | None = None

    def run(self) -> tuple[Tensor | None, ...]:
        """Runs the backward and returns gradients in the order of the forward's inputs."""
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
            work["up again"] = self._up_again
        if home:
            work |= {"up backward": self._up_backward, "home": self._home}
        if self.ticket is not None:
            work["from pool"] = lambda _: self._from_pool()
        if shared:
            work["shared backward"] = self._shared_backward
        if now:
            work |= {
                "down weights": lambda results: self._down_weights(results) if need_out else None,
                "up weights": lambda results: self._up_weights(results) if need_in else None,
            }
        if shared and home:
            work["sum"] = self._sum
        schedule = backward_schedule(
            shared=shared,
            keep=call.keep,
            home=home,
            weights=now,
            split=call.split,
            home_split=call.home_split,
            pool=self.ticket is not None,
            in_turns=in_turns(),
        )
        results = call.executor.run(
            schedule, work, record=call.runs is not None, in_turns_sms=call.in_turns_sms
        )
        if call.runs is not None:
            call.runs.backward = results.recorded
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

    def _from_pool(self) -> None:
        assert self.call.pool is not None and self.ticket is not None
        self.rows_PH, *inner = self.call.pool.restore(self.ticket)
        self.inner_PI = inner[0] if inner else None

    def _rows(self, results: Results) -> Tensor:
        rows_PH: Tensor = results["rows again"] if self.call.keep == "nothing" else self.rows_PH
        return rows_PH

    def _shared_backward(self, results: Results) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of x, shared_in and shared_out."""
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

    def _up_again(self, results: Results) -> Tensor:
        return self.products.grouped_mm(self._rows(results), self.w_in, self.offsets_L)

    def _down_backward(self, results: Results) -> Tensor:
        return self.products.grouped_mm_dgrad(results["gradient rows"], self.w_out, self.offsets_L)

    def _activation_backward(self, results: Results) -> Tensor:
        """Returns the gradient of the first product; sets that of the routing weights, and z."""
        inner_PI: Tensor | None = self.inner_PI if self.call.keep == "all" else results["up again"]
        assert inner_PI is not None
        grad_z_PF = results["down backward"]
        rows = self.handle.num_rows
        grad_inner_PI: Tensor = inner_PI.new_empty(inner_PI.shape)
        if self.need_weights:
            self.grad_weights_P = inner_PI.new_empty(rows, dtype=weight_dtype(inner_PI.dtype))
        if self.need[1]:
            self.z_PF = inner_PI.new_empty(rows, grad_z_PF.shape[1])
        weighted_activation_backward_into(
            grad_inner_PI,
            self.grad_weights_P,
            self.z_PF,
            grad_z_PF,
            inner_PI,
            self.weights_P,
            self.offsets_L,
            activation=self.call.activation,
        )
        for done in ("down backward", *(("up again",) if self.call.keep != "all" else ())):
            results.drop(done)
        return grad_inner_PI

    def _up_backward(self, results: Results) -> Tensor:
        return self.products.grouped_mm_dgrad(results["activation backward"], self.w_in, self.offsets_L)

    def _home(self, results: Results) -> tuple[Tensor, Tensor | None]:
        results["activation backward"]  # the weights' gradients were made there
        found = self.call.comm.dispatch_backward(
            results["up backward"], self.handle, grad_weights=self.grad_weights_P
        )
        results.drop("up backward")
        return found

    def _down_weights(self, results: Results) -> Tensor:
        assert self.z_PF is not None
        gradient = self.products.grouped_mm_wgrad(self.z_PF, results["gradient rows"], self.offsets_L)
        results.drop("gradient rows")
        self.z_PF = None
        return gradient

    def _up_weights(self, results: Results) -> Tensor:
        grad_inner_PI: Tensor = results["activation backward"]
        return self.products.grouped_mm_wgrad(self._rows(results), grad_inner_PI, self.offsets_L)

    def _sum(self, results: Results) -> Tensor | None:
        grad_x_TH, _ = results["home"]
        shared_x_TH = results["shared backward"][0]
        return grad_x_TH if shared_x_TH is None else grad_x_TH.add_(shared_x_TH)

    def _defer(self, deferred: Deferred, results: Results) -> None:
        need_in, need_out, *_ = self.need

        def compute() -> tuple[Tensor | None, Tensor | None]:
            with torch.no_grad(), without_autocast(self.grad_y_TH.device.type):
                grad_out = self._down_weights(results) if need_out else None
                return self._up_weights(results) if need_in else None, grad_out

        if need_in or need_out:
            deferred.pending.append(compute)
