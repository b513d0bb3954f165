"""Experts in fp8 on GPUs: the kernels have the bits of the CPU, products its numbers, and the layer the same
bits in whatever way it runs, also in a graph.

Bodies of the kernels' tests run on rank 0 of a pool of one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm.kernels.quantize import prepare, quantize_columns, quantize_rows, quantize_transposed
from moecomm.kernels.scaled_mm import scaled_grouped_mm, scaled_grouped_mm_wgrad
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.test_activation import Output
from tests.gpu.test_layer import Case, _run, check_graph, check_waits, check_ways

KINDS = ("bfloat16", "float16", "float32")
NAN = 0x7F
"""In e4m3."""


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Draws finite numbers on the CPU, of sizes from far below to far above one, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    low, high = (-24, 12) if dtype == "float16" else (-140, 120)
    around = torch.randint(low, high, (*shape[:-1], 1), generator=generator)
    spread = torch.randint(-6, 3, shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(
        (around + spread).double()
    )
    values *= torch.rand(shape, generator=generator) > 0.05
    return values.to(kind)


def other_bits(text: str, got: Tensor, want: Tensor) -> list[str]:
    """Lists differences in bits of e4m3 values or scales; the sign of a NaN does not count."""
    got = got.cpu()
    same = got.view(torch.uint8) == want.view(torch.uint8)
    if want.dtype == torch.float8_e4m3fn:
        same |= want.float().isnan() & got.float().isnan()
    if bool(same.all()):
        return []
    at = tuple((~same).nonzero()[0].tolist())
    return [f"{text}: {int((~same).sum())} of {same.numel()} bytes differ, first at {at}"]


def ends_of(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


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


def _rows(rank: int, world_size: int, dtype: str, seed: int) -> list[str]:
    problems = []
    for rows, columns in (
        (1, 16),
        (7, 32),
        (513, 528),
        (64, 1024),
        (70, 1040),
        (33, 7168),
        (5, 16400),
        (3, 40016),
    ):
        x = numbers((rows, columns), dtype, seed + columns)
        if rows > 3:
            x[1, 3], x[2, 5] = math.nan, math.inf
        for ends in (None, [rows], [0, rows // 2], [0], [rows + 9], [-4]):
            harness.poison(1 << 20)
            real = rows if ends is None else max(0, min(rows, ends[-1]))
            on_device = None if ends is None else ends_of(ends).to(harness.device())
            got, want = quantize_rows(x.to(harness.device()), on_device), quantize_rows(x)
            for name, one, other in zip(("values", "scales"), got, want, strict=True):
                problems += other_bits(f"{rows} x {columns}, ends {ends}: {name}", one[:real], other[:real])
    return problems


@pytest.mark.parametrize("dtype", KINDS)
def test_rows(pool: Pools, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_rows, dtype, seed))


GROUPS = (
    (50, 32, [3, 3, 20]),
    (50, 80, [50]),
    (0, 16, [0, 0]),
    (50, 16, [0, 0, 50]),
    (2000, 48, [10, 1500, 2000]),  # more than fits in shared memory
    (900, 7168, [100, 101, 899]),
    (4096, 256, [128 * i for i in range(1, 33)]),
    (700, 64, [min(700, 2 * i) for i in range(1, 401)]),  # more groups than a block has threads
    (40, 32, [0]),
)


def _columns(rank: int, world_size: int, dtype: str, seed: int) -> list[str]:
    problems = []
    for rows, columns, ends in GROUPS:
        x = numbers((rows, columns), dtype, seed + columns)
        if rows:
            x[: min(rows, 3), 1] = math.inf
            x[min(rows, 5) - 1, 2] = math.nan
        x[ends[-1] :] = math.nan
        harness.poison(1 << 22)
        got = quantize_columns(x.to(harness.device()), ends_of(ends).to(harness.device()))
        want = quantize_columns(x, ends_of(ends))
        text = f"{rows} x {columns}, {len(ends)} groups"
        padded = int(want.padded_ends_L[-1])
        problems += other_bits(f"{text}: values", got[0][:, :padded], want[0][:, :padded].contiguous())
        problems += other_bits(f"{text}: scales", got[1], want[1])
        if got[2].tolist() != want[2].tolist():
            problems.append(f"{text}: padded ends {got[2].tolist()[:8]}, expected {want[2].tolist()[:8]}")
    for shape in ((2, 32, 48), (1, 1040, 64), (3, 144, 80), (4, 512, 1024), (1, 16, 7168)):
        x = numbers(shape, dtype, seed)
        for quantize in (quantize_transposed, quantize_rows):
            got, want = quantize(x.to(harness.device())), quantize(x)
            for one, other in zip(got, want, strict=True):
                problems += other_bits(f"{quantize.__name__} of {shape}", one, other)
    return problems


@pytest.mark.parametrize("dtype", KINDS)
def test_columns(pool: Pools, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_columns, dtype, seed))


def _untouched(rank: int, world_size: int, dtype: str, seed: int) -> list[str]:
    """The extension's functions on memory of the test's own: nothing is written but what is said."""
    from moecomm import _C
    from moecomm.setup.memory_plan import NATIVE_DTYPES

    problems = []
    kind: torch.dtype = getattr(torch, dtype)
    prepare(harness.device(), kind)
    stream = torch.cuda.current_stream().cuda_stream
    for rows, columns, ends in GROUPS:
        real = ends[-1]
        x = numbers((rows, columns), dtype, seed)
        x[real:] = math.nan
        there, ends_L = x.to(harness.device()), ends_of(ends).to(harness.device())
        given = (there.data_ptr(), ends_L.data_ptr(), len(ends), rows, columns)
        values, scales = Output((rows, columns), torch.uint8, 0), Output((rows,), torch.float32, 0)
        addresses = values.value.data_ptr(), scales.value.data_ptr()
        _C.quantize_rows(*given, NATIVE_DTYPES[kind], *addresses, stream)
        text = f"{rows} x {columns}, {len(ends)} groups"
        if values.touched(real) or scales.touched(real):
            problems.append(f"{text}: rows past the real ones were written")
        padded = quantize_columns(x, ends_of(ends)).padded_ends_L
        width = 16 * (rows // 16 + len(ends))
        lines = Output((columns, width), torch.uint8, 0)
        found, places = Output((len(ends), columns), torch.float32, 0), Output((len(ends),), torch.int32, 0)
        outputs = lines.value, found.value, places.value
        _C.quantize_columns(
            *given, width, NATIVE_DTYPES[kind], *(each.data_ptr() for each in outputs), stream
        )
        if any(each.touched(len(each.value)) for each in (lines, found, places)):
            problems.append(f"{text}: something beside the columns was written")
        if bool((lines.value[:, int(padded[-1]) :] != 0xFF).any()):
            problems.append(f"{text}: values past the last padded end were written")
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
def test_nothing_else_is_written(pool: Pools, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_untouched, dtype, seed))


def _refusals(rank: int, world_size: int) -> list[str]:
    """Checks that the extension itself refuses bad arguments by the typed error."""
    from moecomm import _C
    from moecomm.errors import InvalidArgument

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
    problems = []
    for name, cases in (("quantize_rows", bad), ("quantize_columns", {**bad, **columns_only})):
        left_out = ("out_rows", "padded_ends") if name == "quantize_rows" else ()
        for text, changed in cases.items():
            values = [value for key, value in {**good, **changed}.items() if key not in left_out]
            try:
                getattr(_C, name)(*values, 0)
                problems.append(f"{name}: no error, expected: {text}")
            except InvalidArgument as error:
                if text not in str(error):
                    problems.append(f"{name}: {error}, expected: {text}")
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_what_the_extension_refuses(pool: Pools) -> None:
    harness.assert_none(pool(1)(_refusals))


def _kernels_in_a_graph(rank: int, world_size: int, seed: int) -> list[str]:
    """Inputs and the sizes of groups change between replays; the host waits for nothing while it issues."""
    problems = []
    x = numbers((400, 160), "bfloat16", seed).to(harness.device())
    ends = ends_of([100, 100, 400]).to(harness.device())

    def program() -> list[Tensor]:
        return [
            *quantize_rows(x, ends),
            *quantize_columns(x, ends),
            *quantize_transposed(x.view(1, 400, 160)),
        ]

    program()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    program()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = program()
    for replay, sizes in enumerate(([100, 100, 400], [0, 1, 17], [0, 0, 0], [399, 400, 400])):
        now = numbers((400, 160), "bfloat16", seed + replay + 1)
        x.copy_(now)
        ends.copy_(ends_of(sizes))
        for each in captured:
            each.view(torch.uint8).fill_(0xFF)
        graph.replay()
        rows, columns = quantize_rows(now), quantize_columns(now, ends_of(sizes))
        padded = int(columns.padded_ends_L[-1])
        wanted = (
            (captured[0][: sizes[-1]], rows.values[: sizes[-1]]),
            (captured[1][: sizes[-1]], rows.scales[: sizes[-1]]),
            (captured[2][:, :padded], columns.values_CQ[:, :padded].contiguous()),
            (captured[3], columns.scales_LC),
            (captured[4], columns.padded_ends_L),
            *zip(captured[5:], quantize_transposed(now.view(1, 400, 160)), strict=True),
        )
        for number, (got, want) in enumerate(wanted):
            problems += other_bits(f"replay {replay}, result {number}", got.contiguous(), want)
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_kernels_in_a_cuda_graph(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_kernels_in_a_graph, seed))


# -- products ----------------------------------------------------------------------------------------------

SHAPES = (
    (64, 32, 48, [3, 3, 40, 50]),
    (300, 256, 384, [0, 100, 100, 300]),
    (1024, 1024, 512, [256, 512, 768, 1024]),
    (520, 512, 4096, [130, 260, 390, 520]),
    (100, 16, 16, [25, 50, 75, 90]),
)


def _far_off(text: str, got: Tensor, want: Tensor, size: Tensor, summed: int) -> list[str]:
    """The tensor cores keep 14 bits of a running sum, to which they add 32 products at a time."""
    bound = want.abs() * 2.0**-7 + size * (summed / 32 + 2) * 2.0**-13
    off = ~((got.cpu().double() - want).abs() <= bound)
    return [f"{text}: {int(off.sum())} of {off.numel()} are off"] if bool(off.any()) else []


def _products(rank: int, world_size: int, seed: int) -> list[str]:
    """Compares products with float64 sums of the same quantised operands. NaN lies where nobody may read."""
    problems = []
    torch.manual_seed(seed)
    for rows, a, b, ends in SHAPES:
        text, real = f"{rows} x {a} -> {b}, ends {ends}", ends[-1]
        x, dy = torch.randn(rows, a).to(torch.bfloat16), torch.randn(rows, b).to(torch.bfloat16)
        weight = torch.randn(len(ends), a, b).to(torch.bfloat16)
        x[real:], dy[real:] = math.nan, math.nan
        there = {name: each.to(harness.device()) for name, each in (("x", x), ("dy", dy), ("w", weight))}
        offsets = ends_of(ends).to(harness.device())
        for name, source, quantize, along in (
            ("y", "x", quantize_transposed, a),
            ("dx", "dy", quantize_rows, b),
        ):
            left, right = quantize_rows(there[source], offsets), quantize(there["w"])
            got = scaled_grouped_mm(left, right, offsets)
            left, right = quantize_rows(x if source == "x" else dy), quantize(weight)
            p = left.values.double() * left.scales.double().unsqueeze(1)
            q = (right.values.double() * right.scales.double().unsqueeze(2)).transpose(1, 2)
            for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                part = slice(begin, end)
                want, size = p[part] @ q[group], p[part].abs() @ q[group].abs()
                problems += _far_off(f"{text}: {name}, group {group}", got[part], want, size, along)
        columns = [quantize_columns(there[name], offsets) for name in ("x", "dy")]
        end = int(columns[0].padded_ends_L[-1])
        results = []
        for fill in (NAN, 0):
            for each in columns:
                each.values_CQ.view(torch.uint8)[:, end:] = fill
            results.append(scaled_grouped_mm_wgrad(*columns))
        if not torch.equal(*results):
            problems.append(f"{text}: values past the last padded end matter")
        for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin == end:
                if bool((results[0][group] != 0).any()):
                    problems.append(f"{text}: an empty group has a gradient")
                continue
            parts = [quantize_transposed(_padded(each[begin:end]).unsqueeze(0)) for each in (x, dy)]
            p, q = (each.values[0].double() * each.scales[0].double().unsqueeze(1) for each in parts)
            want, size = p @ q.t(), p.abs() @ q.t().abs()
            problems += _far_off(f"{text}: dw, group {group}", results[0][group], want, size, end - begin)
    return problems


def _padded(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16))


@pytest.mark.usefixtures("products")
def test_products(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_products, seed))


# -- the layer ---------------------------------------------------------------------------------------------

FP8 = {"expert_precision": "fp8"}
FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}


def _case(size: int, seed: int, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case((300, 0, 257, 64)[:size], seed, dtype, {**FP8, **options})


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dropless", "capacity", "gelu, no shared experts"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_way_gives_the_same(pool: Pools, size: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    options: dict[str, dict[str, Any]] = {
        "dropless": {},
        "capacity": {"capacity_factor": 1.5, "pad_to_capacity": True},
        "gelu, no shared experts": {"activation": "gelu", "num_shared_experts": 0},
    }
    harness.assert_none(pool(size)(check_ways, _case(size, seed, options[kind], dtype)))


def _against_cpu(rank: int, world_size: int, case: Case) -> list[str]:
    layer, on_cpu = case.layer(), case.layer("cpu")
    plain = replace(case, options={**case.options, "expert_precision": None}).layer("cpu")
    x, grad = case.input(rank)
    want, exact = _run(on_cpu, x, grad, {}), _run(plain, x, grad, {})
    got = _run(layer, x.to(harness.device()), grad.to(harness.device()), {})
    problems = []
    for name, value in want.items():
        # What differs in the last bits of bfloat16 may be another number of e4m3 in the next product.
        size = float(exact[name].norm())
        off, error = float((got[name].cpu() - value).norm()), float((got[name].cpu() - exact[name]).norm())
        if not off <= 0.06 * size + 1e-6 or not error <= 0.16 * size + 1e-6:
            problems.append(f"rank {rank}: {name} is off by {off} and {error} of {size}")
    for each in (layer, on_cpu, plain):
        each.comm.close()
    return problems


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("size", [1, 2])
def test_against_the_cpu(pool: Pools, size: int, seed: int) -> None:
    """Results in float32, where GPU and CPU choose the same experts, are near those of the CPU, which are
    as far from exact products as docs/fp8.md says."""
    harness.assert_none(pool(size)(_against_cpu, Case((70, 40)[:size], seed, torch.float32, dict(FP8))))


@pytest.mark.usefixtures("cuda_only", "products")
@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_for_nothing_with_a_capacity(pool: Pools, size: int, seed: int) -> None:
    pool(size)(check_waits, Case((96,) * size, seed, options={**FP8, **FIXED}))


@pytest.mark.usefixtures("cuda_only", "products")
@pytest.mark.parametrize("size", [1, 2])
def test_forward_and_backward_in_one_graph(pool: Pools, size: int, seed: int) -> None:
    case = Case((128,) * size, seed, options={**FP8, **FIXED})
    harness.assert_none(pool(size)(check_graph, case))


def _streams(rank: int, world_size: int, seed: int) -> list[str]:
    """Quantised weights that one stream makes, late, and another one uses at once."""
    from moecomm.nn import GroupedExperts, MoEConfig

    torch.manual_seed(seed)
    config = MoEConfig(
        hidden=512, ffn_hidden=512, num_experts=8, top_k=2, dtype=torch.bfloat16, init_std=0.05, **FP8
    )
    experts = GroupedExperts(config, device=harness.device())
    rows = torch.randn(256, 512, device=harness.device()).to(torch.bfloat16)
    offsets = ends_of([32 * i for i in range(1, 9)]).to(harness.device())
    want = experts(rows, offsets, has_tail=False).detach()
    problems = []
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
        if not torch.equal(got, want):
            problems.append("another stream used weights before they were quantised")
    return problems


@pytest.mark.usefixtures("cuda_only", "products")
def test_kept_weights_on_several_streams(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_streams, seed))


def _refused(rank: int, world_size: int) -> list[str]:
    from moecomm.errors import Unsupported
    from moecomm.nn import GroupedExperts, MoEConfig

    config = MoEConfig(hidden=32, ffn_hidden=32, num_experts=2, top_k=1, pre_softmax=True, **FP8)
    supported = torch.cuda.get_device_capability()[0] == 9
    try:
        GroupedExperts(config, device=harness.device())
    except Unsupported as error:
        return [f"refused: {error}"] if supported or "compute capability" not in str(error) else []
    return [] if supported else ["a GPU without such products was not refused"]


@pytest.mark.usefixtures("cuda_only")
def test_refused_where_there_are_no_products(pool: Pools) -> None:
    harness.assert_none(pool(1)(_refused))
