"""Random whole jobs against the numpy reference: hypothesis chooses, one set of ranks plays them all."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, note, seed, settings

import moecomm
from tests import seeds
from tests.cases import Case
from tests.multirank.conftest import Pools
from tests.oracle import assert_none, play
from tests.reference import DTYPES

EXAMPLES = {1: 10, 2: 25, 3: 25, 4: 10}


@st.composite
def jobs(draw: Any, size: int) -> list[Case]:
    """A few dispatches on one communicator."""
    local = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(DTYPES))
    base = Case.on(
        size,
        0,
        experts=local,
        hidden=draw(st.integers(1, 9)) * 16 // {"float32": 4, "float64": 8}.get(dtype, 2),
        top_k=draw(st.integers(1, min(local * size, 9))),
        dtype=dtype,
        num_sms=draw(st.sampled_from([None, 1, 2])),
    )
    count = draw(st.integers(1, 3))
    some = []
    for _ in range(count):
        layout = draw(st.sampled_from(["expert", "rank"]))
        some.append(
            replace(
                base,
                tokens=tuple(draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))),
                layout=layout,
                alignment=draw(st.integers(1, 9)) if layout == "expert" else 1,
                slack=draw(st.none() | st.integers(-6, 6)),
                routing=draw(st.sampled_from(["uniform", "holes", "one-rank"])),
                weights=draw(st.booleans()),
                wide_ids=draw(st.booleans()),
                input_in_window=draw(st.booleans()),
                seed=draw(st.integers(0, 2**16)),
            )
        )
    return some


def _play(rank: int, world_size: int, some: list[Case]) -> list[list[str]]:
    arguments = some[0].communicator
    arguments["max_tokens"] = max(case.communicator["max_tokens"] for case in some)
    with moecomm.Communicator(**arguments) as comm:
        return [play(comm, case, rank) for case in some]


@pytest.mark.parametrize("size", EXAMPLES)
def test_any_job_matches_the_reference(pool: Pools, size: int) -> None:
    ranks = pool(size)

    @seed(seeds.base())
    @settings(
        max_examples=EXAMPLES[size], deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(some=jobs(size))
    def check(some: list[Case]) -> None:
        note(f"base seed {seeds.base()}")
        for results in zip(*ranks(_play, some), strict=True):
            assert_none(results)

    check()
