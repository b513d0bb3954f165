"""Experts in fp8 on GPUs: the kernels have the bits of the CPU, products its numbers, and the layer the same
bits in whatever way it runs, also in a graph.

Bodies of the kernels' tests run on rank 0 of a pool of one.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm import _C
from moecomm.errors import Unsupported
from moecomm.kernels import operators
from moecomm.kernels.quantize import quantize_columns, quantize_rows, quantize_transposed
from moecomm.nn import GroupedExperts, MoEConfig
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.test_activation import Output
from tests.gpu.test_layer import KINDS as LAYERS
from tests.gpu.test_layer import check_graph, check_waits
from tests.multirank.catching import refused
from tests.multirank.moe_cases import LayerCase, check_ways, run_layer
from tests.multirank.on_ranks import on_ranks
from tests.unit.test_fp8_experts import test_products_of_quantised_operands  # noqa: F401
from tests.unit.test_quantize import (  # noqa: F401
    GROUPS,
    KINDS,
    LARGE_GROUPS,
    ends_of,
    numbers,
    test_columns,
    test_matrices,
    test_rows,
)


@pytest.fixture(scope="module")
def products(pool: Pools) -> None:
    """Skips where torch has no grouped product of e4m3."""
    if not harness.on_cpu():
        (capability,) = pool(1)(_capability)
        if capability[0] != 9:
            pytest.skip(f"needs compute capability 9.0, this is {capability}")


def _capability(rank: int, world_size: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability()


# -- kernels -----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
@on_ranks(1)
def test_nothing_else_is_written(rank: int, world_size: int, dtype: str, seed: int) -> None:
    """The extension's functions on memory of the test's own: nothing is written but what is said."""
    from moecomm.setup.memory_plan import NATIVE_DTYPES

    kind: torch.dtype = getattr(torch, dtype)
    operators.prepare("quantize", harness.device(), kind)
    stream = torch.cuda.current_stream().cuda_stream
    for rows, columns, ends in GROUPS + LARGE_GROUPS:
        real = ends[-1]
        x = numbers((rows, columns), kind, seed)
        x[real:] = math.nan
        there, ends_L = x.to(harness.device()), ends_of(ends)
        given = (there.data_ptr(), ends_L.data_ptr(), len(ends), rows, columns)
        values, scales = Output((rows, columns), torch.uint8, 0), Output((rows,), torch.float32, 0)
        addresses = values.value.data_ptr(), scales.value.data_ptr()
        _C.quantize_rows(*given, NATIVE_DTYPES[kind], *addresses, stream)
        text = f"{rows} x {columns}, {len(ends)} groups"
        assert not values.touched(real) and not scales.touched(real), f"{text}: rows"
        padded = quantize_columns(there, ends_L).padded_ends_L
        width = 16 * (rows // 16 + len(ends))
        lines = Output((columns, width), torch.uint8, 0)
        found, places = Output((len(ends), columns), torch.float32, 0), Output((len(ends),), torch.int32, 0)
        outputs = lines.value, found.value, places.value
        _C.quantize_columns(
            *given, width, NATIVE_DTYPES[kind], *(each.data_ptr() for each in outputs), stream
        )
        assert not any(each.touched(len(each.value)) for each in (lines, found, places)), text
        assert not bool((lines.value[:, int(padded[-1]) :] != 0xFF).any()), f"{text}: values"


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_what_the_extension_refuses(rank: int, world_size: int) -> None:
    """Checks that the extension itself refuses bad arguments by the typed error."""
    good: dict[str, Any] = {
        "x": 4096, "ends": 4096, "groups": 2, "rows": 32, "columns": 32, "out_rows": 64,
        "dtype": _C.DType.bfloat16, "values": 4096, "scales": 4096, "padded_ends": 4096,
    }  # fmt: skip
    bad: dict[str, dict[str, Any]] = {
        "rows is -1": {"rows": -1},
        "columns is 24": {"columns": 24},
        "columns is 0": {"columns": 0},
        "groups is 0": {"groups": 0},
        "x has no address": {"x": 0},
        "x is at address 4104": {"x": 4104},
        "values is at address 4100": {"values": 4100},
        "scales has no address": {"scales": 0},
        "x is float64": {"dtype": _C.DType.float64},
    }
    columns_only: dict[str, dict[str, Any]] = {
        "out_rows is 48": {"out_rows": 48},
        "out_rows is 72": {"out_rows": 72},
        "padded_ends has no address": {"padded_ends": 0},
        "rows is 24": {"ends": 0, "rows": 24, "padded_ends": 0},
    }
    for name, cases in (("quantize_rows", bad), ("quantize_columns", {**bad, **columns_only})):
        left_out = ("out_rows", "padded_ends") if name == "quantize_rows" else ()
        for text, changed in cases.items():
            values = [value for key, value in {**good, **changed}.items() if key not in left_out]
            refused(partial(getattr(_C, name), *values, 0), text)


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_kernels_in_a_cuda_graph(rank: int, world_size: int, seed: int) -> None:
    """Inputs and the sizes of groups change between replays; the host waits for nothing while it issues."""
    x = numbers((400, 160), torch.bfloat16, seed).to(harness.device())
    ends = ends_of([100, 100, 400])

    def program() -> list[Tensor]:
        matrices = quantize_transposed(x.view(1, 400, 160))
        return [*quantize_rows(x, ends), *quantize_columns(x, ends), *matrices]

    program()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    program()
    torch.cuda.set_sync_debug_mode("default")
    graph, captured = harness.captured(program, warm_ups=1)
    for replay, sizes in enumerate(([100, 100, 400], [0, 1, 17], [0, 0, 0], [399, 400, 400])):
        x.copy_(numbers((400, 160), torch.bfloat16, seed + replay + 1))
        ends.copy_(ends_of(sizes))
        for each in captured:
            each.view(torch.uint8).fill_(0xFF)
        graph.replay()
        eager = program()
        padded = int(eager[4][-1])
        for number, (got, want) in enumerate(zip(captured, eager, strict=True)):
            if number < 2:
                got, want = got[: sizes[-1]], want[: sizes[-1]]
            elif number == 2:
                got, want = got[:, :padded], want[:, :padded]
            got, want = (each.contiguous().view(torch.uint8) for each in (got, want))
            assert torch.equal(got, want), f"replay {replay}: result {number}"


# -- the layer ---------------------------------------------------------------------------------------------

FP8 = {"expert_precision": "fp8"}
IN_FP8 = {**FP8, "ffn_hidden": 192}
FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dropless", "capacity", "gelu, no shared experts"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_way_gives_the_same(pool: Pools, size: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    case = LayerCase((300, 0, 257, 64)[:size], seed, dtype, {**IN_FP8, **LAYERS[kind]})
    harness.assert_none(pool(size)(check_ways, case))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_against_the_cpu(rank: int, world_size: int, seed: int) -> None:
    """Results in float32, where GPU and CPU choose the same experts, are near those of the CPU, which are as
    far from exact products as docs/fp8.md says."""
    case = LayerCase((70, 40)[:world_size], seed, torch.float32, IN_FP8)
    layer, on_cpu = case.layer(), case.layer("cpu")
    plain = replace(case, options={**case.options, "expert_precision": None}).layer("cpu")
    x, grad = case.input(rank)
    want, exact = run_layer(on_cpu, x, grad, {}), run_layer(plain, x, grad, {})
    got = run_layer(layer, x.to(harness.device()), grad.to(harness.device()), {})
    for name, value in want.items():
        # What differs in the last bits of bfloat16 may be another number of e4m3 in the next product.
        size = float(exact[name].double().norm())
        here = got[name].cpu().double()
        off, error = float((here - value).norm()), float((here - exact[name]).norm())
        assert off <= 0.06 * size + 1e-6 and error <= 0.16 * size + 1e-6, (name, off, error, size)
    for each in (layer, on_cpu, plain):
        each.comm.close()


@pytest.mark.usefixtures("cuda_only", "products")
@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_for_nothing_with_a_capacity(pool: Pools, size: int, seed: int) -> None:
    pool(size)(check_waits, LayerCase((96,) * size, seed, options={**IN_FP8, **FIXED}))


@pytest.mark.usefixtures("cuda_only", "products")
@pytest.mark.parametrize("size", [1, 2])
def test_forward_and_backward_in_one_graph(pool: Pools, size: int, seed: int) -> None:
    case = LayerCase((128,) * size, seed, options={**IN_FP8, **FIXED})
    harness.assert_none(pool(size)(check_graph, case))


@pytest.mark.usefixtures("cuda_only", "products")
@on_ranks(1)
def test_kept_weights_on_several_streams(rank: int, world_size: int, seed: int) -> None:
    """Quantised weights that one stream makes, late, and another one uses at once."""
    torch.manual_seed(seed)
    config = MoEConfig(
        hidden=512, ffn_hidden=512, num_experts=8, top_k=2, dtype=torch.bfloat16, init_std=0.05, **FP8
    )
    experts = GroupedExperts(config, device=harness.device())
    rows = torch.randn(256, 512, device=harness.device()).to(torch.bfloat16)
    offsets = ends_of([32 * i for i in range(1, 9)])
    want = experts(rows, offsets, has_tail=False).detach()
    for _ in range(5):
        experts.forget_quantized()
        harness.poison(1 << 24)
        torch.cuda.synchronize()
        late, soon = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(late):
            torch.cuda._sleep(50_000_000)
            experts(rows, offsets, has_tail=False)
        with torch.cuda.stream(soon):
            got = experts(rows, offsets, has_tail=False)
        torch.cuda.synchronize()
        assert torch.equal(got, want), "another stream used weights before they were quantised"


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_refused_where_there_are_no_products(rank: int, world_size: int) -> list[str]:
    config = MoEConfig(hidden=32, ffn_hidden=32, num_experts=2, top_k=1, pre_softmax=True, **FP8)
    supported = torch.cuda.get_device_capability()[0] == 9
    try:
        GroupedExperts(config, device=harness.device())
    except Unsupported as error:
        return [f"refused: {error}"] if supported or "compute capability" not in str(error) else []
    return [] if supported else ["a GPU without such products was not refused"]
