"""Bad input on GPUs: the tests of the CPU ranks, and what a fixed dispatch with bad ids leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.test_bad_input import (
    arguments_of,
    communicator,
    small,
    test_calls_that_differ_between_ranks,
    test_combine_arguments,
    test_dispatch_arguments,
    test_non_contiguous_input_works,
    test_too_small_a_capacity,
    test_use_after_close,
    test_wild_ids_change_no_memory,
)
from tests.oracle import Oracle, settled_error

__all__ = [
    "test_calls_that_differ_between_ranks",
    "test_combine_arguments",
    "test_dispatch_arguments",
    "test_non_contiguous_input_works",
    "test_too_small_a_capacity",
    "test_use_after_close",
    "test_wild_ids_change_no_memory",
]


def _valid_after_an_error(rank: int, world_size: int, case: Case) -> list[bool]:
    """The output of a fixed dispatch with bad ids is valid memory that says: no rows."""
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        arguments = arguments_of(known)
        arguments["topk_idx_TK"][0, 0] = 1000
        out = comm.dispatch(**arguments)
        y_TH = comm.combine(torch.zeros_like(out.tokens), out.handle)
        harness.synchronize()
        found = [int(out.offsets.max()) == 0, int(out.tokens_per_expert.max()) == 0]
        found += [len(out.tokens) == known.capacity, y_TH.shape == known.own.x_TH.shape]
        dist.barrier()
        error = settled_error(comm)
        return [*found, error is not None and error.name == "InvalidRouting", settled_error(comm) is None]


@pytest.mark.usefixtures("cuda_only")
def test_an_error_leaves_valid_memory(pool: Pools, most_ranks: int, seed: int) -> None:
    for found in pool(most_ranks)(_valid_after_an_error, small(most_ranks, seed, slack=3)):
        assert found == [True] * 6, "offsets, counts, rows, y, InvalidRouting from check(), once"
