"""Operations of few tokens in one kernel: the same bits as in kernels of their own for sending and receiving,
whatever the other ranks run. Most small tests of this folder run them; here are the borders, and the others.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from moecomm.types import WIRE_FORMATS
from tests import cases, oracle, ranks
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.gpu.test_graphs import AtCapacity, Captured
from tests.gpu.test_turns import TURNS, in_turns_case
from tests.multirank.on_ranks import on_ranks
from tests.oracle import DTYPES, Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")

MOST = 1024
"""Tokens of a rank that one kernel takes."""


def fused_tokens(most: int) -> AbstractContextManager[None]:
    """Communicators that are built within take at most so many tokens in one kernel."""
    return ranks.variable("MOECOMM_FUSED_TOKENS", most)


WHO: dict[str, Callable[[int], int]] = {
    "all": lambda rank: MOST,
    "nobody": lambda rank: 0,
    "every other rank": lambda rank: MOST * (rank % 2),
}
"""Which ranks run one kernel."""


def _play(rank: int, world_size: int, who: str, some: list[Case]) -> list[str]:
    problems = []
    for case in some:
        with fused_tokens(WHO[who](rank)):
            comm = harness.communicator(**case.communicator)
        with comm:
            problems += oracle.play(comm, case, rank)
    return problems


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("who", ["nobody", "every other rank"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_cases(pool: Pools, size: int, who: str, dtype: str, seed: int) -> None:
    some = cases.layouts_alignments_and_capacities(size, dtype, seed)
    oracle.assert_none(pool(size)(_play, who, some))


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_wire_formats(pool: Pools, most_ranks: int, wire: str, who: str, seed: int) -> None:
    size = min(3, most_ranks)
    base = Job.on(
        size, (9, 70, 12), experts=4, hidden=144, top_k=3, wire=wire, slack=5, routing="holes", seed=seed
    )
    some = [
        base,
        replace(base, layout="rank"),
        replace(base, hidden=7168, alignment=8),
        replace(base, slack=-9),
    ]
    if wire == "fp8":
        some.append(replace(base, combine_wire="fp8"))
    oracle.assert_none(pool(size)(_play, who, some))


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(
    "tokens", [(MOST, MOST + 1, 1, 0), (1300, MOST, 33, 5000)], ids=["border", "beside more"]
)
def test_beside_ranks_with_more_tokens(
    pool: Pools, most_ranks: int, tokens: tuple[int, ...], layout: str, seed: int
) -> None:
    """Chunks of other ranks hold several tokens; this rank's hold one."""
    size = min(4, most_ranks)
    base = Job(
        tokens=tokens[-size:], num_experts=8 * size, hidden=1024, top_k=4, layout=layout, slack=7, seed=seed
    )
    some = [base, replace(base, routing="skewed", seed=seed + 1), replace(base, slack=-100, seed=seed + 2)]
    oracle.assert_none(pool(size)(_play, "all", some))


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_between_two_ranks(pool: Pools, most_ranks: int, layout: str, wire: str | None, seed: int) -> None:
    """Teams are of one warp where some blocks send and others receive, or of two where rows are quantised."""
    if most_ranks < 2:
        pytest.skip("needs 2 ranks")
    base = Job(
        tokens=(MOST, 300), num_experts=16, hidden=1024, top_k=4, layout=layout, wire=wire, slack=7, seed=seed
    )
    some = [
        base,
        replace(base, tokens=(257, 96), hidden=7168),
        replace(base, tokens=(97, 256), slack=-50),
        replace(base, tokens=(500, 500), routing="skewed", num_sms=16),
    ]
    oracle.assert_none(pool(2)(_play, "all", some))


@pytest.mark.parametrize("who", ["all", "every other rank"])
def test_beside_ranks_whose_chunks_take_turns(pool: Pools, most_ranks: int, who: str, seed: int) -> None:
    """The last rank has few tokens, and gives the others room for theirs."""
    size = min(4, most_ranks)
    if size < 2:
        pytest.skip("needs 2 ranks")
    base = in_turns_case(size, seed)
    some = [replace(base, tokens=(*base.tokens[:-1], 40), slack=slack) for slack in (0, -300, None)]
    oracle.assert_none(pool(size, **TURNS)(_play, who, some))


@pytest.mark.parametrize("num_sms", [2, 3, 8, 24])
def test_few_sms(pool: Pools, most_ranks: int, num_sms: int, seed: int) -> None:
    size = min(3, most_ranks)
    base = Job.on(size, (130, MOST, 7), experts=8, hidden=512, top_k=4, num_sms=num_sms, slack=0, seed=seed)
    oracle.assert_none(pool(size)(_play, "all", [base, replace(base, layout="rank")]))


@pytest.mark.parametrize("who", WHO)
@on_ranks("most_ranks")
def test_replays(rank: int, world_size: int, who: str, seed: int) -> list[str]:
    tokens = (128, 0, 61, 33)[:world_size]
    job = Job(tokens=tokens, num_experts=8 * world_size, hidden=512, top_k=4, seed=seed)
    with fused_tokens(WHO[who](rank)):
        comm = harness.communicator(**job.communicator)
    with comm:
        capacity = 2 * max(Oracle(job, rank, comm.device).needed)
        captured = Captured(comm, job, rank, capacity)
        problems: list[str] = []
        routings = ("uniform", "holes", "empty", "one-expert", "skewed")
        for step in range(40):
            known = AtCapacity(
                replace(job, seed=job.seed + step, routing=routings[step % 5]), rank, comm.device, capacity
            )
            captured.load(known)
            captured.graph.replay()
            problems += captured.check(known)
            oracle.settled_error(comm)
        return problems


def _nodes(rank: int, world_size: int, most: int | None, tokens: int) -> tuple[int, int]:
    """Kernels in a graph of a dispatch with a capacity, and of a combine."""
    from cuda.bindings import runtime

    job = Job(tokens=(tokens,) * world_size, num_experts=8 * world_size, hidden=256, top_k=2)
    with nullcontext() if most is None else fused_tokens(most):
        comm = harness.communicator(**job.communicator)
    counts = []
    with comm:
        known = Oracle(job, rank, comm.device)
        capacity = 2 * tokens * world_size
        out = comm.dispatch(known.own.x_TH, known.own.ids_TK, capacity=capacity)
        steps = (
            lambda: comm.dispatch(known.own.x_TH, known.own.ids_TK, capacity=capacity),
            lambda: comm.combine(out.tokens, out.handle),
        )
        for step in steps:
            harness.warm_up(step)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                step()
            error, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
            assert error == runtime.cudaError_t.cudaSuccess
            counts.append(count)
        comm.check()
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("most", "tokens", "one"),
    [(None, MOST, True), (None, MOST + 1, False), (0, 8, False), (8, 8, True), (8, 9, False)],
)
def test_kernels_of_an_operation(pool: Pools, most: int | None, tokens: int, one: bool) -> None:
    """Beyond few tokens a dispatch is the kernels of its routes, its sender and its receiver. A copy of rows
    would be one more node."""
    pytest.importorskip("cuda.bindings.runtime")
    assert pool(1)(_nodes, most, tokens) == [(1, 1) if one else (3, 2)]


def test_kernels_of_a_combine_of_several_ranks(pool: Pools) -> None:
    """A combine of more than two ranks is two kernels from fewer tokens on than a dispatch is three."""
    pytest.importorskip("cuda.bindings.runtime")
    for tokens, combine in ((768, 1), (769, 2), (MOST, 2)):
        assert pool(3)(_nodes, None, tokens) == [(1, combine)] * 3
    assert pool(2)(_nodes, None, MOST) == [(1, 1)] * 2
