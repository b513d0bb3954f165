"""Mistakes between nodes: the same typed errors on all ranks as on one node, and work as usual after them,
also when what they leave behind is still on its way; forked children.
"""

import contextlib
import gc
import os
import signal
import socket
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

import moecomm
from tests import cases
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank import test_bad_input
from tests.multirank.conftest import Pools
from tests.multirank.harness import Died
from tests.multirank.node_jobs import LONG, NEVER_NOTICED, Found, caught, communicator, run, small_case, steps
from tests.oracle import assert_none, play

pytestmark = needs_fabric


# -- the mistakes of one node, with the ranks on three -------------------------------------------------------
@pytest.fixture
def three(pool: Pools) -> Pools:
    """The ranks of test_bad_input.py on three nodes; what travels comes late and in random order."""
    chosen = {"MOECOMM_RANKS_PER_NODE": "1", "MOECOMM_FABRIC_PROVIDER": "tcp", "MOECOMM_FABRIC_SHUFFLE": "7"}
    return lambda world_size, **_: pool(world_size, **chosen)


def test_dispatch_arguments(three: Pools, seed: int) -> None:
    test_bad_input.test_dispatch_arguments(pool=three, ranks_or_alone=3, fixed=False, seed=seed)


def test_calls_that_differ_between_nodes(three: Pools, seed: int) -> None:
    test_bad_input.test_calls_that_differ_between_ranks(pool=three, size=3, seed=seed)


def test_ranks_stay_in_step_when_an_overflow_and_a_mistake_meet(three: Pools) -> None:
    test = test_bad_input.test_ranks_stay_in_step_when_an_overflow_and_a_mistake_meet
    test(pool=three, mistake="id too large")


# -- operations that are left in the middle ------------------------------------------------------------------
def _left_in_the_middle(rank: int, world_size: int, case: Case, rounds: int) -> tuple[list[str], list[str]]:
    """Good operations among bad ones and ones that this or another rank leaves between their halves, all in
    an order that the ranks share. Returns what went otherwise than it should."""
    rng = np.random.default_rng(case.seed)
    want = torch.from_numpy(case.expected(rank).tokens)
    wrong = []
    with communicator(case, LONG) as comm:
        backend = comm._backend
        make_output = backend._empty

        def no_memory(*_: Any) -> None:
            raise moecomm.OutOfMemory("no room for an output", needed=1, available=0)

        def raises(number: int, name: str, call: Callable[[], Any]) -> None:
            found = caught(call)
            if found["type"] != name:
                wrong.append(f"{number}: {found}, expected {name}")

        for number, what in enumerate(np.concatenate([rng.permutation(7) for _ in range(rounds)])):
            guilty = int(rng.integers(-1, world_size))
            mine = guilty in (rank, -1)
            if what == 0:  # ids
                ids_TK = torch.from_numpy(case.ids(rank))
                if mine:
                    ids_TK[-1, 0] = case.num_experts
                x_TH = torch.from_numpy(case.x(rank))
                raises(number, "InvalidRouting", lambda x=x_TH, ids=ids_TK: comm.dispatch(x, ids))
            elif what == 1 and guilty >= 0:
                odd = replace(case, layout="rank") if mine else case
                raises(number, "MismatchedArguments", lambda odd=odd: cases.dispatch(comm, odd, rank))
            elif what == 2:  # a dispatch that is begun, and an error before its second half
                backend._empty = no_memory if mine else make_output
                raises(
                    number, "OutOfMemory" if mine else "nothing", partial(cases.dispatch, comm, case, rank)
                )
                backend._empty = make_output
            elif what == 3:  # nobody waits for it
                cases.dispatch(comm, case, rank, async_op=True)
            elif what == 4:
                cases.dispatch(comm, replace(case, slack=-1), rank)
                raises(number, "CapacityExceeded", comm.check)
            elif what == 5:
                out = cases.dispatch(comm, case, rank)
                rows_PH = out.tokens[1:] if mine else out.tokens
                raises(number, "InvalidArgument", partial(comm.combine, rows_PH, out.handle))
            out = cases.dispatch(comm, case, rank)
            if not torch.equal(out.tokens, want):
                wrong.append(f"{number}: other rows after {what} of {guilty}")
            if what == 6:
                comm.combine(out.tokens, out.handle)
        return wrong, play(comm, case, rank, gradients=False)


@pytest.mark.parametrize(("size", "per_node", "provider"), [(4, 2, "tcp"), (3, 1, "shm")])
def test_operations_left_in_the_middle(size: int, per_node: int, provider: str, seed: int) -> None:
    # Rows of 16 KiB: several chunks from each rank to each node.
    case = Case(
        tokens=(90, *(64,) * (size - 1)),
        num_experts=2 * size,
        hidden=1 << 12,
        top_k=2,
        seed=seed,
        ranks_per_node=per_node,
    )
    environment = {"MOECOMM_FABRIC_SHUFFLE": str(1 + seed % 1000)}
    results = run(size, _left_in_the_middle, case, 3, provider=provider, environment=environment)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert_none([arrays for _, arrays in results])


# -- forked children -----------------------------------------------------------------------------------------
def _with_children(rank: int, world_size: int, case: Case) -> tuple[list[int], list[str]]:
    """Children of all kinds of moments look at the communicator, drop it, and end."""

    def child(comm: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            try:
                cases.dispatch(comm, case, rank)
            except moecomm.CommunicatorClosed:
                status = 0
            comm.close()
            del comm
            gc.collect()
        finally:
            os._exit(status)

    comm = communicator(case, LONG)
    pids = [child(comm)]
    steps(comm, case, rank, 2)
    work = cases.dispatch(comm, case, rank, async_op=True)
    pids.append(child(comm))
    work.wait()
    steps(comm, case, rank, 2)
    pids.append(child(comm))
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    arrays = play(comm, case, rank, gradients=False)
    comm.close()
    return statuses, arrays


def test_forked_children_are_harmless() -> None:
    """The shm provider maps files of its own, which children inherit besides the windows."""
    case = small_case(4, 2)
    results = run(4, _with_children, case, provider="shm")
    assert [statuses for statuses, _ in results] == [[0, 0, 0]] * 4
    assert_none([arrays for _, arrays in results])


def _close_pipes() -> None:
    """Closes the pipes to the test process, which waits for their end, and nothing of the communicator."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_UNIX:
                os.close(int(name))


def _dies_with_a_child(rank: int, world_size: int, file: str) -> Found:
    """The child lives on and holds what it has inherited."""
    case = small_case(world_size, 1)
    comm = communicator(case, LONG)
    steps(comm, case, rank, 3)
    if rank == 1:
        if os.fork() == 0:
            _close_pipes()
            limit = time.monotonic() + 3.0 * NEVER_NOTICED
            while not os.path.exists(file) and time.monotonic() < limit:
                time.sleep(0.02)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    found = caught(partial(steps, comm, case, rank, 1000))
    comm.close()
    return found


def test_a_loss_is_noticed_although_a_child_lives_on(tmp_path: Path) -> None:
    file = tmp_path / "over"
    try:
        results = run(3, _dies_with_a_child, str(file), may_die=[1])
    finally:
        file.touch()
    assert results[1] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        found = results[rank]
        assert (found["type"], found["peer"]) == ("PeerLost", 1) and found["seconds"] < NEVER_NOTICED, found


# -- the end -------------------------------------------------------------------------------------------------
def _dropped(rank: int, world_size: int) -> tuple[float, int]:
    """Rank 0 drops its communicator while rank 1 is stopped, which cannot say that all has arrived."""
    comm = communicator(small_case(world_size, 1), 2.0)
    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, 0
    while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    ended, count = threading.Event(), 0

    def work() -> None:
        nonlocal count
        while not ended.wait(0.01):
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    before = time.monotonic()
    del comm
    gc.collect()
    seconds = time.monotonic() - before
    os.kill(pids[1], signal.SIGCONT)
    ended.set()
    thread.join()
    return seconds, count


def test_the_end_of_a_dropped_communicator_lets_other_threads_run() -> None:
    seconds, count = run(2, _dropped)[0]
    assert seconds > 1 and count > 10, (seconds, count)
