"""Ranks that die or never come while others wait in kernels: the tests of the CPU ranks, with living CUDA
contexts, and close() while kernels run."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.multirank.test_ends import check_end
from tests.multirank.test_faults import (  # noqa: F401
    FreshRanks,
    check_killed,
    small,
    start,
    test_a_rank_that_closes_early_is_lost_too,
    test_a_rank_that_does_not_call,
    test_a_rank_that_never_comes_to_the_construction,
    test_death_at_any_moment,
    test_death_during_a_backward,
)

pytestmark = pytest.mark.usefixtures("cuda_only")


@pytest.mark.parametrize(
    ("size", "victim", "how"),
    [(2, 1, "between calls"), (2, 0, "fixed"), (3, 1, "graph"), (4, 2, "between calls"), (4, 0, "fixed")],
)
def test_a_killed_rank_is_lost_to_the_others(
    fresh_ranks: FreshRanks, size: int, victim: int, how: str, tmp_path: Any
) -> None:
    check_killed(fresh_ranks, size, victim, how, tmp_path)


def _close_with_work_under_way(rank: int, world_size: int) -> list[str]:
    """close() right behind a call lets what was called finish, on this rank and for its peers."""
    problems = []
    for turn in range(10):
        comm, known = start(small(world_size), rank)
        if turn % world_size == rank:
            torch.cuda._sleep(100_000_000)
        out = known.dispatch(comm)
        y_TH = comm.combine(known.answer(out.tokens), out.handle)
        comm.close()
        known.check_dispatch(out)
        known.check_combine("combine", y_TH)
        problems += known.problems
    return problems


def test_close_waits_for_what_is_under_way(fresh_ranks: FreshRanks, most_ranks: int) -> None:
    harness.assert_none(fresh_ranks(max(2, most_ranks), _close_with_work_under_way))


@pytest.mark.parametrize(
    ("how", "number", "status"), [("exception", None, 1), ("wait", signal.SIGINT, -signal.SIGINT)]
)
def test_waiting_kernels_end_with_their_process(
    require_gpus: Any, tmp_path: Path, how: str, number: signal.Signals | None, status: int
) -> None:
    require_gpus(2)
    check_end(tmp_path, "cuda", how, number, status)
