"""Sets of ranks on GPUs, kept for the whole run: a process with a CUDA context takes seconds to start."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.gpu.harness import GpuPool
from tests.multirank.conftest import MOST_RANKS, Pools, kept_pools, ranks_or_alone

__all__ = ["Pools", "ranks_or_alone"]

# A rank that is kept holds some 0.7 GiB of its GPU, so eight workers together some 40.
_KEPT_A_GPU = 7


def require_ranks(world_size: int) -> None:
    """Skips where the GPUs here are too few for a job of so many ranks."""
    if not harness.on_cpu() and world_size > harness.most_ranks():
        pytest.skip(f"needs {world_size} GPUs, {harness.gpus()} here")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """pool(world_size) is a set of ranks kept for the whole run; after a failure, a fresh one."""

    def start(world_size: int, environment: dict[str, str]) -> GpuPool:
        require_ranks(world_size)
        return GpuPool(world_size, environment=environment)

    yield from kept_pools(start, most=MOST_RANKS if harness.on_cpu() else _KEPT_A_GPU * harness.most_ranks())


@pytest.fixture(scope="session")
def require_gpus() -> Callable[[int], None]:
    """require_gpus(n) skips with a reason where there are fewer."""

    def require(count: int) -> None:
        if not harness.on_cpu() and count > harness.gpus():
            pytest.skip(f"needs {count} GPUs, {harness.gpus()} here")

    return require


@pytest.fixture(scope="session")
def require_own_ranks() -> Callable[[int], None]:
    """require_own_ranks(n) is called before a test starts n ranks by itself."""
    return require_ranks


@pytest.fixture
def fresh_ranks(require_own_ranks: Callable[[int], None]) -> Callable[..., list[Any]]:
    """The fixture `pool` of tests/multirank, with a GPU for each rank."""

    def run(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        require_own_ranks(world_size)
        return harness.run_on_gpus(world_size, fn, *args, **options)

    return run


@pytest.fixture(scope="session")
def most_ranks() -> int:
    """Ranks of the tests that want as many as there are, up to four."""
    return 4 if harness.on_cpu() else min(4, harness.most_ranks())


@pytest.fixture(scope="session")
def widest() -> str:
    """The widest dtype that rows can have."""
    return "float64" if harness.on_cpu() else "float32"


@pytest.fixture(autouse=True)
def _rows_that_gpus_have(request: pytest.FixtureRequest) -> None:
    """Tests shared with ranks on CPUs take their dtypes from a list that has float64 in it."""
    call = getattr(request.node, "callspec", None)
    if call is not None and call.params.get("dtype") in ("float64", torch.float64) and not harness.on_cpu():
        pytest.skip("rows of float64 are for the CPU")


@pytest.fixture(autouse=True)
def _gpus_of_their_own(request: pytest.FixtureRequest) -> None:
    """NCCL takes no two ranks on a GPU."""
    if harness.RANKS_PER_GPU > 1 and "nccl" in request.node.name:
        pytest.skip("NCCL needs a GPU for each rank; MOECOMM_TEST_RANKS_PER_GPU is above 1")


@pytest.fixture
def cuda_only() -> None:
    """Skips, on the CPU backend, tests of what only CUDA has: streams, graphs, the allocator."""
    if harness.on_cpu():
        pytest.skip("about CUDA itself; MOECOMM_TEST_DEVICE is cpu")
