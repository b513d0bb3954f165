"""Rank pools that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.multirank.harness import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """pool(world_size) is a set of ranks kept for the whole run; after a failure, a fresh one."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, timeout=120.0)
        return pools[world_size]

    yield get
    for each in pools.values():
        each.close()
