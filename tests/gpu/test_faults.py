"""Ranks that die or never come while others wait in kernels: typed errors, living CUDA contexts, a new start.

These ranks end with their test; each test pays for fresh processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm.env import read_env
from tests.gpu import harness, oracle
from tests.gpu.harness import run_on_gpus
from tests.gpu.oracle import Job, Oracle
from tests.multirank.catching import catch
from tests.multirank.harness import Died, no_shared_memory_left

pytestmark = pytest.mark.usefixtures("cuda_only")

NEVER_NOTICED = 10.0  # seconds; a generous bound, a loss is normally noticed within one
Require = Callable[[int], None]


def _job(size: int) -> Job:
    return Job(tokens=(300,) * size, num_experts=4 * size, hidden=1024, top_k=2, seed=5)


def _communicator(job: Job, timeout: float) -> Any:
    return harness.communicator(**{**job.communicator, "timeout": timeout})


def _describe(error: BaseException, begin: float) -> dict[str, Any]:
    names = ("rank", "peer", "phase", "expected", "seen")
    return {
        "type": type(error).__name__,
        "text": str(error),
        "seconds": time.monotonic() - begin,
        **{name: getattr(error, name, None) for name in names},
    }


def _until_it_fails(step: Callable[[], None], seconds: float = 30.0) -> dict[str, Any]:
    """Repeats the step, as a training loop would, until it raises."""
    import moecomm

    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        before = time.monotonic()
        try:
            step()
        except moecomm.MoecommError as error:
            return _describe(error, before)
    return {"type": "nothing", "text": f"{seconds} s without an error"}


def _refusals(comm: Any, known: Oracle) -> list[str]:
    """Types of the errors that a broken communicator gives to whatever is asked of it."""
    calls: list[Callable[[], Any]] = [
        lambda: known.dispatch(comm),
        lambda: known.dispatch(comm, async_op=True).wait(),
        comm.check,
    ]
    return [error.name if (error := catch(call)) else "nothing" for call in calls]


def _context_works() -> bool:
    torch.cuda.synchronize()
    a = torch.randn(512, 512, device="cuda", dtype=torch.float64)
    product = torch.linalg.inv(a) @ a
    return bool(torch.allclose(product, torch.eye(512, device="cuda", dtype=torch.float64), atol=1e-5))


def _new_start(folder: str, rank: int, survivors: list[int]) -> list[str]:
    """The survivors, in the same processes, form a new group and a new communicator, and work on it."""
    place = survivors.index(rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/survivors", len(survivors))
    dist.init_process_group("gloo", store=store, rank=place, world_size=len(survivors))
    job = _job(len(survivors))
    if len(survivors) % (read_env().ranks_per_node or 1):
        os.environ["MOECOMM_RANKS_PER_NODE"] = "1"  # equal nodes, as many ranks as are left
    with _communicator(job, harness.COMM_TIMEOUT_S) as comm:
        return oracle.play(comm, job, place)


def _fixed_step(comm: Any, known: Oracle, capacity: int) -> None:
    """A step whose errors come from check()."""
    out = comm.dispatch(known.own.x_TH, known.own.ids_TK, known.own.weights_TK, capacity=capacity)
    comm.combine(out.tokens, out.handle, weights=out.weights)
    torch.cuda.synchronize()
    comm.check()


def _dropless_step(comm: Any, known: Oracle) -> None:
    out = known.dispatch(comm)
    comm.combine(out.tokens, out.handle, weights=out.weights)


# -- kill -9 -------------------------------------------------------------------------------------------------


def _killed(rank: int, world_size: int, victim: int, mode: str, folder: str) -> dict[str, Any]:
    """The victim dies between steps; the others sit in the next dispatch (or replay), and in nothing else."""
    job = _job(world_size)
    comm = _communicator(job, 60.0)
    known = Oracle(job, rank, comm.device)
    capacity = max(known.needed)
    if mode == "dropless":
        step = lambda: _dropless_step(comm, known)  # noqa: E731
    else:
        step = lambda: _fixed_step(comm, known, capacity)  # noqa: E731
    for _ in range(3):
        step()
    if mode == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = comm.dispatch(known.own.x_TH, known.own.ids_TK, capacity=capacity)
            comm.combine(out.tokens, out.handle)

        def step() -> None:
            graph.replay()
            torch.cuda.synchronize()
            comm.check()

        step()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == victim:
        time.sleep(0.3)  # the others are waiting in a kernel by now
        os.kill(os.getpid(), signal.SIGKILL)
    found = _until_it_fails(step)
    found["refusals"] = _refusals(comm, known)
    found["context"] = _context_works()
    comm.close()
    found["new start"] = _new_start(folder, rank, [r for r in range(world_size) if r != victim])
    return found


@pytest.mark.parametrize(
    ("size", "victim", "mode"),
    [(2, 1, "dropless"), (2, 0, "fixed"), (3, 1, "graph"), (4, 2, "dropless"), (4, 0, "fixed")],
)
def test_a_killed_rank_is_lost_to_the_others(
    require_gpus: Require, size: int, victim: int, mode: str, tmp_path: Any
) -> None:
    require_gpus(size)
    with no_shared_memory_left():
        results = run_on_gpus(size, _killed, victim, mode, str(tmp_path), may_die=[victim])
    assert results[victim] == Died(-signal.SIGKILL)
    for rank, found in enumerate(results):
        if rank == victim:
            continue
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, victim), found
        assert f"rank {victim}" in found["text"] and found["phase"] in found["text"], found
        assert found["seconds"] < NEVER_NOTICED, found
        assert set(found["refusals"]) == {"PeerLost"}, found
        assert found["context"] and found["new start"] == [], found
        print(f"{mode}: rank {rank} noticed after {found['seconds']:.3f} s in {found['phase']}")


def _killed_at_any_moment(rank: int, world_size: int, victim: int, delay: float) -> list[Any]:
    import threading

    job = _job(world_size)
    comm = _communicator(job, 60.0)
    known = Oracle(job, rank, comm.device)
    _dropless_step(comm, known)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    found = _until_it_fails(lambda: _dropless_step(comm, known))
    return [found, _refusals(comm, known), _context_works()]


@pytest.mark.parametrize("delay", [0.0, 0.0031, 0.0127])
def test_death_at_any_moment(require_gpus: Require, most_ranks: int, delay: float) -> None:
    require_gpus(2)
    size = max(2, most_ranks)
    with no_shared_memory_left():
        results = run_on_gpus(size, _killed_at_any_moment, size - 1, delay, may_die=[size - 1])
    for found, refusals, context in results[: size - 1]:
        assert (found["type"], found["peer"]) == ("PeerLost", size - 1), found
        assert found["seconds"] < NEVER_NOTICED and set(refusals) == {"PeerLost"} and context


def _killed_in_backward(rank: int, world_size: int) -> dict[str, Any]:
    job = _job(world_size)
    comm = _communicator(job, 60.0)
    known = Oracle(job, rank, comm.device)
    x_TH = known.own.x_TH.clone().requires_grad_()
    out = comm.dispatch(x_TH, known.own.ids_TK)
    y_TH = comm.combine(out.tokens * 2, out.handle)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        y_TH.sum().backward(retain_graph=True)
        torch.cuda.synchronize()
        comm.check()

    found = _until_it_fails(step)
    found["context"] = _context_works()
    return found


def test_death_during_a_backward(require_gpus: Require) -> None:
    require_gpus(2)
    found = run_on_gpus(2, _killed_in_backward, may_die=[1])[0]
    assert (found["type"], found["peer"]) == ("PeerLost", 1) and found["context"], found


# -- a rank that does not come -------------------------------------------------------------------------------


def _absent(rank: int, world_size: int, mode: str) -> dict[str, Any]:
    """Rank 1 does something else for longer than the deadline of two seconds."""
    job = _job(world_size)
    comm = _communicator(job, 2.0)
    known = Oracle(job, rank, comm.device)
    capacity = max(known.needed)

    def step() -> None:
        if mode == "dropless":
            _dropless_step(comm, known)
        else:
            _fixed_step(comm, known, capacity)

    step()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(4.0)
        dist.barrier()
        # What the others sent before they gave up is there; what they have not sent never comes.
        return {**_until_it_fails(step), "context": _context_works()}
    begin = time.monotonic()
    found = _until_it_fails(step)
    found["waited"] = time.monotonic() - begin
    found["refusals"] = _refusals(comm, known)
    found["context"] = _context_works()
    dist.barrier()
    return found


@pytest.mark.parametrize("mode", ["dropless", "fixed"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_call(require_gpus: Require, size: int, mode: str) -> None:
    require_gpus(size)
    results = run_on_gpus(size, _absent, mode)
    for rank, found in enumerate(results):
        if rank == 1:
            assert found["type"] in ("PeerTimeout", "PeerLost") and found["context"], found
            continue
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, 1), found
        assert "dispatch" in found["phase"] and found["seen"] < found["expected"], found
        assert all(str(found[name]) in found["text"] for name in ("rank", "peer", "phase")), found
        assert 1.0 < found["waited"] < NEVER_NOTICED, found
        assert set(found["refusals"]) == {"PeerTimeout"} and found["context"], found


def _never_built(rank: int, world_size: int) -> dict[str, Any]:
    import moecomm

    if rank == 1:
        time.sleep(3.5)
        return {"type": "absent"}
    begin = time.monotonic()
    try:
        _communicator(_job(world_size), 2.0)
    except moecomm.PeerTimeout as error:
        return {**_describe(error, begin), "context": _context_works()}
    return {"type": "nothing"}


def test_a_rank_that_never_comes_to_the_construction(require_gpus: Require) -> None:
    require_gpus(2)
    with no_shared_memory_left():
        found = run_on_gpus(2, _never_built)[0]
    assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", 0, 1), found
    assert "construction" in found["phase"] and found["context"], found


# -- a rank that leaves early --------------------------------------------------------------------------------


def _leaves_early(rank: int, world_size: int, how: str) -> dict[str, Any]:
    job = _job(world_size)
    comm = _communicator(job, 60.0)
    known = Oracle(job, rank, comm.device)
    _dropless_step(comm, known)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        if how == "close":
            comm.close()
        else:
            del comm
        time.sleep(1.0)  # the process lives on: its context must not be what ends the others' wait
        dist.barrier()
        return {"context": _context_works()}
    found = _until_it_fails(lambda: _dropless_step(comm, known))
    found["context"] = _context_works()
    dist.barrier()
    return found


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_rank_that_closes_early_is_lost_too(require_gpus: Require, most_ranks: int, how: str) -> None:
    require_gpus(2)
    results = run_on_gpus(max(2, most_ranks), _leaves_early, how)
    assert all(found["context"] for found in results)
    for rank, found in enumerate(results):
        if rank != 1:
            assert (found["type"], found["peer"]) == ("PeerLost", 1), found
            assert found["seconds"] < NEVER_NOTICED, found


def _close_with_work_under_way(rank: int, world_size: int) -> list[str]:
    """close() right behind a call lets what was called finish, on this rank and for its peers."""
    job = _job(world_size)
    problems = []
    for turn in range(10):
        comm = _communicator(job, harness.COMM_TIMEOUT_S)
        known = Oracle(job, rank, comm.device)
        if turn % world_size == rank:
            torch.cuda._sleep(100_000_000)
        out = known.dispatch(comm)
        y_TH = comm.combine(known.answer(out.tokens), out.handle)
        comm.close()
        known.check_dispatch(out)
        known.check_combine("combine", y_TH)
        problems += known.problems
    return problems


def test_close_waits_for_what_is_under_way(require_gpus: Require, most_ranks: int) -> None:
    require_gpus(2)
    harness.assert_none(run_on_gpus(max(2, most_ranks), _close_with_work_under_way))
