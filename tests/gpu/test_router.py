"""The router's kernel against the operations of torch."""

from __future__ import annotations

import pytest
import torch

from moecomm.kernels.choices import Rule
from moecomm.kernels.routing import route
from tests.gpu.harness import captured
from tests.unit.test_routing_kernel import KINDS, check_router

pytestmark = pytest.mark.usefixtures("cuda_only")


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"),
    [
        (8, 2, 257),
        (33, 2, 40),
        (64, 32, 5),
        (100, 3, 300),
        (128, 8, 2000),
        (256, 8, 1),
        (384, 8, 63),
        (1024, 9, 30),
        (16, 16, 12),
        (40, 4, 0),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_against_torch(kind: str, experts: int, top_k: int, tokens: int, seed: int) -> None:
    if tokens % 3 and KINDS[kind].get("aux_loss") == "sequence":
        tokens -= tokens % 3
    for dtype in (torch.bfloat16, torch.float32):
        check_router(KINDS[kind], experts, top_k, tokens, seed, "cuda", dtype)


def test_equal_and_missing_numbers() -> None:
    """The kernel chooses the lower of equal experts, and NaN first, as torch does. Every id is valid."""
    x_TH = torch.eye(4, 8, device="cuda")
    weight_EH = torch.zeros(70, 8, device="cuda")
    weight_EH[5, 1] = weight_EH[66, 1] = float("nan")
    weight_EH[:, 2] = float("-inf")
    weight_EH[3, 3] = float("inf")
    found = route(x_TH, weight_EH, None, None, Rule(3, "softmax", False, 1.0))
    assert found.ids_TK.tolist()[0] == [0, 1, 2]
    assert len(set(found.ids_TK[1].tolist())) == 3
    assert all(0 <= each < 70 for each in found.ids_TK.flatten().tolist())
    assert int(found.counts_E.sum()) == 12


def test_in_a_graph(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    x_TH = torch.randn(50, 32, device="cuda", generator=generator)
    weight_EH = torch.randn(16, 32, device="cuda", generator=generator)
    rule = Rule(2, "chosen_softmax", False, 1.0)
    graph, found = captured(lambda: route(x_TH, weight_EH, None, None, rule), warm_ups=1)
    for _ in range(2):
        x_TH.normal_(generator=generator)
        graph.replay()
        wanted = route(x_TH, weight_EH, None, None, rule)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
