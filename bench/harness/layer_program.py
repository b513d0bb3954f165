"""The body of moe_layer_perf.py: for every preset, routing and number of tokens, verify all ways, time them
in turn, record, print.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch
from torch import Tensor

import moecomm

from . import layer_record, layer_report, machine, record
from . import layer_reference as reference
from .case import poison
from .contest import first_problem
from .layer_case import Experts, LayerCase
from .layer_options import BASELINE, COMPUTE, OVERLAPPED, PLAIN, SERIAL, TUNED, LayerOptions
from .layer_presets import Preset, why_left_out
from .layer_record import Exposed, LayerMissing, LayerRow, Measured, Point, Span
from .layer_ways import Way, communicator, makers, why_not
from .paths import Path
from .timing import Clock, CpuClock, CudaClock, Timing, mean_over_ranks, measure, slowest, sum_over_ranks

_GPU_FLUSH_BYTES = 256 << 20  # a few times the L2 of any GPU
_LEAD_CYCLES = 10_000_000  # about 5 ms: longer than a step takes to issue
_DENSE = "dense"
_Made = TypeVar("_Made")


def benchmark(options: LayerOptions, rank: int, ranks: int) -> int:
    """Runs everything on one rank and returns 0, or 1 when a value was wrong or a way of moecomm failed."""
    return _Benchmark(options, rank).run()


class _Benchmark:
    def __init__(self, options: LayerOptions, rank: int) -> None:
        self.options, self.rank = options, rank
        on_cpu = options.device == "cpu"
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        flush_bytes = options.flush_bytes
        if flush_bytes is None:
            flush_bytes = machine.describe().last_level_cache_bytes if on_cpu else _GPU_FLUSH_BYTES
        self.flush_bytes = flush_bytes
        self.clock: Clock = (
            CpuClock(flush_bytes) if on_cpu else CudaClock(flush_bytes, self.device, _LEAD_CYCLES)
        )
        self.rows: list[LayerRow] = []
        self.missing: list[LayerMissing] = []
        self.stats: dict[str, Any] = {}

    def run(self) -> int:
        self.say(layer_report.header(self.options, self.flush_bytes))
        for preset in self.options.presets:
            reason = why_left_out(preset, self.options.ranks)
            if reason:
                self.miss(preset, self.options.tokens, "all", "all", reason, failed=False)
            else:
                self._preset(preset)
            self._write()  # what there is by now: a later preset may fail for good
        self.say(layer_report.footer(self.rows, self.missing))
        return int(any(row.wrong for row in self.rows) or any(each.failed for each in self.missing))

    def say(self, text: str) -> None:
        if self.rank == 0 and text:
            print(text, flush=True)

    def miss(self, preset: Preset, tokens: int, routing: str, way: str, reason: str, *, failed: bool) -> None:
        self.missing.append(
            LayerMissing(
                preset=preset.name, tokens=tokens, routing=routing, way=way, reason=reason, failed=failed
            )
        )
        self.say(layer_report.table_row(self.missing[-1], self.options))

    def _preset(self, preset: Preset) -> None:
        options = self.options
        _release(self.device)
        made, problem = _attempt(lambda: Experts(options, preset, self.rank, self.device))
        if made is None:
            self.miss(preset, options.tokens, "all", "all", problem, failed=True)
            return
        with communicator(options, preset) as comm:
            comm.reset_stats()
            points = [(options.tokens, False)]
            if options.graph_tokens:
                points.append((options.graph_tokens, True))
            for routed in options.routings:
                for tokens, graphs in points:
                    _release(self.device)
                    case = LayerCase(options, preset, routed, tokens, self.rank, self.device, made)
                    self._point(comm, case, graphs=graphs)
            self.stats[preset.name] = dict(comm.stats())
            if options.device == "cuda":
                self.say(f"# {comm!r}")

    def _point(self, comm: moecomm.Communicator, case: LayerCase, *, graphs: bool) -> None:
        options = self.options
        routed = (case.kind, case.exponent)
        point = layer_record.point_of(case.preset, options, case.tokens, routed, case.rows_R, graphs=graphs)
        self.say(layer_report.point_header(point, options))
        ways, found = self._verified(comm, case, graphs=graphs)
        if OVERLAPPED in ways and SERIAL in ways:
            same = _same_bits(ways[SERIAL].step(), ways[OVERLAPPED].step())
            equal = sum_over_ranks(int(not same)) == 0
            found[OVERLAPPED] = Measured(
                wrong=found[OVERLAPPED].wrong, worst=found[OVERLAPPED].worst, same_bits=equal
            )
        case.load(0)
        _release(self.device)
        timings = measure(_paths(ways, case), iters=options.iters, warmup=options.warmup, clock=self.clock)
        dense_tflops = layer_record.dense_flops(options.dense) / timings[_DENSE].median / 1e12
        compute = _pair(timings, COMPUTE) if COMPUTE in ways else None
        rows = []
        for name, way in ways.items():
            forward, step = _pair(timings, name)
            rows.append(
                layer_record.make_row(
                    preset=case.preset,
                    point=point,
                    ranks=options.ranks,
                    way=name,
                    computes=way.computes,
                    note=way.note,
                    forward=forward,
                    step=step,
                    compute=compute,
                    dense_tflops=dense_tflops,
                    measured=self._more(way, case, point, found[name]),
                )
            )
            self.say(layer_report.table_row(rows[-1], options))
            if way.settle is not None:
                way.settle()
        self.say(f"# dense product: {dense_tflops:.4g} TFLOP/s")
        self.say(layer_report.comparison(rows))
        self.rows += rows

    def _verified(
        self, comm: moecomm.Communicator, case: LayerCase, *, graphs: bool
    ) -> tuple[dict[str, Way], dict[str, Measured]]:
        """The ways that can run, made and held against the independent computation."""
        ways: dict[str, Way] = {}
        problems: dict[str, str] = {}
        wrong: dict[str, int] = {}
        worst: dict[str, float] = {}
        for name, make in makers(comm, case, graphs=graphs).items():
            absent = why_not(name, self.device)
            if absent is not None:
                self.miss(case.preset, case.tokens, case.kind, name, absent.reason, failed=False)
                continue
            way, problem = _attempt(make)
            if way is None:
                problems[name] = problem
            else:
                ways[name] = way
        for round in range(1, max(1, self.options.checks) + 1):
            case.load(round)
            wanted = reference.expected(case) if self.options.checks else None
            for name in list(ways):
                verdict, problem = _attempt(partial(self._check, ways[name], case, wanted))
                if verdict is None:
                    problems[name] = problem
                    del ways[name]
                    continue
                wrong[name] = wrong.get(name, 0) + verdict.wrong
                worst[name] = max(worst.get(name, 0.0), verdict.worst)
        for name, problem in problems.items():
            failed = name not in (PLAIN, BASELINE, TUNED)  # what this machine's torch cannot is no error here
            self.miss(case.preset, case.tokens, case.kind, name, problem, failed=failed)
        if not self.options.checks:
            return ways, {name: Measured() for name in ways}
        return ways, {
            name: Measured(wrong=sum_over_ranks(wrong[name]), worst=slowest([worst[name]])[0])
            for name in ways
        }

    def _check(self, way: Way, case: LayerCase, wanted: dict[str, Tensor] | None) -> reference.Verdict:
        # Memory that the allocator may well hand out for results.
        poison(
            torch.empty_like(case.x_TH), torch.empty_like(case.experts.w_in), torch.empty_like(case.rows_PH)
        )
        results = way.step()
        if way.settle is not None:
            way.settle()
        if wanted is None:
            return reference.Verdict(0, 0.0)
        if self.options.inject_error:
            _corrupt(next(iter(results.values())))
        verdict = reference.compare(results, wanted, reference.FP8 if way.fp8 else self.options.dtype)
        poison(*results.values())
        return verdict

    def _more(self, way: Way, case: LayerCase, point: Point, found: Measured) -> Measured:
        """What is measured of a way besides its times."""
        exposed = self._exposed(way, case, point) if way.layer is not None else None
        memory_bytes, peak_bytes = (None, None) if way.keeps_memory else self._memory(way)
        return Measured(
            wrong=found.wrong,
            worst=found.worst,
            same_bits=found.same_bits,
            exposed=exposed,
            memory_bytes=memory_bytes,
            peak_bytes=peak_bytes,
            kept_bytes=None if way.keeps_memory or not way.computes else self._kept(way),
            host_s=self._host(way, case),
        )

    def _memory(self, way: Way) -> tuple[int | None, int | None]:
        """(peak of a step over what was there, the peak itself), of the rank where they are largest."""
        if self.device.type != "cuda":
            return None, None
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = way.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del results
        largest = slowest([float(peak - before), float(peak)])
        return int(largest[0]), int(largest[1])

    def _kept(self, way: Way) -> int | None:
        """What a forward leaves for its backward, of the rank where that is most."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        result = way.forward()
        torch.cuda.synchronize()
        own = result.untyped_storage().nbytes() if isinstance(result, Tensor) else 0
        kept = torch.cuda.memory_allocated() - before - own
        del result
        return int(slowest([float(kept)])[0])

    def _host(self, way: Way, case: LayerCase) -> float | None:
        if self.options.host_calls == 0 or self.device.type == "cpu":
            return None
        took = self.clock.host(_path(way.name, way, way.step), self.options.host_calls)
        return None if took is None else slowest([took])[0]

    def _exposed(self, way: Way, case: LayerCase, point: Point) -> Exposed:
        """Recorded steps, under the clock that times them."""
        layer = way.layer
        assert layer is not None
        layer.record = True
        passes = []
        for _ in range(self.options.records):
            if way.before is not None:
                way.before()
            self.clock.time(way.step)
            passes.append(layer.timelines())
        layer.record = False
        passes.sort(key=lambda each: each["forward"].seconds + each["backward"].seconds)
        median = passes[len(passes) // 2]
        forward, backward = median["forward"], median["backward"]
        exposed_s = forward.exposed_seconds + backward.exposed_seconds
        whole_s = forward.seconds + backward.seconds
        means = mean_over_ranks(
            [forward.exposed_share, exposed_s / whole_s if whole_s > 0 else 0.0, exposed_s]
        )
        if self.options.trace is not None and self.rank == 0:
            self._trace(way, point, median)
        return Exposed(
            forward_share=means[0],
            step_share=means[1],
            step_s=means[2],
            forward_spans=_spans(forward),
            backward_spans=_spans(backward),
        )

    def _trace(self, way: Way, point: Point, timelines: dict[str, Any]) -> None:
        folder = FilePath(self.options.trace or ".")
        folder.mkdir(parents=True, exist_ok=True)
        words = [point.preset, layer_report.skew_of(point.routing, point.zipf), str(point.tokens), way.name]
        stem = "-".join("".join(c if c.isalnum() or c in ".-" else "_" for c in word) for word in words)
        for name, timeline in timelines.items():
            path = folder / f"{stem}-{name}"
            timeline.chrome_trace(f"{path}.json", process=f"{point.preset} {name}")
            try:
                timeline.picture(f"{path}.png")
            except moecomm.Unsupported as problem:
                self.say(f"# {path}.png: {problem}")

    def _write(self) -> None:
        if self.rank == 0 and self.options.json is not None:
            document = layer_record.document(self.options, self.rows, self.missing, self.stats)
            record.write(self.options.json, document)


def _attempt(make: Callable[[], _Made]) -> tuple[_Made | None, str]:
    """What `make` gives on all ranks, or None and why it failed on one of them."""
    made, problem = None, ""
    try:
        made = make()
    except Exception as error:  # this way is left out, the others are measured
        problem = f"{type(error).__name__}: {error}"
    reason = first_problem(problem)
    return (None, reason) if reason else (made, "")


def _release(device: torch.device) -> None:
    """What earlier points held goes back to the device: the largest ones need most of it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _corrupt(result: Tensor) -> None:
    """Flips a high bit of the first value."""
    if result.numel():
        result.view(-1).view(torch.uint8)[result.element_size() - 1] ^= 0x40


def _same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    names = (reference.Y, reference.DW_IN, reference.DW_OUT)
    return all(torch.equal(ours[name], theirs[name]) for name in names)


def _path(name: str, way: Way, call: Callable[[], object]) -> Path:
    return Path(
        name=name,
        call=call,
        check=lambda round: 0,
        before=way.before,
        blocks=way.blocks,
        waited=way.waited,
    )


def _names(way: str) -> tuple[str, str]:
    return f"{way} / forward", f"{way} / step"


def _paths(ways: dict[str, Way], case: LayerCase) -> dict[str, Path]:
    """Both calls of every way and the dense product, in the order in which they take turns."""
    rows, inner, columns = case.options.dense
    left = torch.randn(rows, inner, dtype=case.dtype, device=case.device)
    right = torch.randn(inner, columns, dtype=case.dtype, device=case.device)
    paths = {_DENSE: Path(name=_DENSE, call=lambda: torch.mm(left, right), check=lambda round: 0)}
    for name, way in ways.items():
        forward, step = _names(name)
        paths[forward] = _path(forward, way, way.forward)
        paths[step] = _path(step, way, way.step)
    return paths


def _pair(timings: dict[str, Timing], way: str) -> tuple[Timing, Timing]:
    forward, step = _names(way)
    return timings[forward], timings[step]


def _spans(timeline: Any) -> tuple[Span, ...]:
    return tuple((span.name, span.stream, span.begin, span.end, span.communicates) for span in timeline.spans)
