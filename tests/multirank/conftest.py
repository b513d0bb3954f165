"""Rank pools that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.multirank.harness import NO_GPUS, RankPool

MOST_RANKS = 40
"""Alive at a time. A pool that was not used for longest ends when another one would make it more."""


class Pools(Protocol):
    def __call__(self, world_size: int, **environment: str) -> RankPool: ...


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """pool(world_size, NAME="value", ...) is a set of ranks with these environment variables, kept for the
    whole run; after a failure, a fresh one."""
    pools: dict[tuple[int, frozenset[tuple[str, str]]], RankPool] = {}

    def get(world_size: int, **environment: str) -> RankPool:
        key = world_size, frozenset(environment.items())
        # The dictionary's order is that of use: the last one is the newest.
        pools[key] = pools.pop(key, None) or RankPool(
            world_size, timeout=120.0, environment=NO_GPUS | environment
        )
        running = sum(size for size, _ in pools)
        for oldest in list(pools)[:-1]:
            if running <= MOST_RANKS:
                break
            pools.pop(oldest).close()
            running -= oldest[0]
        return pools[key]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def most_ranks() -> int:
    """Ranks of the tests that have one size here, and on GPUs as many as there are, up to four."""
    return 3


@pytest.fixture(scope="session")
def widest() -> str:
    """The widest dtype that rows can have; on GPUs float32."""
    return "float64"
