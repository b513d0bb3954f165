"""Nodes emulated on one host, reached over libfabric: the same results as on one node, bit for bit where that
is promised, against the reference and against the product's own one-node path."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moecomm
from tests import cases, ranks
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.conftest import Pools
from tests.multirank.harness import RankPool
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_dispatch_combine import check
from tests.oracle import Oracle, assert_none, play

pytestmark = needs_fabric

Fabric = Callable[..., RankPool]


@pytest.fixture
def fabric(pool: Pools) -> Fabric:
    """fabric(world_size, provider="tcp", lanes=None): a set of ranks kept for the run."""

    def get(world_size: int, provider: str = "tcp", lanes: int | None = None) -> RankPool:
        chosen = {"MOECOMM_FABRIC_PROVIDER": provider}
        if lanes is not None:
            chosen["MOECOMM_FABRIC_LANES"] = str(lanes)
        return pool(world_size, **chosen)

    return get


def _on_nodes(some: list[Case], ranks_per_node: int) -> list[Case]:
    return [replace(case, ranks_per_node=ranks_per_node) for case in some]


def _chunks(size: int, seed: int, tokens: int = 20) -> Case:
    """Rows of 512 KiB, each a chunk: 20 tokens are more of them under way than there are places for."""
    return Case(
        tokens=(tokens - 2, *(tokens,) * (size - 1)), num_experts=2 * size, hidden=1 << 17, top_k=2, seed=seed
    )


@pytest.mark.parametrize(
    ("size", "per_node", "dtype"), [(2, 1, "float64"), (4, 2, "bfloat16"), (6, 2, "float32")]
)
def test_layouts_alignments_and_capacities(
    fabric: Fabric, size: int, per_node: int, dtype: str, seed: int
) -> None:
    some = cases.layouts_alignments_and_capacities(size, dtype, seed)
    check(fabric(size), _on_nodes(some, per_node), gradients=False)


@pytest.mark.parametrize(
    ("size", "per_node", "provider"), [(4, 1, "tcp"), (6, 3, "tcp"), (2, 1, "shm"), (4, 2, "shm")]
)
def test_many_steps(fabric: Fabric, size: int, per_node: int, provider: str, seed: int) -> None:
    check(fabric(size, provider), _on_nodes(cases.many_steps(size, seed), per_node), gradients=False)


@pytest.mark.parametrize(
    ("size", "per_node", "provider", "lanes", "layout", "tokens"),
    [
        (2, 1, "tcp", 3, "expert", 24),
        (4, 2, "tcp", 2, "expert", 10),
        (3, 1, "tcp", 1, "rank", 20),
        (2, 1, "shm", 2, "expert", 10),
    ],
)
def test_several_lanes(
    fabric: Fabric, size: int, per_node: int, provider: str, lanes: int, layout: str, tokens: int, seed: int
) -> None:
    large = replace(_chunks(size, seed, tokens), layout=layout)
    some = _on_nodes([*cases.many_steps(size, seed)[:12], large], per_node)
    check(fabric(size, provider, lanes), some, gradients=False)


@pytest.mark.parametrize(("size", "own", "used"), [(3, (3, 2, 5), 2), (3, (1, 4, 4), 1)])
@on_ranks("size", MOECOMM_FABRIC_PROVIDER="tcp")
def test_ranks_use_the_lanes_that_all_have(
    rank: int, world_size: int, own: tuple[int, ...], used: int, seed: int
) -> list[str]:
    """Ranks whose hosts differ in what they have."""
    case = replace(_chunks(world_size, seed, tokens=8), ranks_per_node=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_FABRIC_LANES", str(own[rank]))
        comm = moecomm.Communicator(**case.communicator)
    with comm:
        assert comm.network_lanes == used
        assert (f"{used} lanes" in repr(comm)) == (used > 1), repr(comm)
        return play(comm, case, rank, gradients=False)


@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (4, 2)])
def test_nothing_to_do_and_all_to_one(fabric: Fabric, size: int, per_node: int, seed: int) -> None:
    some = cases.nothing_to_do(size, seed) + cases.all_tokens_to_one_rank(size, seed)
    check(fabric(size), _on_nodes(some, per_node), gradients=False)


def test_chunks_and_threads(fabric: Fabric, seed: int) -> None:
    """More rows than a chunk holds, more chunks than there are places for."""
    base = Case(tokens=(560, 1, 200, 200), num_experts=16, hidden=2056, top_k=4, dtype="float64", seed=seed)
    some = [replace(base, num_sms=2), replace(base, layout="rank", slack=-3), replace(base, dtype="bfloat16")]
    check(fabric(4), _on_nodes(some, 2), gradients=False)


@pytest.mark.parametrize(
    ("size", "per_node", "dtype"),
    [(2, 1, "float32"), (4, 2, "float64"), (4, 2, "bfloat16"), (4, 1, "float32")],
)
def test_gradients(fabric: Fabric, size: int, per_node: int, dtype: str, seed: int) -> None:
    base = Case.on(
        size,
        (5, 9, 0, 6),
        experts=3,
        hidden=72,
        top_k=3,
        dtype=dtype,
        routing="holes",
        seed=seed,
        ranks_per_node=per_node,
    )
    check(
        fabric(size),
        [base, replace(base, slack=3), replace(base, layout="rank"), replace(base, routing="one-rank")],
    )


def results(comm: Any, case: Case, rank: int) -> dict[str, torch.Tensor]:
    """What a dispatch and two combines, one with weights, give."""
    oracle = Oracle(case, rank, comm.device)
    out = oracle.dispatch(comm)
    rows_PH = oracle.answer(out.tokens)
    y_TH = comm.combine(rows_PH, out.handle)
    weighted_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
    found = {"tokens": out.tokens, "weights": out.weights, "y": y_TH, "weighted": weighted_TH}
    found |= {"offsets": out.offsets, "tokens_per_expert": out.tokens_per_expert}
    return {name: value.cpu() for name, value in found.items()}


def against_one_node(rank: int, world_size: int, case: Case) -> list[str]:
    """The same case on nodes and on one node. Dispatch gives the same bits, and so does a second run; a
    combine rounds once more for each other node (docs/nodes.md)."""
    one_node = replace(case, ranks_per_node=world_size)
    with (
        ranks.communicator(**case.communicator) as between,
        ranks.communicator(**one_node.communicator) as within,
    ):
        assert between.network_lanes >= 1 and within.network_lanes == 0
        assert case.ranks_per_node is not None
        nodes = world_size // case.ranks_per_node
        assert (between.nodes, between.ranks_per_node) == (nodes, case.ranks_per_node)
        assert (within.nodes, within.ranks_per_node) == (1, world_size)
        problems = play(between, case, rank)
        first, again = results(between, case, rank), results(between, case, rank)
        alone = results(within, one_node, rank)
    problems += [f"{name} again" for name in first if not torch.equal(first[name], again[name])]
    sums = ("y", "weighted")
    problems += [name for name in first if name not in sums and not torch.equal(first[name], alone[name])]
    # Each partial sum of a node is rounded once more: half a unit of it, and one of the result.
    roundings = torch.finfo(case.torch_dtype).eps * (nodes + 1)
    for name in sums:
        got, want = first[name].double(), alone[name].double()
        if want.numel() and (got - want).abs().max() > roundings * want.abs().max():
            problems.append(f"{name} between nodes")
    return [f"rank {rank}: {problem}" for problem in problems]


@pytest.mark.parametrize(
    ("size", "per_node", "dtype"),
    [(2, 1, "float32"), (4, 2, "bfloat16"), (6, 2, "float32"), (4, 1, "bfloat16")],
)
def test_against_one_node(fabric: Fabric, size: int, per_node: int, dtype: str, seed: int) -> None:
    case = Case.on(size, 40, experts=4, hidden=64, top_k=4, dtype=dtype, seed=seed, ranks_per_node=per_node)
    assert_none(fabric(size)(against_one_node, case))


def counted(rank: int, world_size: int, case: Case) -> dict[str, float]:
    with ranks.communicator(**case.communicator) as comm:
        results(comm, case, rank)
        dist.barrier()  # a rank can be done while what it sends is still on its way
        return comm.stats()


def verify_crossing(case: Case, counts: list[dict[str, float]]) -> None:
    """A dispatch and two combines sent each row once to each node that needs it."""
    assert case.ranks_per_node is not None
    size, per_node = case.size, case.ranks_per_node
    local, nodes = case.num_experts // size, size // per_node
    crossing = np.zeros((size, nodes), np.int64)  # rows that a rank's tokens need, by node
    for rank in range(size):
        owners = np.where(case.ids(rank) >= 0, case.ids(rank) // local // per_node, -1)
        for node in range(nodes):
            crossing[rank, node] = (owners == node).any(1).sum() * (node != rank // per_node)
    for rank, stats in enumerate(counts):
        # A dispatch sends this rank's rows out; two combines send sums to the homes on its rail.
        rail = [home for home in range(size) if home % per_node == rank % per_node]
        rows = crossing[rank].sum() + 2 * sum(crossing[home, rank // per_node] for home in rail)
        assert stats["network_row_bytes"] == rows * case.hidden * case.torch_dtype.itemsize


@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (6, 2), (4, 1)])
def test_rows_cross_once_a_node(fabric: Fabric, size: int, per_node: int, seed: int) -> None:
    case = Case.on(
        size,
        cases.unequal_tokens(size, 50, seed),
        experts=4,
        hidden=256,
        top_k=4,
        routing="holes",
        seed=seed,
        ranks_per_node=per_node,
    )
    counts = fabric(size)(counted, case)
    verify_crossing(case, counts)
    others = size // per_node - 1
    for tokens, stats in zip(case.tokens, counts, strict=True):
        plans = stats["network_bytes"] - stats["network_row_bytes"]
        assert plans < stats["network_puts"] * 80 + 2 * others * tokens * case.top_k * 4 + 1
