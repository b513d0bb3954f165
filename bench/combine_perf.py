#!/usr/bin/env python3
"""Times moecomm's combine, verified first, next to gloo with torch permutes and memcpy. See --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(FilePath(__file__).resolve().parents[1]))

from bench.harness import launch
from bench.harness.options import Options, parse

if TYPE_CHECKING:  # a bad flag is answered before torch is loaded
    import moecomm
    from bench.harness.case import Case
    from bench.harness.paths import Path
    from bench.harness.timing import CacheFlusher


def make_paths(comm: moecomm.Communicator, case: Case, flusher: CacheFlusher) -> Sequence[Path]:
    """moecomm first, then the baselines asked for."""
    from bench.harness.gloo import gloo_combine_path
    from bench.harness.memcpy import memcpy_path
    from bench.harness.product import combine_path

    makers = {
        "memcpy": lambda: memcpy_path(case, flusher),
        "gloo": lambda: gloo_combine_path(case, tuned=False),
        "gloo-tuned": lambda: gloo_combine_path(case, tuned=True),
    }
    return [combine_path(comm, case), *(makers[name]() for name in case.options.baselines)]


def rank_main(options: Options, rank: int, ranks: int) -> int:
    """One rank of the program."""
    from bench.harness.program import benchmark

    return benchmark(make_paths, options, rank, ranks)


if __name__ == "__main__":
    raise SystemExit(launch.run(rank_main, parse("combine")))
