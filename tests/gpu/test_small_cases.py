"""Small whole jobs against the numpy reference, bit for bit: the cases of the CPU ranks, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import GpuPool
from tests.gpu.oracle import DTYPES
from tests.multirank import cases
from tests.multirank.cases import Case

SIZES = [1, 2, 3, 4]


def _play(rank: int, world_size: int, some: list[Case]) -> list[cases.Arrays]:
    results = []
    for case in some:
        harness.poison(8 << 20)
        with harness.communicator(**_arguments(case)) as comm:
            assert (comm.rank, comm.size) == (rank, world_size)
            assert comm.num_local_experts == case.num_experts // world_size
            assert comm.device.type == harness.device().type
            results.append(cases.play(comm, case, rank))
    return results


def _arguments(case: Case) -> dict[str, Any]:
    arguments = {**case.communicator, "timeout": harness.COMM_TIMEOUT_S}
    del arguments["device"]
    return arguments


def _check(pool: GpuPool, some: Sequence[Case]) -> None:
    some = [replace(case, ranks_per_node=pool.ranks_per_node) for case in some]
    for case, results in zip(some, zip(*pool(_play, list(some)), strict=True), strict=True):
        cases.verify(case, results)


@pytest.mark.parametrize("size", SIZES)
def test_one_plain_job(pool: Pools, size: int, seed: int) -> None:
    """The first to look at when everything fails."""
    _check(pool(size), [Case(tokens=(4,) * size, num_experts=size, hidden=8, top_k=1, seed=seed)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_layouts_alignments_and_capacities(pool: Pools, size: int, dtype: str, seed: int) -> None:
    _check(pool(size), cases.layouts_alignments_and_capacities(size, dtype, seed))


@pytest.mark.parametrize("size", SIZES)
def test_top_k(pool: Pools, size: int, seed: int) -> None:
    some = []
    for top_k in (1, 2, 4, 6, 8, 10, 16, 22, 32):
        base = Case(
            tokens=cases.unequal_tokens(size, 9, seed),
            num_experts=32 * size,
            hidden=4,
            top_k=top_k,
            seed=seed,
        )
        some += [
            base,
            replace(base, layout="rank", dtype="bfloat16", hidden=8),
            replace(base, routing="holes"),
        ]
    _check(pool(size), some)


@pytest.mark.parametrize("size", SIZES)
def test_all_tokens_to_one_rank(pool: Pools, size: int, seed: int) -> None:
    _check(pool(size), cases.all_tokens_to_one_rank(size, seed))


@pytest.mark.parametrize("size", SIZES)
def test_nothing_to_do(pool: Pools, size: int, seed: int) -> None:
    _check(pool(size), cases.nothing_to_do(size, seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_sizes(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    """A row is any multiple of 16 bytes, also one that fits no vector width or block of the kernels."""
    some = []
    for blocks in (1, 3, 7, 17, 31, 65, 129):
        hidden = blocks * 16 // getattr(cases.torch, dtype).itemsize
        base = Case(
            tokens=cases.unequal_tokens(most_ranks, 10, seed),
            num_experts=2 * most_ranks,
            hidden=hidden,
            top_k=min(4, 2 * most_ranks),
            dtype=dtype,
            routing="holes",
            seed=seed,
        )
        some += [base, replace(base, layout="rank")]
    _check(pool(most_ranks), some)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    """Infinities, NaN, subnormals, and sums that overflow the dtype but not the type they run in."""
    size = min(2, most_ranks)
    base = Case(tokens=(20,) * size, num_experts=8, hidden=40, top_k=4, dtype=dtype, extremes=True, seed=seed)
    _check(pool(size), [base, replace(base, layout="rank")])


def _many_steps(rank: int, world_size: int, some: list[Case]) -> list[cases.Arrays]:
    with harness.communicator(**_arguments(some[0])) as comm:
        return [cases.play(comm, case, rank) for case in some]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_many_steps_on_one_communicator(pool: Pools, size: int, seed: int) -> None:
    """Nothing of an earlier step shows."""
    per_node = pool(size).ranks_per_node
    some = [replace(case, ranks_per_node=per_node) for case in cases.many_steps(size, seed)]
    for case, results in zip(some, zip(*pool(size)(_many_steps, some), strict=True), strict=True):
        cases.verify(case, results)


@pytest.mark.parametrize("size", [2, 4])
def test_runs_repeat_bit_for_bit(pool: Pools, size: int, seed: int) -> None:
    case = Case(tokens=(64,) * size, num_experts=4 * size, hidden=128, top_k=4, dtype="float16", seed=seed)
    first, *others = zip(*pool(size)(_play, [case] * 4), strict=True)
    for results in others:
        for left, right in zip(first, results, strict=True):
            for name, value in left.items():
                if isinstance(value, np.ndarray):
                    assert value.tobytes() == right[name].tobytes(), name
                else:
                    assert value == right[name], name
