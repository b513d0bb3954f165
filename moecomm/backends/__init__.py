"""Backends: each turns tensors into pointers for one kind of memory. The only place where torch meets the
runtime."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from moecomm import _C
from moecomm.backends.base import Backend, DispatchCall, RawDispatch, TensorPlan
from moecomm.backends.cpu import CpuBackend
from moecomm.backends.cuda import CudaBackend
from moecomm.errors import MoecommError
from moecomm.rendezvous import Rendezvous

__all__ = [
    "Backend",
    "DispatchCall",
    "RawDispatch",
    "TensorPlan",
    "available_devices",
    "make_backend",
    "why_no_cuda",
]

_LEAST_CAPABILITY = (8, 0)


def why_no_cuda() -> str | None:
    """What keeps a Communicator of this build and machine from serving CUDA tensors; None if nothing does."""
    if _C.cuda_version is None:
        return "moecomm was built without its CUDA part (no CUDA toolkit at build time)"
    if not hasattr(_C, "DeviceCommunicator"):
        return "the CUDA part of this build has no kernels"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use"
    if not _has_driver_bindings():
        return "the package cuda-bindings is missing (pip install cuda-bindings)"
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} is needed"
        )
    return None


def _has_driver_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def available_devices() -> tuple[str, ...]:
    """Types of device that a Communicator of this build and machine can serve, best first: ("cuda", "cpu")
    with a GPU, else ("cpu",)."""
    return ("cpu",) if why_no_cuda() else ("cuda", "cpu")


def make_backend(
    device: torch.device,
    meeting: Rendezvous,
    arguments: dict[str, Any],
    error: MoecommError | None,
    dtype: torch.dtype,
    num_sms: int | None,
) -> Backend:
    """Builds the backend of `device` together with the other ranks of `meeting`; `arguments` and `error` as
    in `backends.base.meet`."""
    if device.type == "cuda":
        return CudaBackend(device, meeting, arguments, error, dtype, num_sms)
    return CpuBackend(meeting, arguments, error, dtype, num_sms)
