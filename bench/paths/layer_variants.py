"""The variants of a layer that are timed: moecomm's, its products or transfers alone, and the baselines."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Literal

import torch
from torch import Tensor, nn

import moecomm
from moecomm.nn import ActivationPool, GraphedStep, MoEConfig, MoELayer, Routing

from ..harness import options as named
from ..harness import verify
from ..harness.case import DENSE, LayerCase, corrupt, poison
from ..harness.options import FP8_VARIANTS, GRAPH_VARIANTS, KEEPS, keep_name
from ..harness.path import FORWARD, STEP, NotRun, Path, Verdict, Yardstick, attempt
from ..harness.report import skew_words
from ..harness.timing import Clock, mean_over_ranks, slowest
from .moecomm_path import Captured
from .plain_layer import PlainLayer, swiglu_experts

Keep = Literal["all", "rows", "nothing"]
Results = dict[str, Tensor]
"""The result and the gradients of a step, under the names that verify uses."""
_PLACEHOLDER_FFN, _PLACEHOLDER_FP8 = 1, 16
_POOL_MORE = 64 << 20  # bytes for pages that are not full
# What this machine's torch cannot do in them is no failure of moecomm.
_BASELINES = (named.PLAIN, named.BASELINE, named.TUNED)


def make_variants(
    comm: moecomm.Communicator, case: LayerCase, clock: Clock
) -> list[Path | Yardstick | NotRun]:
    """The dense product and the variants asked for, or those around graph replay."""
    wanted = GRAPH_VARIANTS if case.point.graphs else case.options.variants
    variants = _Variants(comm, case, clock)
    made: list[Path | Yardstick | NotRun] = [_dense_path(case)]
    for name, make in variants.makers().items():
        if name not in wanted:
            continue
        if reason := _why_not(name, case.device):
            made.append(NotRun(name, reason))
            continue
        path, problem = attempt(make)
        made.append(path or NotRun(name, problem, failed=name not in _BASELINES))
    return made


def _why_not(name: str, device: torch.device) -> str:
    """The reason why a variant cannot be on this device; "" if it can."""
    if name in (named.GRAPH, named.GRAPHED) and device.type != "cuda":
        return "CUDA graphs are of GPUs"
    if name in FP8_VARIANTS and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            return f"needs compute capability 9.0, this is {major}.{minor}"
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

    return Path(name=DENSE, calls={STEP: lambda: torch.mm(left, right)}, check=check, remote=False)


class _FixedRouting(nn.Module):
    """The case's routing in the place of a router, so that no variant's time has a router in it."""

    def __init__(self, case: LayerCase) -> None:
        super().__init__()
        experts = case.point.experts
        self._routing = Routing(
            topk_idx_TK=case.topk_idx_TK,
            topk_weights_TK=case.weights_TK,
            scores_TE=torch.empty(0, experts, device=case.device),
            losses={},
            tokens_per_expert_E=torch.zeros(experts, dtype=torch.int64, device=case.device),
        )

    def forward(self, x_TH: Tensor, seq_len: int | None = None) -> Routing:
        return self._routing


class _Variants:
    """Makes the variants of one case."""

    def __init__(self, comm: moecomm.Communicator, case: LayerCase, clock: Clock) -> None:
        self.comm, self.case, self.clock = comm, case, clock

    def makers(self) -> dict[str, Callable[[], Path]]:
        """Returns the function that makes each variant, by name."""
        layer, compute = self._layer_path, self._compute
        keeping = {keep_name(keep): partial(layer, keep_name(keep), keep=keep) for keep in KEEPS}  # type: ignore[arg-type]
        return {
            named.COMPUTE: partial(compute, named.COMPUTE),
            named.PLAIN: self._plain_compute,
            named.COMM: self._communication,
            named.SERIAL: partial(layer, named.SERIAL, overlap=False),
            **keeping,
            named.FP8_COMPUTE: partial(compute, named.FP8_COMPUTE, fp8=True),
            named.FP8_OVERLAPPED: partial(layer, named.FP8_OVERLAPPED, fp8=True),
            named.FP8_ANEW: partial(layer, named.FP8_ANEW, fp8=True, anew=True),
            named.FIXED: partial(layer, named.FIXED, capacity=self.case.fixed_rows),
            named.GRAPH: self._graph_replay,
            named.GRAPHED: self._graphed_step,
            named.BASELINE: partial(self._baseline, tuned=False),
            named.TUNED: partial(self._baseline, tuned=True),
        }

    def _path(
        self,
        name: str,
        forward: Callable[[], object],
        step: Callable[[], Results],
        *,
        before: Callable[[], None] | None = None,
        layer: MoELayer | None = None,
        keeps_memory: bool = False,
        fp8: bool = False,
        **more: Any,
    ) -> Path:
        """A variant, checked by its step. `layer` records timelines; `keeps_memory`: its memory is there
        before a step, too.
        """
        case, options = self.case, self.case.options

        def check(round: int) -> Verdict:
            case.load(round)
            wanted = case.wanted(round)
            # Memory that the allocator may well hand out for results.
            poison(*map(torch.empty_like, (case.x_TH, case.experts.w_in, case.rows_PH)))
            results = step()
            self._settle()
            if options.inject_error:
                corrupt(next(iter(results.values())))
            verdict = verify.compare(results, wanted, verify.FP8 if fp8 else case.point.dtype)
            poison(*results.values())
            return verdict

        def measure_more() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {FORWARD: {}, STEP: {}}
            if layer is not None:
                found = self._exposed(layer, before, step, name)
            if case.device.type == "cuda" and not keeps_memory:
                found[STEP] |= self._memory(step, forward, computes=more.get("computes", True))
            self._settle()
            return found

        return Path(
            name=name,
            calls={FORWARD: forward, STEP: step},
            check=check,
            before=before,
            own=name not in _BASELINES,
            more=measure_more,
            **more,
        )

    def _settle(self) -> None:
        """Waits for the device; raises what it found."""
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()
        self.comm.check()

    def _waited(self) -> float:
        return self.comm.stats().get("host_wait_seconds", 0.0)

    # -- what is measured besides the times ----------------------------------------------------------------

    def _memory(
        self, step: Callable[[], Results], forward: Callable[[], object], *, computes: bool
    ) -> dict[str, int | None]:
        """A step's peak over what was there, the peak itself, and what a forward leaves for its backward; of
        the rank where they are largest.
        """

        def start() -> int:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            return int(torch.cuda.memory_allocated())

        before = start()
        results = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del results
        found = [float(peak - before), float(peak)]
        before = start()
        result = forward()
        torch.cuda.synchronize()
        own = result.untyped_storage().nbytes() if isinstance(result, Tensor) else 0
        found.append(float(torch.cuda.memory_allocated() - before - own))
        del result
        largest = list(map(int, slowest(found)))
        kept = largest[2] if computes else None
        return {"memory_bytes": largest[0], "peak_bytes": largest[1], "kept_bytes": kept}

    def _exposed(
        self, layer: MoELayer, before: Callable[[], None] | None, step: Callable[[], Results], name: str
    ) -> dict[str, dict[str, Any]]:
        """Recorded steps, under the clock that times them: of the one of median length the part in which
        something communicates and nothing computes, mean over ranks.
        """
        layer.record = True
        steps = []
        for _ in range(self.case.options.recorded_steps):
            if before is not None:
                before()
            self.clock.time(step)
            steps.append(layer.timelines())
        layer.record = False
        steps.sort(key=lambda each: each["forward"].seconds + each["backward"].seconds)
        median = steps[len(steps) // 2]
        forward, backward = median["forward"], median["backward"]
        exposed_s = forward.exposed_seconds + backward.exposed_seconds
        whole_s = forward.seconds + backward.seconds
        share = exposed_s / whole_s if whole_s > 0 else 0.0
        means = mean_over_ranks([forward.exposed_share, forward.exposed_seconds, share, exposed_s])
        if self.case.options.timelines is not None and self.case.rank == 0:
            self._write_timelines(self.case.options.timelines, name, median)
        return {
            FORWARD: {"exposed_share": means[0], "exposed_s": means[1]},
            STEP: {"exposed_share": means[2], "exposed_s": means[3]},
        }

    def _write_timelines(self, folder: str, name: str, timelines: dict[str, Any]) -> None:
        point = self.case.point
        FilePath(folder).mkdir(parents=True, exist_ok=True)
        words = [point.preset or "layer", skew_words(vars(point)), str(point.tokens), name]
        stem = "-".join("".join(c if c.isalnum() or c in ".-" else "_" for c in word) for word in words)
        for phase, timeline in timelines.items():
            path = FilePath(folder) / f"{stem}-{phase}"
            timeline.chrome_trace(f"{path}.json", process=f"{point.preset} {phase}")
            try:
                timeline.picture(f"{path}.png")
            except moecomm.Unsupported as problem:
                print(f"# {path}.png: {problem}", flush=True)

    # -- the variants ----------------------------------------------------------------------------------------

    def _layer(
        self, *, overlap: bool = True, keep: Keep = "all", capacity: int | None = None, fp8: bool = False
    ) -> MoELayer:
        """A layer with the case's routing and experts, whose weights all layers share."""
        case, point = self.case, self.case.point
        config = MoEConfig(
            hidden=point.hidden,
            # A layer draws its weights on the CPU, which would take minutes: they are put in afterwards.
            ffn_hidden=_PLACEHOLDER_FP8 if fp8 else _PLACEHOLDER_FFN,
            num_experts=point.experts,
            top_k=point.topk,
            pre_softmax=True,
            dtype=case.dtype,
            expert_precision="fp8" if fp8 else None,
        )
        beside = case.options.overlap_num_sms
        layer = MoELayer(config, self.comm, overlap=overlap, keep=keep, beside_sms=beside)
        layer.experts.w_in, layer.experts.w_out = case.experts.w_in, case.experts.w_out
        layer.add_module("router", _FixedRouting(case))
        layer.capacity = capacity
        return layer.eval()

    def _backward(self, y_TH: Tensor) -> Results:
        case = self.case
        leaves = (case.x_TH, case.weights_TK, case.experts.w_in, case.experts.w_out)
        grads = torch.autograd.grad(y_TH, leaves, case.dy_TH)
        # Detached, so that what the forward has kept goes with this call.
        names = (verify.DX, verify.DWEIGHTS, verify.DW_IN, verify.DW_OUT)
        return {verify.Y: y_TH.detach(), **dict(zip(names, grads, strict=True))}

    def _compute(self, name: str, *, fp8: bool = False) -> Path:
        """The experts alone, as moecomm.nn has them, on rows that are here already."""
        case, experts = self.case, self._layer(overlap=False, fp8=fp8).experts

        def forward() -> Tensor:
            rows_PH: Tensor = experts(case.rows_PH, case.offsets_L, case.weights_P, has_tail=False)
            return rows_PH

        def step() -> Results:
            out_PH = forward()
            leaves = (case.rows_PH, case.weights_P, experts.w_in, experts.w_out)
            grads = torch.autograd.grad(out_PH, leaves, case.dy_PH)
            names = (verify.DROWS, verify.DROW_WEIGHTS, verify.DW_IN, verify.DW_OUT)
            return {verify.ROWS_OUT: out_PH.detach(), **dict(zip(names, grads, strict=True))}

        return self._path(name, forward, step, fp8=fp8)

    def _plain_compute(self) -> Path:
        """The experts alone in torch. The weights multiply at home, in a plain framework: here the gradient
        comes multiplied already.
        """
        case = self.case
        w_in, w_out = case.experts.w_in, case.experts.w_out

        def forward() -> Tensor:
            return swiglu_experts(case.rows_PH, w_in, w_out, case.offsets_L)

        def step() -> Results:
            out_PH = forward()
            grads = torch.autograd.grad(out_PH, (case.rows_PH, w_in, w_out), case.weighted_dy_PH)
            names = (verify.DROWS, verify.DW_IN, verify.DW_OUT)
            return {verify.PLAIN_ROWS_OUT: out_PH.detach(), **dict(zip(names, grads, strict=True))}

        return self._path(named.PLAIN, forward, step)

    def _communication(self) -> Path:
        """The four transfers of a step and nothing between them: experts hand back what they get."""
        comm, case = self.comm, self.case

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

        return self._path(
            named.COMM, move, step, before=case.fresh_ids, computes=False, blocks=True, waited=self._waited
        )

    def _layer_path(
        self,
        name: str,
        *,
        overlap: bool = True,
        keep: Keep = "all",
        capacity: int | None = None,
        fp8: bool = False,
        anew: bool = False,
    ) -> Path:
        """A MoELayer as a training loop calls it, behind its router. `anew`: its weights change each time."""
        case, layer = self.case, self._layer(overlap=overlap, keep=keep, capacity=capacity, fp8=fp8)

        def forward() -> Tensor:
            y_TH: Tensor = layer(case.x_TH)
            return y_TH

        def before() -> None:
            case.fresh_ids()
            if anew:
                layer.experts.forget_quantized()

        return self._path(
            name,
            forward,
            lambda: self._backward(forward()),
            before=before,
            layer=layer if overlap else None,
            fp8=fp8,
            blocks=capacity is None,
            waited=self._waited,
            note="" if capacity is None else f"{capacity} rows",
        )

    def _graph_replay(self) -> Path:
        """The layer with a fixed number of rows, replayed from a graph of its forward and one of its step."""
        case, layer = self.case, self._layer(capacity=self.case.fixed_rows)
        forward = Captured(lambda: layer(case.x_TH).detach())
        step = Captured(lambda: self._backward(layer(case.x_TH)))
        return self._path(
            named.GRAPH,
            forward.replay,
            step.replay,
            before=case.fresh_ids,
            keeps_memory=True,
            note=f"{case.fixed_rows} rows",
        )

    def _graphed_step(self) -> Path:
        """The layer as GraphedStep runs it; its forward alone has no pool, as there is nothing to keep."""
        case, layer = self.case, self._layer()
        experts, headroom = layer.experts, case.options.headroom
        assert case.point.ffn is not None
        row_bytes = (case.point.hidden + 2 * case.point.ffn) * case.dtype.itemsize

        def step() -> Results:
            results = self._backward(layer(case.x_TH))
            # Where a backward leaves them, and GraphedStep does.
            experts.w_in.grad, experts.w_out.grad = results.pop(verify.DW_IN), results.pop(verify.DW_OUT)
            return results

        def replay() -> Results:
            results: Results = graphed()
            assert experts.w_in.grad is not None and experts.w_out.grad is not None
            results |= {verify.DW_IN: experts.w_in.grad, verify.DW_OUT: experts.w_out.grad}
            experts.w_in.grad = experts.w_out.grad = None
            return results

        pool = ActivationPool(case.device, case.fixed_rows * row_bytes + _POOL_MORE)
        graphed = GraphedStep(step, layer, pool=pool, headroom=headroom)
        forward = GraphedStep(lambda: layer(case.x_TH).detach(), layer, headroom=headroom)
        return self._path(
            named.GRAPHED,
            forward,
            replay,
            before=case.fresh_ids,
            keeps_memory=True,
            blocks=True,
            note=f"{graphed.capacities[0]} rows",
        )

    def _baseline(self, *, tuned: bool) -> Path:
        """The layer of a plain framework."""
        case = self.case
        layer = PlainLayer(case.point.experts, tuned=tuned)

        def forward() -> Tensor:
            experts = case.experts
            return layer.forward(case.x_TH, case.topk_idx_TK, case.weights_TK, experts.w_in, experts.w_out)

        return self._path(
            named.TUNED if tuned else named.BASELINE,
            forward,
            lambda: self._backward(forward()),
            before=case.fresh_ids,
            blocks=True,
            note="nccl" if case.device.type == "cuda" else "gloo",
        )
