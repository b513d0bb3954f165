"""The variants of a layer that are timed: moecomm's, its products or transfers alone, and the baseline."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import moecomm
from moecomm.nn import GraphedStep, GroupedExperts, MoEConfig, MoELayer, OverlapConfig, Routing

from ..harness import options as named
from ..harness import verify
from ..harness.case import Case, Experts, LayerCase, corrupt, poison
from ..harness.options import GRAPH_VARIANTS, HEADROOM, KEEPS, keep_name
from ..harness.path import FORWARD, STEP, NotRun, Path, Verdict, Yardstick, attempt
from ..harness.timing import Clock, mean_over_ranks, slowest
from .captured import Captured
from .liger_layer import LigerLayer
from .plain_layer import PlainLayer, swiglu_experts

IN_ORDER = OverlapConfig(overlap=False)
Results = dict[str, Tensor]
"""The result and the gradients of a step, under the names that verify uses."""
_RECORDED = 5  # steps, of which the one of median length says what is exposed


def make_variants(
    comm: moecomm.Communicator, case: LayerCase, clock: Clock
) -> list[Path | Yardstick | NotRun]:
    """The dense product and the variants asked for, or those around graph replay."""
    wanted = GRAPH_VARIANTS if case.point.graphs else case.options.variants
    makers = _Variants(comm, case, clock).makers()
    return made_of({name: make for name, make in makers.items() if name in wanted}, case)


def made_of(makers: Mapping[str, Callable[[], Path]], case: LayerCase) -> list[Path | Yardstick | NotRun]:
    """Makes the dense product and each variant; one that cannot be made on any rank runs on none."""
    made: list[Path | Yardstick | NotRun] = [_dense_path(case)]
    for name, make in makers.items():
        if reason := _why_not(name, case):
            made.append(NotRun(name, reason))
            continue
        path, problem = attempt(make)
        # What this machine's torch or GPU does not have is no failure of moecomm.
        missing = name in named.PEERS or problem.startswith("Unsupported: ")
        made.append(path or NotRun(name, problem, failed=not missing))
    return made


def _why_not(name: str, case: LayerCase) -> str:
    """The reason why a variant cannot be on this device, or of this case; "" if it can."""
    if name in (named.GRAPH, named.GRAPHED) and case.device.type != "cuda":
        return "CUDA graphs are of GPUs"
    if name == named.BASELINE and case.options.activation != "swiglu":
        return "a plain framework has its gates in halves: --activation swiglu"
    if name == named.LIGER and (case.device.type, case.dtype) != ("cuda", torch.bfloat16):
        return "LigerCute is for bfloat16 on GPUs"
    return ""


def _dense_path(case: LayerCase) -> Path:
    """Makes the path of one dense product; the rates of the variants are given as shares of its rate."""
    rows, inner, columns = case.options.dense
    left = torch.randn(rows, inner, dtype=case.dtype, device=case.device)
    right = torch.randn(inner, columns, dtype=case.dtype, device=case.device)

    def check(round: int) -> Verdict:
        """Sums of all columns: the product's, and the factors'."""
        sums = torch.mm(left, right).to(torch.float64).sum(1)
        want = left.to(torch.float64) @ right.to(torch.float64).sum(1)
        allowed = 2.0**-4 * (want.square().mean().sqrt() + want.abs())
        return Verdict(int((~((sums - want).abs() <= allowed)).sum()))

    return Path(name=named.DENSE, calls={STEP: lambda: torch.mm(left, right)}, check=check, remote=False)


class FixedRouting(nn.Module):
    """The routing of cases in the place of a router, so that no variant's time has a router in it: each call
    takes the next one's."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        experts, device = cases[0].point.experts, cases[0].device
        self._turn = 0
        self._routings = [
            Routing(
                topk_idx_TK=case.topk_idx_TK,
                topk_weights_TK=case.weights_TK,
                scores_TE=torch.empty(0, experts, device=device),
                losses={},
                tokens_per_expert_E=torch.zeros(experts, dtype=torch.int64, device=device),
            )
            for case in cases
        ]

    def restart(self) -> None:
        """Begins with the first case again."""
        self._turn = 0

    def forward(self, x_TH: Tensor, seq_len: int | None = None) -> Routing:
        self._turn += 1
        return self._routings[(self._turn - 1) % len(self._routings)]


def make_layer(
    comm: moecomm.Communicator,
    cases: Sequence[Case],
    experts: Experts,
    products: str | None,
    *,
    overlap: OverlapConfig | None = None,
) -> MoELayer:
    """A layer with the cases' routings and experts whose weights all layers share. `products`: None leaves
    them to moecomm."""
    options, point = cases[0].options, cases[0].point
    assert point.ffn is not None
    # A layer draws its weights on the CPU, which would take minutes: they are put in afterwards.
    with mock.patch.object(GroupedExperts, "reset_parameters"):
        config = MoEConfig(
            hidden=point.hidden,
            ffn_hidden=point.ffn,
            num_experts=point.experts,
            top_k=point.topk,
            num_shared_experts=point.shared,
            activation=options.activation,
            pre_softmax=True,
            dtype=cases[0].dtype,
            products=products,
        )
        overlap = overlap or OverlapConfig()
        layer = MoELayer(config, comm, overlap=overlap)
    layer.experts.w_in, layer.experts.w_out = experts.w_in, experts.w_out
    if layer.shared is not None:
        layer.shared.w_in, layer.shared.w_out = experts.shared
    layer.add_module("router", FixedRouting(cases))
    return layer.eval()


class Variants:
    """What the variants of one case have in common."""

    def __init__(self, comm: moecomm.Communicator, case: LayerCase, clock: Clock) -> None:
        self.comm, self.case, self.clock = comm, case, clock
        self.weights = (case.experts.w_in, case.experts.w_out, *case.experts.shared)
        layer = make_layer(comm, [case], case.experts, None, overlap=IN_ORDER) if case.point.shared else None
        self.shared = layer and layer.shared

    def with_shared(self, y_TH: Tensor, x_TH: Tensor) -> Tensor:
        """Returns a layer's result y and what moecomm's shared experts make of x; without any, y itself, so
        that no peer is timed with a sum that it does not need."""
        return y_TH if self.shared is None else y_TH + self.shared(x_TH)

    def path(
        self,
        name: str,
        calls: Mapping[str, Callable[[], object]],
        run: Callable[[], Iterable[Sequence[Results]]],
        *,
        layer: MoELayer | None = None,
        keeps_memory: bool = False,
        **more: Any,
    ) -> Path:
        """A variant, checked by what `run` yields: the results of every microbatch, those of the experts'
        weights with the first, as often as it likes. `layer` records timelines; `keeps_memory`: its memory is
        there before a call, too.
        """
        case, options = self.case, self.case.options

        def check(round: int) -> Verdict:
            wanted = verify.wanted(case, round)
            # Memory that the allocator may well hand out for results.
            poison(*map(torch.empty_like, (case.x_TH, case.experts.w_in, case.rows_PH)))
            verdicts: list[Verdict] = []
            grads: list[Tensor] = []
            for results in run():
                self.settle()
                if options.inject_error:
                    corrupt(next(iter(results[0].values())))
                for found, want in zip(results, wanted, strict=True):
                    verdicts.append(verify.compare(found, want, case.point.dtype))
                    poison(*(value for key, value in found.items() if key not in verify.OF_WEIGHTS))
                    grads = [found[key] for key in verify.OF_WEIGHTS if key in found] or grads
            poison(*grads)
            worst = [each.worst for each in verdicts if each.worst is not None]
            return Verdict(sum(each.wrong for each in verdicts), max(worst))

        def measure_more() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {phase: {} for phase in calls}
            if layer is not None:
                for phase, exposed in self._exposed(layer, more.get("before"), calls[STEP]).items():
                    found.setdefault(phase, {}).update(exposed)
            if case.device.type == "cuda" and not keeps_memory:
                last = list(calls)[-1]
                found[last] |= self.memory(calls, last, computes=more.get("computes", True))
            self.settle()
            return found

        return Path(
            name=name, calls=calls, check=check, own=name not in named.PEERS, more=measure_more, **more
        )

    def settle(self) -> None:
        """Waits for the device; raises what it found."""
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()
        self.comm.check()

    def waited(self) -> float:
        """The seconds that the host has waited for the GPU in the communicator."""
        return float(self.comm.stats().get("host_wait_seconds", 0.0))

    def products(self, name: str, phases: Mapping[str, Sequence[LayerCase]], products: str | None) -> Path:
        """The experts alone, as moecomm.nn has them, on rows that are here already; `phases` says of which
        cases."""
        case = self.case
        experts = make_layer(self.comm, [case], case.experts, products, overlap=IN_ORDER).experts

        def forward(case: LayerCase) -> tuple[Tensor, ...]:
            rows_PH: Tensor = experts(case.rows_PH, case.offsets_L, case.weights_P, has_tail=False)
            return (rows_PH,) if self.shared is None else (rows_PH, self.shared(case.x_TH))

        def step(case: LayerCase) -> Results:
            outputs = forward(case)
            leaves, dy = (case.rows_PH, case.weights_P, *self.weights), (case.dy_PH, case.dy_TH)
            drows, dweights, *grads = torch.autograd.grad(outputs, leaves, dy[: len(outputs)])
            found = {verify.ROWS_OUT: outputs[0].detach(), verify.DROWS: drows, verify.DROW_WEIGHTS: dweights}
            return found | verify.by_name(grads)

        def all_of(call: Callable[[LayerCase], object], cases: Sequence[LayerCase]) -> object:
            for each in cases[:-1]:
                call(each)
            return call(cases[-1])

        def run() -> Iterable[list[Results]]:
            found = [step(case)]
            for each in case.microbatches[1:]:
                found.append(step(each))
                for key in found[0].keys() & verify.OF_WEIGHTS:
                    found[0][key].add_(found[-1].pop(key))
            yield found

        calls = {
            phase: partial(all_of, forward if phase == FORWARD else step, cases)
            for phase, cases in phases.items()
        }
        note = f"products by {experts.products.name}"
        return self.path(name, calls, run, remote=False, note=note)

    # -- what is measured besides the times ----------------------------------------------------------------

    def memory(
        self, calls: Mapping[str, Callable[[], object]], phase: str, *, computes: bool
    ) -> dict[str, Any]:
        """The peak of a phase over what was there, and what a forward leaves for its backward; of the rank
        where they are largest.
        """

        def start() -> int:
            for each in self.weights:
                each.grad = None
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            return int(torch.cuda.memory_allocated())

        before = start()
        results = calls[phase]()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del results
        found = {"memory_bytes": float(peak - before)}
        if FORWARD not in calls:
            return dict(zip(found, map(int, slowest(list(found.values()))), strict=True))
        before = start()
        result = calls[FORWARD]()
        torch.cuda.synchronize()
        own = result.untyped_storage().nbytes() if isinstance(result, Tensor) else 0
        found["kept_bytes"] = float(torch.cuda.memory_allocated() - before - own)
        del result
        largest = dict(zip(found, map(int, slowest(list(found.values()))), strict=True))
        return largest if computes else {**largest, "kept_bytes": None}

    def _exposed(
        self, layer: MoELayer, before: Callable[[], None] | None, step: Callable[[], object]
    ) -> dict[str, dict[str, Any]]:
        """Recorded steps, under the clock that times them: of the one of median length the part in which
        something communicates and nothing computes, mean over ranks.
        """
        layer.overlap = replace(layer.overlap, record=True)
        steps = []
        for _ in range(_RECORDED):
            if before is not None:
                before()
            self.clock.time(step)
            steps.append(layer.timelines())
        layer.overlap = replace(layer.overlap, record=False)
        steps.sort(key=lambda each: each["forward"].seconds + each["backward"].seconds)
        median = steps[len(steps) // 2]
        forward, backward = median["forward"], median["backward"]
        exposed_s = forward.exposed_seconds + backward.exposed_seconds
        whole_s = forward.seconds + backward.seconds
        share = exposed_s / whole_s if whole_s > 0 else 0.0
        means = mean_over_ranks([forward.exposed_share, forward.exposed_seconds, share, exposed_s])
        return {
            FORWARD: {"exposed_share": means[0], "exposed_s": means[1]},
            STEP: {"exposed_share": means[2], "exposed_s": means[3]},
        }


class _Variants(Variants):
    """Makes the variants of one call of a layer."""

    def makers(self) -> dict[str, Callable[[], Path]]:
        """Returns the function that makes each variant, by name."""
        layer, case = self._layer_path, self.case
        phases, products = {FORWARD: [case], STEP: [case]}, case.options.products[0]
        keeping = {
            keep_name(keep): partial(layer, keep_name(keep), overlap=OverlapConfig(keep=keep))
            for keep in KEEPS
        }
        return {
            named.COMPUTE: partial(self.products, named.COMPUTE, phases, products),
            named.COMM: self._communication,
            named.SERIAL: partial(layer, named.SERIAL, overlap=IN_ORDER),
            **keeping,
            named.FIXED: partial(layer, named.FIXED, capacity=case.fixed_rows),
            named.GRAPH: self._graph_replay,
            named.GRAPHED: self._graphed_step,
            named.BASELINE: self._baseline,
            named.LIGER: self._liger,
        }

    def _call(
        self, name: str, forward: Callable[[], object], step: Callable[[], Results], **more: Any
    ) -> Path:
        return self.path(name, {FORWARD: forward, STEP: step}, lambda: [[step()]], **more)

    def _layer(self, *, capacity: int | None = None, **how: Any) -> MoELayer:
        case = self.case
        layer = make_layer(self.comm, [case], case.experts, case.options.products[0], **how)
        layer.capacity = capacity
        return layer

    def _backward(self, y_TH: Tensor) -> Results:
        case = self.case
        leaves = (case.x_TH, case.weights_TK, *self.weights)
        dx, dweights, *grads = torch.autograd.grad(y_TH, leaves, case.dy_TH)
        # Detached, so that what the forward has kept goes with this call.
        found = {verify.Y: y_TH.detach(), verify.DX: dx, verify.DWEIGHTS: dweights}
        return found | verify.by_name(grads)

    def _communication(self) -> Path:
        """The four transfers of a step and nothing between them: experts hand back what they get."""
        case, comm = self.case, self.comm

        def move() -> tuple[moecomm.DispatchOutput, Tensor]:
            out = comm.dispatch(case.x_TH.detach(), case.topk_idx_TK, case.weights_TK.detach())
            return out, comm.combine(out.tokens, out.handle)

        def step() -> Results:
            out, y_TH = move()
            dy_PH = comm.redispatch(case.dy_TH, out.handle)
            dx_TH, dweights_TK = comm.dispatch_backward(dy_PH, out.handle, grad_weights=out.weights)
            assert dweights_TK is not None
            moved = {verify.MOVED: out.tokens, verify.MOVED_Y: y_TH, verify.MOVED_DY: dy_PH}
            return {**moved, verify.MOVED_DX: dx_TH, verify.MOVED_DWEIGHTS: dweights_TK}

        return self._call(
            named.COMM, move, step, before=case.fresh_ids, computes=False, blocks=True, waited=self.waited
        )

    def _layer_path(self, name: str, *, capacity: int | None = None, **how: Any) -> Path:
        """A MoELayer as a training loop calls it, behind its router."""
        case, layer = self.case, self._layer(capacity=capacity, **how)

        def forward() -> Tensor:
            y_TH: Tensor = layer(case.x_TH)
            return y_TH

        return self._call(
            name,
            forward,
            lambda: self._backward(forward()),
            before=case.fresh_ids,
            layer=layer if layer.overlap.overlap else None,
            blocks=capacity is None,
            waited=self.waited,
            note=f"products by {layer.experts.products.name}"
            + ("" if capacity is None else f", {capacity} rows"),
        )

    def _graph_replay(self) -> Path:
        """The layer with a fixed number of rows, replayed from a graph of its forward and one of its step."""
        case, layer = self.case, self._layer(capacity=self.case.fixed_rows)
        forward = Captured(lambda: layer(case.x_TH).detach())
        step = Captured(lambda: self._backward(layer(case.x_TH)))
        return self._call(
            named.GRAPH,
            forward.replay,
            step.replay,
            before=case.fresh_ids,
            keeps_memory=True,
            note=f"{case.fixed_rows} rows",
        )

    def _graphed_step(self) -> Path:
        """The layer as GraphedStep runs it."""
        case, layer = self.case, self._layer()

        def step() -> Results:
            results = self._backward(layer(case.x_TH))
            for name, weight in verify.by_name(self.weights).items():
                weight.grad = results.pop(name)  # where a backward leaves them, and GraphedStep does
            return results

        def replay() -> Results:
            results: Results = graphed()
            for name, weight in verify.by_name(self.weights).items():
                assert weight.grad is not None
                results[name], weight.grad = weight.grad, None
            return results

        graphed = GraphedStep(step, layer, headroom=HEADROOM)
        forward = GraphedStep(lambda: layer(case.x_TH).detach(), layer, headroom=HEADROOM)
        return self._call(
            named.GRAPHED,
            forward,
            replay,
            before=case.fresh_ids,
            keeps_memory=True,
            blocks=True,
            note=f"{graphed.capacities[0]} rows",
        )

    def _baseline(self) -> Path:
        """The layer of a plain framework."""
        case = self.case
        layer, experts = PlainLayer(case.point.experts), case.experts

        def compute(rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
            return swiglu_experts(rows_PH, experts.w_in, experts.w_out, offsets_L)

        def forward() -> Tensor:
            y_TH = layer.forward(case.x_TH, case.topk_idx_TK, case.weights_TK, compute)
            return self.with_shared(y_TH, case.x_TH)

        return self._call(
            named.BASELINE,
            forward,
            lambda: self._backward(forward()),
            before=case.fresh_ids,
            blocks=True,
            note="nccl" if case.device.type == "cuda" else "gloo",
        )

    def _liger(self) -> Path:
        """LigerCute's layer. Its forward alone is one without a backward to come, since it keeps memory for
        each that is to come."""
        case = self.case
        layer = LigerLayer(case, FixedRouting([case]), self.with_shared)

        def forward() -> Tensor:
            with torch.no_grad():
                return layer(case.x_TH)

        def step() -> tuple[Tensor, ...]:
            y_TH = layer(case.x_TH)
            leaves = (case.x_TH, case.weights_TK, *layer.weights)
            return (y_TH.detach(), *torch.autograd.grad(y_TH, leaves, case.dy_TH))

        def run() -> Iterable[list[Results]]:
            y_TH, dx_TH, dweights_TK, *grads = step()
            found = {verify.Y: y_TH, verify.DX: dx_TH, verify.DWEIGHTS: dweights_TK}
            yield [found | layer.by_name(grads)]

        return self.path(named.LIGER, {FORWARD: forward, STEP: step}, run, before=case.fresh_ids)
