"""Transfers by the copy engine: the tests of transfers by SMs, with communicators of engine="copy".

The bodies are those of other files; the fixtures of this one tell the ranks which engine to use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import oracle
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.gpu.test_epochs import test_across_the_borders, test_who_gives_up_waits_for_slow_peers
from tests.gpu.test_faults import (
    FreshRanks,
    test_a_killed_rank_is_lost_to_the_others,
    test_a_rank_that_does_not_call,
    test_close_waits_for_what_is_under_way,
    test_death_at_any_moment,
)
from tests.gpu.test_graphs import (
    test_a_captured_training_step,
    test_overflow_in_some_replays,
    test_routing_changes_between_replays,
    test_thousands_of_replays,
    test_two_captured_layers_with_gemms,
)
from tests.gpu.test_layer import test_every_way_gives_the_same
from tests.gpu.test_merged import (
    test_a_graphed_step,
    test_one_fixed_order,
    test_same_bits_as_one_after_the_other,
)
from tests.gpu.test_sizes import test_hidden, test_routing, test_tokens
from tests.gpu.test_streams import (
    test_async_follows_torch_distributed,
    test_several_communicators_on_streams_of_their_own,
    test_several_in_flight,
    test_the_caller_changes_streams,
    test_work_is_in_order_with_the_callers,
)
from tests.multirank.catching import catch
from tests.multirank.test_dispatch_combine import (
    check,
    test_all_tokens_to_one_rank,
    test_layouts_alignments_and_capacities,
    test_many_steps_on_one_communicator,
    test_nothing_to_do,
)

__all__ = [
    "test_a_captured_training_step",
    "test_a_graphed_step",
    "test_a_killed_rank_is_lost_to_the_others",
    "test_a_rank_that_does_not_call",
    "test_across_the_borders",
    "test_all_tokens_to_one_rank",
    "test_async_follows_torch_distributed",
    "test_close_waits_for_what_is_under_way",
    "test_death_at_any_moment",
    "test_every_way_gives_the_same",
    "test_hidden",
    "test_layouts_alignments_and_capacities",
    "test_many_steps_on_one_communicator",
    "test_nothing_to_do",
    "test_one_fixed_order",
    "test_overflow_in_some_replays",
    "test_routing",
    "test_routing_changes_between_replays",
    "test_same_bits_as_one_after_the_other",
    "test_several_communicators_on_streams_of_their_own",
    "test_several_in_flight",
    "test_the_caller_changes_streams",
    "test_thousands_of_replays",
    "test_tokens",
    "test_two_captured_layers_with_gemms",
    "test_who_gives_up_waits_for_slow_peers",
    "test_work_is_in_order_with_the_callers",
]

pytestmark = pytest.mark.usefixtures("cuda_only")


def _by_copies(rank: int, world_size: int, body: Callable[..., Any], *arguments: Any) -> Any:
    os.environ["MOECOMM_TEST_ENGINE"] = "copy"
    try:
        return body(rank, world_size, *arguments)
    finally:
        del os.environ["MOECOMM_TEST_ENGINE"]


class _Pool:
    """A pool of ranks whose communicators use the copy engine."""

    ranks_per_node = None

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __call__(self, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._pool(_by_copies, body, *arguments, **options)


@pytest.fixture
def pool(pool: Pools) -> Any:
    return lambda size: _Pool(pool(size))


@pytest.fixture
def fresh_ranks(fresh_ranks: FreshRanks) -> FreshRanks:
    return lambda size, body, *arguments, **options: fresh_ranks(
        size, _by_copies, body, *arguments, **options
    )


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_in_fp8(pool: Any, size: int, layout: str, seed: int) -> None:
    """Rows are brought into the wire format before they are copied, this rank's own as well."""
    tokens = (300, 1, 77, 0)[:size]
    job = Job(tokens=tokens, num_experts=8 * size, hidden=400, top_k=4, wire="fp8", layout=layout, seed=seed)
    check(pool(size), [job, replace(job, routing="holes", slack=5)])


def _in_turns(rank: int, world_size: int, job: Job) -> list[str]:
    """Operations by the copy engine and by SMs follow each other on one communicator."""
    problems = []
    with harness.communicator(**{**job.communicator, "engine": "auto"}) as comm:
        for step in range(12):
            now = replace(job, seed=job.seed + step, layout=("expert", "rank")[step % 5 % 2])
            with comm.use_engine("copy" if step % 3 else "sm"):
                problems += oracle.play(comm, now, rank)
    return problems


@pytest.mark.parametrize("size", [2, 4])
def test_engines_in_turns(pool: Any, size: int, seed: int) -> None:
    job = Job(tokens=(90, 200, 0, 17)[:size], num_experts=8 * size, hidden=264, top_k=4, seed=seed)
    harness.assert_none(pool(size)(_in_turns, job))


def _at_odds(rank: int, world_size: int, job: Job) -> list[str | None]:
    """One rank lets SMs move what the others copy; all are told, and go on together."""
    found: list[str | None] = []
    with harness.communicator(**{**job.communicator, "engine": "auto"}) as comm:
        known = oracle.Oracle(job, rank, comm.device)
        for what in ("dispatch", "combine"):
            out = known.dispatch(comm)
            with comm.use_engine("sm" if rank == 0 else "copy"):
                if what == "dispatch":
                    error = catch(lambda: known.dispatch(comm))
                else:
                    comm.combine(known.answer(out.tokens), out.handle)
                    torch.cuda.synchronize()
                    error = catch(comm.check)
            found.append(error and f"{error.name}: {error.text}")
        found += oracle.play(comm, job, rank)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_engines(pool: Any, size: int, seed: int) -> None:
    job = Job(tokens=(50,) * size, num_experts=4 * size, hidden=64, top_k=2, seed=seed)
    for found in pool(size)(_at_odds, job):
        assert len(found) == 2, found
        for text in found:
            assert text.startswith("MismatchedArguments: ranks disagree on what travels"), text
