"""Timing: every path in turn within one iteration, caches emptied before each call, the slowest rank
counts.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from .path import CALL, Path, Verdict

_TRIAL_ITERS = 3
_SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU
_LEAD_CYCLES = 2_000_000  # about 1 ms: longer than dispatch and combine take to issue a call


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


class CpuClock:
    """Wall clock from a barrier to the rank's own return.

    The caches are emptied by rewriting a buffer of `flush_bytes`, read and written so that it passes through
    them; a plain fill would not do, large fills bypass the cache.
    """

    def __init__(self, flush_bytes: int) -> None:
        self._buffer = torch.ones(flush_bytes // 8, dtype=torch.int64)

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call on this rank: caches emptied first, all ranks started together."""
        if self._buffer.numel():
            self._buffer.add_(1)
        with _no_collection():
            dist.barrier()
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
        del result
        return seconds

    def host(self, path: Path, call: Callable[[], object], times: int) -> float | None:
        return None


class CudaClock:
    """CUDA events on the current stream around the call, behind a sleep (the host is ahead), a rewritten
    buffer (the L2 is empty) and a tiny all-reduce (the GPUs start together, within microseconds).

    All are queued before the call, so launches are hidden as they are in a training step, as far as the
    call does not itself wait for the GPU. What the host takes is `host`'s to say. `lead_cycles`: how long the
    GPU sleeps, which is longer than the host takes to issue a call.
    """

    def __init__(self, flush_bytes: int, device: torch.device, lead_cycles: int = _LEAD_CYCLES) -> None:
        self._lead_cycles = lead_cycles
        self._buffer = torch.ones(flush_bytes // 8, dtype=torch.int64, device=device)
        self._aligner = torch.ones(1, device=device)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        with _no_collection():
            torch.cuda._sleep(self._lead_cycles)
            if self._buffer.numel():
                self._buffer.add_(1)
            dist.all_reduce(self._aligner, op=dist.ReduceOp.MAX)
            self._start.record()
            result = call()
            self._stop.record()
            torch.cuda.synchronize()
        del result
        return float(self._start.elapsed_time(self._stop)) * 1e-3

    def host(self, path: Path, call: Callable[[], object], times: int) -> float | None:
        """Median seconds that the CPU is busy with `call` of `path`, waits for the GPU left out; None where
        there is no such thing.
        """
        if path.blocks and path.waited is None:
            return None
        took = []
        torch.cuda.synchronize()
        sum_over_ranks(0)  # all ranks begin together: what is waited for is the GPU alone
        if not path.blocks:
            torch.cuda._sleep(_SLEEP_CYCLES)  # no call can find its work done, nor wait for room
        with _no_collection():
            for _ in range(times):
                waited = path.waited() if path.blocks and path.waited is not None else 0.0
                start = time.perf_counter()
                result = call()
                seconds = time.perf_counter() - start
                if path.blocks and path.waited is not None:
                    seconds -= path.waited() - waited
                    torch.cuda.synchronize()
                took.append(seconds)
                del result
        torch.cuda.synchronize()
        return float(np.median(took)) / path.times


Clock = CpuClock | CudaClock


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def measure(
    paths: Sequence[Path],
    *,
    iters: int,
    warmup: int,
    clock: Clock,
    watch: Callable[[tuple[str, str], float], None] | None = None,
) -> dict[tuple[str, str], Timing]:
    """Times by path and phase, of all ranks of the default group; every rank passes the same paths.

    The calls alternate within an iteration, so that a slow spell of the machine hits all of them. A result is
    released after the clock has stopped. `watch` is told path, phase and seconds right after each timed call.
    """
    took = {(path.name, phase): np.zeros(iters) for path in paths for phase in path.calls}
    for iteration in range(-warmup, iters):
        for path in paths:
            for phase, call in path.calls.items():
                if path.before is not None:
                    path.before()
                seconds = clock.time(call) / path.times
                if iteration >= 0:
                    took[path.name, phase][iteration] = seconds
                    if watch is not None:
                        watch((path.name, phase), seconds)
    return {key: Timing(tuple(slowest(list(local)))) for key, local in took.items()}


def fastest(choices: Mapping[str, Callable[[], object]], clock: Clock) -> str:
    """The name of the fastest of several calls that do one thing, by a short trial; the same on all ranks."""
    if len(choices) == 1:
        return next(iter(choices))
    paths = [
        Path(name=name, calls={CALL: each}, check=lambda round: Verdict(0)) for name, each in choices.items()
    ]
    trial = measure(paths, iters=_TRIAL_ITERS, warmup=1, clock=clock)
    # Medians are over all ranks: all choose alike.
    return min(choices, key=lambda name: trial[name, CALL].median)


def slowest(local_I: Sequence[float]) -> list[float]:
    """Takes each value from the rank where it is largest."""
    merged = torch.tensor(local_I, dtype=torch.float64)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX)
    return [float(value) for value in merged]


def mean_over_ranks(local_I: Sequence[float]) -> list[float]:
    """Returns the mean of each value over the ranks."""
    merged = torch.tensor(local_I, dtype=torch.float64)
    dist.all_reduce(merged)
    return [float(value) / dist.get_world_size() for value in merged]


def sum_over_ranks(value: int) -> int:
    """`value` summed over the default group. Also a barrier of the hosts."""
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)
