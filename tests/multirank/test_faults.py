"""Ranks that die, stop, leave or never come: typed errors on the others in bounded time, no hang, nothing
left, life afterwards; on one node and on several, which are emulated on this host.

These ranks end with their test: each pays for fresh processes.
"""

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moecomm.env import read_env
from tests import oracle, ranks
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank import node_jobs
from tests.multirank.harness import Died, no_shared_memory_left, run_ranks
from tests.multirank.node_jobs import LONG, NEVER_NOTICED, Found, caught, left_since, resources, run
from tests.oracle import Oracle
from tests.ranks import gathered

FreshRanks = Callable[..., list[Any]]


def small(size: int) -> Case:
    if ranks.on_cpu():
        return Case(tokens=(6,) * size, num_experts=2 * size, hidden=64, top_k=2, seed=5)
    return Case(tokens=(300,) * size, num_experts=4 * size, hidden=1024, top_k=2, dtype="bfloat16", seed=5)


def start(case: Case, rank: int, timeout: float = LONG) -> tuple[Any, Oracle]:
    comm = ranks.communicator(**{**case.communicator, "timeout": timeout})
    return comm, Oracle(case, rank, comm.device)


def until_it_fails(step: Callable[[], object], seconds: float = 30.0) -> Found:
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
    return node_jobs.refusals(comm, partial(known.dispatch, comm))


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


def warm_up(case: Case, rank: int) -> dict[str, int]:
    """Makes a first communicator, which loads libraries and their threads for good, and returns what this
    process holds after it."""
    comm, known = start(case, rank)
    with comm:
        one_step(comm, known)
        wait_for_all_devices()
    return resources()


def left_by(comm: Any, before: dict[str, int]) -> dict[str, int]:
    """Closes the communicator; returns what is left of it on the CPU: drivers of GPUs keep what they like."""
    comm.close()
    return left_since(before) if ranks.on_cpu() else {}


def new_start(folder: str, rank: int, gone: int, world_size: int) -> list[str]:
    """All but the rank that is gone, in the same processes, form a new group and a new communicator, and work
    on it."""
    survivors = [r for r in range(world_size) if r != gone]
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


def on_nodes(words: str) -> FreshRanks:
    """Runs on fresh ranks, of "2 a node, tcp, 3 lanes" for instance, or "one node"."""
    if words == "one node":
        return run_ranks
    per_node, provider, *lanes = words.split(", ")
    environment = {"MOECOMM_RANKS_PER_NODE": per_node.split()[0]}
    if lanes:
        environment["MOECOMM_FABRIC_LANES"] = lanes[0].split()[0]
    return partial(run, provider=provider, environment=environment)


def nodes(*given: Any) -> Any:
    """A case of a test, whose last value says on which nodes."""
    return pytest.param(*given, marks=needs_fabric)


# -- death in the middle of steps ----------------------------------------------------------------------------
def _killed(rank: int, world_size: int, victim: int, how: str, folder: str) -> Found:
    """The victim dies between or within steps; the others sit in the next one, and in nothing else."""
    case = small(world_size)
    before = warm_up(case, rank)
    comm, known = start(case, rank)

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
    found["known as ended"] = comm._backend.has_ended
    found["refusals"] = refusals(comm, known)
    found["device works"] = device_works()
    found["left"] = left_by(comm, before)
    found["new start"] = new_start(folder, rank, victim, world_size)
    return found


def check_killed(fresh_ranks: FreshRanks, size: int, victim: int, how: str, folder: Any) -> None:
    with no_shared_memory_left():
        results = fresh_ranks(size, _killed, victim, how, str(folder), may_die=[victim])
    assert results.pop(victim) == Died(-signal.SIGKILL)
    for rank, found in zip((r for r in range(size) if r != victim), results, strict=True):
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, victim), found
        assert f"rank {victim}" in found["text"] and found["phase"] in found["text"], found
        assert found["seconds"] < NEVER_NOTICED, found
        assert found["refusals"] == {"PeerLost"} and found["left"] == {}, found
        assert found["known as ended"] and found["device works"] and found["new start"] == [], found
        print(f"{how}: rank {rank} noticed after {found['seconds']:.3f} s in {found['phase']}")


@pytest.mark.parametrize(
    ("size", "victim", "how", "where"),
    [
        (2, 0, "fixed", "one node"),
        (3, 1, "after dispatch", "one node"),
        (3, 2, "in a call", "one node"),
        (7, 3, "between calls", "one node"),
        nodes(2, 0, "after dispatch", "1 a node, shm"),
        nodes(4, 2, "in a call", "2 a node, tcp"),
        nodes(6, 3, "between calls", "2 a node, tcp"),
        nodes(4, 1, "after dispatch", "2 a node, tcp, 3 lanes"),
    ],
)
def test_a_killed_rank_is_lost_to_the_others(
    size: int, victim: int, how: str, where: str, tmp_path: Path
) -> None:
    check_killed(on_nodes(where), size, victim, how, tmp_path)


def _killed_at_any_moment(rank: int, world_size: int, victim: int, delay: float, large: bool) -> list[Any]:
    """Communicators in a tight loop, or one whose rows are of many chunks; the victim's own thread kills it
    wherever it is."""
    case = replace(small(world_size), hidden=1024)
    if large:
        case = replace(case, tokens=(64,) * world_size, hidden=1 << 14)
    pairs = [start(case, rank) for _ in range(2 if ranks.on_cpu() and not large else 1)]
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, die).start()
    found = until_it_fails(lambda: [one_step(*pair) for pair in pairs])
    return [found, *(refusals(*pair) for pair in pairs), device_works()]


def check_death_at_any_moment(
    fresh_ranks: FreshRanks, size: int, longest: float, large: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    victim, delay = int(rng.integers(size)), float(rng.uniform(0.0, longest))
    with no_shared_memory_left():
        results = fresh_ranks(size, _killed_at_any_moment, victim, delay, large, may_die=[victim])
    del results[victim]
    for found, *refused, works in results:
        assert (found["type"], found["peer"]) == ("PeerLost", victim), (delay, found)
        assert found["seconds"] < NEVER_NOTICED, found
        assert all(types == {"PeerLost"} for types in refused) and works, refused


@pytest.mark.parametrize("longest", [0.0, 0.03])
def test_death_at_any_moment(fresh_ranks: FreshRanks, most_ranks: int, longest: float, seed: int) -> None:
    check_death_at_any_moment(fresh_ranks, max(2, most_ranks), longest, False, seed)


@needs_fabric
@pytest.mark.parametrize(("size", "where"), [(4, "2 a node, tcp"), (3, "1 a node, tcp, 2 lanes")])
def test_death_between_nodes_at_any_moment(size: int, where: str, seed: int) -> None:
    check_death_at_any_moment(on_nodes(where), size, 0.1, True, seed)


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


# -- leaving -------------------------------------------------------------------------------------------------
def _leaves_early(rank: int, world_size: int, leaver: int, how: str) -> Found:
    """A rank closes its communicator, or simply drops it, while others still need it."""
    comm, known = start(small(world_size), rank)
    one_step(comm, known)
    ranks.synchronize()
    # Else a rank that loses the leaver in the next step might end, by giving up, waits of others in this one.
    dist.barrier()
    if rank == leaver:
        begin = time.monotonic()
        if how == "close":
            comm.close()
        elif how == "drop":
            del comm
            gc.collect()
        else:
            with contextlib.suppress(KeyError), comm:
                raise KeyError("of the user")
        found: Found = {"seconds": time.monotonic() - begin}
    else:
        found = until_it_fails(lambda: one_step(comm, known))
    dist.barrier()  # the leaver lives on: its end must not be what ends the others' wait
    return {**found, "device works": device_works(), "on cpu": ranks.on_cpu()}


def check_leaves_early(fresh_ranks: FreshRanks, size: int, leaver: int, how: str) -> None:
    results = fresh_ranks(size, _leaves_early, leaver, how)
    assert all(found["device works"] and found["seconds"] < NEVER_NOTICED for found in results), results
    del results[leaver]
    for found in results:
        assert (found["type"], found["peer"]) == ("PeerLost", leaver), found
    # One of them noticed; the others may have learnt it from that one.
    assert not results[0]["on cpu"] or any(
        "has closed the communicator" in found["text"] for found in results
    )


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_rank_that_closes_early_is_lost_too(fresh_ranks: FreshRanks, most_ranks: int, how: str) -> None:
    check_leaves_early(fresh_ranks, max(2, most_ranks), 1, how)


@needs_fabric
@pytest.mark.parametrize(
    ("size", "leaver", "how", "where"),
    [(3, 1, "drop", "1 a node, tcp"), (4, 0, "exception", "2 a node, tcp")],
)
def test_a_rank_that_leaves_its_node_early_is_lost_too(size: int, leaver: int, how: str, where: str) -> None:
    check_leaves_early(on_nodes(where), size, leaver, how)


def _leaves_at_different_times(
    rank: int, world_size: int, case: Case, rounds: int, first: int
) -> list[tuple[list[str], float]]:
    """Makes one rank slow, in each round, to receive what the others sent it last; they leave at once."""
    found = []
    for number in range(first, first + rounds):
        comm = ranks.communicator(**case.communicator)
        slow = number % world_size
        kept: Any = None
        if rank == slow and number % 3 == 0:
            stopper = _stop_for(os.getpid(), 0.2)
        arrays = oracle.play(comm, case, rank, gradients=False)
        if number % 4 == 1:
            # What belongs to a graph keeps the runtime's objects alive beyond the end of the communicator.
            x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
            kept = comm.dispatch(x_TH, torch.from_numpy(case.ids(rank)))
        if rank == slow and number % 3 == 1:
            time.sleep(0.2)
        begin = time.monotonic()
        if (number + rank) % 2:
            comm.close()
        else:
            del comm
            if kept is None:
                gc.collect()
        found.append((arrays, time.monotonic() - begin))
        if rank == slow and number % 3 == 0:
            assert stopper.wait(10.0) == 0
        if kept is not None:
            dist.barrier()
        del kept
    return found


@needs_fabric
@pytest.mark.parametrize(("size", "where"), [(2, "1 a node, shm"), (4, "2 a node, tcp, 3 lanes")])
def test_nobody_loses_rows_when_others_leave(size: int, where: str, seed: int) -> None:
    case = Case(tokens=(9,) * size, num_experts=2 * size, hidden=4096, top_k=2, seed=5)
    results = on_nodes(where)(size, _leaves_at_different_times, case, 6, seed % 12)
    for rounds in zip(*results, strict=True):
        oracle.assert_none([arrays for arrays, _ in rounds])
        # Nobody waits for the end of those that have left already.
        assert all(seconds < 5.0 for _, seconds in rounds), [seconds for _, seconds in rounds]


# -- a rank that stops ---------------------------------------------------------------------------------------
def _stop_for(pid: int, seconds: float, after: float = 0.0) -> subprocess.Popen[bytes]:
    """Stops the process from another one, which continues it."""
    return subprocess.Popen(
        ["sh", "-c", f"sleep {after}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"]
    )


def _paused(rank: int, world_size: int) -> list[str]:
    """The last rank stops in the middle of steps, for less than the deadline."""
    comm, known = start(small(world_size), rank)
    with comm:
        dist.barrier()
        if rank == world_size - 1:
            stopper = _stop_for(os.getpid(), 0.4, after=0.05)
        limit = time.monotonic() + 0.6
        more = torch.ones(1)
        while more:  # all ranks end after the same step
            for _ in range(10):
                one_step(comm, known)
            more.fill_(time.monotonic() < limit)
            dist.all_reduce(more, dist.ReduceOp.MAX)
        if rank == world_size - 1:
            assert stopper.wait(10.0) == 0
        return oracle.play(comm, known.job, rank, gradients=False)


@pytest.mark.parametrize(
    ("size", "where"), [(3, "one node"), nodes(2, "1 a node, shm"), nodes(4, "2 a node, tcp")]
)
def test_a_short_stop_is_only_a_delay(size: int, where: str) -> None:
    oracle.assert_none(on_nodes(where)(size, _paused))


def _stopped(rank: int, world_size: int, victim: int, folder: str) -> Found:
    """The first survivor continues the victim after everybody has noticed: it must hear that it was given up,
    and not hang."""
    case = small(world_size)
    before = warm_up(case, rank)
    comm, known = start(case, rank, timeout=1.0)
    for _ in range(5):
        one_step(comm, known)
    pids = gathered(os.getpid())
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = until_it_fails(lambda: one_step(comm, known))
    found["refusals"] = refusals(comm, known)
    found["left"] = left_by(comm, before)
    if rank != victim:
        found["new start"] = new_start(folder, rank, victim, world_size)
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(pids[victim], signal.SIGCONT)
    return found


@pytest.mark.parametrize(
    ("size", "victim", "where"),
    [(3, 2, "one node"), nodes(4, 3, "2 a node, tcp"), nodes(4, 2, "2 a node, shm")],
)
def test_a_stopped_rank_is_a_timeout_with_rank_peer_and_phase(
    size: int, victim: int, where: str, tmp_path: Path
) -> None:
    with no_shared_memory_left():
        results = on_nodes(where)(size, _stopped, victim, str(tmp_path))
    stopped = results[victim]
    for rank, found in enumerate(results):
        if rank == victim:
            continue
        names = ("rank", "peer", "phase", "expected", "seen")
        assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, victim), found
        assert found["phase"] == "dispatch" and found["expected"] == found["seen"] + 1, found
        assert all(str(found[name]) in found["text"] for name in names), found
        assert found["refusals"] == {"PeerTimeout"} and found["left"] == {}, found
        assert found["seconds"] < NEVER_NOTICED and found["new start"] == [], found
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


def _never_built(rank: int, world_size: int) -> Found:
    timeout = 1.0 if ranks.on_cpu() else 2.0
    wait_for_all_devices()
    found = {} if rank == 1 else caught(lambda: start(small(world_size), rank, timeout))
    dist.barrier()  # the missing rank is there until the others have given it up
    return {**found, "device works": device_works()}


def test_a_rank_that_never_comes_to_the_construction(fresh_ranks: FreshRanks, most_ranks: int) -> None:
    with no_shared_memory_left():
        results = fresh_ranks(max(2, most_ranks), _never_built)
    for rank, found in enumerate(results):
        assert found["device works"]
        if rank != 1:
            assert (found["type"], found["rank"], found["peer"]) == ("PeerTimeout", rank, 1), found
            assert "construction" in found["phase"] and "rank 1" in found["text"]


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


# -- everybody dies; interrupts ------------------------------------------------------------------------------
def _interrupted(rank: int, world_size: int, file: str) -> Found:
    """Ctrl-C on rank 0 while it waits for the last rank, which comes after that."""
    case = small(world_size)
    before = warm_up(case, rank)
    comm, known = start(case, rank)
    dist.barrier()
    limit = time.monotonic() + NEVER_NOTICED
    while rank == world_size - 1 and not os.path.exists(file) and time.monotonic() < limit:
        time.sleep(0.01)
    found: Found
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        begin = time.monotonic()
        found = {"type": "nothing"}
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.4)
            known.dispatch(comm)
        except KeyboardInterrupt:
            found = {"type": "KeyboardInterrupt"}
        found["seconds"] = time.monotonic() - begin
        Path(file).touch()
    else:
        found = until_it_fails(lambda: one_step(comm, known))
    found["refusals"] = refusals(comm, known)
    found["left"] = left_by(comm, before)
    return found


@pytest.mark.parametrize(("size", "where"), [(2, "one node"), nodes(4, "2 a node, tcp")])
def test_an_interrupt_during_a_wait_is_not_swallowed(size: int, where: str, tmp_path: Path) -> None:
    with no_shared_memory_left():
        interrupted, *others = on_nodes(where)(size, _interrupted, str(tmp_path / "interrupted"))
    for found in (interrupted, *others):
        assert found["seconds"] < NEVER_NOTICED and found["left"] == {}, found
    assert interrupted["type"] == "KeyboardInterrupt", interrupted
    assert interrupted["refusals"] == {"CommunicatorClosed"}, interrupted
    for rank, found in enumerate(others, 1):
        assert (found["type"], found["rank"], found["peer"]) == ("PeerLost", rank, 0), found
        assert found["refusals"] == {"PeerLost"}, found
