"""Communicators come and go: GPU memory, descriptors, threads and names do too."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import harness, oracle
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Job, Oracle
from tests.multirank.catching import Caught, catch
from tests.multirank.harness import no_shared_memory_left

pytestmark = pytest.mark.usefixtures("cuda_only")

SLACK_BYTES = 32 << 20  # what the driver may keep for itself; one window below is larger


def _job(size: int, seed: int) -> Job:
    return Job(tokens=(2048,) * size, num_experts=8 * size, hidden=2048, top_k=4, seed=seed)


def _free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()  # ranks that map each other's memory have let go of it as well
    return torch.cuda.mem_get_info()[0]


def _counts() -> dict[str, int]:
    return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def _come_and_go(rank: int, world_size: int, job: Job, turns: int, how: str) -> list[str]:
    def use(full: bool) -> None:
        comm = harness.communicator(**job.communicator)
        if full:
            known = Oracle(replace(job, tokens=(16,) * world_size), rank, comm.device)
            known.check_dispatch(known.dispatch(comm))
            assert known.problems == []
        dist.barrier()
        if how == "close":
            comm.close()
        elif how == "with":
            with comm:
                pass

    for _ in range(3):
        use(True)
    free, counts = _free_bytes(), _counts()
    for turn in range(turns):
        use(turn % 3 == 0)
    lost = free - _free_bytes()
    problems = []
    if lost > SLACK_BYTES:
        problems.append(f"rank {rank}: {lost >> 20} MiB lost after {turns} communicators")
    after = _counts()
    if any(after[name] > counts[name] + 2 for name in counts):
        problems.append(f"rank {rank}: {counts} before, {after} after {turns} communicators")
    return problems


@pytest.mark.parametrize(("how", "turns"), [("close", 50), ("with", 10), ("drop", 10)])
def test_nothing_leaks(pool: Pools, most_ranks: int, how: str, turns: int, seed: int) -> None:
    with no_shared_memory_left():
        harness.assert_none(pool(most_ranks)(_come_and_go, _job(most_ranks, seed), turns, how))


def _memory_plan(rank: int, world_size: int, job: Job) -> list[str]:
    """A communicator takes what its memory plan says, and a granule of the driver's at most besides."""
    import moecomm

    torch.zeros(1, device=harness.device())
    with harness.communicator(**job.communicator):
        pass
    before = _free_bytes()
    with harness.communicator(**job.communicator) as comm:
        dist.barrier()
        taken = before - torch.cuda.mem_get_info()[0]
        said = comm.memory.committed_bytes
        arguments = {k: v for k, v in job.communicator.items() if k != "num_sms"}
        plan = moecomm.Communicator.memory_plan(ranks=world_size, device="cuda", **arguments)
        dist.barrier()
    problems = [] if plan == comm.memory else [f"rank {rank}: memory_plan() says otherwise: {plan}"]
    if not said <= taken + SLACK_BYTES or taken > said + SLACK_BYTES:
        problems.append(f"rank {rank}: {taken} bytes taken, the plan says {said}")
    return problems


def test_the_memory_plan_is_what_is_taken(pool: Pools, most_ranks: int, seed: int) -> None:
    harness.assert_none(pool(most_ranks)(_memory_plan, _job(most_ranks, seed)))


def _expandable(rank: int, world_size: int, job: Job) -> list[str]:
    """torch's own use of VMM (expandable segments) beside ours."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        problems = []
        for step in range(3):
            now = replace(job, seed=job.seed + step, slack=None if step % 2 else 8)
            with harness.communicator(**now.communicator) as comm:
                harness.poison()
                problems += oracle.play(comm, now, rank)
            torch.cuda.empty_cache()
        return problems
    finally:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_beside_expandable_segments(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_expandable, _job(size, seed)))


def _many_at_once(rank: int, world_size: int, job: Job) -> list[str]:
    comms = [harness.communicator(**job.communicator) for _ in range(8)]
    problems = []
    for i in (3, 0, 7, 5):
        problems += oracle.play(comms[i], replace(job, seed=job.seed + i), rank)
    for comm in comms[:4]:
        comm.close()
    for comm in comms[4:]:
        problems += oracle.play(comm, job, rank)
        comm.close()
    return problems


def test_many_at_once(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(tokens=(64,) * most_ranks, num_experts=4 * most_ranks, hidden=256, top_k=2, seed=seed)
    harness.assert_none(pool(most_ranks)(_many_at_once, job))


def _subgroup(rank: int, world_size: int, job: Job) -> list[str]:
    """A communicator of some ranks beside one of all; rank 0 of the group is not rank 0 of the job."""
    members = list(range(1, world_size))
    group = dist.new_group(members)
    problems = []
    with harness.communicator(**job.communicator) as everybody:
        if rank in members:
            part = replace(job, tokens=(20,) * len(members), num_experts=4 * len(members))
            with harness.communicator(group=group, **part.communicator) as comm:
                problems += oracle.play(comm, part, members.index(rank))
        problems += oracle.play(everybody, job, rank)
    return problems


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_group_of_some_ranks(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(30,) * size, num_experts=4 * size, hidden=128, top_k=2, seed=seed)
    harness.assert_none(pool(size)(_subgroup, job))


def _on_nccl(rank: int, world_size: int, job: Job) -> list[str]:
    """The group may be one of NCCL."""
    with harness.communicator(group=harness.nccl(), **job.communicator) as comm:
        return oracle.play(comm, job, rank)


def test_a_group_of_nccl(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(tokens=(30,) * most_ranks, num_experts=4 * most_ranks, hidden=128, top_k=2, seed=seed)
    harness.assert_none(pool(most_ranks)(_on_nccl, job))


def _closed(rank: int, world_size: int, job: Job) -> dict[str, Caught | None]:
    comm = harness.communicator(**job.communicator)
    known = Oracle(job, rank, comm.device)
    out = known.dispatch(comm)
    x_TH = known.own.x_TH.clone().requires_grad_()
    pending = comm.dispatch(x_TH, known.own.ids_TK)
    torch.cuda.synchronize()
    dist.barrier()
    comm.close()
    comm.close()
    calls: dict[str, Any] = {
        "dispatch": lambda: known.dispatch(comm),
        "combine": lambda: comm.combine(out.tokens, out.handle),
        "check": comm.check,
        "stats": comm.stats,
        "backward": lambda: pending.tokens.sum().backward(),
    }
    caught = {name: catch(call) for name, call in calls.items()}
    known.check_dispatch(out)  # outputs are ordinary memory and outlive the communicator
    assert known.problems == []
    return caught


def test_use_after_close(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(tokens=(30,) * most_ranks, num_experts=2 * most_ranks, hidden=128, top_k=2, seed=seed)
    for caught in pool(most_ranks)(_closed, job):
        for name, error in caught.items():
            assert error is not None and error.name == "CommunicatorClosed", f"{name}: {error}"


def _stats(rank: int, world_size: int, job: Job) -> list[str]:
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        comm.reset_stats()
        for _ in range(3):
            out = known.dispatch(comm)
            comm.combine(out.tokens, out.handle)
        torch.cuda.synchronize()
        stats = comm.stats()
        want = {"dispatch_calls": 3, "combine_calls": 3, "rows_in": 3 * job.tokens[rank]}
        return [
            f"rank {rank}: {k} is {stats.get(k)}, expected {v}" for k, v in want.items() if stats.get(k) != v
        ]


def test_stats_count_calls(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(tokens=(30,) * most_ranks, num_experts=2 * most_ranks, hidden=128, top_k=2, seed=seed)
    harness.assert_none(pool(most_ranks)(_stats, job))
