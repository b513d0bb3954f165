"""Backends: each turns tensors into pointers for one kind of memory. The only place where torch meets the
runtime."""

from moecomm.backends.cpu import CpuBackend, RawDispatch

__all__ = ["CpuBackend", "RawDispatch", "available_devices"]


def available_devices() -> tuple[str, ...]:
    """Types of device that a Communicator of this build and machine can serve, best first. Now ("cpu",)."""
    return ("cpu",)
