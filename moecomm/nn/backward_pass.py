"""The backward of a pass of tokens through the experts, as the stages of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecomm.activation import weighted_activation_backward, weighted_activation_backward_into
from moecomm.nn.passes import Call, Deferred, of_part, without_autocast
from moecomm.nn.pool import Ticket
from moecomm.overlap import Results, backward_schedule, in_turns
from moecomm.overlap.moe import stage_name
from moecomm.routing import weight_dtype


class BackwardPass:
    """One backward: its stages take each other's results and what the forward has kept."""

    def __init__(self, ctx: Any, grad_y_TH: Tensor) -> None:
        self.call: Call = ctx.call
        self.products = self.call.products
        self.route, self.handle, self.slices = ctx.route, ctx.handle, ctx.slices
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
            *self.inners,
        ) = ctx.saved_tensors
        self.ticket: Ticket | None = ctx.ticket
        if self.ticket is not None:
            # A checkpoint has thrown the first table away and made another.
            self.ticket = self.ticket._replace(table=self.inners.pop())
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
            stage_name(step, part, parts): of_part(do, part)
            for step, do in steps.items()
            for part in range(parts)
        }
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
            parts=parts,
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

    def _from_pool(self) -> None:
        assert self.call.pool is not None and self.ticket is not None
        self.rows_PH, *self.inners = self.call.pool.pop(self.ticket)

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
        return self.products.rows_by_weights(rows, self.w_in, slices.offsets(part), slices.experts(part))

    def _down_backward(self, results: Results, part: int) -> Tensor:
        slices = self.slices
        grads = results[self._name("gradient rows", part)][slices.rows(part)]
        return self.products.rows_by_weights_transposed(
            grads, self.w_out, slices.offsets(part), slices.experts(part)
        )

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
        return self.products.rows_by_weights_transposed(
            grad_inner, self.w_in, slices.offsets(part), slices.experts(part)
        )

    def _home(self, results: Results, part: int) -> tuple[Tensor, Tensor | None] | None:
        results[self._name("activation backward", part)]  # the weights' gradients were made there
        grads = results[self._name("up backward", part)]
        found: tuple[Tensor, Tensor | None] | None = self.route.home(
            part, grads, self.handle, self.grad_weights_P
        )
        results.drop(self._name("up backward", part))
        return found

    def _down_weights(self, results: Results) -> Tensor:
        assert self.z_PF is not None
        last = self._name("gradient rows", self.call.parts - 1)
        gradient = self.products.rows_by_rows(self.z_PF, results[last], self.offsets_L)
        results.drop(last)
        self.z_PF = None
        return gradient

    def _up_weights(self, results: Results) -> Tensor:
        assert self.grad_inner_PI is not None
        rows_PH = self._rows(results, self.call.parts - 1)
        return self.products.rows_by_rows(rows_PH, self.grad_inner_PI, self.offsets_L)

    def _sum(self, results: Results) -> Tensor | None:
        grad_x_TH, _ = results[self._name("home", self.call.parts - 1)]
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
