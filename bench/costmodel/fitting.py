"""A line through measured times: what each piece costs, and what each byte does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moecomm import InvalidArgument


@dataclass(frozen=True)
class Line:
    """seconds = each_s + bytes / (GBps 1e9)."""

    each_s: float
    GBps: float

    @property
    def half_bytes(self) -> float:
        """Size at which half of GBps is reached, Machine.nic_half_bytes of a line through times of puts."""
        return self.each_s * self.GBps * 1e9

    def seconds(self, size: float) -> float:
        """Time of a piece of `size` bytes."""
        return self.each_s + size / (self.GBps * 1e9)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of squared relative errors, so that small pieces count like large ones; a
    time at zero bytes that would be negative becomes zero.

    sizes: bytes of a piece (a put, or all that a rank sends); seconds: its time, 1 / rate for puts that
    follow each other.

    Example: puts of 7 KiB, 64 KiB and 1 MiB at 2.3, 6.0 and 7.2 GB/s take 3.1, 10.9 and 145.6 us; the line
    has 2.1 us each and 7.36 GB/s, half of which is reached with puts of 15.7 KB.

    Raises InvalidArgument for fewer than two sizes, times that are not positive, or times that do not grow.
    """
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if size.shape != time.shape or size.ndim != 1 or len(np.unique(size)) < 2:
        raise InvalidArgument(
            f"{size.size} sizes and {time.size} times, must be as many, of at least two different sizes"
        )
    if not (np.isfinite(time).all() and (time > 0).all() and np.isfinite(size).all()):
        raise InvalidArgument("sizes and times must be finite, and times positive")
    # Dividing each equation each + size * slope = time by its time makes the errors relative.
    columns = np.stack([1 / time, size / time], axis=1)
    each, slope = np.linalg.lstsq(columns, np.ones_like(time), rcond=None)[0]
    if each < 0:
        each = 0.0
        slope = (size / time).sum() / ((size / time) ** 2).sum()
    if slope <= 0:
        raise InvalidArgument("times do not grow with the sizes: no rate can be found")
    return Line(float(each), float(1e-9 / slope))
