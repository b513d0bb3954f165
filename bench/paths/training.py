"""The microbatches of a training step through one layer, beside its products alone. The gradients of weights
add up in the parameters' `grad`, as in a training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moecomm import Communicator
from moecomm.nn import MoELayer, backward_weights

from ..harness import options as named
from ..harness import verify
from ..harness.case import LayerCase
from ..harness.path import IN_A_ROW, STEP, WHOLE, NotRun, Path, Yardstick
from ..harness.timing import Clock
from .layer_variants import FixedRouting, Results, Variants, made_of, make_layer
from .liger_layer import LigerLayer

Schedule = Callable[[MoELayer, Sequence[LayerCase]], list[Tensor]]
"""Runs microbatches forward and backward, in their order; leaves gradients of inputs and weights in `grad`,
and returns the results."""


def one_after_the_other(layer: MoELayer | LigerLayer, cases: Sequence[LayerCase]) -> list[Tensor]:
    """The forward and the backward of a microbatch, then those of the next."""
    results: list[Tensor] = []
    for case in cases:
        y_TH = layer(case.x_TH)
        y_TH.backward(case.dy_TH)
        results.append(y_TH.detach())
    return results


def weights_together(layer: MoELayer, cases: Sequence[LayerCase]) -> list[Tensor]:
    """One after the other, with the gradients of the experts' weights of all microbatches at the end."""
    layer.overlap = replace(layer.overlap, defer_weights=True)
    results = one_after_the_other(layer, cases)
    backward_weights(layer)
    return results


SCHEDULES: dict[str, Schedule] = {
    "one after the other": one_after_the_other,
    "weights together": weights_together,
}


class _OfALayer(Variants):
    """Makes the variants of a layer's microbatches."""

    def makers(self) -> dict[str, Callable[[], Path]]:
        """Returns the function that makes each variant, by name."""
        case = self.case
        phases = {STEP: [case], IN_A_ROW: case.microbatches}
        found: dict[str, Callable[[], Path]] = {
            name: partial(self.products, name, phases, products)
            for name, products in ((named.TORCH_PRODUCTS, "torch"), (named.QUACK_PRODUCTS, "quack"))
        }
        for products in case.options.products:
            for schedule in SCHEDULES:
                name = schedule if products is None else f"{schedule}, {products}"
                found[name] = partial(self._own_steps, name, schedule, products)
        if named.LIGER in case.options.variants:
            found[named.LIGER] = self._liger_steps
        return found

    def _own_steps(self, name: str, schedule: str, products: str | None) -> Path:
        """The steps of a layer of moecomm by a schedule."""
        layer = make_layer(self.comm, self.case.microbatches, self.case.experts, products)
        more = {"layer": layer, "blocks": True, "waited": self.waited}
        note = f"products by {layer.experts.products.name}"
        run_step = partial(SCHEDULES[schedule], layer)
        return self._steps(name, run_step, layer.router, self.weights, verify.by_name, note=note, **more)

    def _liger_steps(self) -> Path:
        """The steps of LigerCute's layer, one microbatch after the other."""
        layer = LigerLayer(self.case, FixedRouting(self.case.microbatches), self.with_shared)
        run_step = partial(one_after_the_other, layer)
        return self._steps(named.LIGER, run_step, layer.router, layer.weights, layer.by_name)

    def _steps(
        self,
        name: str,
        run_step: Callable[[Sequence[LayerCase]], list[Tensor]],
        router: nn.Module,
        weights: Sequence[Tensor],
        by_name: Callable[[Sequence[Tensor]], Results],
        **more: Any,
    ) -> Path:
        """The steps of a layer whose router has a case for each microbatch. `by_name` brings the gradients of
        its weights into moecomm's layout, under the names that verify uses."""
        cases = self.case.microbatches
        assert isinstance(router, FixedRouting)

        def step(count: int, *, anew: bool) -> list[Tensor]:
            """Runs the first microbatches; `anew`: the weights have no gradients before."""
            router.restart()
            for weight in weights if anew else ():
                weight.grad = None
            for case in cases:
                case.x_TH.grad = case.weights_TK.grad = None
            return run_step(cases[:count])

        def run() -> Iterable[list[Results]]:
            """A whole step, then the same once more on top of its gradients, which doubles them."""
            for anew in (True, False):
                outputs = step(len(cases), anew=anew)
                found = [
                    {verify.Y: y_TH, verify.DX: each.x_TH.grad, verify.DWEIGHTS: each.weights_TK.grad}
                    for y_TH, each in zip(outputs, cases, strict=True)
                ]
                grads = [weight.grad for weight in weights if weight.grad is not None]
                found[0] |= by_name([grad if anew else grad.mul_(0.5) for grad in grads])
                yield found  # type: ignore[misc]  # a grad that is not there is an error of its own

        def fresh_ids() -> None:
            for case in cases:
                case.fresh_ids()

        calls = {
            STEP: partial(step, 1, anew=True),
            IN_A_ROW: partial(step, len(cases), anew=False),
            WHOLE: partial(step, len(cases), anew=True),
        }
        return self.path(name, calls, run, before=fresh_ids, **more)


def make_microbatches(comm: Communicator, case: LayerCase, clock: Clock) -> list[Path | Yardstick | NotRun]:
    """The variants of a layer's microbatches: products alone, by torch and by quack, and each schedule with
    each of the products that were asked for."""
    return made_of(_OfALayer(comm, case, clock).makers(), case)
