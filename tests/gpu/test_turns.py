"""Dispatches in two halves, and dispatches whose rows do not all fit into the owners' staging sections: with
more ranks than top-k, and more than have room for all of their tokens, chunks take turns there, so what sends
and what receives wait for each other.

Nothing that a program puts between the two calls of a dispatch may keep them apart: work on the same stream,
events, a wait of the host for the device.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import oracle
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, opened

pytestmark = pytest.mark.usefixtures("cuda_only")

LIMITS = (2, 3, 8, 14, 33, 132, None)
"""Numbers of SMs."""

TURNS = {"MOECOMM_WHOLE_SOURCES": "0"}
"""The environment of ranks in which no source has more room than a combine needs."""


def in_turns_case(size: int, seed: int, **changes: Any) -> Job:
    """Two thirds of each source's tokens have a place of their own, or less. Of two ranks only rows that
    change their format take turns, those of the owner itself among them: short ones, since they are no
    shorter on the way."""
    tokens = (2048, 2000, 1025, 2048)[:size]
    hidden = 1024
    if size == 2:
        changes, hidden = {"wire": "fp8", **changes}, 128
    return Job(tokens=tokens, num_experts=8 * size, hidden=hidden, top_k=size // 2, seed=seed, **changes)


def begin(comm: Any, known: Oracle) -> Callable[[], Any]:
    return comm.begin_dispatch(known.own.x_TH, known.own.ids_TK, known.own.weights_TK)


def _work_on_the_stream(device: torch.device) -> None:
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(4):
        busy = busy @ busy * 1e-3


def _events(device: torch.device) -> None:
    for _ in range(2):
        torch.cuda.Event(enable_timing=True).record()


def _all_memory_back(device: torch.device) -> None:
    """Frees all cached memory, as the allocator does before it gives up: cudaFree waits for the device."""
    memory = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    del memory
    torch.cuda.empty_cache()


BETWEEN: dict[str, Callable[[torch.device], object]] = {
    "nothing": lambda device: None,
    "work": _work_on_the_stream,
    "events": _events,
    "wait": torch.cuda.synchronize,
    "memory": _all_memory_back,
}


def _in_halves(
    rank: int, world_size: int, job: Job, between: str, sms: list[int | None], steps: int = 1
) -> list[str]:
    """`sms`: the number of SMs of each rank."""
    problems = []
    with harness.communicator(**{**job.communicator, "num_sms": sms[rank]}) as comm:
        for step in range(steps):
            known = Oracle(replace(job, seed=job.seed + step), rank, comm.device)
            harness.poison(32 << 20)
            receive = begin(comm, known)
            BETWEEN[between](comm.device)
            out = receive()
            known.check_dispatch(out)
            known.check_combine("combine", comm.combine(known.answer(out.tokens), out.handle))
            rows = comm.redispatch(known.own.x_TH, out.handle)
            if not torch.equal(rows, out.tokens) and job.wire is None:
                known.problems.append(f"rank {rank}: other rows along the plan")
            problems += known.problems
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.parametrize("between", list(BETWEEN)[1:])
@pytest.mark.parametrize(("size", "wire"), [(2, "fp8"), (4, None), (4, "fp8")])
def test_whatever_is_between_the_calls(
    pool: Pools, size: int, between: str, wire: str | None, seed: int
) -> None:
    job, sms = in_turns_case(size, seed, wire=wire), [None] * size
    oracle.assert_none(pool(size, **TURNS)(_in_halves, job, between, sms, 3))


@pytest.mark.parametrize("agree", [True, False], ids=["the same on all", "another on each"])
@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("top_k", [1, 4])  # 1: of four ranks, or in fp8, chunks take turns
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_sms(
    pool: Pools, size: int, top_k: int, wire: str | None, agree: bool, seed: int
) -> None:
    job = Job.on(size, (1500, 64, 1200, 0), experts=8, hidden=1040, top_k=top_k, wire=wire, seed=seed)
    for step in range(len(LIMITS)):
        sms = [LIMITS[(step + (0 if agree else rank)) % len(LIMITS)] for rank in range(size)]
        oracle.assert_none(pool(size, **TURNS)(_in_halves, job, "nothing", sms))


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size", **TURNS)
def test_what_is_given_up_keeps_nobody_waiting(rank: int, world_size: int, seed: int) -> list[str]:
    """Each rank in turn abandons a dispatch, then all do: nobody waits for it. The others lack rows of the
    one that abandons it: all ranks hear of that in the next operation. What comes then is right."""
    with opened(in_turns_case(world_size, seed), rank) as (comm, known):
        for leaver in range(world_size + 1):
            receive = begin(comm, known)
            if rank != leaver and leaver < world_size:
                receive()
            if leaver < world_size:
                says = "ranks disagree on whether the dispatch before was received"
                refused(lambda: known.dispatch(comm), says, name="MismatchedArguments")
            for _ in range(2):
                known.check_step(comm)
        harness.synchronize()
        comm.check()
        return known.problems


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size", **TURNS)
def test_in_a_graph(rank: int, world_size: int, seed: int) -> list[str]:
    job, problems = in_turns_case(world_size, seed, slack=4096), []
    with opened(job, rank) as (comm, known):
        x_TH, ids_TK = known.own.x_TH.clone(), known.own.ids_TK.clone()

        def dispatch() -> Any:
            return comm.dispatch(x_TH, ids_TK, known.own.weights_TK, capacity=known.capacity)

        harness.warm_up(dispatch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch()
            rows = comm.redispatch(x_TH, out.handle)
            y_TH = comm.combine(rows, out.handle)
        for step in range(4):
            other = Oracle(replace(job, seed=job.seed + step), rank, comm.device)
            x_TH.copy_(other.own.x_TH)
            ids_TK.copy_(other.own.ids_TK)
            graph.replay()
            torch.cuda.synchronize()
            eager = dispatch()
            kept = min(other.mine.needed, other.capacity or 0)
            along = comm.redispatch(x_TH, eager.handle)
            for name, got, want in (
                ("dispatch", out.tokens, eager.tokens),
                ("other rows along the plan", rows, along),
            ):
                assert torch.equal(got[:kept], want[:kept]), f"replay {step}: {name}"
            if job.wire is None and not torch.equal(along[:kept], eager.tokens[:kept]):
                problems.append(f"rank {rank}, replay {step}: other rows along the plan than dispatched")
            assert torch.equal(y_TH, comm.combine(along, eager.handle)), f"replay {step}: combine"
        comm.check()
    return problems
