"""Faults between nodes: ranks that die, stop, leave or are interrupted. Typed errors on all ranks in bounded
time, no hang, nothing left behind, life afterwards.

Nodes are emulated on one host (`ranks_per_node`), so a fault is that of a process; test_node_links.py is
about links that fail.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import cases
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.harness import Died
from tests.multirank.node_jobs import (
    LONG,
    NEVER_NOTICED,
    SHORT,
    Found,
    caught,
    communicator,
    left_since,
    life_afterwards,
    refusals,
    run,
    small_case,
    step,
    steps,
    verify_life,
    warm_up,
)
from tests.oracle import assert_none, play

pytestmark = needs_fabric


# -- death ---------------------------------------------------------------------------------------------------


def _killed(rank: int, world_size: int, per_node: int, victim: int, where: str, folder: str) -> Found:
    case = small_case(world_size, per_node)
    before = warm_up(case, rank)
    comm = communicator(case, LONG)
    steps(comm, case, rank, 5)
    dist.barrier()
    if rank == victim:
        if where == "others in combine":
            cases.dispatch(comm, case, rank)
        if where == "in a call":
            cases.dispatch(comm, case, rank, async_op=True)
        if where != "between calls":
            time.sleep(0.3)  # the others, or this rank, are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "in a call":
        time.sleep(0.6)

    found = caught(partial(steps, comm, case, rank, 1000))
    found["refusals"] = refusals(comm, case, rank)
    comm.close()
    del comm
    found["left"] = left_since(before)
    survivors = [r for r in range(world_size) if r != victim]
    found["afterwards"] = life_afterwards(folder, rank, survivors, per_node)
    return found


def _lanes_of(words: str) -> tuple[str, dict[str, str]]:
    """("tcp", the environment) of "tcp, 3 lanes"."""
    provider, _, lanes = words.partition(", ")
    return provider, {"MOECOMM_FABRIC_LANES": lanes.split()[0]} if lanes else {}


@pytest.mark.parametrize(
    ("size", "per_node", "victim", "where", "provider"),
    [
        (2, 1, 0, "others in combine", "shm"),
        (2, 1, 1, "between calls", "tcp"),
        (4, 2, 2, "in a call", "tcp"),
        (6, 2, 3, "others in dispatch", "tcp"),
        (4, 2, 1, "others in combine", "tcp, 3 lanes"),
    ],
)
def test_a_killed_rank_is_lost_to_all_nodes(
    size: int, per_node: int, victim: int, where: str, provider: str, tmp_path: Path
) -> None:
    provider, environment = _lanes_of(provider)
    results = run(
        size, _killed, per_node, victim, where, str(tmp_path), provider=provider, may_die=[victim],
        environment=environment,
    )  # fmt: skip
    assert results[victim] == Died(-signal.SIGKILL)
    for rank, found in enumerate(results):
        if rank == victim:
            continue
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, victim), found
        assert f"rank {victim}" in found["text"] and found["phase"] in found["text"], found
        assert found["seconds"] < NEVER_NOTICED, found
        assert found["refusals"] == {"PeerLost"}, found
        assert found["left"] == {}, found
        print(f"{where}: rank {rank} noticed after {found['seconds']:.3f} s")
    verify_life(results, victim)


def _killed_at_any_moment(rank: int, world_size: int, per_node: int, victim: int, delay: float) -> Found:
    """Rows of many chunks in a tight loop; a thread of the victim kills it wherever it is."""
    case = replace(small_case(world_size, per_node), tokens=(64,) * world_size, hidden=1 << 14)
    comm = communicator(case, LONG)
    step(comm, case, rank)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def steps() -> None:
        while True:
            started[0] = time.monotonic()
            step(comm, case, rank)

    started = [0.0]
    found = caught(steps)
    found["seconds"] = time.monotonic() - started[0]
    found["refusals"] = refusals(comm, case, rank)
    comm.close()
    return found


@pytest.mark.parametrize(
    ("provider", "nodes"),
    [("tcp", [(4, 2), (3, 1)]), ("tcp, 2 lanes", [(3, 1)])],
)
def test_death_at_any_moment(provider: str, nodes: list[tuple[int, int]], seed: int) -> None:
    provider, environment = _lanes_of(provider)
    rng = np.random.default_rng(seed)
    for size, per_node in nodes:
        victim, delay = int(rng.integers(0, size)), float(rng.uniform(0.0, 0.1))
        text = f"seed {seed}, {size} ranks, victim {victim}, delay {delay}"
        results = run(
            size, _killed_at_any_moment, per_node, victim, delay, provider=provider, may_die=[victim],
            environment=environment,
        )  # fmt: skip
        for rank, found in enumerate(results):
            if rank != victim:
                assert (found["type"], found["peer"]) == ("PeerLost", victim), (text, found)
                assert found["seconds"] < NEVER_NOTICED and found["refusals"] == {"PeerLost"}, (text, found)


# -- a rank that stops ---------------------------------------------------------------------------------------


def _stopped(rank: int, world_size: int, per_node: int, victim: int, folder: str) -> Found:
    case = small_case(world_size, per_node)
    pids = _all_pids(world_size)
    before = warm_up(case, rank)
    comm = communicator(case, SHORT)
    steps(comm, case, rank, 3)
    dist.barrier()
    if rank == victim:
        # Continued by another rank once everybody has noticed: it must hear that it was given up.
        os.kill(os.getpid(), signal.SIGSTOP)
    found = caught(partial(steps, comm, case, rank, 3))
    found["refusals"] = refusals(comm, case, rank)
    comm.close()
    del comm
    if rank != victim:
        found["left"] = left_since(before)
        survivors = [r for r in range(world_size) if r != victim]
        found["afterwards"] = life_afterwards(folder, rank, survivors, per_node)
        dist.barrier()
        if rank == survivors[0]:
            os.kill(pids[victim], signal.SIGCONT)
    return found


def _all_pids(world_size: int) -> list[int]:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    return pids


@pytest.mark.parametrize(("size", "per_node", "victim", "provider"), [(4, 2, 3, "tcp"), (4, 2, 2, "shm")])
def test_a_stopped_rank_is_a_timeout_with_rank_peer_and_phase(
    size: int, per_node: int, victim: int, provider: str, tmp_path: Path
) -> None:
    results = run(size, _stopped, per_node, victim, str(tmp_path), provider=provider)
    for rank, found in enumerate(results):
        if rank == victim:
            continue
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, victim), found
        assert found["phase"] == "dispatch" and found["expected"] == found["seen"] + 1, found
        assert all(
            str(found[name]) in found["text"] for name in ("rank", "peer", "phase", "expected", "seen")
        ), found
        assert found["seconds"] < NEVER_NOTICED, found
        assert found["refusals"] == {"PeerTimeout"} and found["left"] == {}, found
    assert results[victim]["type"] in ("PeerTimeout", "PeerLost"), results[victim]
    assert results[victim]["refusals"] == {results[victim]["type"]}, results[victim]
    verify_life(results, victim)


def _stop_for(pid: int, seconds: float, after: float = 0.0) -> subprocess.Popen[bytes]:
    """Stops the process from another one, which continues it."""
    return subprocess.Popen(
        ["sh", "-c", f"sleep {after}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"]
    )


def _paused(rank: int, world_size: int, case: Case, victim: int) -> list[str]:
    with communicator(case, LONG) as comm:
        dist.barrier()
        if rank == victim:
            stopper = _stop_for(os.getpid(), 0.4, after=0.05)
        limit = time.monotonic() + 0.6
        more = torch.ones(1)
        while more:  # stopped in the middle of it; all ranks end after the same step
            steps(comm, case, rank, 10)
            more.fill_(time.monotonic() < limit)
            dist.all_reduce(more, dist.ReduceOp.MAX)
        if rank == victim:
            assert stopper.wait(10.0) == 0
        return play(comm, case, rank, gradients=False)


@pytest.mark.parametrize(("size", "per_node", "provider"), [(2, 1, "shm"), (4, 2, "tcp")])
def test_a_short_stop_is_only_a_delay(size: int, per_node: int, provider: str) -> None:
    case = small_case(size, per_node)
    assert_none(run(size, _paused, case, size - 1, provider=provider))


# -- leaving -------------------------------------------------------------------------------------------------


class _UserError(Exception):
    pass


def _leaves_early(rank: int, world_size: int, per_node: int, leaver: int, how: str) -> Found:
    case = small_case(world_size, per_node)
    comm = communicator(case, LONG)
    step(comm, case, rank)
    # Else a rank that loses the leaver in the next step might end, by giving up, waits of others in this one.
    dist.barrier()
    if rank != leaver:
        return caught(partial(steps, comm, case, rank, 3))
    started = time.monotonic()
    if how == "close":
        comm.close()
    elif how == "drop":
        del comm
        gc.collect()
    else:
        with contextlib.suppress(_UserError), comm:
            raise _UserError
    return {"seconds": time.monotonic() - started}


@pytest.mark.parametrize(
    ("size", "per_node", "leaver", "how"),
    [(3, 1, 1, "close"), (4, 2, 3, "drop"), (4, 2, 0, "exception of the user")],
)
def test_a_rank_that_leaves_early_is_lost_too(size: int, per_node: int, leaver: int, how: str) -> None:
    results = run(size, _leaves_early, per_node, leaver, how)
    for rank, found in enumerate(results):
        assert found["seconds"] < NEVER_NOTICED, found
        if rank != leaver:
            assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, leaver), found
    texts = [found["text"] for rank, found in enumerate(results) if rank != leaver]
    assert any("has closed the communicator" in text for text in texts), texts


def _leaves_at_different_times(
    rank: int, world_size: int, case: Case, rounds: int, first: int
) -> list[tuple[list[str], float]]:
    """Makes one rank slow, in each round, to receive what the others sent it last; they leave at once."""
    found = []
    for number in range(first, first + rounds):
        comm = communicator(case, LONG)
        slow = number % world_size
        kept: Any = None
        if rank == slow and number % 3 == 0:
            stopper = _stop_for(os.getpid(), 0.2)
        arrays = play(comm, case, rank, gradients=False)
        if number % 4 == 1:
            # What belongs to a graph keeps the runtime's objects alive beyond the end of the communicator.
            x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
            kept = comm.dispatch(x_TH, torch.from_numpy(case.ids(rank)))
        if rank == slow and number % 3 == 1:
            time.sleep(0.2)
        started = time.monotonic()
        if (number + rank) % 2:
            comm.close()
        else:
            del comm
            if kept is None:
                gc.collect()
        found.append((arrays, time.monotonic() - started))
        if rank == slow and number % 3 == 0:
            assert stopper.wait(10.0) == 0
        if kept is not None:
            dist.barrier()
        del kept
    return found


@pytest.mark.parametrize(
    ("size", "per_node", "provider"), [(2, 1, "shm"), (3, 1, "tcp"), (4, 2, "tcp, 3 lanes")]
)
def test_nobody_loses_rows_when_others_leave(size: int, per_node: int, provider: str, seed: int) -> None:
    case = replace(small_case(size, per_node), hidden=4096, tokens=(9,) * size, weights=True)
    provider, environment = _lanes_of(provider)
    results = run(
        size, _leaves_at_different_times, case, 6, seed % 12, provider=provider, environment=environment
    )
    for rounds in zip(*results, strict=True):
        assert_none([arrays for arrays, _ in rounds])
        # Nobody waits for the end of those that have left already.
        assert all(seconds < 5.0 for _, seconds in rounds), [seconds for _, seconds in rounds]
