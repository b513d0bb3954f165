"""The forward of tokens through the experts, as the stages of a schedule, and its recomputation for a
checkpoint that has thrown the saved tensors away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm.kernels.activation import INPUTS, weighted_activation_into
from moecomm.nn.passes import Call, Weights, without_autocast
from moecomm.nn.pool import PoolHandle
from moecomm.overlap import Results, forward_schedule, in_turns, recompute_schedule
from moecomm.types import DispatchOutput, Handle


class Known(NamedTuple):
    """The saved outcome of a dispatch, from which rows can be sent again without a new plan."""

    handle: Handle
    weights_P: Tensor
    offsets_L: Tensor


class ForwardPass:
    """One forward. `run` computes all of it. With the outcome of an earlier dispatch, `prepare` recomputes
    what a backward needs, with no new plan, and `finish` computes the result, if it is wanted."""

    def __init__(
        self,
        call: Call,
        x_TH: Tensor,
        topk_weights_TK: Tensor,
        weights: Weights,
        known: Known | None = None,
    ) -> None:
        self.call, self.x_TH, self.topk_weights_TK, self.weights = call, x_TH, topk_weights_TK, weights
        self._known = known
        self._receive: Callable[[], DispatchOutput] | None = None
        self._rows_PH: Tensor | None = None
        self._inner_PI: Tensor | None = None
        self._shared_inner_TI: Tensor | None = None
        self.keeps = True
        """False keeps nothing in the pool; the handle in `ticket` is then a blank one."""
        self.ticket: PoolHandle | None = None
        """The handle of the tensors in the pool."""

    @property
    def known(self) -> Known:
        """The outcome of the dispatch; set from the dispatch on."""
        assert self._known is not None
        return self._known

    def run(self) -> Tensor:
        """Runs the forward and returns y (T, H)."""
        call = self.call
        shared = self.weights.shared_in is not None
        work: dict[str, Callable[[Results], Any]] = {
            "publish": lambda _: self._publish(),
            "dispatch": lambda _: self._dispatch(),
            "up": self._up,
            "activation": lambda results: self._activation(results["up"]),
            "down": lambda results: self._down(results["activation"]),
            "combine": self._combine,
        }
        if shared:
            work["shared experts"] = lambda _: self._share()
            work["sum"] = lambda results: results["combine"].add_(results["shared experts"])
        pool = call.pool is not None
        if pool:
            work["to pool"] = lambda results: self._to_pool(results, "dispatch")
        schedule = forward_schedule(
            shared=shared, split=call.split, pool=pool, in_turns=in_turns() and call.capacity is None
        )
        results = self._execute(schedule, work)
        if call.runs is not None:
            call.runs.forward = results.recorded
        y_TH: Tensor = results["sum" if shared else "combine"]
        return y_TH

    def prepare(self) -> None:
        """Recomputes the tensors of `kept`, along the known plan."""
        call = self.call
        shared = self.weights.shared_in is not None
        work: dict[str, Callable[[Results], Any]] = {}
        if call.keep != "nothing":
            work["rows again"] = lambda _: self._rows_again()
        if call.keep == "all":
            work["up again"] = self._up_again
        if shared:
            work["shared experts"] = lambda _: self._share_first()
        pool = call.pool is not None
        if pool:
            work["to pool"] = lambda results: self._to_pool(results, "rows again")
        self._execute(recompute_schedule(shared=shared, keep=call.keep, pool=pool), work)

    def finish(self) -> Tensor:
        """Returns y (T, H), after `prepare`."""
        with self._without_autocast():
            if self.call.keep == "nothing":
                self._rows_again()
            if self.call.keep != "all":
                assert self._rows_PH is not None
                self._inner_PI = self._first_product(self._rows_PH)
            assert self._inner_PI is not None
            y_TH = self.call.comm.combine(self._down(self._activation(self._inner_PI)), self.known.handle)
            return y_TH if self.weights.shared_in is None else y_TH.add_(self._share_second())

    def kept(self, need_in: bool) -> tuple[Tensor | None, ...]:
        """Returns the tensors that a backward needs besides the weights. Tensors in the pool are not among
        them; the table of the pool's handle comes last instead. `need_in`: w_in needs a gradient."""
        keep = self.call.keep
        shared = self.weights.shared_in is not None
        if self.ticket is not None:
            return (
                self.x_TH if shared else None,
                None,
                self.known.weights_P,
                self.known.offsets_L,
                self._shared_inner_TI,
                self.ticket.table,
            )
        keeps_rows = keep != "nothing" and (need_in or keep == "rows")
        return (
            self.x_TH if shared or keep == "nothing" else None,
            self._rows_PH if keeps_rows else None,
            self.known.weights_P,
            self.known.offsets_L,
            self._shared_inner_TI,
            self._inner_PI if keep == "all" else None,
        )

    def _to_pool(self, results: Results, rows_from: str) -> None:
        """Puts the rows, and the first product if kept, into the pool. `rows_from`: the stage that has
        received the rows."""
        results[rows_from]
        assert self.call.pool is not None and self._rows_PH is not None
        inner = (self._inner_PI,) if self._inner_PI is not None else ()
        kept, pool = (self._rows_PH, *inner), self.call.pool
        if self.keeps:
            self.ticket = pool.owned(pool.stash(*kept, ends=self.known.offsets_L))
        else:
            self.ticket = pool.blank(*kept)

    def _execute(self, schedule: Any, work: dict[str, Callable[[Results], Any]]) -> Results:
        with self._without_autocast():
            call = self.call
            return call.executor.run(
                schedule, work, record=call.runs is not None, in_turns_sms=call.in_turns_sms
            )

    def _without_autocast(self) -> Any:
        return without_autocast(self.x_TH.device.type)

    def _share(self) -> Tensor:
        self._share_first()
        return self._share_second()

    def _share_first(self) -> None:
        assert self.weights.shared_in is not None
        self._shared_inner_TI = self.x_TH @ self.weights.shared_in

    def _share_second(self) -> Tensor:
        assert self._shared_inner_TI is not None and self.weights.shared_out is not None
        return self._activated(self._shared_inner_TI) @ self.weights.shared_out

    def _activated(
        self, inner: Tensor, weights_P: Tensor | None = None, ends_L: Tensor | None = None
    ) -> Tensor:
        activation = self.call.activation
        z = inner.new_empty(inner.shape[0], inner.shape[1] // INPUTS[activation])
        weighted_activation_into(z, inner, weights_P, ends_L, activation=activation)
        return z

    def _publish(self) -> None:
        """Sends the rows. Without a capacity, receiving waits for their number. In a program of `interleave`
        other programs' operations may come before that, and the rows are received on the communicator's
        stream."""
        call = self.call
        tokens = (self.x_TH, call.topk_idx_TK, self.topk_weights_TK)
        if call.capacity is not None:
            out = call.comm.dispatch(*tokens, capacity=call.capacity)
            self._receive = lambda: out
        elif in_turns():
            self._receive = call.comm.dispatch(*tokens, async_op=True).wait
        else:
            self._receive = call.comm.begin_dispatch(*tokens)

    def _dispatch(self) -> DispatchOutput:
        receive, self._receive = self._receive, None
        assert receive is not None
        out = receive()
        overflow = self.call.overflow
        if overflow is not None:
            torch.maximum(overflow, out.overflow, out=overflow)
        return out

    def _up(self, results: Results) -> Tensor:
        out: DispatchOutput = results["dispatch"]
        assert out.weights is not None
        self._known = Known(out.handle, out.weights, out.offsets)
        self._rows_PH = out.tokens
        inner_PI = self._first_product(out.tokens)
        if self.call.keep == "all":
            self._inner_PI = inner_PI
        return inner_PI

    def _rows_again(self) -> Tensor:
        self._rows_PH = self.call.comm.redispatch(self.x_TH, self.known.handle)
        return self._rows_PH

    def _up_again(self, results: Results) -> None:
        self._inner_PI = self._first_product(results["rows again"])

    def _first_product(self, rows_PH: Tensor) -> Tensor:
        return self.call.products.grouped_mm(rows_PH, self.weights.w_in, self.known.offsets_L)

    def _activation(self, inner_PI: Tensor) -> Tensor:
        return self._activated(inner_PI, self.known.weights_P, self.known.offsets_L)

    def _down(self, z_PF: Tensor) -> Tensor:
        return self.call.products.grouped_mm(z_PF, self.weights.w_out, self.known.offsets_L)

    def _combine(self, results: Results) -> Tensor:
        y_TH = self.call.comm.combine(results["down"], self.known.handle)
        for done in ("activation", "up"):
            results.drop(done)
        return y_TH
