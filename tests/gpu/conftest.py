"""Pools of ranks on GPUs, kept for the whole run: a process with a CUDA context takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu import harness
from tests.gpu.harness import GpuPool

Pools = Callable[[int], GpuPool]


def _require(world_size: int) -> None:
    """Skips where ranks would have to share a GPU."""
    if not harness.on_cpu() and world_size > harness.gpus():
        pytest.skip(f"needs {world_size} GPUs, {harness.gpus()} here")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """pool(world_size) is a set of ranks kept for the whole run; after a failure, a fresh one."""
    pools: dict[int, GpuPool] = {}

    def get(world_size: int) -> GpuPool:
        _require(world_size)
        if world_size not in pools:
            pools[world_size] = GpuPool(world_size)
        return pools[world_size]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def require_gpus() -> Callable[[int], None]:
    """require_gpus(n) skips with a reason where there are fewer."""
    return _require


@pytest.fixture(scope="session")
def most_ranks() -> int:
    """Ranks of the tests that want as many as there are, up to four."""
    return 4 if harness.on_cpu() else min(4, harness.gpus())


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


@pytest.fixture
def cuda_only() -> None:
    """Skips, on the CPU backend, tests of what only CUDA has: streams, graphs, the allocator."""
    if harness.on_cpu():
        pytest.skip("about CUDA itself; MOECOMM_TEST_DEVICE is cpu")
