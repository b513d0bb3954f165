"""The reference of mxfp8, worked by hand; only GPUs have this format. That of fp8: test_quantize.py."""

import numpy as np

from tests import reference


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
