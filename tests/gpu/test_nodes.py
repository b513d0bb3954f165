"""GPUs on several nodes, emulated on one host: rows go through pinned host memory and libfabric's TCP.

Tests of one node find the same results here; `pool` and `require_own_ranks` are what is different. Then what
only several nodes have.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fabric import needs_fabric
from tests.gpu import (
    conftest,
    harness,
    test_autograd,
    test_bad_input,
    test_faults,
    test_graphs,
    test_lifetime,
    test_sizes,
    test_small_cases,
    test_streams,
    test_wire_formats,
)
from tests.gpu.conftest import Pools
from tests.gpu.harness import GpuPool, Job
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_nodes import against_one_node, counted, verify_crossing
from tests.oracle import opened, play

SAME_AS_ON_ONE_NODE: list[Callable[..., None]] = [
    test_small_cases.test_layouts_alignments_and_capacities,
    test_small_cases.test_top_k,
    test_small_cases.test_all_tokens_to_one_rank,
    test_small_cases.test_nothing_to_do,
    test_small_cases.test_many_steps_on_one_communicator,
    test_small_cases.test_stats_count_calls_rows_and_bytes,
    test_autograd.test_checkpointing_gives_the_same_bits_and_reuses_plans,
    test_sizes.test_hidden,
    test_sizes.test_experts,
    test_sizes.test_routing,
    test_sizes.test_many_tokens_all_to_one_rank,
    test_wire_formats.test_small_cases_match_the_reference,
    test_wire_formats.test_data_and_scales,
    test_wire_formats.test_sums_in_fp8,
    test_wire_formats.test_many_sums_in_fp8,
    test_wire_formats.test_gradients_in_narrow_formats,
    test_wire_formats.test_many_gradients_in_narrow_formats,
    test_graphs.test_routing_changes_between_replays,
    test_graphs.test_overflow_in_some_replays,
    test_graphs.test_two_captured_layers_with_gemms,
    test_graphs.test_a_captured_training_step,
    test_graphs.test_beside_nccl_on_another_stream,
    test_streams.test_fixed_mode_never_waits,
    test_streams.test_dropless_waits_for_its_own_count_only,
    test_streams.test_async_follows_torch_distributed,
    test_streams.test_several_in_flight,
    test_bad_input.test_dispatch_arguments,
    test_bad_input.test_an_error_leaves_valid_memory,
    test_bad_input.test_calls_that_differ_between_ranks,
    test_bad_input.test_too_small_a_capacity,
    test_lifetime.test_nothing_leaks,
    test_small_cases.test_several_communicators_at_once,
    test_faults.test_a_killed_rank_is_lost_to_the_others,
    test_faults.test_death_at_any_moment,
    test_faults.test_a_rank_that_does_not_call,
    test_faults.test_a_rank_that_closes_early_is_lost_too,
    test_faults.test_close_waits_for_what_is_under_way,
]
"""Collected here too, with the fixtures of this module."""

globals().update({test.__name__: test for test in SAME_AS_ON_ONE_NODE})

pytestmark = [pytest.mark.usefixtures("cuda_only"), needs_fabric]

PER_NODE = [1, 2]
"""Ranks a node."""


@pytest.fixture(scope="module", params=PER_NODE, ids=lambda count: f"{count}-a-node")
def per_node(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def pool(per_node: int) -> Iterator[Pools]:
    """Pools as in the other modules, for sizes that are several nodes."""
    pools: dict[int, GpuPool] = {}

    def get(world_size: int) -> GpuPool:
        if world_size <= per_node or world_size % per_node != 0:
            pytest.skip(f"{world_size} ranks are not several nodes of {per_node}")
        conftest.require_ranks(world_size)
        if world_size not in pools:
            pools[world_size] = GpuPool(world_size, ranks_per_node=per_node)
        return pools[world_size]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture
def require_own_ranks(per_node: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Skips a test that starts its own ranks if there are too few GPUs, and sets its ranks per node."""
    for name, value in harness.on_nodes(per_node).items():
        monkeypatch.setitem(harness.ENVIRONMENT, name, value)

    def require(world_size: int) -> None:
        if world_size <= per_node or world_size % per_node != 0:
            pytest.skip(f"{world_size} ranks are not several nodes of {per_node}")
        conftest.require_ranks(world_size)

    return require


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_against_one_node(pool: Pools, per_node: int, size: int, wire: str | None, seed: int) -> None:
    case = Job.on(
        size,
        (300, 1, 200, 133),
        experts=8,
        hidden=1040,
        top_k=4,
        wire=wire,
        routing="holes",
        seed=seed,
        ranks_per_node=per_node,
    )
    harness.assert_none(pool(size)(against_one_node, case))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_cross_once_a_node(pool: Pools, per_node: int, size: int, seed: int) -> None:
    case = Job.on(
        size, 200, experts=4, hidden=256, top_k=3, routing="holes", seed=seed, ranks_per_node=per_node
    )
    verify_crossing(case, pool(size)(counted, case))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_many_chunks(pool: Pools, size: int, seed: int) -> None:
    """More than one put for each node, with chunks that end between the tokens of a warp."""
    base = Job.on(size, (3000, 1, 2999, 1500), experts=16, hidden=4096, top_k=2, seed=seed)
    # On four nodes there is not room for all sums on their way: chunks take turns.
    for job in (
        base,
        replace(base, top_k=1),
        replace(base, layout="rank"),
        replace(base, routing="one-rank"),
    ):
        for problems in pool(size)(_play, job):
            assert problems == []


def _play(rank: int, world_size: int, job: Job) -> list[str]:
    with harness.communicator(**job.communicator) as comm:
        return [problem for _ in range(3) for problem in play(comm, job, rank)]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_any_number_of_lanes(rank: int, world_size: int, seed: int) -> list[Any]:
    job = Job.on(world_size, (2000, 1, 1500, 700), experts=8, hidden=4096, top_k=3, seed=seed)
    found = []
    for lanes in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOECOMM_FABRIC_LANES", str(lanes))
            comm = harness.communicator(**job.communicator)
        with comm:
            assert comm.network_lanes == lanes, f"{comm.network_lanes} lanes instead of {lanes}"
            found += [problem for _ in range(3) for problem in play(comm, job, rank)]
    return found


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_any_number_of_sms(rank: int, world_size: int, seed: int) -> list[Any]:
    job = Job(tokens=(900,) * world_size, num_experts=8 * world_size, hidden=1024, top_k=4, seed=seed)
    found = []
    for num_sms in harness.sm_counts():
        with opened(job, rank, num_sms=num_sms) as (comm, known):
            known.check_step(comm)
            found += known.problems
    return found
