"""The router's kernel against the operations of torch."""

from itertools import product

import pytest
import torch

from moecomm.kernels import routing
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
    for dtype, weights in product((torch.bfloat16, torch.float32), repeat=2):
        check_router(KINDS[kind], experts, top_k, tokens, seed, "cuda", dtype, weights)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_a_graph(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    x_TH = torch.randn(50, 32, device="cuda", generator=generator).to(dtype)
    weight_EH = torch.randn(16, 32, device="cuda", generator=generator)
    rule = Rule(2, "chosen_softmax", False, 1.0)
    graph, found = captured(lambda: route(x_TH, weight_EH, None, None, rule), warm_ups=1)
    for _ in range(2):
        x_TH.normal_(generator=generator)
        graph.replay()
        wanted = route(x_TH, weight_EH, None, None, rule)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(4096, 2048, 128), (8192, 7168, 256), (3, 512, 8)])
def test_products_of_parts(tokens: int, hidden: int, experts: int, seed: int) -> None:
    """Products of bfloat16 rows differ from those in float64 by 2e-5 of the largest value at most, and the
    gradient of the rows by its rounding."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x_TH = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight_EH = torch.randn(experts, hidden, device="cuda", generator=generator).mul_(0.02).requires_grad_()
    bias_E = torch.randn(experts, device="cuda", generator=generator).requires_grad_()
    grad_TE = torch.randn(tokens, experts, device="cuda", generator=generator)
    assert routing._in_parts(x_TH, weight_EH)
    found = route(x_TH, weight_EH, bias_E, None, Rule(2, "softmax", False, 1.0))
    found.logits_TE.backward(grad_TE)
    assert x_TH.grad is not None and weight_EH.grad is not None and bias_E.grad is not None
    x64_TH, weight64_EH, grad64_TE = (each.detach().double() for each in (x_TH, weight_EH, grad_TE))
    for name, value, wanted, bound in (
        ("logits", found.logits_TE, x64_TH @ weight64_EH.t() + bias_E.detach(), 2e-5),
        ("x", x_TH.grad, grad64_TE @ weight64_EH, 2**-8),
        ("weight", weight_EH.grad, grad64_TE.t() @ x64_TH, 2e-5),
        ("bias", bias_E.grad, grad64_TE.sum(0), 2e-5),
    ):
        difference = float((value.detach() - wanted).abs().max() / wanted.abs().max())
        assert difference < bound, (name, difference)


def test_a_router_computed_again_has_the_same_bits() -> None:
    x_TH = torch.randn(100, 256, device="cuda").bfloat16()
    weight_EH, bias_E = torch.randn(16, 256, device="cuda"), torch.randn(16, device="cuda")
    first = route(x_TH, weight_EH, bias_E, None, Rule(2, "softmax", False, 1.0))
    again = route(x_TH, weight_EH, bias_E, None, Rule(2, "softmax", False, 1.0), first.ids_TK)
    assert torch.equal(first.logits_TE, again.logits_TE) and torch.equal(first.counts_E, again.counts_E)


def test_parts_of_no_numbers() -> None:
    """Infinities and NaN of a weight come to the logits as by a product in float32."""
    x_TH = torch.randn(20, 64, device="cuda").bfloat16()
    weight_EH = torch.randn(8, 64, device="cuda")
    weight_EH[1, 3], weight_EH[2, 5], weight_EH[3, 7] = float("inf"), float("-inf"), float("nan")
    found = route(x_TH, weight_EH, None, None, Rule(2, "sigmoid", False, 1.0)).logits_TE
    wanted = x_TH.float() @ weight_EH.t()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4, equal_nan=True)


def test_rows_that_have_no_parts() -> None:
    """Other dtypes, and sizes that tensor cores do not take, are multiplied in float32."""
    x_TH, weight_EH = torch.randn(6, 64, device="cuda").bfloat16(), torch.randn(8, 64, device="cuda")
    assert routing._in_parts(x_TH, weight_EH)
    odd_EH = torch.randn(8 * 64 + 1, device="cuda")[1:].view(8, 64)
    for rows, weight in (
        (x_TH.half(), weight_EH),
        (x_TH.float(), weight_EH),
        (x_TH[:0], weight_EH),
        (x_TH, weight_EH[:7]),
        (x_TH[:, :60], weight_EH[:, :60].contiguous()),
        (x_TH, odd_EH),
        (x_TH, torch.randn(64, 8, device="cuda").t()),
    ):
        assert not routing._in_parts(rows, weight)
        found = route(rows, weight, None, None, Rule(2, "softmax", False, 1.0))
        torch.testing.assert_close(found.logits_TE, rows.float() @ weight.t())
