"""Backends: each turns tensors into pointers for one kind of memory. The only place where torch meets the
runtime."""

from moecomm.backends.cpu import CpuBackend, RawDispatch

__all__ = ["CpuBackend", "RawDispatch"]
