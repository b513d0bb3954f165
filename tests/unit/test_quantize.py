"""Rows and columns in e4m3: bit for bit against numpy. Tests on ranks run on a GPU, too
(tests/gpu/test_fp8_experts.py)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moecomm.errors import InvalidArgument
from moecomm.kernels.quantize import quantize_columns, quantize_rows, quantize_transposed
from tests import ranks, reference
from tests.multirank.on_ranks import on_ranks

KINDS = ("bfloat16", "float16", "float32")
LEAST = np.float32(2.0**-126)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draws finite numbers of all sizes that the dtype has, subnormal ones too, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    last = np.log2(torch.finfo(dtype).max) - 3
    first = np.log2(torch.finfo(dtype).smallest_normal) - 4
    around = rng.uniform(first, last, (*shape[:-1], 1))
    values = rng.standard_normal(shape) * np.exp2(np.clip(around + rng.normal(0, 4, shape), first, last))
    values *= rng.random(shape) > 0.05
    found = torch.from_numpy(values).to(dtype)
    return found.nan_to_num(posinf=torch.finfo(dtype).max, neginf=torch.finfo(dtype).min)


def oracle(x_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of float32 with one scale each."""
    if x_NC.shape[0] == 0:
        return x_NC, np.zeros(0, np.float32)
    data, scales = reference.quantised(x_NC, block=x_NC.shape[1])
    return data, scales[:, 0]


def column_oracle(x_PC: np.ndarray, ends: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Lines of padded groups, scales by group and column, where the groups end."""
    lines, scales, padded = [], [], []
    for begin, end in zip([0, *ends], ends, strict=False):
        part = x_PC[begin:end]
        if len(part):
            data, scale = oracle(np.ascontiguousarray(part.T))
        else:
            data, scale = np.zeros((x_PC.shape[1], 0), np.float32), np.full(x_PC.shape[1], LEAST)
        missing = 16 - len(part) if len(part) < 16 else -len(part) % 16
        lines.append(np.pad(data, ((0, 0), (0, missing))))
        scales.append(scale)
        padded.append((padded[-1] if padded else 0) + lines[-1].shape[1])
    return np.concatenate(lines, axis=1), np.stack(scales), padded


def assert_bits(values: Tensor, scales: Tensor, want: np.ndarray, want_scales: np.ndarray) -> None:
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    values, scales = values.cpu(), scales.cpu()
    np.testing.assert_array_equal(values.float().numpy(), want)
    np.testing.assert_array_equal(scales.numpy(), want_scales)
    # Zeros have signs, which comparing numbers does not see.
    numbers_only = ~np.isnan(want)
    signs = values.view(torch.uint8).numpy() >> 7
    np.testing.assert_array_equal(signs[numbers_only], np.signbit(want)[numbers_only])


def ends_of(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=ranks.device())


@pytest.mark.parametrize("dtype", KINDS)
@on_ranks(1)
def test_rows(rank: int, world_size: int, dtype: str, seed: int) -> None:
    """NaN past the last end is nobody's."""
    shapes = ((1, 16), (7, 32), (40, 64), (7, 1040))
    large = ((513, 528), (64, 1024), (70, 1040), (33, 7168), (5, 16400), (3, 40016))
    for rows, columns in shapes if ranks.on_cpu() else shapes + large:
        x = numbers((rows, columns), getattr(torch, dtype), seed + columns)
        if rows > 3:
            x[1, 3], x[2, 5] = math.nan, math.inf
        for ends in (None, [rows], [0, rows // 2], [0], [rows + 9], [-4]):
            ranks.poison(1 << 20)
            real = rows if ends is None else max(0, min(rows, ends[-1]))
            given = x.clone()
            given[real:] = math.nan
            values, scales = quantize_rows(given.to(ranks.device()), None if ends is None else ends_of(ends))
            assert_bits(values[:real], scales[:real], *oracle(x[:real].float().numpy()))
            if ranks.on_cpu():  # GPUs leave other rows alone
                assert int(values[real:].view(torch.uint8).sum()) == 0
                assert bool((scales[real:] == LEAST.item()).all())
    values, scales = quantize_rows(x[:0].to(ranks.device()))
    assert values.shape == x[:0].shape and scales.shape == (0,)


GROUPS = (
    (50, 32, [50]),
    (50, 32, [3, 3, 20]),
    (50, 80, [16, 32, 48]),
    (0, 16, [0, 0]),
    (50, 16, [0, 0, 50]),
    (50, 32, [1, 18, 18, 19, 50]),
    (50, 16, [49, 50]),
    (40, 32, [0]),
    (40, 32, [40, 40]),
)
LARGE_GROUPS = (
    (2000, 48, [10, 1500, 2000]),  # more than fits in shared memory
    (900, 7168, [100, 101, 899]),
    (4096, 256, [128 * i for i in range(1, 33)]),
    (700, 64, [min(700, 2 * i) for i in range(1, 401)]),  # more groups than a block has threads
)


@pytest.mark.parametrize("dtype", KINDS)
@on_ranks(1)
def test_columns(rank: int, world_size: int, dtype: str, seed: int) -> None:
    """NaN past the last end is nobody's."""
    for rows, columns, ends in GROUPS if ranks.on_cpu() else GROUPS + LARGE_GROUPS:
        x = numbers((rows, columns), getattr(torch, dtype), seed + columns)
        if rows:
            x[: min(rows, 3), 1] = math.inf
            x[min(rows, 5) - 1, 2] = math.nan
        x[ends[-1] :] = math.nan
        ranks.poison(1 << 22)
        values, scales, padded = quantize_columns(x.to(ranks.device()), ends_of(ends))
        want, want_scales, want_padded = column_oracle(x.float().numpy(), ends)
        last = want_padded[-1]
        assert padded.dtype == torch.int32 and padded.tolist() == want_padded
        assert values.shape == (columns, 16 * (rows // 16 + len(ends))) and values.shape[1] >= last
        assert_bits(values[:, :last].contiguous(), scales, want, want_scales)
        assert not ranks.on_cpu() or int(values[:, last:].view(torch.uint8).sum()) == 0


@pytest.mark.parametrize("dtype", KINDS)
@on_ranks(1)
def test_matrices(rank: int, world_size: int, dtype: str, seed: int) -> None:
    shapes = ((3, 48, 32), (1, 16, 16))
    large = ((2, 32, 48), (1, 1040, 64), (3, 144, 80), (4, 512, 1024), (1, 16, 7168))
    for shape in shapes if ranks.on_cpu() else shapes + large:
        x = numbers(shape, getattr(torch, dtype), seed)
        columns, rows = quantize_transposed(x.to(ranks.device())), quantize_rows(x.to(ranks.device()))
        assert columns.values.shape == (shape[0], shape[2], shape[1]) and rows.values.shape == shape
        for number, each in enumerate(x.float().numpy()):
            assert_bits(columns.values[number], columns.scales[number], *oracle(np.ascontiguousarray(each.T)))
            assert_bits(rows.values[number], rows.scales[number], *oracle(each))


def test_the_example() -> None:
    """The example in the docstring and in csrc/kernels/experts/quantize.hpp is right."""
    x = torch.ones(20, 16)
    values, _, padded = quantize_columns(x, torch.tensor([3, 3, 20], dtype=torch.int32))
    assert padded.tolist() == [16, 32, 64] and values.shape == (16, 64)
    real = [*range(3), *range(32, 49)]
    want = torch.zeros(64)
    want[real] = 448
    assert torch.equal(values.float(), want.expand(16, 64))


def test_the_bound_for_groups_is_enough(seed: int) -> None:
    """The bound on padded rows holds for groups of any sizes, and is reached."""
    rng = np.random.default_rng(seed)
    tight = False
    for _ in range(300):
        sizes = rng.choice([0, 1, 15, 16, 17, 33], size=rng.integers(1, 6))
        ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32))
        values, _, padded = quantize_columns(torch.zeros(int(sizes.sum()), 16), ends)
        assert int(padded[-1]) <= values.shape[1]
        tight |= int(padded[-1]) == values.shape[1]
    assert tight


def test_extremes() -> None:
    """Blocks that cannot be scaled to 448, or that hold NaN or infinities, and their neighbours are right."""
    tiny = 2.0**-149
    x = torch.zeros(6, 16)
    x[1, 3] = tiny  # below the least scale: subnormal in e4m3, or zero
    x[2] = torch.linspace(-1, 1, 16) * 3.4e38
    x[3, 0], x[3, 1] = math.nan, 2.0
    x[4, 0], x[4, 1] = math.inf, 2.0
    x[5] = -0.0
    values, scales = quantize_rows(x)
    back = values.float() * scales.unsqueeze(1)
    assert back[0].tolist() == [0] * 16 and scales[0] == LEAST.item()
    assert back[1].tolist() == [0] * 16 and scales[1] == LEAST.item()
    assert bool(torch.isfinite(back[2]).all()) and values[2, -1].float() == 448
    assert bool(back[3, 0].isnan()) and back[3, 1] == 2 and not bool(back[3, 2:].any())
    assert bool(back[4].isnan().all())
    assert bool(torch.signbit(values[5].float()).all())
    columns, column_scales = quantize_transposed(x.repeat(8, 1)[:48].unsqueeze(0))
    assert columns.shape == (1, 16, 48) and bool(column_scales[0, 0].isinf())


def test_strides_do_not_matter(seed: int) -> None:
    x = numbers((32, 48), torch.bfloat16, seed)
    ends = torch.tensor([5, 9, 30, 9], dtype=torch.int32)[::2]
    for each in (x.t().contiguous().t(), torch.stack([x, -x], dim=2)[:, :, 0]):
        for want, got in (
            (quantize_rows(x), quantize_rows(each)),
            (quantize_columns(x, ends.contiguous()), quantize_columns(each, ends)),
            (quantize_transposed(x.unsqueeze(0)), quantize_transposed(each.unsqueeze(0))),
        ):
            for a, b in zip(want, got, strict=True):
                assert b.is_contiguous() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


GOOD_ENDS = torch.tensor([1, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: quantize_rows(torch.zeros(4, 24)), r"\(4, 24\), expected columns in multiples of 16"),
        (lambda: quantize_rows(torch.zeros(4, 0)), "at least 16"),
        (lambda: quantize_rows(torch.zeros(16)), "expected at least two dimensions"),
        (lambda: quantize_rows(torch.zeros(4, 16, dtype=torch.float64)), "x is torch.float64, expected one"),
        (lambda: quantize_rows(torch.zeros(2, 4, 16), GOOD_ENDS), r"expected \(P, C\)"),
        (lambda: quantize_rows(torch.zeros(4, 16), GOOD_ENDS.long()), "ends is torch.int64"),
        (lambda: quantize_rows(torch.zeros(4, 16), GOOD_ENDS[:0]), "L at least 1"),
        (lambda: quantize_rows(torch.zeros(4, 16), GOOD_ENDS.to("meta")), "ends is on meta"),
        (lambda: quantize_columns(torch.zeros(4, 8), GOOD_ENDS), "columns in multiples of 16"),
        (lambda: quantize_columns(torch.zeros(1, 4, 16), GOOD_ENDS), r"expected \(P, C\)"),
        (lambda: quantize_columns(torch.zeros(4, 16), GOOD_ENDS.view(1, 2)), r"expected \(L,\)"),
        (lambda: quantize_transposed(torch.zeros(2, 8, 16)), "A and B multiples of 16"),
        (lambda: quantize_transposed(torch.zeros(2, 16, 20)), "A and B multiples of 16"),
        (lambda: quantize_transposed(torch.zeros(16, 16)), r"expected \(L, A, B\)"),
        (lambda: quantize_transposed(torch.zeros(0, 16, 16)), "L at least 1"),
    ],
)
def test_refuses(call: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        call()


def test_gradients_end_here() -> None:
    x = torch.ones(16, 16, requires_grad=True)
    for each in (*quantize_rows(x), *quantize_columns(x, GOOD_ENDS), *quantize_transposed(x.unsqueeze(0))):
        assert not each.requires_grad


def test_operators_are_what_they_say(seed: int) -> None:
    x = numbers((20, 32), torch.float32, seed)
    ops = torch.ops.moecomm
    tests = ("test_schema", "test_faketensor")  # opcheck's others compare e4m3, which torch cannot
    torch.library.opcheck(ops.quantize_rows.default, (x, None), test_utils=tests)
    torch.library.opcheck(ops.quantize_rows.default, (x, GOOD_ENDS), test_utils=tests)
    torch.library.opcheck(ops.quantize_columns.default, (x, GOOD_ENDS), test_utils=tests)
    torch.library.opcheck(ops.quantize_transposed.default, (x[:16].unsqueeze(0),), test_utils=tests)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph(backend: str, seed: int) -> None:
    def program(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        rows, columns = quantize_rows(x * 2, ends), quantize_columns(x * 2, ends)
        return rows.values.float(), rows.scales, columns.values_CQ.float(), columns.scales_LC

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for rows in (6, 6, 40):
        x = numbers((rows, 32), torch.float32, seed) / 4
        torch.testing.assert_close(compiled(x, GOOD_ENDS), program(x, GOOD_ENDS), rtol=0, atol=0)
    torch._dynamo.reset()
