"""Helpers of test bodies that run on a rank, on the CPU or on a GPU.

A test that is the same for both is written once, with the fixture `pool`: tests/multirank hands it ranks on
CPUs, and a file of tests/gpu that imports it hands it ranks on GPUs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

COMM_TIMEOUT_S = float(os.environ.get("MOECOMM_TEST_TIMEOUT", "30"))
"""Deadline of the communicators in these tests: a hang ends by itself, before the pool's own deadline."""


def on_cpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Does this rank, or one with `environment`, work on the CPU backend: without GPUs in sight, or because
    the suite is played there?"""
    return environment.get("MOECOMM_TEST_DEVICE") == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == ""


def shares_its_gpus() -> bool:
    """True where other processes run tests on the same GPUs, and take and give back memory meanwhile."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())


def synchronize(where: torch.device | None = None) -> None:
    """Waits for the GPU `where`, if nothing is said for the one that is current."""
    if not on_cpu():
        torch.cuda.synchronize(where)


def communicator(**arguments: Any) -> Any:
    """A communicator on this rank's device with the deadline of these tests."""
    import moecomm

    return moecomm.Communicator(**{"device": device(), "timeout": COMM_TIMEOUT_S, **arguments})


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, which call this together."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def variable(name: str, value: object) -> Iterator[None]:
    """Sets an environment variable of this rank, which has none of that name, within the block."""
    os.environ[name] = str(value)
    try:
        yield
    finally:
        del os.environ[name]


def poison(most: int = 256 << 20) -> None:
    """Leaves 0xFF (NaN in every floating-point type) in memory that the allocator will hand out next."""
    if on_cpu():
        return
    # Large blocks are split, small ones have a pool of their own.
    sizes = [most, *[1 << 20] * 16, *[1 << 16] * 64]
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device()) for size in sizes]
    del blocks
