"""Two ranks whose kernels run at the same time on one GPU (tests/gpu/twin.py): in one kernel or two, called
and in graphs, results have the same bits."""

from __future__ import annotations

import pytest
import torch

from moecomm.types import WIRE_FORMATS
from tests.gpu.conftest import Pools
from tests.gpu.twin import MOST_FUSED, Rank, Shape, Twin

pytestmark = pytest.mark.usefixtures("cuda_only")


def _results(twin: Twin, ranks: list[Rank]) -> list[torch.Tensor]:
    return [result.clone() for rank in ranks for result in rank.results()]


def _play(rank: int, world_size: int, shape: Shape, seed: int) -> list[str]:
    problems = []
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
                if not all(same):
                    problems.append(f"{name} with one kernel up to {most} tokens of each rank differs")
    return problems


@pytest.mark.parametrize("wire", ["same", *WIRE_FORMATS])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("tokens", [1, 7, 130, 512])
def test_same_bits(pool: Pools, tokens: int, layout: str, wire: str, seed: int) -> None:
    shape = Shape(tokens=tokens, layout=layout, wire=wire, hidden=1024, num_experts=64, top_k=4)
    assert pool(1)(_play, shape, seed) == [[]]
