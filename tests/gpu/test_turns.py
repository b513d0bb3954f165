"""Dispatches whose rows do not all fit into the owners' staging sections, with more ranks than top-k: chunks
take turns there, so what sends and what receives wait for each other.

Nothing that a program puts between the two calls of a dispatch may keep them apart: work on the same stream,
events, a wait of the host for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Job, Oracle


def _job(size: int, seed: int, **changes: Any) -> Job:
    """Half of each source's tokens have a place of their own, or less."""
    tokens = (2048, 2000, 1025, 2048)[:size]
    return Job(tokens=tokens, num_experts=8 * size, hidden=1024, top_k=size // 2, seed=seed, **changes)


def _work_on_the_stream(device: torch.device) -> None:
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(4):
        busy = busy @ busy * 1e-3


def _events(device: torch.device) -> None:
    for _ in range(2):
        torch.cuda.Event(enable_timing=True).record()


def _wait(device: torch.device) -> None:
    torch.cuda.synchronize()


def _all_memory_back(device: torch.device) -> None:
    """Frees all cached memory, as the allocator does before it gives up: cudaFree waits for the device."""
    memory = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    del memory
    torch.cuda.empty_cache()


BETWEEN: dict[str, Callable[[torch.device], None]] = {
    "work": _work_on_the_stream,
    "events": _events,
    "wait": _wait,
    "memory": _all_memory_back,
}


def _separated(rank: int, world_size: int, job: Job, between: str) -> list[str]:
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        own = known.own
        for _ in range(3):
            harness.poison(32 << 20)
            receive = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK)
            BETWEEN[between](comm.device)
            out = receive()
            known.check_dispatch(out)
            answer = known.answer(out.tokens)
            known.check_combine("combine", comm.combine(answer, out.handle))
            rows = comm.redispatch(known.own.x_TH, out.handle)
            if not torch.equal(rows, out.tokens) and job.wire is None:
                known.problems.append(f"rank {rank}: other rows along the plan")
        harness.synchronize()
        comm.check()
    return known.problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("between", list(BETWEEN))
@pytest.mark.parametrize("size", [2, 4])
def test_whatever_is_between_the_calls(
    pool: Pools, size: int, between: str, wire: str | None, seed: int
) -> None:
    harness.assert_none(pool(size)(_separated, _job(size, seed, wire=wire), between))


def _given_up(rank: int, world_size: int, job: Job) -> list[str]:
    """Each rank in turn abandons a dispatch: nobody waits for it, and the next one is right everywhere."""
    problems = []
    with harness.communicator(**job.communicator) as comm:
        for leaver in range(world_size):
            own = Oracle(job, rank, comm.device).own
            receive = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK)
            if rank != leaver:
                receive()
            for _ in range(2):
                known = Oracle(job, rank, comm.device)
                out = known.dispatch(comm)
                known.check_dispatch(out)
                known.check_combine("combine", comm.combine(known.answer(out.tokens), out.handle))
                problems += known.problems
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_given_up_keeps_nobody_waiting(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_given_up, _job(size, seed)))


def _replayed(rank: int, world_size: int, job: Job) -> list[str]:
    problems: list[str] = []
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        x_TH, ids_TK = known.own.x_TH.clone(), known.own.ids_TK.clone()
        harness.warm_up(lambda: comm.dispatch(x_TH, ids_TK, known.own.weights_TK, capacity=known.capacity))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = comm.dispatch(x_TH, ids_TK, known.own.weights_TK, capacity=known.capacity)
            rows = comm.redispatch(x_TH, out.handle)
            y_TH = comm.combine(rows, out.handle)
        for step in range(4):
            other = Oracle(replace(job, seed=job.seed + step), rank, comm.device)
            x_TH.copy_(other.own.x_TH)
            ids_TK.copy_(other.own.ids_TK)
            graph.replay()
            torch.cuda.synchronize()
            eager = comm.dispatch(x_TH, ids_TK, known.own.weights_TK, capacity=known.capacity)
            kept = min(other.mine.needed, other.capacity or 0)
            for name, got in (("dispatch", out.tokens), ("other rows along the plan", rows)):
                if not torch.equal(got[:kept], eager.tokens[:kept]):
                    problems.append(f"rank {rank}, replay {step}: {name}")
            if not torch.equal(y_TH, comm.combine(eager.tokens, eager.handle)):
                problems.append(f"rank {rank}, replay {step}: combine")
        comm.check()
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [2, 4])
def test_in_a_graph(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_replayed, _job(size, seed, slack=4096)))
