"""The microbatches of a training step: through one layer, beside its products alone, and through blocks of a
transformer. The gradients of weights add up in the parameters' `grad`, as in a training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from moecomm import Communicator
from moecomm.nn import MoELayer, backward_weights

from ..harness import options as named
from ..harness import verify
from ..harness.case import Case, LayerCase
from ..harness.path import IN_A_ROW, STEP, WHOLE, NotRun, Path, Yardstick
from ..harness.timing import Clock
from .layer_variants import FixedRouting, Results, Variants, made_of, make_layer

Schedule = Callable[[Sequence[nn.Module], Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""Runs microbatches through blocks, forward and backward, given inputs and gradients of the results; leaves
gradients of inputs and weights in `grad`, and returns the results. Routers are called in the order of the
microbatches."""
_OF_MEMORY = 0.8  # the part of the free memory that a model may take
_LAYER_SEED = 1000  # added to the seed for each layer of a model, beyond the microbatches of one


def _named(name: str, products: str | None) -> str:
    """The name of a schedule's variant with these products."""
    return name if products is None else f"{name}, {products}"


def one_after_the_other(
    blocks: Sequence[nn.Module], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The forward and the backward of a microbatch, then those of the next."""
    results: list[Tensor] = []
    for x_TH, dy_TH in zip(inputs, gradients, strict=True):
        for block in blocks:
            x_TH = block(x_TH)
        x_TH.backward(dy_TH)
        results.append(x_TH.detach())
    return results


def weights_together(
    blocks: Sequence[nn.Module], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """One after the other, with the gradients of the experts' weights of all microbatches at the end."""
    layers = [each for block in blocks for each in block.modules() if isinstance(each, MoELayer)]
    for each in layers:
        each.overlap = replace(each.overlap, defer_weights=True)
    results = one_after_the_other(blocks, inputs, gradients)
    for block in blocks:
        backward_weights(block)
    return results


SCHEDULES: dict[str, Schedule] = {
    "one after the other": one_after_the_other,
    "weights together": weights_together,
}


class Steps:
    """The steps of a schedule over blocks, whose routers have a case for each microbatch: `cases_LM`, by
    block and microbatch. The first block's cases have the inputs."""

    def __init__(
        self, schedule: Schedule, blocks: Sequence[nn.Module], cases_LM: Sequence[Sequence[Case]]
    ) -> None:
        self.schedule, self.blocks, self.cases_LM = schedule, blocks, cases_LM
        self.inputs = [case for case in cases_LM[0] if isinstance(case, LayerCase)]
        self.parameters = [each for block in blocks for each in block.parameters()]
        self._routers = [
            each for block in blocks for each in block.modules() if isinstance(each, FixedRouting)
        ]

    def calls(self) -> dict[str, Callable[[], list[Tensor]]]:
        """What is timed, by phase."""
        count = len(self.inputs)
        return {
            STEP: partial(self.run, 1, anew=True),
            IN_A_ROW: partial(self.run, count, anew=False),
            WHOLE: partial(self.run, count, anew=True),
        }

    def run(self, count: int, *, anew: bool) -> list[Tensor]:
        """Runs the first microbatches; `anew`: the weights have no gradients before."""
        for each in self._routers:
            each.restart()
        for parameter in self.parameters if anew else ():
            parameter.grad = None
        for cases in self.cases_LM:
            for case in cases:
                case.x_TH.grad = case.weights_TK.grad = None
        some = self.inputs[:count]
        return self.schedule(self.blocks, [each.x_TH for each in some], [each.dy_TH for each in some])

    def fresh_ids(self) -> None:
        """Puts other ids with the same traffic into all cases."""
        for cases in self.cases_LM:
            for case in cases:
                case.fresh_ids()


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
            for name, schedule in SCHEDULES.items():
                full = _named(name, products)
                found[full] = partial(self._steps, full, schedule, products)
        return found

    def _steps(self, name: str, schedule: Schedule, products: str | None) -> Path:
        case = self.case
        layer = make_layer(self.comm, case.microbatches, case.experts, products)
        steps = Steps(schedule, [layer], [case.microbatches])
        weights = (layer.experts.w_in, layer.experts.w_out)

        def run() -> Iterable[list[Results]]:
            """A whole step, then the same once more on top of its gradients, which doubles them."""
            for anew in (True, False):
                outputs = steps.run(len(steps.inputs), anew=anew)
                found = [
                    {verify.Y: y_TH, verify.DX: each.x_TH.grad, verify.DWEIGHTS: each.weights_TK.grad}
                    for y_TH, each in zip(outputs, steps.inputs, strict=True)
                ]
                for key, weight in zip((verify.DW_IN, verify.DW_OUT), weights, strict=True):
                    assert weight.grad is not None
                    found[0][key] = weight.grad if anew else weight.grad.mul_(0.5)
                yield found  # type: ignore[misc]  # a grad that is not there is an error of its own

        return self.path(
            name,
            steps.calls(),
            run,
            layer=layer,
            before=steps.fresh_ids,
            blocks=True,
            waited=self.waited,
            note=f"products by {layer.experts.products.name}",
        )


def make_microbatches(comm: Communicator, case: LayerCase, clock: Clock) -> list[Path | Yardstick | NotRun]:
    """The variants of a layer's microbatches: products alone, by torch and by quack, and each schedule with
    each of the products that were asked for."""
    return made_of(_OfALayer(comm, case, clock).makers(), case)
