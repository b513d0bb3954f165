"""What a program does when it is started: reads its flags, then runs the benchmark on every rank."""

from __future__ import annotations

from . import launch
from .options import Options, parse


def main(operation: str) -> int:
    """The exit status of the program for `operation`. A bad flag is answered before torch is loaded."""
    return launch.run(rank_main, parse(operation))


def rank_main(options: Options, rank: int, ranks: int) -> int:
    """One rank of the program."""
    from .program import benchmark

    return benchmark(options, rank, ranks)
