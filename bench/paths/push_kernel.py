"""The kernels of push.cu: compiled when they are first wanted, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("push.cu")
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
        module = _checked(self._driver.cuModuleLoadData(_cubin(device)))
        self._push, self._exchange = (
            _checked(self._driver.cuModuleGetFunction(module, name))
            for name in (b"push_rows", b"exchange_rows")
        )
        attributes = self._driver.CUdevice_attribute
        optin = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_bytes: int = _checked(self._driver.cuDeviceGetAttribute(optin, device.index))
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for kernel in (self._push, self._exchange):
            _checked(self._driver.cuFuncSetAttribute(kernel, limit, self.shared_bytes))
        self._late = torch.zeros(1, dtype=torch.int32, device=device)

    def push(self, from_N: torch.Tensor, to_N: torch.Tensor, row_bytes: int, sms: int) -> None:
        """Copies a row of `row_bytes` from each address of `from_N` to its address in `to_N` (int64)."""
        if from_N.numel():
            self._launch(self._push, from_N, to_N, row_bytes, sms)

    def exchange(
        self,
        from_N: torch.Tensor,
        to_N: torch.Tensor,
        row_bytes: int,
        sms: int,
        flags_P: torch.Tensor,
        own_P: torch.Tensor,
        counters: torch.Tensor,
    ) -> None:
        """The same, then a flag to each peer, at the addresses `flags_P`, and a wait for theirs at `own_P`
        (int64); `counters` are two zeros (int64) that the exchanges of these flags keep. All ranks call it.
        """
        flags = (flags_P.data_ptr(), own_P.data_ptr(), flags_P.numel(), counters.data_ptr())
        self._launch(self._exchange, from_N, to_N, row_bytes, sms, *flags)

    def _launch(
        self, kernel: Any, from_N: torch.Tensor, to_N: torch.Tensor, row_bytes: int, sms: int, *flags: int
    ) -> None:
        shape = ring(row_bytes, self.shared_bytes)
        rows = (from_N.data_ptr(), to_N.data_ptr(), from_N.numel(), row_bytes, shape.slots)
        pointer, word = ctypes.c_void_p, ctypes.c_int
        kinds = (pointer, pointer, word, word, word, pointer, pointer, pointer, word, pointer)
        values = (*rows, self._late.data_ptr(), *flags)
        _checked(
            self._driver.cuLaunchKernel(
                kernel,
                *(sms, 1, 1),
                *(32 * shape.lanes, 1, 1),
                shape.shared_bytes,
                torch.cuda.current_stream().cuda_stream,
                (values, kinds[: len(values)]),
                0,
            )
        )

    def require_done(self) -> None:
        """Raises RuntimeError if a row of an earlier push, or a peer's flag, did not come in time."""
        if int(self._late):
            self._late.zero_()
            raise RuntimeError("the push kernel gave up waiting for a load or a flag")


@lru_cache(maxsize=1)
def push_kernel(device: torch.device) -> PushKernel:
    """The one kernel of this process."""
    return PushKernel(device)


def _cubin(device: torch.device) -> bytes:
    """push.cu compiled by NVRTC. Raises RuntimeError with the compiler's log, or why there can be none."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise RuntimeError(f"bulk copies need compute capability 9.0, this GPU has {major}.{minor}")
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"push.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
    compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    _checked(compiled, log.decode(errors="replace").strip("\0 \n"))
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _checked(result: tuple[Any, ...], log: str = "") -> Any:
    """The value of a call of the driver or of NVRTC. Raises RuntimeError for an error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{error!r} {log}".strip())
    return values[0] if values else None
