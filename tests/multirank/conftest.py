"""Sets of ranks on CPUs that tests share."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.multirank.harness import NO_GPUS, RankPool, run_ranks

MOST_RANKS = 40
"""Alive at a time. A pool that was not used for longest ends when another one would make it more."""


class Pools(Protocol):
    def __call__(self, world_size: int, **environment: str) -> RankPool: ...


def kept_pools(start: Callable[[int, dict[str, str]], RankPool], most: int) -> Iterator[Pools]:
    """Yields pool(world_size, NAME="value", ...), a set of ranks with these environment variables that is
    kept for the whole run; after a failure, a fresh one."""
    pools: dict[tuple[int, frozenset[tuple[str, str]]], RankPool] = {}

    def get(world_size: int, **environment: str) -> RankPool:
        key = world_size, frozenset(environment.items())
        # The dictionary's order is that of use: the last one is the newest.
        pools[key] = pools.pop(key, None) or start(world_size, environment)
        running = sum(size for size, _ in pools)
        for oldest in list(pools)[:-1]:
            if running <= most:
                break
            pools.pop(oldest).close()
            running -= oldest[0]
        return pools[key]

    yield get
    for each in pools.values():
        each.close()


def cpu_pools() -> Iterator[Pools]:
    yield from kept_pools(
        lambda size, environment: RankPool(size, timeout=120.0, environment=NO_GPUS | environment), MOST_RANKS
    )


def own_pool() -> Any:
    """`pool = own_pool()` gives a file sets of ranks that end with it: tests that leave process groups behind
    want that, as the thread of a gloo group never sleeps for long."""
    return pytest.fixture(scope="module")(cpu_pools)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """pool(world_size, NAME="value", ...) is a set of ranks that are kept (`kept_pools`)."""
    yield from cpu_pools()


@pytest.fixture(scope="session")
def fresh_ranks() -> Callable[..., list[Any]]:
    """fresh_ranks(world_size, fn, *args, may_die=()): on processes that end with the call, for ranks that die
    or leave."""
    return run_ranks


@pytest.fixture(scope="session")
def most_ranks() -> int:
    """Ranks of the tests that have one size here, and on GPUs as many as there are, up to four."""
    return 3


@pytest.fixture(scope="session")
def widest() -> str:
    """The widest dtype that rows can have; on GPUs float32."""
    return "float64"


@pytest.fixture(params=["ranks", "alone"])
def ranks_or_alone(request: pytest.FixtureRequest, most_ranks: int) -> int:
    """Ranks of the tests of as many as there are, and of one."""
    return most_ranks if request.param == "ranks" else 1
