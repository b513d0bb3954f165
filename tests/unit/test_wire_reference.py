"""The reference of the wire formats: against torch's own conversion, against float64, and worked by hand."""

from __future__ import annotations

import numpy as np
import torch

from tests import reference


def _torch_e4m3(x: np.ndarray) -> np.ndarray:
    """torch converts to nearest even and does not saturate: what is too large is cut off first."""
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()


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
