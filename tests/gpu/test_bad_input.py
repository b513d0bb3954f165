"""Bad input on GPUs: the tests of the CPU ranks, and what a fixed dispatch with bad ids leaves behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from moecomm import OutOfMemory
from tests import oracle
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.catching import catch
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
from tests.multirank.test_errors_told import (
    test_a_call_within_a_call_is_refused,
    test_texts_that_are_not_ascii,
    test_the_first_cause_is_told_where_one_rank_alone_checks,
    test_what_torch_raises_of_one_rank_is_told,
)
from tests.oracle import Oracle, settled_error

__all__ = [
    "test_a_call_within_a_call_is_refused",
    "test_calls_that_differ_between_ranks",
    "test_combine_arguments",
    "test_dispatch_arguments",
    "test_non_contiguous_input_works",
    "test_texts_that_are_not_ascii",
    "test_the_first_cause_is_told_where_one_rank_alone_checks",
    "test_too_small_a_capacity",
    "test_use_after_close",
    "test_what_torch_raises_of_one_rank_is_told",
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


def _no_memory_for_rows(rank: int, world_size: int, case: Case) -> tuple[list[bool], list[str]]:
    """Rank 0 has no memory for the padded rows of a dispatch, dropless and with a capacity."""
    found = []
    with communicator(case) as comm:
        known, backend = Oracle(case, rank, comm.device), comm._open()
        room = torch.full((1 << 20,), 7, dtype=torch.uint8, device=comm.device)
        backend._nowhere, backend._nowhere_address = room, room.data_ptr()
        make = backend._empty

        def no_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if rank == 0 and len(shape) == 2:
                raise OutOfMemory("none left", needed=1)
            return make(shape, dtype)

        for capacity in (None, 4096):
            call = partial(comm.dispatch, known.own.x_TH, known.own.ids_TK, alignment=16, capacity=capacity)
            backend._empty = no_rows
            caught = catch(call)
            backend._empty = make
            harness.synchronize()
            found.append((caught is not None and caught.name == "OutOfMemory") == (rank == 0))
            found.append(bool((room == 7).all()))
        return found, oracle.play(comm, case, rank)


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("tokens", [None, 0], ids=["one kernel", "two kernels"])
def test_no_memory_for_rows_changes_none(pool: Pools, most_ranks: int, tokens: int | None, seed: int) -> None:
    environment = {} if tokens is None else {"MOECOMM_FUSED_TOKENS": str(tokens)}
    answers = pool(most_ranks, **environment)(_no_memory_for_rows, small(most_ranks, seed, slack=3))
    for found, problems in answers:
        assert problems == [] and found == [True] * 4, found
