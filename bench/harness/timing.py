"""Timing: every path in turn within one iteration, caches emptied before each call, the slowest rank
counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from .paths import Path


@dataclass(frozen=True)
class Timing:
    """Seconds of each iteration's slowest rank."""

    slowest_I: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.slowest_I))

    @property
    def fastest(self) -> float:
        return min(self.slowest_I)


class CacheFlusher:
    """Empties the caches by rewriting a buffer of `num_bytes`, read and written so that it passes through
    them.

    A plain fill would not do: large fills bypass the cache.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.ones(num_bytes // 8, dtype=torch.int64)

    def flush(self) -> None:
        if self._buffer.numel():
            self._buffer.add_(1)


def measure(
    paths: Mapping[str, Path], *, iters: int, warmup: int, flusher: CacheFlusher
) -> dict[str, Timing]:
    """Times each of `paths` on all ranks of the default group; every rank has to pass the same names in one
    order.

    The paths alternate within an iteration, so that a slow spell of the machine hits all of them. A result is
    released after the clock has stopped. Each rank's time runs from the barrier to its own return.
    """
    took = {name: np.zeros(iters) for name in paths}
    for iteration in range(-warmup, iters):
        for name, path in paths.items():
            if path.before is not None:
                path.before()
            seconds = _timed(path.call, flusher)
            if iteration >= 0:
                took[name][iteration] = seconds
    return {name: Timing(tuple(_slowest(list(local)))) for name, local in took.items()}


def _timed(call: Callable[[], object], flusher: CacheFlusher) -> float:
    flusher.flush()
    collecting = gc.isenabled()
    gc.disable()
    try:
        dist.barrier()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()
    del result
    return seconds


def _slowest(local_I: Sequence[float]) -> list[float]:
    merged = torch.tensor(local_I, dtype=torch.float64)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX)
    return [float(value) for value in merged]


def sum_over_ranks(value: int) -> int:
    """`value` summed over the default group."""
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)
