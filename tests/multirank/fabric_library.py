"""Loads libfabric, for the fork server: a library that it needs calibrates a clock at its start, which takes every
process that loads it 0.4 s."""

import contextlib
import ctypes

with contextlib.suppress(OSError):
    ctypes.CDLL("libfabric.so.1")
