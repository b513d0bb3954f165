"""Operations whose epochs pass 2^31 and 2^32, where 32 bits would change their sign or begin anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fabric import needs_fabric
from tests.multirank import cases
from tests.multirank.cases import Case
from tests.multirank.harness import NO_GPUS, RankPool
from tests.multirank.node_jobs import Found, caught
from tests.multirank.test_dispatch_combine import play_here

Pools = Callable[[int], RankPool]

BORDERS = [2**31, 2**32, 2**62]
"""The last one is the highest first epoch that is taken."""


@contextmanager
def first_epoch(epoch: int) -> Iterator[None]:
    os.environ["MOECOMM_FIRST_EPOCH"] = str(epoch)
    try:
        yield
    finally:
        del os.environ["MOECOMM_FIRST_EPOCH"]


def _across(rank: int, world_size: int, some: list[Case], borders: list[int]) -> list[list[cases.Arrays]]:
    found = []
    for border in borders:
        with first_epoch(border - 2 if border < 2**62 else border):
            found.append(play_here(rank, world_size, some))
    return found


def _check(pool: RankPool, some: list[Case]) -> None:
    for results in zip(*pool(_across, some, BORDERS), strict=True):
        for case, of_ranks in zip(some, zip(*results, strict=True), strict=True):
            cases.verify(case, of_ranks)


@pytest.mark.parametrize("size", [2, 3])
def test_results_across_the_borders(pool: Pools, size: int, seed: int) -> None:
    base = Case(tokens=(9, 4, 12)[:size], num_experts=4 * size, hidden=20, top_k=2, seed=seed)
    _check(pool(size), [base])


@needs_fabric
def test_between_nodes(seed: int) -> None:
    """Immediates hold three bits of the epoch; the rest comes from what was shown before."""
    case = Case(tokens=(9, 4), num_experts=8, hidden=20, top_k=2, seed=seed, ranks_per_node=1)
    network = {"MOECOMM_FABRIC_PROVIDER": "tcp", "MOECOMM_FABRIC_SHUFFLE": "5"}
    with RankPool(2, timeout=120.0, environment=NO_GPUS | network) as pool:
        _check(pool, [case])


def _apart(rank: int, world_size: int, case: Case) -> Found:
    import moecomm

    with first_epoch(7 + rank):
        return caught(lambda: moecomm.Communicator(**case.communicator))


def test_ranks_have_to_agree(pool: Pools) -> None:
    for found in pool(2)(_apart, Case(tokens=(3, 3), num_experts=4, hidden=20, top_k=1, seed=1)):
        assert found["type"] == "MismatchedArguments"
        assert "MOECOMM_FIRST_EPOCH: rank 0 has 7, rank 1 has 8" in found["text"]
