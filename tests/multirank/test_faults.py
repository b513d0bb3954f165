"""Ranks that die, stop or never come: typed errors on the others, no hang, nothing left, life afterwards.

These ranks end with their test: each pays for fresh processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moecomm.env import read_env
from tests import oracle, ranks
from tests.cases import Case
from tests.multirank.catching import catch
from tests.multirank.harness import Died, no_shared_memory_left, run_ranks
from tests.oracle import Oracle

NEVER_NOTICED = 10.0  # seconds; a generous bound, a loss is normally noticed within one
LONG = 60.0
"""A timeout of communicators that no test waits for."""
Found = dict[str, Any]
FreshRanks = Callable[..., list[Any]]


def small(size: int) -> Case:
    if ranks.on_cpu():
        return Case(tokens=(6,) * size, num_experts=2 * size, hidden=64, top_k=2, seed=5)
    return Case(tokens=(300,) * size, num_experts=4 * size, hidden=1024, top_k=2, dtype="bfloat16", seed=5)


def start(case: Case, rank: int, timeout: float = LONG) -> tuple[Any, Oracle]:
    comm = ranks.communicator(**{**case.communicator, "timeout": timeout})
    return comm, Oracle(case, rank, comm.device)


def describe(error: BaseException, begin: float) -> Found:
    names = ("rank", "peer", "phase", "expected", "seen")
    return {
        "type": type(error).__name__,
        "text": str(error),
        "seconds": time.monotonic() - begin,
        **{name: getattr(error, name, None) for name in names},
    }


def caught(call: Callable[[], Any]) -> Found:
    import moecomm

    begin = time.monotonic()
    try:
        call()
    except moecomm.MoecommError as error:
        return describe(error, begin)
    return {"type": "nothing"}


def until_it_fails(step: Callable[[], None], seconds: float = 30.0) -> Found:
    """Repeats the step, as a training loop would, until it raises."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if (found := caught(step))["type"] != "nothing":
            return found
    return {"type": "nothing", "text": f"{seconds} s without an error"}


def one_step(comm: Any, known: Oracle, fixed: bool = False) -> None:
    """A dispatch and a combine. `fixed`: with a capacity; on GPUs its errors come from check()."""
    out = known.dispatch(comm, capacity=max(known.needed) if fixed else None)
    comm.combine(out.tokens, out.handle, weights=out.weights)
    if fixed:
        ranks.synchronize()
        comm.check()


def refusals(comm: Any, known: Oracle) -> set[str]:
    """Types of the errors that a broken communicator gives to whatever is asked of it."""
    calls: list[Callable[[], Any]] = [
        lambda: known.dispatch(comm),
        lambda: known.dispatch(comm, async_op=True).wait(),
        comm.check,
    ]
    if ranks.on_cpu():
        calls.append(lambda: comm.dispatch(torch.zeros(1), torch.zeros(1)))
    return {error.name if (error := catch(call)) else "nothing" for call in calls}


def device_works() -> bool:
    """Is there a CUDA context that can still be used, where there are GPUs?"""
    ranks.synchronize()
    a = torch.randn(128, 128, device=ranks.device(), dtype=torch.float64)
    unit = torch.eye(128, device=ranks.device(), dtype=torch.float64)
    return bool(torch.allclose(torch.linalg.inv(a) @ a, unit, atol=1e-5))


def wait_for_all_devices() -> None:
    """Waits until all ranks can use their device. A short deadline of a communicator that is built next is
    then not used up by the start of a process."""
    assert device_works()
    dist.barrier()


def new_start(folder: str, rank: int, survivors: list[int]) -> list[str]:
    """The survivors, in the same processes, form a new group and a new communicator, and work on it."""
    place, size = survivors.index(rank), len(survivors)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/survivors", size)
    dist.init_process_group("gloo", store=store, rank=place, world_size=size)
    case = small(size)
    if size % (read_env().ranks_per_node or 1):
        os.environ["MOECOMM_RANKS_PER_NODE"] = "1"  # equal nodes, as many ranks as are left
    with ranks.communicator(**case.communicator) as comm:
        return oracle.play(comm, case, place)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- death in the middle of steps ----------------------------------------------------------------------------


def _killed(rank: int, world_size: int, victim: int, how: str, folder: str) -> Found:
    """The victim dies between or within steps; the others sit in the next one, and in nothing else."""
    comm, known = start(small(world_size), rank)

    def step() -> None:
        one_step(comm, known, fixed=how in ("fixed", "graph"))

    for _ in range(3):
        step()
    if how == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = known.dispatch(comm, capacity=max(known.needed))
            comm.combine(out.tokens, out.handle)

        def step() -> None:
            graph.replay()
            torch.cuda.synchronize()
            comm.check()

        step()
    ranks.synchronize()
    dist.barrier()
    if rank == victim:
        if how == "after dispatch":
            known.dispatch(comm)
        elif how == "in a call":  # the others are late for this step: the call waits when the signal comes
            known.dispatch(comm, async_op=True)
        time.sleep(0.2)  # the others are waiting by now
        die()
    if how == "in a call":
        time.sleep(0.4)
    found = until_it_fails(step)
    found["refusals"] = refusals(comm, known)
    found["device works"] = device_works()
    comm.close()
    found["new start"] = new_start(folder, rank, [r for r in range(world_size) if r != victim])
    return found


def check_killed(fresh_ranks: FreshRanks, size: int, victim: int, how: str, folder: Any) -> None:
    with no_shared_memory_left():
        results = fresh_ranks(size, _killed, victim, how, str(folder), may_die=[victim])
    assert results.pop(victim) == Died(-signal.SIGKILL)
    for rank, found in zip((r for r in range(size) if r != victim), results, strict=True):
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, victim), found
        assert f"rank {victim}" in found["text"] and found["phase"] in found["text"], found
        assert found["seconds"] < NEVER_NOTICED, found
        assert found["refusals"] == {"PeerLost"}, found
        assert found["device works"] and found["new start"] == [], found
        print(f"{how}: rank {rank} noticed after {found['seconds']:.3f} s in {found['phase']}")


@pytest.mark.parametrize(
    ("size", "victim", "how"),
    [(2, 0, "fixed"), (3, 0, "between calls"), (3, 1, "after dispatch"), (3, 2, "in a call"),
     (7, 3, "between calls")],
)  # fmt: skip
def test_a_killed_rank_is_lost_to_the_others(
    fresh_ranks: FreshRanks, size: int, victim: int, how: str, tmp_path: Any
) -> None:
    check_killed(fresh_ranks, size, victim, how, tmp_path)


def _killed_at_any_moment(rank: int, world_size: int, victim: int, delay: float) -> list[Any]:
    """Communicators in a tight loop; the victim's own thread kills it wherever it is."""
    case = replace(small(world_size), hidden=1024)
    pairs = [start(case, rank) for _ in range(2 if ranks.on_cpu() else 1)]
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, die).start()
    found = until_it_fails(lambda: [one_step(*pair) for pair in pairs])
    return [found, *(refusals(*pair) for pair in pairs), device_works()]


@pytest.mark.parametrize("turn", range(3))
def test_death_at_any_moment(fresh_ranks: FreshRanks, most_ranks: int, turn: int, seed: int) -> None:
    size = max(2, most_ranks)
    rng = np.random.default_rng(seed)
    victim, delay = int(rng.integers(size)), turn and float(rng.uniform(0.0, 0.03))
    with no_shared_memory_left():
        results = fresh_ranks(size, _killed_at_any_moment, victim, delay, may_die=[victim])
    del results[victim]
    for found, *refused, works in results:
        assert (found["type"], found["peer"]) == ("PeerLost", victim), found
        assert found["seconds"] < NEVER_NOTICED, found
        assert all(types == {"PeerLost"} for types in refused) and works, refused


def _killed_in_backward(rank: int, world_size: int) -> Found:
    comm, known = start(small(world_size), rank)
    out = comm.dispatch(known.own.x_TH.clone().requires_grad_(), known.own.ids_TK)
    y_TH = comm.combine(out.tokens * 2, out.handle)
    ranks.synchronize()
    dist.barrier()
    if rank == 1:
        die()

    def step() -> None:
        y_TH.sum().backward(retain_graph=True)
        ranks.synchronize()
        comm.check()

    return {**until_it_fails(step), "device works": device_works(), "on cpu": ranks.on_cpu()}


def test_death_during_a_backward(fresh_ranks: FreshRanks, most_ranks: int) -> None:
    results = fresh_ranks(max(2, most_ranks), _killed_in_backward, may_die=[1])
    del results[1]
    for found in results:
        assert (found["type"], found["peer"]) == ("PeerLost", 1) and found["device works"], found
        assert not found["on cpu"] or found["phase"] == "backward of combine"


def _leaves_early(rank: int, world_size: int, how: str) -> Found:
    """A rank closes its communicator, or simply drops it, while others still need it."""
    comm, known = start(small(world_size), rank)
    one_step(comm, known)
    ranks.synchronize()
    dist.barrier()
    if rank == 1:
        if how == "close":
            comm.close()
        else:
            del comm
        found: Found = {}
    else:
        found = until_it_fails(lambda: one_step(comm, known))
    dist.barrier()  # rank 1 lives on: its end must not be what ends the others' wait
    return {**found, "device works": device_works(), "on cpu": ranks.on_cpu()}


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_rank_that_closes_early_is_lost_too(fresh_ranks: FreshRanks, most_ranks: int, how: str) -> None:
    results = fresh_ranks(max(2, most_ranks), _leaves_early, how)
    assert all(found["device works"] for found in results)
    del results[1]
    for found in results:
        assert (found["type"], found["peer"]) == ("PeerLost", 1), found
        assert found["seconds"] < NEVER_NOTICED, found
    # One of them noticed; the other may have learnt it from that one.
    assert not results[0]["on cpu"] or any("closed" in found["text"] for found in results)


# -- a rank that stops ---------------------------------------------------------------------------------------


def _paused(rank: int, world_size: int) -> list[str]:
    """A stop that is shorter than the deadline is only a delay."""
    case = small(world_size)
    comm, _ = start(case, rank)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        for pause in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(pids[1], pause)
            time.sleep(0.3)
    return oracle.play(comm, case, rank)


def test_a_short_stop_is_only_a_delay() -> None:
    oracle.assert_none(run_ranks(3, _paused))


def _stopped(rank: int, world_size: int, victim: int, folder: str) -> Found:
    """Rank 0 continues the victim after everybody has noticed: it must hear that it was given up, and not
    hang."""
    wait_for_all_devices()
    comm, known = start(small(world_size), rank, timeout=1.0)
    for _ in range(5):
        one_step(comm, known)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = until_it_fails(lambda: one_step(comm, known))
    found["refusals"] = refusals(comm, known)
    if rank != victim:
        comm.close()
        found["new start"] = new_start(folder, rank, [r for r in range(world_size) if r != victim])
        if rank == 0:
            os.kill(pids[victim], signal.SIGCONT)
    return found


def test_a_stopped_rank_is_a_timeout_with_rank_peer_and_phase(tmp_path: Any) -> None:
    with no_shared_memory_left():
        *others, stopped = run_ranks(3, _stopped, 2, str(tmp_path))
    for rank, found in enumerate(others):
        names = ("rank", "peer", "phase", "expected", "seen")
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, 2), found
        assert found["phase"] == "dispatch" and found["expected"] == found["seen"] + 1, found
        assert all(str(found[name]) in found["text"] for name in names)
        assert found["refusals"] == {"PeerTimeout"} and found["new start"] == [], found
    assert stopped["type"] in ("PeerTimeout", "PeerLost"), stopped
    assert stopped["refusals"] == {stopped["type"]}


# -- a rank that does not come -------------------------------------------------------------------------------


def _absent(rank: int, world_size: int, fixed: bool) -> Found:
    """Rank 1 does something else for longer than the deadline."""
    timeout = 1.0 if ranks.on_cpu() else 2.0
    wait_for_all_devices()
    comm, known = start(small(world_size), rank, timeout)
    one_step(comm, known, fixed)
    ranks.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(2 * timeout)
        dist.barrier()
        # What the others sent before they gave up is there; what they have not sent never comes.
        return {**until_it_fails(lambda: one_step(comm, known, fixed)), "device works": device_works()}
    begin = time.monotonic()
    found = until_it_fails(lambda: one_step(comm, known, fixed))
    found["waited"] = (time.monotonic() - begin) / timeout
    found["refusals"] = refusals(comm, known)
    found["device works"] = device_works()
    dist.barrier()
    return found


@pytest.mark.parametrize(("size", "fixed"), [(2, True), (3, False)])
def test_a_rank_that_does_not_call(fresh_ranks: FreshRanks, size: int, fixed: bool) -> None:
    results = fresh_ranks(size, _absent, fixed)
    late = results.pop(1)
    assert late["type"] in ("PeerTimeout", "PeerLost") and late["device works"], late
    assert "its own kernels" not in late["text"], late
    for rank, found in zip((0, 2), results, strict=False):
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, 1), found
        assert "dispatch" in found["phase"] and found["seen"] < found["expected"], found
        assert all(str(found[name]) in found["text"] for name in ("rank", "peer", "phase")), found
        assert 0.5 < found["waited"] < NEVER_NOTICED, found
        assert found["refusals"] == {"PeerTimeout"} and found["device works"], found


def _never_built(rank: int, world_size: int, missing: int) -> Found:
    timeout = 1.0 if ranks.on_cpu() else 2.0
    wait_for_all_devices()
    found = {} if rank == missing else caught(lambda: start(small(world_size), rank, timeout))
    dist.barrier()  # the missing rank is there until the others have given it up
    return {**found, "device works": device_works()}


@pytest.mark.parametrize(("size", "missing"), [(2, 0), (3, 1)])
def test_a_rank_that_never_comes_to_the_construction(
    fresh_ranks: FreshRanks, size: int, missing: int
) -> None:
    with no_shared_memory_left():
        results = fresh_ranks(size, _never_built, missing)
    for rank, found in enumerate(results):
        assert found["device works"]
        if rank != missing:
            assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, missing), found
            assert "construction" in found["phase"] and f"rank {missing}" in found["text"]


def _dies_at_construction(rank: int, world_size: int) -> Found:
    wait_for_all_devices()
    if rank == 1:
        # Takes part in the first meeting of the construction and dies before the windows are mapped.
        from moecomm.backends import cpu

        cpu.connect = lambda *_, **__: die()
    return caught(lambda: start(small(world_size), rank, 1.0))


def test_death_during_the_construction_leaves_nothing_behind() -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _dies_at_construction, may_die=[1])
    for found in results[::2]:
        assert found["type"] in ("PeerTimeout", "PeerLost") and found["peer"] == 1, found


# -- everybody dies ------------------------------------------------------------------------------------------


def _all_die(rank: int, world_size: int) -> None:
    comm, known = start(small(world_size), rank)
    one_step(comm, known)
    die()


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _all_die, may_die=[0, 1, 2])
    assert results == [Died(-signal.SIGKILL)] * 3


def _interrupted(rank: int, world_size: int) -> str:
    """Ctrl-C while a call waits for a peer that does not come."""
    comm, known = start(small(world_size), rank)
    found = "absent"
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        found = "nothing"
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            known.dispatch(comm)
        except BaseException as error:
            found = type(error).__name__
    dist.barrier()
    return found


def test_an_interrupt_during_a_wait_is_not_swallowed() -> None:
    with no_shared_memory_left():
        results = run_ranks(2, _interrupted)
    assert results[0] == "KeyboardInterrupt"
