"""Bad input on GPUs: the tests of the CPU ranks, and what a fixed dispatch with bad ids leaves behind."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moecomm import OutOfMemory
from tests import oracle
from tests.gpu import harness
from tests.multirank.catching import catch, require
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_bad_input import (  # noqa: F401
    MAX_TOKENS,
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
from tests.multirank.test_errors_told import (  # noqa: F401
    test_a_call_within_a_call_is_refused,
    test_texts_that_are_not_ascii,
    test_the_first_cause_is_told_where_one_rank_alone_checks,
    test_what_torch_raises_of_one_rank_is_told,
)
from tests.oracle import Oracle, opened, settled_error
from tests.ranks import variable


@pytest.mark.usefixtures("cuda_only")
@on_ranks("most_ranks")
def test_an_error_leaves_valid_memory(rank: int, world_size: int, seed: int) -> None:
    """The output of a fixed dispatch with bad ids is valid memory that says: no rows."""
    with opened(small(world_size, seed, slack=3), rank, max_tokens=MAX_TOKENS) as (comm, known):
        arguments = arguments_of(known)
        arguments["topk_idx_TK"][0, 0] = 1000
        out = comm.dispatch(**arguments)
        y_TH = comm.combine(torch.zeros_like(out.tokens), out.handle)
        harness.synchronize()
        assert int(out.offsets.max()) == 0 and int(out.tokens_per_expert.max()) == 0
        assert len(out.tokens) == known.capacity and y_TH.shape == known.own.x_TH.shape
        dist.barrier()
        require(settled_error(comm), name="InvalidRouting")
        assert settled_error(comm) is None


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("tokens", [None, 0], ids=["one kernel", "two kernels"])
@on_ranks("most_ranks")
def test_no_memory_for_rows_changes_none(
    rank: int, world_size: int, tokens: int | None, seed: int
) -> list[str]:
    """Rank 0 has no memory for the padded rows of a dispatch, dropless and with a capacity."""
    case = small(world_size, seed, slack=3)
    with nullcontext() if tokens is None else variable("MOECOMM_FUSED_TOKENS", tokens):
        comm = communicator(case)
    with comm:
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
            assert (caught is not None and caught.name == "OutOfMemory") == (rank == 0)
            assert bool((room == 7).all())
        return oracle.play(comm, case, rank)
