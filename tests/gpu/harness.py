"""Ranks on GPUs: `GpuPool` is a RankPool whose rank r works on GPU r.

    def body(rank: int, world_size: int) -> None:          # torch.cuda.current_device() is the rank's
        x = torch.ones(4, device=device())

    pool(3)(body)

The default process group is gloo; `nccl()` makes an NCCL one where a test needs it. With
MOECOMM_TEST_DEVICE=cpu the ranks work on the CPU backend instead: for work on the tests themselves, where
there is no GPU. With MOECOMM_TEST_RANKS_PER_GPU=N, N ranks take turns on every GPU, so that jobs of more
ranks run than there are GPUs; slowly, since a kernel that waits keeps the GPU for its slice of time. NCCL
refuses that, so tests with "nccl" in their names are skipped then, and tests that start programs want a GPU
for each rank as ever. What a rank leaves behind in torch (deterministic mode, cached memory) is put away
after each call.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tests.cases import Case
from tests.multirank.harness import RankPool
from tests.oracle import assert_none, settled_error
from tests.ranks import COMM_TIMEOUT_S, communicator, device, on_cpu, poison, synchronize

__all__ = [
    "COMM_TIMEOUT_S",
    "assert_none",
    "communicator",
    "device",
    "on_cpu",
    "poison",
    "settled_error",
    "synchronize",
]

TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Job(Case):
    """A case whose rows are bfloat16, if nothing else is said."""

    dtype: str = "bfloat16"


# The fork server must not touch CUDA, or its children could not: with this, is_available() asks NVML alone.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
os.environ.update(ENVIRONMENT)

RANKS_PER_GPU = int(os.environ.get("MOECOMM_TEST_RANKS_PER_GPU", "1"))


def gpus() -> int:
    return 0 if on_cpu() else torch.cuda.device_count()


def most_ranks() -> int:
    """The most ranks that a job on these GPUs can have."""
    return gpus() * RANKS_PER_GPU


def sm_counts() -> list[int | None]:
    """Settings of num_sms that have to give the same bits: few, odd, all, and what moecomm chooses."""
    if on_cpu():
        return [2, 3]
    most = torch.cuda.get_device_properties(device()).multi_processor_count
    return [2, 5, 24, 64, most, None]


def on_nodes(ranks_per_node: int) -> dict[str, str]:
    """The environment of ranks whose communicators take so many of them for a node; between nodes rows go
    over TCP on this host."""
    return {
        "MOECOMM_RANKS_PER_NODE": str(ranks_per_node),
        "MOECOMM_FABRIC_PROVIDER": "tcp",
        "MOECOMM_FABRIC_INTERFACE": "127.0.0.1",
    }


class GpuPool(RankPool):
    """A set of ranks, one a GPU, that runs one function after another; a fresh set after a failure."""

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = TIMEOUT_S,
        ranks_per_node: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`ranks_per_node`: of nodes that are emulated on this host."""
        nodes = {} if ranks_per_node is None else on_nodes(ranks_per_node)
        super().__init__(world_size, timeout=timeout, environment={**ENVIRONMENT, **nodes, **environment})

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """fn(rank, world_size, *args) on every rank; the results by rank."""
        return super().__call__(_on_device, fn, args, **options)


def run_on_gpus(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_S,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """Runs `fn` as `GpuPool` does, on fresh processes that end with the call: for ranks that die or leave."""
    with GpuPool(world_size, timeout=timeout) as pool:
        return pool(fn, *args, may_die=may_die)


def _on_device(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    use_device(rank)
    try:
        result = fn(rank, world_size, *args)
        synchronize()  # an error of the device belongs to the test that made it
    finally:
        torch.use_deterministic_algorithms(False)
        if not on_cpu():
            torch.cuda.set_sync_debug_mode("default")
    if not on_cpu():
        torch.cuda.empty_cache()
    return result


def use_device(rank: int) -> None:
    if on_cpu():
        return
    torch.cuda.set_device(rank // RANKS_PER_GPU)
    if RANKS_PER_GPU > 1:
        _take_for_own(rank)


def _take_for_own(rank: int) -> None:
    """Gives the GPU of this process a name that no other rank's has: a communicator refuses ranks on the same
    GPU."""
    from moecomm.device.cuda_device import CudaDevice

    shared = CudaDevice.uuid
    if shared.__module__ != __name__:  # the first call of this process
        CudaDevice.uuid = lambda self: f"{shared(self)} of rank {rank}"  # type: ignore[method-assign]


@functools.cache
def nccl() -> dist.ProcessGroup:
    """An NCCL group of all ranks (gloo on the CPU); one a process."""
    return dist.new_group(backend="gloo" if on_cpu() else "nccl")


def warm_up(step: Any, times: int = 2) -> None:
    """Makes some calls on a side stream, which torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(step: Callable[[], Any], warm_ups: int = 2) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step, and what the step returned when it was captured."""
    warm_up(step, warm_ups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()
