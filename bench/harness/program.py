"""The body shared by the programs: for every type and size, verify all paths, time them in turn, print,
record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moecomm

from . import machine, record, report
from .case import Case
from .contest import make_paths
from .options import Options
from .product import communicator
from .record import Row
from .timing import CacheFlusher, measure, sum_over_ranks


def benchmark(options: Options, rank: int, ranks: int) -> int:
    """Runs the whole sweep on one rank and returns 0, or 1 when any value was wrong."""
    flush_bytes = (
        machine.describe().last_level_cache_bytes if options.flush_bytes is None else options.flush_bytes
    )
    flusher = CacheFlusher(flush_bytes)
    rows: list[Row] = []
    stats: dict[str, Any] = {}
    say = _printer(rank)
    say(report.header(options, flush_bytes))
    with torch.no_grad():
        for dtype in options.dtypes:
            with communicator(options, dtype) as comm:
                comm.reset_stats()
                for tokens in options.sizes:
                    for row in _one_size(comm, Case(options, rank, tokens, dtype), flusher):
                        rows.append(row)
                        say(report.table_row(row))
                stats[dtype] = dict(comm.stats())
    say(report.footer(rows))
    say(report.comparison(rows))
    if rank == 0:
        _write_files(options, rows, stats)
    return int(any(row.wrong for row in rows))


def _one_size(comm: moecomm.Communicator, case: Case, flusher: CacheFlusher) -> list[Row]:
    options = case.options
    paths = make_paths(comm, case, flusher)
    wrong: dict[str, int | None] = {}
    for path in paths:
        # Rounds count from 1: round 0 is the data the paths were made with.
        local = sum(path.check(round) for round in range(1, options.checks + 1))
        wrong[path.name] = sum_over_ranks(local) if options.checks else None
    timings = measure(
        {path.name: path for path in paths}, iters=options.iters, warmup=options.warmup, flusher=flusher
    )
    return [
        record.make_row(
            path=path.name,
            dtype=case.dtype,
            tokens=case.tokens,
            row_bytes=case.row_bytes,
            moved=case.traffic,
            timing=timings[path.name],
            wrong=wrong[path.name],
            note=path.note,
            remote=path.remote,
        )
        for path in paths
    ]


def _printer(rank: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0 and text:
            print(text, flush=True)

    return say


def _write_files(options: Options, rows: Sequence[Row], stats: dict[str, Any]) -> None:
    if options.json is not None:
        record.write(options.json, record.document(options, rows, stats))
    if options.plot is not None:
        from . import plot  # matplotlib only when a picture is asked for

        plot.draw(options.plot, options, rows)
        print(f"# plot: {options.plot}", file=sys.stdout, flush=True)
