"""Epochs beyond 32 bits, and peers that are an operation behind: nobody takes an old flag for a new one, or
writes over what somebody still reads.
"""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.gpu.test_graphs import AtCapacity, Captured
from tests.gpu.test_turns import TURNS, in_turns_case
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_epochs import first_epoch
from tests.oracle import Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")

STARTS = {
    "up to 2^31": 2**31 - 20,
    "beyond 2^31": 2**31 + 5,  # where a new flag, zero, would be one of an epoch to come
    "up to 2^32": 2**32 - 20,
    "the highest": 2**62,
}
SLEEP = 400_000_000
"""Clock ticks of a GPU, some tenths of a second."""


def _across(rank: int, world_size: int, job: Case, start: int) -> list[str]:
    """Runs all operations, abandoned operations and replays of a graph, from epoch `start` on."""
    with first_epoch(start):
        comm = harness.communicator(**job.communicator)
    with comm:
        problems = oracle.play(comm, job, rank)
        known = Oracle(job, rank, comm.device)
        for _ in range(3):
            comm.begin_dispatch(known.own.x_TH, known.own.ids_TK, known.own.weights_TK)
            known.check_dispatch(known.dispatch(comm))
        problems += known.problems
        capacity = 2 * max(known.needed)
        captured = Captured(comm, job, rank, capacity)
        for step in range(12):
            now = AtCapacity(replace(job, seed=job.seed + step), rank, comm.device, capacity)
            captured.load(now)
            captured.graph.replay()
            problems += captured.check(now)
        error = oracle.settled_error(comm)
        return problems + ([f"rank {rank}: {error}"] if error else [])


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize("in_turns", [False, True], ids=["at once", "in turns"])
@pytest.mark.parametrize("size", [2, 4])
def test_across_the_borders(pool: Pools, size: int, in_turns: bool, start: int, seed: int) -> None:
    """Chunks that take turns in the staging section get the right credits across the borders as well."""
    job = Job(tokens=(64, 33, 50, 0)[:size], num_experts=8 * size, hidden=256, top_k=4, seed=seed)
    if in_turns:
        job = in_turns_case(size, seed)
    oracle.assert_none(pool(size, **(TURNS if in_turns else {}))(_across, job, start))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_who_gives_up_waits_for_slow_peers(rank: int, world_size: int, seed: int) -> list[str]:
    """Each rank in turn is slow between sending and receiving a dispatch, epoch n. The others give n + 1 up
    and begin n + 2, whose rows lie where those of n do."""
    job = Job.on(world_size, (600, 333, 64, 512), experts=8, hidden=512, top_k=4, seed=seed)
    problems = []
    with harness.communicator(**job.communicator) as comm:
        first, second = (Oracle(replace(job, seed=job.seed + step), rank, comm.device) for step in range(2))
        for slow in range(world_size):
            receive = comm.begin_dispatch(first.own.x_TH, first.own.ids_TK, first.own.weights_TK)
            if rank == slow:
                torch.cuda._sleep(SLEEP)
            received = receive()
            comm.begin_dispatch(second.own.x_TH, second.own.ids_TK, second.own.weights_TK)
            out = second.dispatch(comm)
            first.check_dispatch(received)
            second.check_dispatch(out)
            second.check_combine("combine", comm.combine(second.answer(out.tokens), out.handle))
        harness.synchronize()
        comm.check()
        problems += first.problems + second.problems
    return problems
