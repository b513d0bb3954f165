"""Finds the devices that communicators of this build can use on this machine, and the number of threads per
CPU rank."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

import moecomm._C as _C
from moecomm.errors import InvalidArgument, Unsupported

_CAPABILITIES = (9, 10)
"""The major compute capabilities for which kernels are built (CMakeLists.txt)."""


def why_no_cuda() -> str | None:
    """Returns why a Communicator of this build cannot serve CUDA tensors on this machine; None if it can."""
    if _C.cuda_version is None:
        return "moecomm was built without its CUDA part (no CUDA toolkit at build time)"
    if not hasattr(_C, "DeviceCommunicator"):
        return "the CUDA part of this build has no kernels"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use"
    if not _has_driver_bindings():
        return "the package cuda-bindings is missing (pip install cuda-bindings)"
    major, minor = torch.cuda.get_device_capability()
    if major not in _CAPABILITIES:
        return (
            f"the GPU has compute capability {major}.{minor}, 9.0 or 10.x is needed, whose blocks can "
            "have the 227 KiB of shared memory that the kernels take"
        )
    return None


def _has_driver_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # the package `cuda` itself is missing
        return False


def available_devices() -> tuple[str, ...]:
    """Returns the device types that a Communicator of this build can serve on this machine, best first:
    ("cuda", "cpu") with a GPU, else ("cpu",)."""
    return ("cpu",) if why_no_cuda() else ("cuda", "cpu")


def choose_device(device: Any) -> torch.device:
    """Returns the device for a Communicator. Raises Unsupported if it cannot be served; InvalidArgument if
    `device` names no device."""
    types = available_devices()
    if device is None and types == ("cpu",) and torch.cuda.is_available():
        raise Unsupported(
            f"device is None, and the GPU here cannot be served: {why_no_cuda()}; pass device='cpu' to "
            "communicate tensors on the CPU"
        )
    try:
        chosen = torch.device(types[0] if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"device is {device!r}, expected a torch.device or its name") from error
    if chosen.type not in types:
        reason = why_no_cuda() if chosen.type == "cuda" else None
        raise Unsupported(
            f"device is {device}, this version serves {', '.join(types)} here"
            + (f": {reason}" if reason else "")
        )
    if chosen.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise InvalidArgument(f"device is {device}, expected an index below the {count} GPUs of this process")
    return torch.device("cuda", index)


def default_threads(local_ranks: int) -> int:
    """Returns the number of threads of a rank: the cores of this process, divided by the host's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
