"""The body of all programs: for every point make all paths, verify them, time them in turn, print, record."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

import moecomm

from ..paths import between_nodes, layer_variants, moecomm_path, registry, training
from . import machine, record, report
from .case import Case, Experts, LayerCase, device_of
from .options import Options, Point
from .path import CALL, NotMeasured, NotRun, Path, Verdict, Yardstick, attempt
from .telemetry import Telemetry
from .timing import Clock, CpuClock, CudaClock, Timing, measure, slowest, sum_over_ranks

_GPU_FLUSH_BYTES = 256 << 20  # a few times the L2 of any GPU
_HOST_CALLS, _HOST_CALLS_OF_LAYERS = 20, 5  # to time the CPU with
_LAYER_LEAD_CYCLES = 10_000_000  # about 5 ms: longer than a step of a layer takes to issue

Entry = Path | Yardstick | NotRun


def benchmark(options: Options, rank: int) -> int:
    """Runs everything on one rank and returns 0, or 1 when a value was wrong or a path of moecomm failed."""
    return _Benchmark(options, rank).run()


class _Benchmark:
    def __init__(self, options: Options, rank: int) -> None:
        self.options, self.rank = options, rank
        if options.nodes > 1:
            # NCCL takes emulated nodes for hosts, and the transports that it has between those.
            node = rank // (options.ranks // options.nodes)
            os.environ.setdefault("NCCL_HOSTID", f"moecomm-bench-{node}")
        on_cpu = options.device == "cpu"
        flush_bytes = options.flush_bytes
        if flush_bytes is None:
            flush_bytes = machine.describe()["last_level_cache_bytes"] if on_cpu else _GPU_FLUSH_BYTES
        self.flush_bytes = flush_bytes
        lead = {"lead_cycles": _LAYER_LEAD_CYCLES} if options.is_layer else {}
        self.clock: Clock = (
            CpuClock(flush_bytes) if on_cpu else CudaClock(flush_bytes, device_of(options), **lead)
        )
        self.rows: list[record.Row] = []
        self.missing: list[record.Row] = []
        self.stats: dict[str, Any] = {}

    def run(self) -> int:
        self.say(report.header(self.options, self.flush_bytes))
        for _, points in itertools.groupby(self.options.points(), key=lambda point: point.setup):
            with ExitStack() as held:
                self._setup(list(points), held)
        self._write()
        self.say(report.footer(self.rows, self.missing))
        self.say(report.comparison(self.rows))
        return int(any(row["wrong"] for row in self.rows) or any(each["failed"] for each in self.missing))

    def say(self, text: str) -> None:
        if self.rank == 0 and text:
            print(text, flush=True)

    def _write(self) -> None:
        if self.rank == 0 and self.options.json is not None:
            document = record.document(self.options, self.rows, self.missing, self.stats)
            record.write(self.options.json, document)

    def _miss(self, path: NotRun, point: Point) -> None:
        self.missing.append(record.make_missing(path, point))
        self.say(report.table_row(self.missing[-1], self.options))

    def _setup(self, points: list[Point], held: ExitStack) -> None:
        """Measures all points that use one communicator and, for layers, one set of weights."""
        options, first = self.options, points[0]
        experts: Experts | None = None
        if options.is_layer:
            if first.experts % options.ranks:
                reason = f"{first.experts} experts cannot be shared evenly by {options.ranks} ranks"
                self._miss(NotRun("all", reason), first)
                return
            self._release()
            experts, problem = attempt(lambda: Experts(options, first, self.rank))
            if experts is None:
                self._miss(NotRun("all", problem, failed=True), first)
                return
        comm = held.enter_context(moecomm_path.communicator(options, first))
        comm.reset_stats()
        shown: tuple[object, ...] = ()
        for point in points:
            self._release()
            title: tuple[object, ...] = (point.routing, point.zipf)
            if options.is_layer:
                title += (point.tokens, point.graphs, point.microbatches)
            if title != shown:
                self.say(report.titles(point, options))
                shown = title
            if experts is None:
                with torch.no_grad():
                    self._point(comm, Case(options, point, self.rank))
            else:
                self._point(comm, LayerCase(options, point, self.rank, experts))
        words = [each for each in (first.preset, first.dtype, f"top-{first.topk} of {first.experts}") if each]
        sms = [] if first.num_sms is None else [f"{first.num_sms} SMs"]
        self.stats[" ".join([*words, *sms])] = {**comm.stats(), "network_lanes": comm.network_lanes}
        if options.device == "cuda" or comm.nodes > 1:
            self.say(f"# {comm!r}")

    def _release(self) -> None:
        """Returns the memory of earlier points to the device: the largest points need most of it."""
        if self.options.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _point(self, comm: moecomm.Communicator, case: Case) -> None:
        options, point = self.options, case.point
        entries: list[Entry]
        if isinstance(case, LayerCase):
            make = training.make_microbatches if point.microbatches else layer_variants.make_variants
            entries = make(comm, case, self.clock)
        else:
            entries = registry.make_paths(comm, case, self.clock)
        checked = self._verified(entries)
        if isinstance(case, LayerCase):
            case.wanted = None  # before times and memory are measured
            for each in case.microbatches:
                each.load(0)
            self._release()
        paths = [entry for entry in entries if isinstance(entry, Path)]
        sent: Mapping[str, Any] = {}
        if comm.nodes > 1 and paths and paths[0].own:
            sent = between_nodes.count(comm, paths[0], case)
        samples: dict[tuple[str, str], list[float]] = {}
        _sample(entries, samples)
        with self._telemetry() if point.microbatches else nullcontext() as telemetry:
            timings = measure(
                paths,
                iters=options.iters,
                warmup=options.warmup,
                clock=self.clock,
                watch=None if telemetry is None else telemetry.keep,
            )
        _sample(entries, samples)
        timings |= {key: Timing(tuple(slowest(taken))) for key, taken in samples.items()}
        for entry in entries:
            if isinstance(entry, NotRun):
                self._miss(entry, point)
                continue
            more = entry.more() if isinstance(entry, Path) else {}
            for phase in entry.calls if isinstance(entry, Path) else (CALL,):
                found = case.figures(entry, phase, timings)
                if isinstance(entry, Path):
                    found["host_s"] = self._host(entry, phase)
                if sent and isinstance(entry, Path) and entry.own:
                    found |= between_nodes.figures(sent, options.ranks, timings[entry.name, phase])
                if telemetry is not None:
                    found |= telemetry.medians((entry.name, phase))
                wrong, worst = checked.get(entry.name, (None, None))
                if worst is not None:
                    found["worst"] = worst
                found |= more.get(phase, {})
                row = record.make_row(entry, phase, point, timings[entry.name, phase], wrong, **found)
                self.rows.append(row)
                self.say(report.table_row(row, options))

    def _telemetry(self) -> AbstractContextManager[Telemetry | None]:
        """What samples clock and power of the GPUs; None on a CPU, and where a rank has no NVML."""
        if self.options.device == "cpu":
            return nullcontext()
        telemetry, problem = attempt(lambda: Telemetry(device_of(self.options)))
        if telemetry is None:
            self.say(f"# no clocks and power: {problem}")
            return nullcontext()
        return telemetry

    def _verified(self, entries: list[Entry]) -> dict[str, tuple[int, float | None]]:
        """(wrong values, largest deviation) of every path, over all ranks; a path that cannot run is replaced
        by why.
        """
        found: dict[str, tuple[int, float | None]] = {}
        # Round by round, so that what a round's data call for is computed once. Round 0 is the data the paths
        # were made with.
        for round in range(1, max(1, self.options.checks) + 1):
            for place, path in enumerate(entries):
                if not isinstance(path, Path):
                    continue
                check = partial(path.check, round) if self.options.checks else partial(_run_once, path)
                verdict, problem = attempt(check)
                if verdict is None:
                    entries[place] = NotRun(path.name, problem, failed=path.own)
                    found.pop(path.name, None)
                    continue
                wrong, worst = found.get(path.name, (0, None))
                if verdict.worst is not None:
                    worst = max(worst or 0.0, slowest([verdict.worst])[0])
                found[path.name] = (wrong + sum_over_ranks(verdict.wrong), worst)
        return found if self.options.checks else {}

    def _host(self, path: Path, phase: str) -> float | None:
        if self.options.device == "cpu":
            return None
        calls = _HOST_CALLS_OF_LAYERS if self.options.is_layer else _HOST_CALLS
        took = self.clock.host(path, path.calls[phase], calls)
        return None if took is None else slowest([took])[0]


def _run_once(path: Path) -> Verdict:
    """Runs every call of an unchecked path once, to see whether it can run."""
    for call in path.calls.values():
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Verdict(0)


def _sample(entries: list[Entry], samples: dict[tuple[str, str], list[float]]) -> None:
    """Takes one sample of every yardstick, before and after the paths compared with it, since a machine's
    speed drifts. A yardstick that cannot be measured is left out.
    """
    for place, entry in enumerate(entries):
        if isinstance(entry, Yardstick):
            try:
                samples.setdefault((entry.name, CALL), []).append(entry.sample())
            except NotMeasured as problem:
                samples.pop((entry.name, CALL), None)
                entries[place] = NotRun(entry.name, str(problem))
