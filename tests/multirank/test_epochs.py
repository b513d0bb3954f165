"""Operations whose epochs pass 2^31 and 2^32, where 32 bits would change their sign or begin anew."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests import oracle, ranks
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks

BORDERS = [2**31, 2**32, 2**62]
"""The last one is the highest first epoch that is taken."""


def first_epoch(epoch: int) -> AbstractContextManager[None]:
    """Communicators that are built within begin with this epoch."""
    return ranks.variable("MOECOMM_FIRST_EPOCH", epoch)


def _case(size: int, seed: int, **options: Any) -> Case:
    tokens = (9, 4, 12)[:size]
    return Case(tokens=tokens, num_experts=4 * size, hidden=20, top_k=2, seed=seed, **options)


def _across(rank: int, case: Case) -> list[str]:
    problems = []
    for border in BORDERS:
        with first_epoch(border - 2 if border < 2**62 else border):
            comm = ranks.communicator(**case.communicator)
        with comm:
            problems += oracle.play(comm, case, rank)
    return problems


@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_results_across_the_borders(rank: int, world_size: int, seed: int) -> list[str]:
    return _across(rank, _case(world_size, seed))


@needs_fabric
@on_ranks(2, MOECOMM_FABRIC_PROVIDER="tcp", MOECOMM_FABRIC_SHUFFLE="5")
def test_between_nodes(rank: int, world_size: int, seed: int) -> list[str]:
    """Immediates hold three bits of the epoch; the rest comes from what was shown before."""
    return _across(rank, _case(world_size, seed, ranks_per_node=1))


@on_ranks(2)
def test_ranks_have_to_agree(rank: int, world_size: int) -> None:
    case = Case(tokens=(3, 3), num_experts=4, hidden=20, top_k=1)
    with first_epoch(7 + rank):
        says = "MOECOMM_FIRST_EPOCH: rank 0 has 7, rank 1 has 8"
        refused(lambda: ranks.communicator(**case.communicator), says, name="MismatchedArguments")
