"""What the benchmarks build layers with, and the attention of their blocks; without ranks."""

from __future__ import annotations

import pytest
import torch

from bench.harness import case, command_line
from bench.harness.options import ATTENTION, PRESETS, Heads
from bench.paths import layer_variants, moecomm_path
from bench.paths.attention import Attention

pytestmark = pytest.mark.usefixtures("bench_on_cpu")
FLAGS = "-g 1 --presets qwen3-30b --hidden 32 --ffn 16 --experts 4 --topk 2 -b 8 --graph-tokens 0"


def layer_case() -> case.LayerCase:
    given = command_line.parse("moe_layer", FLAGS.split())
    (point,) = given.points()
    return case.LayerCase(given, point, 0, case.Experts(given, point, 0))


def test_layers_are_built_with_the_products_asked_for() -> None:
    one = layer_case()
    comm = moecomm_path.communicator(one.options, one.point)
    for products in ("torch", None):
        layer = layer_variants.make_layer(comm, [one], one.experts, products)
        assert layer.config.products == products
        assert layer.experts.w_in is one.experts.w_in


def test_each_call_of_a_router_takes_the_next_microbatch() -> None:
    cases = [layer_case(), layer_case()]
    router = layer_variants.FixedRouting(cases)
    for _ in range(2):
        router.restart()
        taken = [router(each.x_TH).topk_weights_TK for each in cases]
        assert all(got is each.weights_TK for got, each in zip(taken, cases, strict=True))


@pytest.mark.parametrize("heads", [Heads(4, 2, 8), Heads(4, 4, 8, latent=(24, 16), rope=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sees_no_later_token(heads: Heads, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    attention = Attention(32, heads, dtype, generator)
    matrices = [each for each in attention.parameters() if each.dim() == 2]
    assert sum(each.numel() for each in matrices) == Attention.weights(32, heads)
    x_BSH = torch.randn(2, 6, 32, generator=generator).to(dtype)
    other_BSH = x_BSH.clone()
    other_BSH[:, 4:] += 1
    with torch.no_grad():
        y_BSH, changed_BSH = attention(x_BSH), attention(other_BSH)
    assert y_BSH.shape == x_BSH.shape and not torch.equal(y_BSH, x_BSH)
    torch.testing.assert_close(y_BSH[:, :4], changed_BSH[:, :4])
    assert not torch.allclose(y_BSH[:, 4:], changed_BSH[:, 4:])


def test_every_preset_has_its_attention() -> None:
    assert set(ATTENTION) == set(PRESETS)
    # The published sizes of some: DeepSeek-V3's attention has 187 M weights a layer, Qwen3-30B's 19 M.
    millions = {
        name: Attention.weights(PRESETS[name].hidden, heads) / 1e6 for name, heads in ATTENTION.items()
    }
    assert round(millions["deepseek-v3"]) == 187 and round(millions["qwen3-30b"]) == 19
    assert ATTENTION["qwen3-235b"].scaled(16) == Heads(16, 1, 128)
    assert ATTENTION["deepseek-v3"].scaled(1) == ATTENTION["deepseek-v3"]
