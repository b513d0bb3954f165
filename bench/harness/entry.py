"""What a program does when it is started: reads its flags, then runs the benchmark on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from . import launch, layer_options, options
from .layer_options import LayerOptions
from .options import Options

Given = Options | LayerOptions


def main(operation: str) -> int:
    """The exit status of the program for `operation`. A bad flag is answered before torch is loaded."""
    return launch.run(rank_main, parse(operation))


def parse(operation: str, flags: Sequence[str] | None = None) -> Given:
    """The options of the program for `operation`: dispatch, combine, alltoall or moe_layer."""
    if operation == layer_options.PROGRAM:
        return layer_options.parse(flags)
    return options.parse(operation, flags)


def rank_main(options: Given, rank: int, ranks: int) -> int:
    """One rank of a program."""
    if isinstance(options, LayerOptions):
        from . import layer_program

        return layer_program.benchmark(options, rank, ranks)
    from . import program

    return program.benchmark(options, rank, ranks)


def ranks_main(plan: tuple[Given, ...], deadline_s: float, options: Given, rank: int, ranks: int) -> int:
    """One rank of several runs in turn, which saves starting for each; none begins after the deadline."""
    from .timing import sum_over_ranks

    begun = time.monotonic()
    status = 0
    for each in plan:
        late = rank == 0 and time.monotonic() - begun > deadline_s
        if sum_over_ranks(int(late)):
            break
        if rank == 0:
            print(f"\n$ {each.command}", flush=True)
        status |= rank_main(each, rank, ranks)
    return status
