"""Loads libfabric, for the fork server: a library below it calibrates a clock at its start, for 0.4 s in
every process that loads it."""

import contextlib
import ctypes

with contextlib.suppress(OSError):
    ctypes.CDLL("libfabric.so.1")
