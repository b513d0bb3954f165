"""Communicators on GPUs come and go: the tests of the CPU ranks, and what only GPUs have beside them."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import oracle, ranks
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.harness import Job
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_lifetime import (  # noqa: F401
    test_memory_comes_and_goes_as_planned,
    test_nothing_leaks,
    test_outputs_outlive_the_communicator,
    test_the_graph_keeps_a_communicator_alive,
)

pytestmark = pytest.mark.usefixtures("cuda_only")


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """Skips what measures the free memory of whole GPUs while other processes use them."""
    shared = ranks.shares_its_gpus() or harness.RANKS_PER_GPU > 1
    if shared and request.node.name == test_memory_comes_and_goes_as_planned.__name__:
        pytest.skip("other processes take and give back memory of these GPUs meanwhile")


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_beside_expandable_segments(rank: int, world_size: int, seed: int) -> list[str]:
    """torch's own use of VMM (expandable segments) beside ours."""
    case = Job(tokens=(2048,) * world_size, num_experts=8 * world_size, hidden=2048, top_k=4, seed=seed)
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        problems = []
        for step in range(3):
            now = replace(case, seed=case.seed + step, slack=None if step % 2 else 8)
            with harness.communicator(**now.communicator) as comm:
                harness.poison()
                problems += oracle.play(comm, now, rank)
            torch.cuda.empty_cache()
        return problems
    finally:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _opened() -> list[int]:
    """The GPUs on which this process has a context, of some 520 MiB each on an H100."""
    return [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]


def _all_from_threads(rank: int, world_size: int, case: Case) -> list[str]:
    """Returns what was wrong with a communicator, then with one in a thread that has not chosen a GPU, and
    after what a GPU of another rank was open."""
    own, problems = torch.cuda.current_device(), []

    def look(after: str) -> None:
        problems.extend(f"after {after}: GPU {gpu} is open" for gpu in _opened() if gpu != own)

    def live(where: str) -> None:
        with harness.communicator(device=torch.device("cuda", own), **case.communicator) as comm:
            look(f"construction {where}")
            problems.extend(oracle.play(comm, case, rank))
            look(f"the operations {where}")
            comm.stats()
            comm.reset_stats()
            comm.last_phases()
            look(f"the counters {where}")
        look(f"close {where}")
        del comm
        gc.collect()
        look(f"the end {where}")

    look("the tests before this one")
    live("in the main thread")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(live, "in a thread").result()
    return problems


@pytest.mark.parametrize("size", [2, 4])
def test_only_its_own_gpu_is_open(fresh_ranks: Callable[..., list[Any]], size: int, seed: int) -> None:
    case = Case(tokens=(64,) * size, num_experts=4 * size, hidden=256, top_k=2, seed=seed)
    oracle.assert_none(fresh_ranks(size, _all_from_threads, case))


@on_ranks("most_ranks")
def test_a_group_of_nccl(rank: int, world_size: int, seed: int) -> list[str]:
    """The group may be one of NCCL."""
    case = Case(tokens=(30,) * world_size, num_experts=12, hidden=128, top_k=2, seed=seed)
    with harness.communicator(group=harness.nccl(), **case.communicator) as comm:
        return oracle.play(comm, case, rank)
