"""The reference of the wire formats: against torch's own conversion, against float64, and worked by hand."""

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
