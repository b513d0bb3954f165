"""What the benchmarks build layers with; without ranks."""

from __future__ import annotations

import pytest

from bench.harness import case, command_line
from bench.paths import layer_variants, moecomm_path

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
