"""Two ranks whose kernels run at the same time on one GPU (tests/gpu/twin.py): in one kernel or two, called
and in graphs, results have the same bits; rows of many tokens are those of a sort, sums those of additions in
their order."""

import pytest
import torch

from moecomm.types import WIRE_FORMATS
from tests.gpu.twin import MOST_FUSED, RANKS, Rank, Shape, Twin
from tests.multirank.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("cuda_only")


def _results(twin: Twin, ranks: list[Rank]) -> list[torch.Tensor]:
    return [result.clone() for rank in ranks for result in rank.results()]


@pytest.mark.parametrize("wire", ["same", *WIRE_FORMATS])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (7, 1024), (130, 1024), (130, 4128), (512, 1024)])
@on_ranks(1)
def test_same_bits(
    rank: int, world_size: int, tokens: int, hidden: int, layout: str, wire: str, seed: int
) -> None:
    shape = Shape(tokens=tokens, layout=layout, wire=wire, hidden=hidden, num_experts=64, top_k=4)
    with Twin(shape, seed) as twin:
        twin.fuse(0, 0)
        known = twin.ranks()
        for operation in twin.operations().values():
            operation(known)
            twin.check()
        for most in ((MOST_FUSED, MOST_FUSED), (0, MOST_FUSED), (MOST_FUSED, 0)):
            twin.fuse(*most)
            ranks = twin.ranks()
            for _ in range(20):  # ranks are ahead of each other by chance
                for operation in twin.operations().values():
                    operation(ranks)
            twin.check()
            for name, operation in twin.operations().items():
                graph = twin.capture(operation, ranks, 10)
                for _ in range(10):
                    graph.replay()
                twin.check()
                same = map(torch.equal, _results(twin, known), _results(twin, ranks))
                assert all(same), f"{name} with one kernel up to {most} tokens of each rank differs"


def _one_sided_ids(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Ids of tokens of which most have all experts on one rank, and some have none."""
    local = shape.num_experts // RANKS
    anywhere_TE = torch.rand(shape.tokens, shape.num_experts, generator=generator)
    owner_T = torch.randint(0, RANKS, (shape.tokens,), generator=generator)
    allowed_TE = torch.arange(shape.num_experts) // local == owner_T[:, None]
    both_T = torch.rand(shape.tokens, generator=generator) < 0.1
    ids_TK = (anywhere_TE + 2.0 * (allowed_TE | both_T[:, None])).topk(shape.top_k, dim=1).indices
    none_T = torch.rand(shape.tokens, generator=generator) < 0.3
    ids_TK[none_T] = -1
    return ids_TK.cuda()


def _sums(shape: Shape, rank: Rank) -> torch.Tensor:
    """What a combine of a dispatch's own rows gives: at each owner the token's rows, times their weights in
    the expert layout, are added by ascending k, and the owners' sums by ascending rank; each is rounded."""
    by_expert = shape.layout == "expert"
    owner_TK = rank.ids_TK // (shape.num_experts // RANKS)
    x_TH = rank.x_TH.float()
    zero_TH = torch.zeros_like(x_TH)
    total_TH, begun_T = zero_TH, torch.zeros(shape.tokens, dtype=torch.bool, device="cuda")
    for owner in range(RANKS):
        owned_TK = (owner_TK == owner) & (rank.ids_TK >= 0)
        sum_TH, some_T = zero_TH, torch.zeros_like(begun_T)
        for k in range(shape.top_k if by_expert else 0):
            row_TH = x_TH * rank.weights_TK[:, k, None]
            added_TH = torch.where(some_T[:, None], sum_TH + row_TH, row_TH)
            sum_TH = torch.where(owned_TK[:, k, None], added_TH, sum_TH)
            some_T = some_T | owned_TK[:, k]
        if not by_expert:
            sum_TH, some_T = x_TH, owned_TK.any(1)
        sum_TH = sum_TH.bfloat16().float()
        added_TH = torch.where(begun_T[:, None], total_TH + sum_TH, sum_TH)
        total_TH = torch.where(some_T[:, None], added_TH, total_TH)
        begun_T = begun_T | some_T
    return total_TH.bfloat16()


def _wrong_rows(shape: Shape, ranks: list[Rank]) -> list[str]:
    """Compares what came in the expert layout with torch's own sort: by expert, by source, by token.
    Gradients are the rows again, so that each one's product with what was dispatched is its square.
    """
    local, problems = shape.num_experts // RANKS, []
    ids_N = torch.cat([own.ids_TK.flatten() for own in ranks])
    weights_N = torch.cat([own.weights_TK.flatten() for own in ranks])
    rows_NH = torch.cat([own.x_TH for own in ranks])
    order_N = ids_N.argsort(stable=True)
    for number, own in enumerate(ranks):
        of_rank_N = order_N[(ids_N[order_N] >= 0) & (ids_N[order_N] // local == number)]
        count = len(of_rank_N)
        rows_PH, weights_P1 = rows_NH[of_rank_N // shape.top_k], weights_N[of_rank_N][:, None]
        expected = {
            "rows": (own.rows_PH, rows_PH),
            "weights": (own.weights_P, weights_P1),
            "gradients": (own.grad_PH, rows_PH),
            "gradients times weights": (own.scaled_PH, (rows_PH.float() * weights_P1).bfloat16()),
        }
        for name, (found, wanted) in expected.items():
            if not torch.equal(found[:count], wanted):
                problems.append(f"{name} of rank {number}")
        squares_P = rows_PH.double().square().sum(1)
        if not torch.allclose(own.dots_P[:count].double(), squares_P, rtol=1e-5):
            problems.append(f"products of rank {number}")
    return problems


@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "num_experts", "num_sms"),
    [
        (3000, 1024, 8, 256, 24),
        (1030, 520, 6, 64, 5),
        (2000, 7168, 8, 256, 40),
        (600, 9000, 4, 16, 8),  # more than a stage holds
        (5000, 64, 1, 2, 2),
        (9000, 64, 8, 2048, 66),
        (17000, 64, 20, 64, 30),  # chunks of more places than a list has
    ],
)
@on_ranks(1)
def test_rows_of_many_tokens(
    rank: int,
    world_size: int,
    tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    num_sms: int,
    seed: int,
) -> list[str]:
    shape = Shape(tokens=tokens, hidden=hidden, top_k=top_k, num_experts=num_experts, num_sms=num_sms)
    problems = []
    generator = torch.Generator().manual_seed(seed)
    with Twin(shape, seed) as twin:
        for routing in ("uniform", "one-sided"):
            found = []
            for dispatch in (twin.dispatch, twin.dispatch_dropless):
                ranks = twin.ranks()
                if routing == "one-sided":
                    for own in ranks:
                        own.ids_TK = _one_sided_ids(shape, generator.manual_seed(seed))
                for _ in range(3):
                    dispatch(ranks)
                twin.check()
                found.append(ranks)
            for own, dropless in zip(*found, strict=True):
                assert all(map(torch.equal, own.results(), dropless.results())), routing
            twin.redispatch(found[0])
            twin.weighted(found[0])
            twin.check()
            problems += [f"{routing}: {wrong}" for wrong in _wrong_rows(shape, found[0])]
    return problems


@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "num_sms", "layout"),
    [
        (3000, 7168, 8, 24, "expert"),
        (3000, 7168, 8, 6, "rank"),
        (1030, 9000, 8, 16, "expert"),  # rows in two pieces
        (5001, 520, 6, 2, "expert"),
        (17000, 2056, 32, 8, "expert"),  # pipes whose lists have fewer tokens than a chunk
        (17000, 1024, 2, 66, "expert"),  # short rows, without pipes
        (17000, 64, 32, 66, "rank"),
    ],
)
@on_ranks(1)
def test_sums_of_many_tokens(
    rank: int, world_size: int, tokens: int, hidden: int, top_k: int, num_sms: int, layout: str, seed: int
) -> None:
    shape = Shape(tokens=tokens, hidden=hidden, top_k=top_k, num_sms=num_sms, layout=layout)
    generator = torch.Generator().manual_seed(seed)
    with Twin(shape, seed) as twin:
        for routing in ("uniform", "one-sided"):
            ranks = twin.ranks()
            if routing == "one-sided":
                for own in ranks:
                    own.ids_TK = _one_sided_ids(shape, generator)
            twin.dispatch(ranks)
            for _ in range(3):
                for own in ranks:
                    own.y_TH.fill_(torch.nan)
                twin.combine(ranks)
                twin.check()
                wrong = [int((own.y_TH != _sums(shape, own)).sum()) for own in ranks]
                assert not any(wrong), f"{routing}: {wrong} elements of each rank differ"
