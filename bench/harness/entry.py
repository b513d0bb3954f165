"""What a program does when it is started: reads its flags, then runs the benchmark on every rank."""

from __future__ import annotations

import time

from . import launch
from .options import Options, parse


def main(operation: str) -> int:
    """The exit status of the program for `operation`. A bad flag is answered before torch is loaded."""
    return launch.run(rank_main, parse(operation))


def rank_main(options: Options, rank: int, ranks: int) -> int:
    """One rank of the program."""
    from .program import benchmark

    return benchmark(options, rank, ranks)


def ranks_main(plan: tuple[Options, ...], deadline_s: float, options: Options, rank: int, ranks: int) -> int:
    """One rank of several runs in turn, which saves starting for each; none begins after the deadline."""
    from .program import benchmark
    from .timing import sum_over_ranks

    begun = time.monotonic()
    status = 0
    for each in plan:
        late = rank == 0 and time.monotonic() - begun > deadline_s
        if sum_over_ranks(int(late)):
            break
        if rank == 0:
            print(f"\n$ {each.command}", flush=True)
        status |= benchmark(each, rank, ranks)
    return status
