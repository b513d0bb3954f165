"""The microbatches of a training step: through one layer, beside its products alone, and through blocks of a
transformer. The gradients of weights add up in the parameters' `grad`, as in a training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from moecomm import Communicator
from moecomm.nn import MoELayer, backward_weights

from ..harness import inputs, verify
from ..harness import options as named
from ..harness.case import Case, Experts, LayerCase, corrupt, poison
from ..harness.options import ATTENTION, MOST_LAYERS, WIDE
from ..harness.path import IN_A_ROW, STEP, WHOLE, NotRun, Path, Verdict, Yardstick, attempt
from ..harness.timing import Clock, slowest
from .attention import Attention
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


# -- whole models --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer: x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, attention: Attention, layer: MoELayer, hidden: int) -> None:
        super().__init__()
        weight = next(attention.parameters())
        self.attention, self.layer = attention, layer
        self.norm = nn.RMSNorm(hidden, eps=1e-6, dtype=weight.dtype, device=weight.device)

    def forward(self, x_TH: Tensor) -> Tensor:
        x_TH = self.attention(x_TH[None])[0]
        y_TH: Tensor = x_TH + self.layer(self.norm(x_TH))
        return y_TH


class _OfAModel(Variants):
    """Makes the variants of a model's microbatches, all of them of the same layers."""

    def __init__(self, comm: Communicator, case: LayerCase, clock: Clock) -> None:
        super().__init__(comm, case, clock)
        point, options = case.point, case.options
        preset = WIDE.get(point.preset or "", point.preset or "")
        # Flags may have replaced the preset's sizes: heads shrink with --scale, as widths do.
        self.heads = ATTENTION[preset].scaled(named.PRESETS[preset].hidden // point.hidden)
        self.layers = options.layers or self._fitting()
        self.experts = [case.experts] + [
            Experts(options, point, case.rank, number) for number in range(1, self.layers)
        ]
        self.cases_LM: list[list[Case]] = [list(case.microbatches)]
        for number in range(1, self.layers):
            of_layer = replace(options, seed=options.seed + _LAYER_SEED * number)
            made = [Case(replace(of_layer, seed=of_layer.seed + 2 * each), point, case.rank)
                    for each in range(point.microbatches)]  # fmt: skip
            for each in made:
                each.weights_TK.requires_grad_()
            self.cases_LM.append(made)

    def _fitting(self) -> int:
        """The most layers up to MOST_LAYERS whose weights, gradients and activations of two microbatches fit
        beside what the check takes, on every rank."""
        case, point = self.case, self.case.point
        assert point.ffn is not None
        size = case.dtype.itemsize
        experts = case.experts.w_in.numel() + case.experts.w_out.numel()
        attention = Attention.weights(point.hidden, self.heads)
        of_a_token = 10 * point.hidden + 5 * Attention.columns(self.heads)
        kept = len(case.rows_PH) * (point.hidden + 2 * point.ffn) + point.tokens * of_a_token
        layer = size * 2 * (experts + attention + kept)
        check = 4 * 2 * point.microbatches * point.tokens * of_a_token
        if case.device.type == "cuda":
            free = torch.cuda.mem_get_info(case.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()
        fitting = max(1, min(MOST_LAYERS, int((_OF_MEMORY * free - check) // layer)))
        return int(-slowest([-float(fitting)])[0])

    def makers(self) -> dict[str, Callable[[], Path]]:
        """Returns the function that makes each variant, by name."""
        return {
            _named(name, products): partial(self._steps, _named(name, products), schedule, products)
            for products in self.case.options.products
            for name, schedule in SCHEDULES.items()
        }

    def _steps(self, name: str, schedule: Schedule, products: str | None) -> Path:
        case, point = self.case, self.case.point
        blocks = []
        for number, (cases, experts) in enumerate(zip(self.cases_LM, self.experts, strict=True)):
            generator = torch.Generator(case.device).manual_seed(case.options.seed + number)
            attention = Attention(point.hidden, self.heads, case.dtype, generator)
            blocks.append(Block(attention, make_layer(self.comm, cases, experts, products), point.hidden))
        steps = Steps(schedule, blocks, self.cases_LM)
        calls = steps.calls()

        def check(round: int) -> Verdict:
            for cases in self.cases_LM:
                for each in cases:
                    each.load(round)
            poison(*(torch.empty_like(each.x_TH) for each in steps.inputs))
            outputs = steps.run(len(steps.inputs), anew=True)
            self.settle()
            if case.options.inject_error:
                corrupt(outputs[0])
            verdicts = self._compared(blocks, steps, outputs)
            poison(*outputs, *(each.grad for each in steps.parameters))
            worst = [each.worst for each in verdicts if each.worst is not None]
            return Verdict(sum(each.wrong for each in verdicts), max(worst))

        def more() -> dict[str, dict[str, object]]:
            found: dict[str, dict[str, object]] = {phase: {"layers": self.layers} for phase in calls}
            for parameter in steps.parameters:
                parameter.grad = None
            if case.device.type == "cuda":
                found[WHOLE] |= self.memory(calls, WHOLE, computes=True)
            for parameter in steps.parameters:
                parameter.grad = None
            return found

        return Path(
            name=name,
            calls=calls,
            check=check,
            before=steps.fresh_ids,
            computes=False,  # TFLOP/s are those of experts' products alone
            blocks=True,
            waited=self.waited,
            own=True,
            more=more,
            note=f"{self.layers} layers, products by {blocks[0].layer.experts.products.name}",
        )

    def _compared(self, blocks: Sequence[Block], steps: Steps, outputs: Sequence[Tensor]) -> list[Verdict]:
        """Holds results and gradients of a whole step against those of the same blocks in a wide type, with
        experts one at a time, all microbatches at once. A block is computed again for its backward, so that
        one alone takes memory."""
        case, wide = self.case, verify.wide_type(self.case.dtype)
        copies = [
            {
                name: value.detach().to(wide).requires_grad_()
                for name, value in block.named_parameters()
                if not name.startswith("layer.")
            }
            for block in blocks
        ]
        x_MTH = torch.stack([each.x_TH.detach().to(wide) for each in steps.inputs]).requires_grad_()
        weights_L = [
            torch.cat([each.weights_TK.detach().to(wide) for each in cases]).requires_grad_()
            for cases in self.cases_LM
        ]
        verdicts: list[Verdict] = []

        def held(name: str, found: Tensor | None, wanted: Tensor | None) -> None:
            assert found is not None and wanted is not None
            depth = 2 * self.layers  # of attention and of experts
            verdicts.append(verify.compare({name: found}, {name: wanted}, case.point.dtype, depth))

        def plain_block(number: int, x_MTH: Tensor) -> Tensor:
            block, copied, cases = blocks[number], copies[number], self.cases_LM[number]
            own = self.experts[number]
            assert case.point.ffn is not None
            sizes = (case.point.hidden, case.point.ffn, case.dtype, case.device)

            def make(expert: int) -> list[Tensor]:
                return [each.to(wide) for each in inputs.expert(own.seed, expert, *sizes)]

            def take(expert: int, gradients: Sequence[Tensor]) -> None:
                place = expert - case.rank * case.local
                for name, weight, wanted in zip(
                    (verify.DW_IN, verify.DW_OUT), (own.w_in, own.w_out), gradients, strict=True
                ):
                    assert weight.grad is not None
                    held(name, weight.grad[place : place + 1], wanted[None])

            of_attention = {
                name.removeprefix("attention."): value
                for name, value in copied.items()
                if name.startswith("attention.")
            }
            x_MTH = functional_call(block.attention, of_attention, (x_MTH,))
            h_MTH = nn.functional.rms_norm(x_MTH, x_MTH.shape[-1:], copied["norm.weight"], eps=1e-6)
            ids_TK = torch.cat([each.topk_idx_TK for each in cases])
            y_TH: Tensor = verify.PlainExperts.apply(  # type: ignore[no-untyped-call]
                h_MTH.flatten(0, 1),
                weights_L[number],
                ids_TK,
                case.options.activation,
                case.point.experts,
                make,
                take,
            )
            return x_MTH + y_TH.view_as(x_MTH)

        y_MTH = x_MTH
        for number in range(len(blocks)):
            y_MTH = checkpoint(partial(plain_block, number), y_MTH, use_reentrant=False)
        y_MTH.backward(torch.stack([each.dy_TH.to(wide) for each in steps.inputs]))
        assert x_MTH.grad is not None
        for number, each in enumerate(steps.inputs):
            held(verify.Y, outputs[number], y_MTH[number].detach())
            held(verify.DX, each.x_TH.grad, x_MTH.grad[number])
        for cases, weights_TK, block, copied in zip(self.cases_LM, weights_L, blocks, copies, strict=True):
            held(verify.DWEIGHTS, torch.cat([each.weights_TK.grad for each in cases]), weights_TK.grad)  # type: ignore[misc]
            own_parameters = dict(block.named_parameters())
            for name, value in copied.items():
                found, wanted = own_parameters[name].grad, value.grad
                assert found is not None and wanted is not None
                shape = (1, -1, found.shape[-1])
                held(verify.DW_IN, found.view(shape), wanted.view(shape))
        return verdicts


def make_models(comm: Communicator, case: LayerCase, clock: Clock) -> list[Path | Yardstick | NotRun]:
    """The variants of a model's microbatches: each schedule with each of the products that were asked for."""
    model, problem = attempt(lambda: _OfAModel(comm, case, clock))
    return [NotRun("model", problem, failed=True)] if model is None else made_of(model.makers(), case)
