"""The kernels of ActivationPool: the tests of the CPU, graphs whose replays differ, streams, sizes.

Bodies run on rank 0 of a pool of one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moecomm.errors import MoecommError
from moecomm.nn.pool import ActivationPool
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.unit.test_pool import (
    pages_for,
    same,
    tensors_of,
    test_only_real_rows_are_written,
    test_random_order,
)

__all__ = ["test_only_real_rows_are_written", "test_random_order"]

PAGE = 1 << 14


def _owned(rank: int, world_size: int, seed: int) -> list[str]:
    """Pages of tables that nobody has any more: at once, and within a graph, in each of its replays."""
    device = harness.device()
    pool = ActivationPool(device, 16 * PAGE, page_bytes=PAGE)
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(64, 256, device=device, generator=generator)  # 4 pages
    problems = []
    kept = pool.owned(pool.stash(rows))
    alias = kept.table[1:]
    del kept
    if pool.use().held != 4 * PAGE:
        problems.append(f"{pool.use()} while an alias lives")
    del alias
    if pool.use().held:
        problems.append(f"{pool.use()} after the last one")
    eager = pool.owned(pool.stash(rows))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.owned(pool.stash(rows))
        handle = pool.owned(pool.stash(rows))
        (back,) = pool.restore(handle)
        del handle
    del eager
    for replay in range(4):
        back.fill_(7.0)
        graph.replay()
        use = pool.use()
        if use.held or use.peak > 8 * PAGE or not torch.equal(back, rows):
            problems.append(f"replay {replay}: {use}")
    pool.check()
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_pages_go_back_with_their_tables(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_owned, seed))


def _graph(rank: int, world_size: int, spill: int, seed: int) -> list[str]:
    """Checks a graph whose replays each take as much as they need; some need more than there is."""
    device, rng, problems = harness.device(), random.Random(seed), []
    rows, pages = 400, 40
    pool = ActivationPool(device, (pages - spill) * PAGE, page_bytes=PAGE, spill_bytes=spill * PAGE)
    sources = [
        [torch.zeros(rows, 256, device=device), torch.zeros(rows, 100, dtype=torch.bfloat16, device=device)],
        [torch.zeros(rows, 300, dtype=torch.float64, device=device)],
        [torch.zeros(rows, 64, dtype=torch.float16, device=device)],
    ]
    ends = [torch.zeros(2, dtype=torch.int32, device=device) for _ in sources]
    words = torch.zeros(2, dtype=torch.int64, device=device)

    def step() -> list[tuple[torch.Tensor, ...]]:
        pool.reset()
        handles = [pool.stash(*each, ends=end) for each, end in zip(sources, ends, strict=True)]
        found: dict[int, tuple[torch.Tensor, ...]] = {}
        for index in (1, 0, 2):
            found[index] = pool.restore(handles[index])
        pool.record(words)
        return [found[index] for index in range(3)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    overflows = 0
    for turn in range(60):
        counts = [rng.randint(0, rows) if turn % 3 else rng.randint(0, rows // 4) for _ in sources]
        for each, end, count in zip(sources, ends, counts, strict=True):
            end.copy_(torch.tensor([count // 2, count], dtype=torch.int32))
            for tensor in each:
                tensor.copy_(torch.randn(tensor.shape, device=device))
        graph.replay()
        needed = [pages_for(each, count, PAGE) for each, count in zip(sources, counts, strict=True)]
        free, taken = pages, []
        for count in needed:
            taken.append(count <= free)
            free -= count if count <= free else 0
        want = 0 if all(taken) else sum(needed) * PAGE
        overflows += want > 0
        if words.tolist() != [want, 0]:
            problems.append(f"turn {turn}: {counts} rows: {words.tolist()} was recorded, expected {want}")
        for each, result, count, fits in zip(sources, results, counts, taken, strict=True):
            for tensor, got in zip(each, result, strict=True):
                if fits and not same(got, tensor, count):
                    problems.append(
                        f"turn {turn}: {count} rows of {tuple(tensor.shape)} came back differently"
                    )
        if pool.use().held:
            problems.append(f"turn {turn}: {pool.use()}")
        if problems:
            break
    if not 0 < overflows < 60:
        problems.append(f"{overflows} of 60 turns overflowed: some have to, others not")
    del graph
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("spill", [0, 25])
def test_replays_take_what_they_need(pool: Pools, spill: int, seed: int) -> None:
    harness.assert_none(pool(1)(_graph, spill, seed))


def _streams(rank: int, world_size: int, seed: int) -> list[str]:
    """Pushed on one stream, popped on another, with only the pool to order them, each late by a time of its
    own."""
    device, rng, problems = harness.device(), random.Random(seed), []
    streams = [torch.cuda.Stream() for _ in range(3)]
    sources = [tensors_of(device, 2000, rng, most=2) for _ in range(20)]
    pages = sum(pages_for(each, 2000, PAGE) for each in sources)
    pool = ActivationPool(device, pages * PAGE, page_bytes=PAGE)
    torch.cuda.synchronize()
    handles = []
    for index, each in enumerate(sources):
        with torch.cuda.stream(streams[index % 3]):
            torch.cuda._sleep(rng.randrange(200_000))
            handles.append(pool.stash(*each))
    results = []
    for index, handle in enumerate(handles):
        with torch.cuda.stream(streams[(index + 1) % 3]):
            torch.cuda._sleep(rng.randrange(200_000))
            results.append(pool.restore(handle))
    torch.cuda.synchronize()
    for index, (each, result) in enumerate(zip(sources, results, strict=True)):
        for tensor, got in zip(each, result, strict=True):
            if not same(got, tensor, 2000):
                problems.append(f"push {index}: {tuple(tensor.shape)} came back differently")
    try:
        pool.check()
    except MoecommError as error:
        problems.append(
            f"{error}; {pool._pages.state.tolist()}, {[each.table[:8].tolist() for each in handles]}"
        )
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_several_streams(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_streams, seed))


def _no_waits(rank: int, world_size: int) -> None:
    pool = ActivationPool(harness.device(), 100 * PAGE, page_bytes=PAGE)
    rows = torch.zeros(100, 64, device=harness.device())
    ends = torch.full((2,), 50, dtype=torch.int32, device=harness.device())
    words = torch.zeros(2, dtype=torch.int64, device=harness.device())
    torch.cuda.set_sync_debug_mode("error")
    pool.reset()
    pool.restore(pool.stash(rows, ends=ends))
    pool.drop(pool.stash(rows))
    pool.record(words)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("cuda_only")
def test_the_host_waits_for_nothing(pool: Pools) -> None:
    pool(1)(_no_waits)


def _large(rank: int, world_size: int, seed: int) -> list[str]:
    """More than 4 GiB in one tensor, so that offsets do not fit 32 bits."""
    device = harness.device()
    rows = torch.randint(0, 1 << 30, (70_000, 16_384), dtype=torch.int32, device=device)
    ends = torch.tensor([69_999], dtype=torch.int32, device=device)
    pool = ActivationPool(device, 5 << 30)
    (got,) = pool.restore(pool.stash(rows, ends=ends))
    pool.check()
    return [] if torch.equal(got[:69_999], rows[:69_999]) else ["rows came back differently"]


@pytest.mark.usefixtures("cuda_only")
def test_large_tensors(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_large, seed))


def _no_memory(rank: int, world_size: int) -> Any:
    from tests.multirank.catching import catch

    return catch(lambda: ActivationPool(harness.device(), 1 << 50))


@pytest.mark.usefixtures("cuda_only")
def test_no_memory(pool: Pools) -> None:
    (error,) = pool(1)(_no_memory)
    assert error is not None and error.name == "OutOfMemory" and error.needed == 1 << 50, error
