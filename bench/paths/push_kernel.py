"""The push kernel of push.cu: compiled when it is first wanted, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("push.cu")
_LEAST_SLOTS = 3  # of a lane: more than the stores that may be under way (KEEP in push.cu)
_WANTED_SLOTS = 5
_MOST_LANES, _MOST_SLOTS = 12, 16
_SLOT_ALIGNMENT = 128
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class Ring:
    """The division of a block's shared memory into lanes and slots."""

    lanes: int
    slots: int
    shared_bytes: int


def ring(row_bytes: int, shared_bytes: int) -> Ring:
    """Lanes and slots a lane for rows of `row_bytes` in blocks of at most `shared_bytes`.

    Example: rows of 14336 bytes, 227 KiB: 16 slots fit, 3 lanes of 5.
    """
    if row_bytes % 16:
        raise ValueError(f"rows of {row_bytes} bytes: bulk copies want multiples of 16")
    pitch = -(-row_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    fit = shared_bytes // (pitch + _BARRIER_BYTES)
    if fit < _LEAST_SLOTS:
        raise ValueError(f"rows of {row_bytes} bytes: {fit} fit in the shared memory of an SM")
    lanes = max(1, min(_MOST_LANES, fit // _WANTED_SLOTS))
    slots = min(_MOST_SLOTS, fit // lanes)
    return Ring(lanes, slots, lanes * slots * (pitch + _BARRIER_BYTES))


class PushKernel:
    """Pushes rows from addresses to addresses, both known to this GPU."""

    def __init__(self, device: torch.device) -> None:
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        torch.cuda.current_stream(device).synchronize()  # torch's context is there and current
        module = self._checked(self._driver.cuModuleLoadData(_cubin(device)))
        self._kernel = self._checked(self._driver.cuModuleGetFunction(module, b"push_rows"))
        attributes = self._driver.CUdevice_attribute
        optin = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_bytes: int = self._checked(self._driver.cuDeviceGetAttribute(optin, device.index))
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(self._driver.cuFuncSetAttribute(self._kernel, limit, self.shared_bytes))
        self._late = torch.zeros(1, dtype=torch.int32, device=device)

    def push(self, from_N: torch.Tensor, to_N: torch.Tensor, row_bytes: int, sms: int) -> None:
        """Copies a row of `row_bytes` from each address of `from_N` to its address in `to_N` (int64)."""
        rows = from_N.numel()
        if rows == 0:
            return
        shape = ring(row_bytes, self.shared_bytes)
        values = (from_N.data_ptr(), to_N.data_ptr(), rows, row_bytes, shape.slots, self._late.data_ptr())
        pointer, word = ctypes.c_void_p, ctypes.c_int
        self._checked(
            self._driver.cuLaunchKernel(
                self._kernel,
                *(sms, 1, 1),
                *(32 * shape.lanes, 1, 1),
                shape.shared_bytes,
                torch.cuda.current_stream().cuda_stream,
                (values, (pointer, pointer, word, word, word, pointer)),
                0,
            )
        )

    def require_done(self) -> None:
        """Raises RuntimeError if a row of an earlier push did not come out of memory in time."""
        if int(self._late):
            self._late.zero_()
            raise RuntimeError("the push kernel gave up waiting for a load")

    def _checked(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(f"CUDA driver: {error}")
        return values[0] if values else None


@lru_cache(maxsize=1)
def push_kernel(device: torch.device) -> PushKernel:
    """The one kernel of this process."""
    return PushKernel(device)


def _cubin(device: torch.device) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise RuntimeError(f"bulk copies need compute capability 9.0, this GPU has {major}.{minor}")
    architecture = f"sm_{major}{minor}"
    try:
        return _compile_here(architecture)
    except (ImportError, RuntimeError) as here:
        try:
            return compile_with_nvcc(architecture)
        except (OSError, subprocess.SubprocessError) as there:
            raise RuntimeError(f"push.cu cannot be compiled: NVRTC: {here}; nvcc: {there}") from there


def _compile_here(architecture: str) -> bytes:
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

    def checked(result: tuple[Any, ...], log: str = "") -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(f"{error} {log}".strip())
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(_SOURCE.read_bytes(), b"push.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    checked(compiled, log.decode(errors="replace").strip("\0 \n"))
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def compile_with_nvcc(architecture: str) -> bytes:
    """push.cu for one architecture, where there is no NVRTC that Python reaches."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "push.cubin"
        command = ["nvcc", f"-arch={architecture}", "-cubin", "-o", str(target), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return target.read_bytes()
