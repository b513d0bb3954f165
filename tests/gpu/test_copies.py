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

from moecomm.overlap import Beside
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
    test_beside_nccl_on_another_stream,
    test_overflow_in_some_replays,
    test_routing_changes_between_replays,
    test_thousands_of_replays,
    test_two_captured_layers_with_gemms,
)
from tests.gpu.test_layer import test_every_way_gives_the_same
from tests.gpu.test_sizes import test_hidden, test_routing, test_tokens
from tests.gpu.test_streams import (
    test_async_follows_torch_distributed,
    test_several_communicators_on_streams_of_their_own,
    test_several_in_flight,
    test_the_caller_changes_streams,
    test_work_is_in_order_with_the_callers,
)
from tests.gpu.test_turns import TURNS
from tests.multirank.catching import catch
from tests.multirank.test_bad_input import (
    test_calls_that_differ_between_ranks,
    test_combine_arguments,
    test_dispatch_arguments,
)
from tests.multirank.test_dispatch_combine import (
    check,
    test_all_tokens_to_one_rank,
    test_layouts_alignments_and_capacities,
    test_many_steps_on_one_communicator,
    test_nothing_to_do,
)

__all__ = [
    "test_a_captured_training_step",
    "test_a_killed_rank_is_lost_to_the_others",
    "test_a_rank_that_does_not_call",
    "test_across_the_borders",
    "test_all_tokens_to_one_rank",
    "test_async_follows_torch_distributed",
    "test_beside_nccl_on_another_stream",
    "test_calls_that_differ_between_ranks",
    "test_close_waits_for_what_is_under_way",
    "test_combine_arguments",
    "test_death_at_any_moment",
    "test_dispatch_arguments",
    "test_every_way_gives_the_same",
    "test_hidden",
    "test_layouts_alignments_and_capacities",
    "test_many_steps_on_one_communicator",
    "test_nothing_to_do",
    "test_overflow_in_some_replays",
    "test_routing",
    "test_routing_changes_between_replays",
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
        self.on_cpu = pool.on_cpu

    def __call__(self, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._pool(_by_copies, body, *arguments, **options)


@pytest.fixture
def pool(pool: Pools) -> Any:
    return lambda size, **environment: _Pool(pool(size, **environment))


@pytest.fixture
def fresh_ranks(fresh_ranks: FreshRanks) -> FreshRanks:
    return lambda size, body, *arguments, **options: fresh_ranks(
        size, _by_copies, body, *arguments, **options
    )


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("top_k", [4, 1])  # 1: by SMs chunks would take turns in the staging section
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_in_fp8(pool: Any, size: int, top_k: int, layout: str, seed: int) -> None:
    """Rows are brought into the wire format before they are copied, this rank's own as well."""
    tokens = (300, 1, 77, 0)[:size]
    job = Job(
        tokens=tokens, num_experts=8 * size, hidden=400, top_k=top_k, wire="fp8", layout=layout, seed=seed
    )
    check(pool(size, **TURNS), [job, replace(job, routing="holes", slack=5)])


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
    """One rank lets SMs move what the others copy; all are told, and go on together, also by copies, of which
    that rank has made one less."""
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
            with comm.use_engine("copy"):
                found += oracle.play(comm, replace(job, seed=job.seed + len(found)), rank)
        found += oracle.play(comm, job, rank)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_engines(pool: Any, size: int, seed: int) -> None:
    job = Job(tokens=(50,) * size, num_experts=4 * size, hidden=64, top_k=2, seed=seed)
    for found in pool(size)(_at_odds, job):
        assert len(found) == 2, found
        for text in found:
            assert text.startswith("MismatchedArguments: ranks disagree on what travels"), text


def _one_rank_is_wrong(rank: int, world_size: int, job: Job) -> list[str]:
    """After a call that one rank's host refuses, whose copies that rank has not made, all copy again."""
    problems = []
    with harness.communicator(**job.communicator) as comm:
        for step in range(3):
            known = oracle.Oracle(replace(job, seed=job.seed + step), rank, comm.device)
            own = known.own
            x_TH = own.x_TH[:, :-1] if rank == step % world_size else own.x_TH
            error = catch(lambda x_TH=x_TH, own=own: comm.dispatch(x_TH, own.ids_TK))
            if error is None or error.name != "InvalidArgument":
                problems.append(f"rank {rank}, step {step}: raised {error}")
            problems += oracle.play(comm, known.job, rank)
    return problems


@pytest.mark.parametrize("size", [2, 4])
def test_copies_after_an_error_of_one_rank(pool: Any, size: int, seed: int) -> None:
    job = Job(tokens=(50,) * size, num_experts=4 * size, hidden=64, top_k=2, seed=seed)
    harness.assert_none(pool(size)(_one_rank_is_wrong, job))


def _beside_products(rank: int, world_size: int, job: Job) -> list[str]:
    """Transfers that are held beside products have the bits of those by SMs alone."""
    problems = []
    with harness.communicator(**job.communicator) as comm:
        known = oracle.Oracle(job, rank, comm.device)
        out = known.dispatch(comm)
        rows_PH = known.answer(out.tokens)
        factor = torch.randn(2048, 2048, device=comm.device)
        transfers: dict[str, Callable[[], torch.Tensor]] = {
            "redispatch": lambda: comm.redispatch(known.own.x_TH, out.handle),
            "combine": lambda: comm.combine(rows_PH, out.handle),
        }
        for step in range(10):
            for name, transfer in transfers.items():
                side = Beside(comm, only_transfers=True)
                with side:
                    held = transfer()
                for _ in range(4):
                    factor = (factor @ factor).clamp(-1, 1)
                side.join(held)
                with comm.use_engine("sm"):
                    if not torch.equal(held, transfer()):
                        problems.append(f"rank {rank}: {name} {step} beside products")
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("size", [2, 4])
def test_beside_products_with_few_connections(pool: Any, size: int, connections: str, seed: int) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM sets it, what is put on any stream of a process
    reaches the GPU in the order of the calls."""
    job = Job(tokens=(700,) * size, num_experts=4 * size, hidden=512, top_k=4, seed=seed)
    ranks = pool(size, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    harness.assert_none(ranks(_beside_products, job))
    harness.assert_none(ranks(_in_turns, job))
