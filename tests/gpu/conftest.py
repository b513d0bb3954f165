"""Pools of ranks on GPUs, kept for the whole run: a process with a CUDA context takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu import harness
from tests.gpu.harness import GpuPool

Pools = Callable[[int], GpuPool]


def _require(config: pytest.Config, world_size: int) -> None:
    """Skips where ranks would have to share a GPU, unless that was asked for."""
    if harness.on_cpu() or config.getoption("--share-gpus"):
        return
    if world_size > harness.gpus():
        pytest.skip(f"needs {world_size} GPUs, {harness.gpus()} here (--share-gpus puts ranks together)")


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pools]:
    """pool(world_size) is a set of ranks kept for the whole run; after a failure, a fresh one."""
    pools: dict[int, GpuPool] = {}

    def get(world_size: int) -> GpuPool:
        _require(pytestconfig, world_size)
        if world_size not in pools:
            pools[world_size] = GpuPool(world_size)
        return pools[world_size]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def require_gpus(pytestconfig: pytest.Config) -> Callable[[int], None]:
    """require_gpus(n) skips with a reason where there are fewer."""
    return lambda world_size: _require(pytestconfig, world_size)


@pytest.fixture(scope="session")
def most_ranks(pytestconfig: pytest.Config) -> int:
    """Ranks of the tests that want as many as there are, up to four."""
    if harness.on_cpu() or pytestconfig.getoption("--share-gpus"):
        return 4
    return min(4, harness.gpus())


@pytest.fixture
def cuda_only() -> None:
    """For what has no meaning on the CPU backend: streams, graphs, the allocator."""
    if harness.on_cpu():
        pytest.skip("about CUDA itself; MOECOMM_TEST_DEVICE is cpu")


@pytest.fixture
def own_gpus(pytestconfig: pytest.Config, cuda_only: None) -> None:
    """For what cannot work with several ranks on one GPU, as NCCL."""
    if pytestconfig.getoption("--share-gpus"):
        pytest.skip("needs a GPU for each rank, and --share-gpus was given")
