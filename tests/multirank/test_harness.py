"""The harness itself: results, errors, deadlines, deaths."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.multirank import harness
from tests.multirank.harness import Died, RankFailure, RankPool, RankTimeout, run_ranks


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _raise(rank: int, world_size: int, bad: int) -> None:
    print(f"word from {rank}")
    if rank == bad:
        raise KeyError("the reason")
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    time.sleep(1000)


def _die(rank: int, world_size: int, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _stop(rank: int, world_size: int) -> int:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def test_an_exception_names_the_rank_and_carries_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.5)
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, _raise, 2)
    text = str(caught.value)
    assert caught.value.ranks[0] == 2 and caught.value.types[0] == "KeyError"
    assert "rank 2 of 3" in text and "in _raise" in text and "the reason" in text and "word from 2" in text


def test_the_deadline_kills_and_shows_stacks() -> None:
    """A rank that stands still, and one that the system has stopped."""
    for body, late, shown in ((_hang, 1, "_sleep_for_ever"), (_stop, 0, "no stack")):
        pool = RankPool(2)
        pids = pool(_pid)
        with pytest.raises(RankTimeout) as caught:
            pool(body, timeout=0.3)
        assert caught.value.ranks == (late,) and shown in str(caught.value)
        assert not any(_alive(pid) for pid in pids)


def test_a_death_is_an_error_unless_allowed() -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(2, _die, 1)
    assert run_ranks(2, _die, 1, may_die=[1]) == [0, Died(-signal.SIGKILL)]


def test_a_pool_keeps_its_ranks_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.5)
    with RankPool(2) as pool:
        first = pool(_pid)
        assert pool(_pid) == first
        with pytest.raises(RankFailure):
            pool(_raise, 0)
        second = pool(_pid)
        assert not set(first) & set(second)
    assert not any(_alive(pid) for pid in first + second)
