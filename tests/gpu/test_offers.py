"""Dropless dispatches, which are offered an output before the number of their rows is known: it is large
enough, or too small, and then the rows come into another one.
"""

from dataclasses import replace

import pytest

from moecomm import _C
from moecomm.types import WIRE_FORMATS
from tests import oracle, ranks
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")

MOST = 1024
"""Tokens of a rank that one kernel takes."""


def _play(rank: int, world_size: int, some: list[Case], fused: int = MOST) -> list[str]:
    """Dispatches with one communicator, whose offers follow what came before."""
    problems: list[str] = []
    most = max(max(case.tokens) for case in some)
    with ranks.variable("MOECOMM_FUSED_TOKENS", fused):
        comm = harness.communicator(**{**some[0].communicator, "max_tokens": most})
    with comm:
        for number, case in enumerate(some):
            known = Oracle(case, rank, comm.device)
            out = known.check_step(comm)
            out.tokens.zero_()
            problems += [f"dispatch {number}: {problem}" for problem in known.problems]
        comm.check()
    return problems


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("hidden", [512, 7168])
def test_few_tokens(pool: Pools, most_ranks: int, hidden: int, layout: str, seed: int) -> None:
    """Beside ranks that bring many more, and none."""
    size = most_ranks
    base = Job.on(size, (200, MOST + 5, 0, 64), experts=8, hidden=hidden, top_k=8, layout=layout, seed=seed)
    some = [
        base,
        replace(base, routing="one-rank"),
        replace(base, routing="empty"),
        replace(base, tokens=(0, 3, 700, 40)[:size]),
        replace(base, tokens=(MOST, 900, 1, MOST + 1)[:size], routing="skewed"),
        base,
    ]
    if layout == "expert":
        some.append(replace(base, alignment=8, tokens=(7,) * size))
    oracle.assert_none(pool(size)(_play, [replace(each, seed=seed + i) for i, each in enumerate(some)]))


@on_ranks("most_ranks")
def test_tokens_between_few_and_many(rank: int, world_size: int, seed: int) -> list[str]:
    """Dispatches too large for the offer of few tokens, which follows earlier ones instead."""
    base = Job(tokens=(900,) * world_size, num_experts=8 * world_size, hidden=7168, top_k=8)
    some = [replace(base, seed=seed + i) for i in range(3)]
    some += [replace(base, tokens=(600,) * world_size, seed=seed)]
    some += [replace(base, routing="one-rank", seed=seed)]
    problems: list[str] = []
    with harness.communicator(**some[0].communicator) as comm:
        for number, case in enumerate(some):
            known = Oracle(case, rank, comm.device)
            offered = comm._backend._native.offered_rows(case.tokens[rank], _C.RowLayout.expert, 1)[0] > 0
            assert offered == (number > 0), f"dispatch {number}: offered is {offered}"
            known.check_dispatch(known.dispatch(comm))
            problems += [f"dispatch {number}: {problem}" for problem in known.problems]
        comm.check()
    return problems


@pytest.mark.parametrize("fused", [0, MOST], ids=["pipes alone", "as it is"])
@pytest.mark.parametrize("wire", [None, *WIRE_FORMATS])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_many_tokens(
    pool: Pools, most_ranks: int, layout: str, wire: str | None, fused: int, seed: int
) -> None:
    """The offer follows the rows of earlier dispatches; after one that brought many more there is none."""
    size = min(4, most_ranks)
    base = Job.on(
        size, (3000, 2048, 1500, MOST + 1), experts=8, hidden=512, top_k=4, layout=layout, wire=wire
    )
    routings = ("uniform", "uniform", "holes", "one-rank", "uniform", "skewed", "empty", "uniform")
    some = [replace(base, routing=routing, seed=seed + i) for i, routing in enumerate(routings)]
    some.insert(2, replace(base, tokens=(1800, 3000, 40, 2)[:size], seed=seed))
    oracle.assert_none(pool(size)(_play, some, fused))
