"""Functions that define the operators of moecomm for torch, and that load the GPU kernels of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import moecomm._C as _C
from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import Unsupported
from moecomm.setup.memory_plan import NATIVE_DTYPES

LIBRARY = torch.library.Library("moecomm", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
    """Defines the operator moecomm::NAME, which torch.compile keeps whole. schema: "NAME(arguments) ->
    results"; run: computes the results; fake: checks its arguments and returns uninitialised results."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moecomm::{name}", fake, lib=LIBRARY)


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
