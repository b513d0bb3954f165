"""Functions that load the GPU kernels of experts and routers."""

from __future__ import annotations

import functools

import torch

import moecomm._C as _C
from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import Unsupported
from moecomm.setup.memory_plan import NATIVE_DTYPES


def prepare(kernels: str, device: torch.device, dtype: torch.dtype) -> None:
    """Loads `kernels` of the extension for a dtype onto a CUDA device, before their first use: loading may
    wait for running kernels, and those of a communicator for other ranks. Does nothing elsewhere. Raises
    Unsupported if this build has no CUDA part."""
    if device.type == "cuda":
        loaded(kernels, device.index if device.index is not None else torch.cuda.current_device(), dtype)


@functools.cache
def loaded(kernels: str, index: int, dtype: torch.dtype) -> CudaDevice:
    """Loads `kernels` of the extension for a dtype onto a GPU, if needed, and returns the GPU."""
    if not hasattr(_C, f"prepare_{kernels}"):
        raise Unsupported(
            f"a tensor is on cuda:{index}, but this moecomm was built without its CUDA part (no CUDA toolkit "
            "at build time), or before it had this operation: build it again where nvcc is on PATH"
        )
    gpu = CudaDevice(index)
    with gpu.current():
        getattr(_C, f"prepare_{kernels}")(NATIVE_DTYPES[dtype])
    return gpu
