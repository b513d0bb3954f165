"""Ranks that die, stop or never come: typed errors on the others, no hang, nothing left, life afterwards."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.multirank import cases
from tests.multirank.cases import Case
from tests.multirank.harness import Died, no_shared_memory_left, run_ranks

NEVER_NOTICED = 10.0  # seconds; a generous bound, a loss is normally noticed within some tens of milliseconds


def _case(size: int) -> Case:
    return Case(tokens=(6,) * size, num_experts=2 * size, hidden=64, top_k=2, seed=5)


def _communicator(case: Case, timeout: float, group: Any = None) -> Any:
    import moecomm

    return moecomm.Communicator(group, **{**case.communicator, "timeout": timeout})


def _describe(error: Any) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "text": str(error),
        **{name: getattr(error, name, None) for name in ("rank", "peer", "phase", "expected", "seen")},
    }


def _step(comm: Any, case: Case, rank: int) -> None:
    out = cases.dispatch(comm, case, rank)
    comm.combine(out.tokens, out.handle, weights=out.weights)


def _refusals(comm: Any, case: Case, rank: int) -> list[str]:
    """Types of the errors that a broken communicator gives to whatever is asked of it."""
    calls = [
        lambda: cases.dispatch(comm, case, rank),
        lambda: cases.dispatch(comm, case, rank, async_op=True).wait(),
        lambda: comm.dispatch(torch.zeros(1), torch.zeros(1)),
        comm.check,
    ]
    found = []
    for call in calls:
        try:
            call()
        except Exception as error:
            found.append(type(error).__name__)
        else:
            found.append("nothing")
    return found


def _life_afterwards(folder: str, rank: int, survivors: list[int]) -> bool:
    """The survivors, in the same processes, form a new group and work on it."""
    place = survivors.index(rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/survivors", len(survivors))
    dist.init_process_group("gloo", store=store, rank=place, world_size=len(survivors))
    case = _case(len(survivors))
    with _communicator(case, 20.0) as comm:
        out = cases.dispatch(comm, case, place)
        return torch.equal(out.tokens, torch.from_numpy(case.expected(place).tokens))


# -- death in the middle of steps ----------------------------------------------------------------------------


def _killed(rank: int, world_size: int, victim: int, where: str, folder: str) -> dict[str, Any]:
    import moecomm

    case = _case(world_size)
    comm = _communicator(case, 60.0)
    try:
        for step in range(1000):
            if rank == victim and step == 20:
                if where == "between calls":
                    os.kill(os.getpid(), signal.SIGKILL)
                if where == "after dispatch":
                    cases.dispatch(comm, case, rank)
                    os.kill(os.getpid(), signal.SIGKILL)
                if where == "in a call":
                    # The others are late for this step: the call is waiting when the signal comes.
                    cases.dispatch(comm, case, rank, async_op=True)
                    time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == 20 and where == "in a call":
                time.sleep(0.3)
            before = time.monotonic()
            _step(comm, case, rank)
    except moecomm.PeerLost as error:
        found = _describe(error)
    found["seconds"] = time.monotonic() - before
    found["refusals"] = _refusals(comm, case, rank)
    comm.close()
    found["afterwards"] = _life_afterwards(folder, rank, [r for r in range(world_size) if r != victim])
    return found


@pytest.mark.parametrize(
    ("size", "victim", "where"),
    [
        (2, 1, "between calls"),
        (3, 0, "between calls"),
        (3, 1, "after dispatch"),
        (3, 2, "in a call"),
        (7, 3, "between calls"),
    ],
)
def test_a_killed_rank_is_lost_to_the_others(size: int, victim: int, where: str, tmp_path: Any) -> None:
    with no_shared_memory_left():
        results = run_ranks(size, _killed, victim, where, str(tmp_path), may_die=[victim])
    assert results[victim] == Died(-signal.SIGKILL)
    for rank, found in enumerate(results):
        if rank == victim:
            continue
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, victim), found
        assert found["phase"] in ("dispatch", "combine"), found
        assert found["seen"] < found["expected"], found
        assert f"rank {victim}" in found["text"] and found["phase"] in found["text"]
        assert found["seconds"] < NEVER_NOTICED, found
        assert set(found["refusals"]) == {"PeerLost"}, found
        assert found["afterwards"]
        print(f"{where}: rank {rank} noticed after {found['seconds']:.3f} s")


def _killed_at_any_moment(rank: int, world_size: int, victim: int, delay: float) -> list[dict[str, Any]]:
    """Two communicators in a tight loop; the victim's own thread kills it wherever it is."""
    import threading

    import moecomm

    case = replace(_case(world_size), tokens=(64,) * world_size, hidden=1024)
    comms = [_communicator(case, 60.0) for _ in range(2)]
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    found = []
    try:
        while True:
            for comm in comms:
                before = time.monotonic()
                _step(comm, case, rank)
    except moecomm.PeerLost as error:
        found.append({**_describe(error), "seconds": time.monotonic() - before})
    for comm in comms:
        try:
            cases.dispatch(comm, case, rank)
        except moecomm.PeerLost as error:
            found.append(_describe(error))
    return found


def test_death_at_any_moment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        victim, delay = int(rng.integers(0, 3)), float(rng.uniform(0.0, 0.03))
        with no_shared_memory_left():
            results = run_ranks(3, _killed_at_any_moment, victim, delay, may_die=[victim])
        for rank, found in enumerate(results):
            if rank != victim:
                assert [error["type"] for error in found] == ["PeerLost"] * 3, found
                assert {error["peer"] for error in found} == {victim}, found
                assert found[0]["seconds"] < NEVER_NOTICED, found


def _paused(rank: int, world_size: int, folder: str) -> bool:
    """A stop that is shorter than the deadline is only a delay."""
    case = _case(world_size)
    with _communicator(case, 30.0) as comm:
        if rank == 1:
            with open(f"{folder}/pid", "w") as file:
                file.write(str(os.getpid()))
        dist.barrier()
        if rank == 0:
            with open(f"{folder}/pid") as file:
                peer = int(file.read())
            for pause in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(peer, pause)
                time.sleep(0.3)
        out = cases.dispatch(comm, case, rank)
        return torch.equal(out.tokens, torch.from_numpy(case.expected(rank).tokens))


def test_a_short_stop_is_only_a_delay(tmp_path: Any) -> None:
    assert run_ranks(3, _paused, str(tmp_path)) == [True] * 3


def _killed_in_backward(rank: int, world_size: int) -> dict[str, Any]:
    import moecomm

    case = _case(world_size)
    comm = _communicator(case, 60.0)
    x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
    out = comm.dispatch(x_TH, torch.from_numpy(case.ids(rank)))
    y_TH = comm.combine(out.tokens * 2, out.handle)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        y_TH.sum().backward()
    except moecomm.PeerLost as error:
        return _describe(error)
    return {"type": "nothing"}


def test_death_during_a_backward() -> None:
    results = run_ranks(3, _killed_in_backward, may_die=[1])
    for rank in (0, 2):
        assert (results[rank]["type"], results[rank]["peer"]) == ("PeerLost", 1), results[rank]
        assert results[rank]["phase"] == "backward of combine"


def _exit_early(rank: int, world_size: int, how: str) -> dict[str, Any]:
    """A rank closes its communicator, or simply drops it, while others still need it."""
    import moecomm

    case = _case(world_size)
    comm = _communicator(case, 60.0)
    _step(comm, case, rank)
    if rank == 1:
        if how == "close":
            comm.close()
        else:
            del comm
        return {}
    try:
        _step(comm, case, rank)
    except moecomm.PeerLost as error:
        return _describe(error)
    return {"type": "nothing"}


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_rank_that_closes_early_is_lost_too(how: str) -> None:
    results = run_ranks(3, _exit_early, how)
    for rank in (0, 2):
        assert (results[rank]["type"], results[rank]["peer"]) == ("PeerLost", 1), results[rank]
    # One of them noticed; the other may have learnt it from that one.
    assert any("closed" in results[rank]["text"] for rank in (0, 2))


# -- a rank that stops ---------------------------------------------------------------------------------------


def _stopped(rank: int, world_size: int, victim: int, folder: str) -> dict[str, Any]:
    import moecomm

    case = _case(world_size)
    comm = _communicator(case, 1.0)
    for _ in range(5):
        _step(comm, case, rank)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued by rank 0 after everybody has noticed: it must hear that it was given up, and not hang.
    try:
        for _ in range(3):
            _step(comm, case, rank)
    except (moecomm.PeerTimeout, moecomm.PeerLost) as error:
        found = _describe(error)
    else:
        found = {"type": "nothing"}
    found["refusals"] = _refusals(comm, case, rank)
    if rank != victim:
        comm.close()
        found["afterwards"] = _life_afterwards(folder, rank, [r for r in range(world_size) if r != victim])
        if rank == 0:
            with open(f"{folder}/pid") as file:
                os.kill(int(file.read()), signal.SIGCONT)
    return found


def _stopped_main(rank: int, world_size: int, victim: int, folder: str) -> dict[str, Any]:
    if rank == victim:
        with open(f"{folder}/pid", "w") as file:
            file.write(str(os.getpid()))
    return _stopped(rank, world_size, victim, folder)


def test_a_stopped_rank_is_a_timeout_with_rank_peer_and_phase(tmp_path: Any) -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _stopped_main, 2, str(tmp_path))
    for rank in (0, 1):
        found = results[rank]
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, 2), found
        assert found["phase"] == "dispatch" and found["expected"] == found["seen"] + 1, found
        assert all(
            str(found[name]) in found["text"] for name in ("rank", "peer", "phase", "expected", "seen")
        )
        assert set(found["refusals"]) == {"PeerTimeout"}, found
        assert found["afterwards"]
    assert results[2]["type"] in ("PeerTimeout", "PeerLost"), results[2]
    assert set(results[2]["refusals"]) == {results[2]["type"]}


# -- a rank that never comes ---------------------------------------------------------------------------------


def _absent(rank: int, world_size: int, missing: int) -> dict[str, Any]:
    import moecomm

    found = {"type": "nothing"}
    if rank != missing:
        try:
            _communicator(_case(world_size), 1.0)
        except moecomm.PeerTimeout as error:
            found = _describe(error)
    dist.barrier()  # the missing rank is there until the others have given it up
    return found


@pytest.mark.parametrize(("size", "missing"), [(2, 0), (3, 1)])
def test_a_rank_that_never_comes_to_the_construction(size: int, missing: int) -> None:
    with no_shared_memory_left():
        results = run_ranks(size, _absent, missing)
    for rank, found in enumerate(results):
        if rank != missing:
            assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, missing), found
            assert "construction" in found["phase"] and f"rank {missing}" in found["text"]


def _dies_at_construction(rank: int, world_size: int) -> dict[str, Any]:
    import moecomm

    if rank == 1:
        # Takes part in the first meeting of the construction and dies before the windows are mapped.
        from moecomm.backends import cpu

        cpu.connect = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        _communicator(_case(world_size), 1.0)
    except (moecomm.PeerTimeout, moecomm.PeerLost) as error:
        return _describe(error)
    return {"type": "nothing"}


def test_death_during_the_construction_leaves_nothing_behind() -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _dies_at_construction, may_die=[1])
    for rank in (0, 2):
        assert results[rank]["type"] in ("PeerTimeout", "PeerLost") and results[rank]["peer"] == 1, results[
            rank
        ]


def _other_call(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 does something else altogether: the others learn what they waited for."""
    import moecomm

    case = _case(world_size)
    comm = _communicator(case, 1.0)
    found = {"type": "nothing"}
    if rank != 1:
        try:
            cases.dispatch(comm, case, rank)
        except moecomm.PeerTimeout as error:
            found = _describe(error)
    dist.barrier()
    return found


def test_a_rank_that_does_not_call() -> None:
    results = run_ranks(3, _other_call)
    for rank in (0, 2):
        found = results[rank]
        assert (found["type"], found["peer"], found["phase"]) == ("PeerTimeout", 1, "dispatch"), found
        assert (found["expected"], found["seen"]) == (1, 0)


# -- everybody dies ------------------------------------------------------------------------------------------


def _all_die(rank: int, world_size: int) -> None:
    case = _case(world_size)
    comm = _communicator(case, 60.0)
    for _ in range(10):
        _step(comm, case, rank)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _all_die, may_die=[0, 1, 2])
    assert results == [Died(-signal.SIGKILL)] * 3


def _interrupted(rank: int, world_size: int) -> str:
    """Ctrl-C while a call waits for a peer that does not come."""
    case = _case(world_size)
    comm = _communicator(case, 20.0)
    found = "absent"
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        found = "nothing"
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            cases.dispatch(comm, case, rank)
        except BaseException as error:
            found = type(error).__name__
    dist.barrier()
    return found


def test_an_interrupt_during_a_wait_is_not_swallowed() -> None:
    with no_shared_memory_left():
        results = run_ranks(2, _interrupted)
    assert results[0] == "KeyboardInterrupt"
