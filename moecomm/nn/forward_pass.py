"""The forward of a pass of tokens through the experts, as the stages of a schedule; and what of it has to be
done again where a checkpoint has thrown away what it kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm.activation import INPUTS, weighted_activation_into
from moecomm.nn.passes import Call, Weights, of_part, without_autocast
from moecomm.nn.pool import Ticket
from moecomm.nn.routes import Route, Slices, make_route
from moecomm.overlap import Results, forward_schedule, in_turns, recompute_schedule
from moecomm.overlap.moe import stage_name
from moecomm.types import DispatchOutput, Handle


class Known(NamedTuple):
    """What a dispatch has found, so that nobody need find it again."""

    handle: Handle
    slices: Slices
    weights_P: Tensor
    offsets_L: Tensor


class ForwardPass:
    """One forward. `run` does all of it. With what an earlier one has found, `prepare` makes again what a
    backward needs, with no new plan, and `finish` the rest, if that is wanted at all."""

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
        self.route: Route = make_route(
            call.comm, call.capacity, call.parts, None if known is None else known.handle
        )
        self._rows_PH: Tensor | None = None
        self._inners: list[Tensor] = []
        self._shared_inner_TI: Tensor | None = None
        self.keeps = True
        """False: nothing goes to the pool; the ticket is like one of a pass that keeps."""
        self.ticket: Ticket | None = None
        """Of what the pool has."""

    @property
    def known(self) -> Known:
        """From the dispatch on."""
        assert self._known is not None
        return self._known

    def run(self) -> Tensor:
        """(T, H)."""
        call, parts = self.call, self.call.parts
        shared = self.weights.shared_in is not None
        steps: dict[str, Callable[[Results, int], Any]] = {
            "dispatch": self._dispatch,
            "up": self._up,
            "activation": lambda results, part: self._activation(results[self._name("up", part)], part),
            "down": lambda results, part: self._down(results[self._name("activation", part)], part),
            "combine": lambda results, part: self._combine(results, part),
        }
        work: dict[str, Callable[[Results], Any]] = {
            self._name(step, part): of_part(do, part) for step, do in steps.items() for part in range(parts)
        }
        work["publish"] = lambda _: self.route.publish(self.x_TH, call.topk_idx_TK, self.topk_weights_TK)
        last = self._name("combine", parts - 1)
        if shared:
            work["shared experts"] = lambda _: self._share()
            work["sum"] = lambda results: results[last].add_(results["shared experts"])
        pool = call.pool is not None
        if pool:
            work["to pool"] = lambda results: self._to_pool(results, "dispatch")
        schedule = forward_schedule(
            shared=shared,
            parts=parts,
            split=call.split,
            pool=pool,
            in_turns=in_turns() and call.capacity is None,
        )
        results = self._execute(schedule, work)
        if call.runs is not None:
            call.runs.forward = results.recorded
        y_TH: Tensor = results["sum" if shared else last]
        return y_TH

    def prepare(self) -> None:
        """What `kept` has, along the plan that is known."""
        call, parts = self.call, self.call.parts
        shared = self.weights.shared_in is not None
        work: dict[str, Callable[[Results], Any]] = {}
        for part in range(parts):
            if call.keep != "nothing":
                work[self._name("rows again", part)] = of_part(self._rows_again, part)
            if call.keep == "all":
                work[self._name("up again", part)] = of_part(self._up_again, part)
        if shared:
            work["shared experts"] = lambda _: self._share_first()
        pool = call.pool is not None
        if pool:
            work["to pool"] = lambda results: self._to_pool(results, "rows again")
        self._execute(recompute_schedule(shared=shared, keep=call.keep, parts=parts, pool=pool), work)

    def finish(self) -> Tensor:
        """(T, H), after `prepare`."""
        y_TH: Tensor | None = None
        with self._without_autocast():
            if self.call.keep == "nothing":
                for part in range(self.call.parts):
                    self._rows_PH = self.route.send_again(part, "rows", self.x_TH, self.known.handle)
            if self.call.keep != "all":
                assert self._rows_PH is not None
                rows_PH = self._rows_PH
                self._inners = [self._first_product(rows_PH, part) for part in range(self.call.parts)]
            for part, inner in enumerate(self._inners):
                y_TH = self.route.combine(part, self._down(self._activation(inner, part), part))
            assert y_TH is not None
            return y_TH if self.weights.shared_in is None else y_TH.add_(self._share_second())

    def kept(self, need_in: bool) -> tuple[Tensor | None, ...]:
        """What a backward needs, beside the weights; what is in the pool is not among it, but the ticket's
        table comes last. `need_in`: w_in needs a gradient."""
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
            *(self._inners if keep == "all" else ()),
        )

    def _to_pool(self, results: Results, rows_from: str) -> None:
        """`rows_from`: the stage that has received them."""
        results[self._name(rows_from, 0)]
        assert self.call.pool is not None and self._rows_PH is not None
        inners = self._inners if self.call.keep == "all" else []
        kept, pool = (self._rows_PH, *inners), self.call.pool
        if self.keeps:
            self.ticket = pool.owned(pool.push(*kept, ends=self.known.offsets_L))
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

    def _name(self, step: str, part: int) -> str:
        return stage_name(step, part, self.call.parts)

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

    def _dispatch(self, results: Results, part: int) -> DispatchOutput:
        out = self.route.receive(part)
        overflow = self.call.overflow
        if overflow is not None:
            torch.maximum(overflow, out.overflow, out=overflow)
        return out

    def _up(self, results: Results, part: int) -> Tensor:
        out: DispatchOutput = results[self._name("dispatch", part)]
        if self._known is None:
            assert out.weights is not None
            slices = Slices(out, self.weights.w_in.shape[0])
            self._known = Known(out.handle, slices, out.weights, out.offsets)
            self._rows_PH = out.tokens
        inner = self._first_product(out.tokens, part)
        if self.call.keep == "all":
            self._inners.append(inner)
        return inner

    def _rows_again(self, results: Results, part: int) -> Tensor:
        self._rows_PH = self.route.send_again(part, "rows", self.x_TH, self.known.handle)
        return self._rows_PH

    def _up_again(self, results: Results, part: int) -> None:
        self._inners.append(self._first_product(results[self._name("rows again", part)], part))

    def _first_product(self, rows_PH: Tensor, part: int) -> Tensor:
        slices = self.known.slices
        return self.call.products.rows_by_weights(
            rows_PH[slices.rows(part)], self.weights.w_in, slices.offsets(part), slices.experts(part)
        )

    def _activation(self, inner: Tensor, part: int) -> Tensor:
        slices = self.known.slices
        weights = self.known.weights_P[slices.rows(part)]
        return self._activated(inner, weights, slices.ends(part))

    def _down(self, z: Tensor, part: int) -> Tensor:
        slices = self.known.slices
        return self.call.products.rows_by_weights(
            z, self.weights.w_out, slices.offsets(part), slices.experts(part)
        )

    def _combine(self, results: Results, part: int) -> Tensor | None:
        y_TH = self.route.combine(part, results[self._name("down", part)])
        for done in ("activation", "up"):
            results.drop(self._name(done, part))
        return y_TH
