"""The reference of the wire formats: against torch's own conversion, against float64, and worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import reference


def _torch_e4m3(x: np.ndarray) -> np.ndarray:
    """torch converts to nearest even and does not saturate: what is too large is cut off first."""
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()


def test_the_table_is_e4m3fn() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(reference.E4M3, codes)
    assert reference.E4M3[-1] == 448 and reference.E4M3[1] == 2.0**-9


def test_conversion_is_torchs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(200_000) * np.exp2(rng.integers(-14, 10, 200_000))).astype(np.float32)
    np.testing.assert_array_equal(reference.as_e4m3(x), _torch_e4m3(x))


def test_ties_ends_and_special_values() -> None:
    between = (reference.E4M3[1:] + reference.E4M3[:-1]) / 2
    below, above = np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(999))
    ends = np.array([0.0, 448, 449, 464, 1e30, np.inf, np.nan, 2.0**-10, 2.0**-11, 1e-40], np.float32)
    x = np.concatenate([between, below, above, reference.E4M3, ends])
    x = np.concatenate([x, -x])
    got = reference.as_e4m3(x)
    np.testing.assert_array_equal(got, _torch_e4m3(x))
    np.testing.assert_array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("hidden", [8, 128, 136, 300])
def test_quantised_rows_are_torchs(dtype: str, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((50, hidden)) * np.exp2(rng.integers(-20, 10, (50, 1)))
    x = reference.rounded(x.astype(reference.wide(dtype)), dtype)
    x[3] = 0
    x[4, 0] = np.nan
    data, scales = reference.quantised(x)
    assert data.shape == x.shape and scales.shape == (50, -(-hidden // 128))
    for b in range(scales.shape[1]):
        part = torch.from_numpy(x[:, 128 * b : 128 * (b + 1)]).float()
        scale = (part.nan_to_num(nan=0.0).abs().amax(1) / torch.tensor(448.0)).clamp_min(2.0**-126)
        want = (part * (1 / scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        np.testing.assert_array_equal(data[:, 128 * b : 128 * (b + 1)], want.float().numpy())
        np.testing.assert_array_equal(scales[:, b], scale.numpy())
        back = (want.float() * scale[:, None]).to(getattr(torch, dtype))
        got = reference.through_wire(x, dtype)[:, 128 * b : 128 * (b + 1)]
        np.testing.assert_array_equal(got, back.to(torch.from_numpy(got).dtype).numpy())


def test_a_row_by_hand() -> None:
    """amax 896 makes the scale 2: 896 -> 448, 100 -> 50 -> 48 or 52, 50 is a tie and goes to 48 (even)."""
    x = np.array([[896.0, 100.0, -3.0, 0.0]], np.float32)
    data, scales = reference.quantised(x)
    assert scales.tolist() == [[2.0]] and data.tolist() == [[448.0, 48.0, -1.5, 0.0]]
    assert reference.through_wire(x, "bfloat16").tolist() == [[896.0, 96.0, -3.0, 0.0]]


def test_zero_tiny_infinite_and_nan() -> None:
    x = np.zeros((4, 128), np.float32)
    x[1, 0] = 1e-44
    x[2, 0] = np.inf
    x[3, :2] = [np.nan, 448.0]
    data, scales = reference.quantised(x)
    assert scales[:, 0].tolist() == [2.0**-126, 2.0**-126, np.inf, 1.0]
    assert not data[:2].any()
    assert np.isnan(data[2, 0]) and np.isnan(data[3, 0]) and data[3, 1] == 448
    back = reference.dequantised(data, scales, "float32")
    assert np.isnan(back[2]).all(), "an infinity takes its block with it"
    assert np.isnan(back[3, 0]) and back[3, 1] == 448 and not back[3, 2:].any()


def test_a_scale_of_mxfp8_is_the_least_power_of_two() -> None:
    """The scales of quotients amax / 448, by hand: powers of two, what is above one, the ends, infinity."""
    quotients = [0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 1.0000001, 1.5, 2.0, 3.0, 2.0**100, np.inf]
    scales = [2.0**-127, 2.0**-127, 2.0**-127, 2.0**-126, 1.0, 2.0, 2.0, 2.0, 4.0, 2.0**100, np.nan]
    np.testing.assert_array_equal(reference.powers_of_two(np.array(quotients, np.float32)), scales)
    x = np.zeros((3, 64), np.float32)
    x[0, :3] = [7.0, 0.3, np.nan]
    x[1, 40] = -500.0
    x[2, 3] = np.inf
    data, scales_of_x = reference.quantised(x, "mxfp8")
    assert scales_of_x[:2].tolist() == [[2.0**-6, 2.0**-127], [2.0**-127, 2.0]]
    assert data[0, :2].tolist() == [448, 20] and np.isnan(data[0, 2]) and data[1, 40] == -256
    back = reference.dequantised(data, scales_of_x, "float32", "mxfp8")
    assert np.isnan(back[2, :32]).all() and not back[2, 32:].any() and back[1, 40] == -512


def test_rows_in_nvfp4_by_hand() -> None:
    """The row's largest value, 2688, makes its scale 1. A block of 12 at most has scale 2: 12 -> 6, 5 -> 2.5,
    a tie that goes to 2, and 1 -> 0.5. A block with a NaN or an infinity is NaN, and no other."""
    x = np.zeros((2, 64), np.float32)
    x[0, 0] = 2688
    x[0, 16:20] = [12, 5, -1, 0.2]
    x[0, 32], x[0, 48] = np.nan, np.inf
    x[1, 5] = 1e-40
    arrived, factors = reference.through_nvfp4(x, "float32")
    assert factors[0, :32:16].tolist() == [448, 2] and np.isnan(factors[0, 32:]).all()
    assert arrived[0, 0] == 2688 and arrived[0, 16:20].tolist() == [12, 4, -1, 0]
    assert np.isnan(arrived[0, 32:]).all() and not arrived[0, 1:16].any() and not arrived[1].any()
    codes = np.array([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 7, -0.1, np.nan], np.float32)
    want = [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, 0, 0]
    assert reference.as_e2m1(codes).tolist() == want and np.signbit(reference.as_e2m1(codes)[10])


@pytest.mark.parametrize("wire", reference.SCALE_COLUMNS)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_error_against_float64_is_within_the_bound(dtype: str, wire: str, seed: int) -> None:
    columns = reference.SCALE_COLUMNS[wire]
    rng = np.random.default_rng(seed)
    spread = 6 if dtype == "float16" else 30
    x = rng.standard_normal((400, 328)) * np.exp2(rng.integers(-spread, spread, (400, 1)))
    x[::3] *= np.exp2(rng.integers(-12, 3, x[::3].shape))  # blocks whose small elements become subnormal
    x = reference.rounded(x.astype(reference.wide(dtype)), dtype).astype(np.float64)
    error = np.abs(reference.through_wire(x, dtype, wire).astype(np.float64) - x)
    bound = reference.wire_error_bound(x, dtype, wire)
    assert (error <= bound).all(), (error / bound).max()
    assert (error / bound).max() > 0.9, "the bound is not idle"
    amax = np.abs(x[:, :columns]).max(1, keepdims=True)
    move = reference.LARGEST_MOVE[wire] + torch.finfo(getattr(torch, dtype)).eps / 2
    assert (error[:, :columns] <= amax * move + 2.0**-24).all()
