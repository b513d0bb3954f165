"""The body shared by the programs: for every variant, type and size, verify all paths, time them in turn,
print, record.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moecomm

from . import machine, record, report, wire
from .case import Case, device_of
from .contest import checked, make_baselines, product_path
from .options import Options
from .paths import NotMeasured, NotRun, Path, Yardstick
from .product import communicator
from .record import Missing, Row
from .timing import Clock, CpuClock, CudaClock, Timing, measure, slowest, sum_over_ranks

_GPU_FLUSH_BYTES = 256 << 20  # a few times the L2 of any GPU


def benchmark(options: Options, rank: int, ranks: int) -> int:
    """Runs the whole sweep on one rank and returns 0, or 1 when any value was wrong."""
    if options.nodes > 1:
        # NCCL takes emulated nodes for hosts, and the ways that it has between those.
        os.environ.setdefault("NCCL_HOSTID", f"moecomm-bench-{rank // (ranks // options.nodes)}")
    flush_bytes = options.flush_bytes
    if flush_bytes is None:
        on_cpu = options.device == "cpu"
        flush_bytes = machine.describe().last_level_cache_bytes if on_cpu else _GPU_FLUSH_BYTES
    device = device_of(options)
    clock: Clock = CpuClock(flush_bytes) if device.type == "cpu" else CudaClock(flush_bytes, device)
    rows: list[Row] = []
    missing: list[Missing] = []
    stats: dict[str, Any] = {}
    say = _printer(rank)
    say(report.header(options, flush_bytes))
    with torch.no_grad():
        for variant in options.each():
            if len(options.variants) > 1:
                say(f"# {variant.label()}")
            for dtype in options.dtypes:
                with (
                    contextlib.nullcontext()
                    if options.baselines_only
                    else communicator(variant, dtype) as comm
                ):
                    if comm is not None:
                        comm.reset_stats()
                    for tokens in options.sizes:
                        _release(options)
                        for row in _one_size(comm, Case(variant, rank, tokens, dtype), clock):
                            say(report.table_row(row, options))
                            (rows if isinstance(row, Row) else missing).append(row)  # type: ignore[arg-type]
                    if comm is not None:
                        name = dtype if len(options.variants) == 1 else f"{dtype} {variant.label()}"
                        stats[name] = {**comm.stats(), "network_lanes": comm.network_lanes}
                        if options.device == "cuda" or comm.nodes > 1:
                            say(f"# {comm!r}")
    say(report.footer(rows))
    say(report.comparison(rows))
    if rank == 0:
        _write_files(options, rows, stats, missing)
    return int(any(row.wrong for row in rows))


def _release(options: Options) -> None:
    """What earlier sizes held goes back to the device: the largest ones need most of it."""
    if options.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _one_size(comm: moecomm.Communicator | None, case: Case, clock: Clock) -> list[Row | Missing]:
    """The rows of one size, in the order of the paths."""
    options = case.options
    own = None if comm is None else product_path(comm, case)
    lanes = 1 if comm is None else comm.network_lanes
    baselines = make_baselines(case, clock, lanes)
    entries: list[Path | Yardstick | NotRun] = [*([] if own is None else [own]), *baselines]
    wrong: dict[str, int | None] = {}
    for place, path in enumerate(entries):
        if not isinstance(path, Path):
            continue
        if path is own:
            local = sum(path.check(round) for round in range(1, options.checks + 1))
        else:
            local, problem = checked(path, options.checks)
            if problem:
                entries[place] = NotRun(path.name, problem)
                continue
        wrong[path.name] = sum_over_ranks(local) if options.checks else None
    between = None if comm is None or own is None else wire.count(comm, own, case)
    paths = [path for path in entries if isinstance(path, Path)]
    samples: dict[str, list[float]] = {}
    _sample(entries, samples)
    timings = measure(
        {path.name: path for path in paths}, iters=options.iters, warmup=options.warmup, clock=clock
    )
    _sample(entries, samples)
    timings |= {name: Timing(tuple(slowest(taken))) for name, taken in samples.items()}
    host = {path.name: _host(path, options, clock) for path in paths}
    return [
        _missing(path, case)
        if isinstance(path, NotRun)
        else record.make_row(
            path=path,
            options=options,
            dtype=case.dtype,
            tokens=case.tokens,
            row_bytes=case.row_bytes,
            moved=case.traffic,
            timing=timings[path.name],
            host_s=host.get(path.name),
            wrong=wrong.get(path.name),
            between=between if path is own else None,
        )
        for path in entries
    ]


def _sample(entries: list[Path | Yardstick | NotRun], samples: dict[str, list[float]]) -> None:
    """One sample of every yardstick, before and after what is held against it, as a machine's speed drifts;
    one that can't be measured is left out.
    """
    for place, entry in enumerate(entries):
        if isinstance(entry, Yardstick):
            try:
                samples.setdefault(entry.name, []).append(entry.sample())
            except NotMeasured as problem:
                samples.pop(entry.name, None)
                entries[place] = NotRun(entry.name, str(problem))


def _host(path: Path, options: Options, clock: Clock) -> float | None:
    if options.host_calls == 0 or options.device == "cpu":
        return None
    took = clock.host(path, options.host_calls)
    return None if took is None else slowest([took])[0]


def _missing(path: NotRun, case: Case) -> Missing:
    return Missing(
        path=path.name,
        dtype=case.dtype,
        tokens=case.tokens,
        experts=case.options.experts,
        topk=case.options.topk,
        num_sms=case.options.num_sms,
        reason=path.reason,
    )


def _printer(rank: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0 and text:
            print(text, flush=True)

    return say


def _write_files(
    options: Options, rows: Sequence[Row], stats: dict[str, Any], missing: Sequence[Missing]
) -> None:
    if options.json is not None:
        record.write(options.json, record.document(options, rows, stats, missing))
    if options.plot is not None:
        from . import plot  # matplotlib only when a picture is asked for

        plot.draw(
            options.plot,
            rows,
            title=f"{options.operation}: {options.ranks} ranks, hidden {options.hidden}, "
            f"top-{options.topk} of {options.experts} experts",
            remote=options.device == "cuda",
        )
        print(f"# plot: {options.plot}", file=sys.stdout, flush=True)
