"""Ranks that are in the constructor at the same time meet, whatever they or others did before; ranks of
different groups do not."""

import datetime
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.setup.rendezvous import Rendezvous
from tests import oracle
from tests.cases import Case
from tests.multirank.catching import catch, refused, require
from tests.multirank.harness import new_store, no_shared_memory_left, run_ranks
from tests.multirank.on_ranks import on_ranks


@pytest.fixture
def pool() -> Iterator[Callable[[int], Any]]:
    """Ranks that end with their test, and leave nothing in /dev/shm."""
    with no_shared_memory_left():
        yield lambda size: partial(run_ranks, size)


def _build(group: Any = None, timeout: float = 10.0) -> Any:
    sizes = {"num_experts": 4 * dist.get_world_size(group), "hidden": 8, "top_k": 2, "max_tokens": 6}
    return moecomm.Communicator(group, **sizes, dtype=torch.float32, timeout=timeout)


def _build_and_play(group: Any = None, timeout: float = 10.0) -> list[str]:
    with _build(group, timeout) as comm:
        case = Case(tokens=(5, 3, 6)[: comm.size], num_experts=4 * comm.size, hidden=8, top_k=2)
        return oracle.play(comm, case, comm.rank)


def _join(rank: int, ranks: list[int], store: dist.Store) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank in ranks:
        dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))


@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_ranks_that_have_failed_unequally_often(rank: int, world_size: int, late: int) -> list[str]:
    if rank == late:
        time.sleep(1.3)
    for _ in range(12):
        try:
            return _build_and_play(timeout=0.5)
        except (moecomm.PeerTimeout, moecomm.PeerLost):
            continue
    return ["was never built"]


@pytest.mark.parametrize("phase", ["construction: arguments", "construction: names"])
@on_ranks(2)
def test_a_construction_that_was_interrupted_on_one_rank(rank: int, world_size: int, phase: str) -> list[str]:
    """The others take part in the next one if they had not begun to build, and hear of it at once if they
    had."""
    exchange = Rendezvous.exchange

    def interrupt(self: Any, its_phase: str, *arguments: Any) -> Any:
        if its_phase == phase:
            signal.raise_signal(signal.SIGINT)
        return exchange(self, its_phase, *arguments)

    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with mock.patch.object(Rendezvous, "exchange", interrupt), pytest.raises(KeyboardInterrupt):
            _build()
    try:
        return _build_and_play()
    except moecomm.PeerLost as error:  # rank 1 has left the construction, and is in its next
        if phase == "construction: arguments" or error.peer not in (-1, 1):
            raise
        return _build_and_play()


@on_ranks(3)
def test_processes_that_have_built_before_beside_new_ones(
    rank: int, world_size: int, tmp_path: Path
) -> list[str]:
    """A rank is replaced, one is added, and one leaves."""
    problems = []
    for number, ranks in enumerate([[0, 1], [0, 2], [0, 1, 2], [2, 1]]):
        _join(rank, ranks, dist.FileStore(f"{tmp_path}/{number}", len(ranks)))
        if rank in ranks:
            problems += _build_and_play()
    return problems


@on_ranks(3)
def test_groups_of_other_ranks_with_a_name_that_was_used_before(
    rank: int, world_size: int, tmp_path: Path
) -> list[str]:
    """After destroy_process_group() torch begins again to number groups."""
    problems, names = [], set()
    for run, members in enumerate(([0, 1], [1, 2], [2, 0])):
        _join(rank, [0, 1, 2], dist.FileStore(f"{tmp_path}/{run}", world_size))
        group = dist.new_group(members)
        if rank in members:
            names.add(group.group_name)
            problems += _build_and_play(group)
        dist.barrier()
    return problems + ([] if len(names) == 1 else [f"expected one name, got {names}"])


WAVES = [[[0, 3], [1, 2]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]]
"""In which order the ranks of two pairs come."""


@on_ranks(4)
def test_pairs_of_one_name_are_never_joined(rank: int, world_size: int) -> None:
    """They are refused; where all come at once, a pair that has met before the other comes is built."""
    found: list[Any] = []
    for number, waves in enumerate(WAVES):
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        group = first if rank < 2 else second
        # As torch calls them where each rank calls new_group() for its own pair alone.
        name = property(lambda _, number=number: f"pair {number}")
        with mock.patch.object(dist.ProcessGroup, "group_name", name):
            for wave in waves:
                if rank in wave:
                    played: list[str] = []
                    caught = catch(lambda p=played, g=group: p.extend(_build_and_play(g, 4.0)))
                    found.append(caught or played)
                dist.barrier()
    for number, each in enumerate(found):
        if number < 2 or each != []:
            words = (f"'pair {number}'", "0,1", "2,3", "new_group") if number < 2 else ()
            require(each, *words, name="MismatchedArguments")


@on_ranks(2)
def test_a_rank_that_has_met_is_told_of_a_pair_of_the_same_name(rank: int, world_size: int) -> None:
    """Rank 0 sees ranks of another pair after rank 1 has met it."""
    meet = Rendezvous._meet

    def met(self: Rendezvous, phase: str, *others: float) -> None:
        meet(self, phase, *others)
        if rank == 1:
            self._base.set("rank 1 has met", "")
            return
        self._base.get("rank 1 has met")
        conflict = f"{self._own} 2,3"
        self._base.set("conflict", conflict)
        raise self._conflict(conflict)

    with mock.patch.object(Rendezvous, "_meet", met):
        refused(lambda: _build_and_play(None, 20.0), name="MismatchedArguments")


@on_ranks(2)
def test_a_thread_that_waits_in_the_store_meanwhile(rank: int, world_size: int) -> list[str]:
    store = new_store()
    _join(rank, [0, 1], store)
    release = f"release {rank}"
    waiting = threading.Thread(target=lambda: store.wait([release], datetime.timedelta(seconds=40)))
    waiting.start()
    time.sleep(0.3)  # the thread has the store's connection
    problems = _build_and_play()
    assert waiting.is_alive(), "the construction waited for another thread's wait"
    store.clone().set(release, "")
    waiting.join()
    dist.barrier()  # the server lives in rank 0
    return problems


@on_ranks(2)
def test_threads_that_build_in_another_order_on_each_rank(rank: int, world_size: int) -> list[str]:
    _join(rank, [0, 1], new_store())
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    problems: list[str] = []
    lock = threading.Lock()

    def build(group: Any) -> None:
        try:
            found = _build_and_play(group)
        except Exception as error:
            found = [repr(error)]
        with lock:
            problems.extend(found)

    for pair in ((first, second), (first, first)):
        ordered = pair if rank == 0 else pair[::-1]
        threads = [threading.Thread(target=build, args=(group,)) for group in ordered]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        dist.barrier()
    return problems


@on_ranks(2)
def test_groups_that_nothing_can_be_built_over(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {"num_experts": 8, "hidden": 8, "top_k": 2, "max_tokens": 6, "dtype": torch.float32}
    group = dist.new_group([0, 1])
    dist.destroy_process_group()
    refused(lambda: moecomm.Communicator(group, **sizes), "destroy_process_group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    refused(lambda: moecomm.Communicator(**sizes), "fake", name="Unsupported")
