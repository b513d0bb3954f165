"""A stand-in for cuda.bindings.driver: the calls that moecomm makes, with the host's memory for the GPU's.

An allocation is a memfd, a shareable handle a descriptor of it (so it can be passed to another process), a
mapping a real mapping: what one process stores through its address another one reads through its own. The
fake counts what is alive and can make the n-th call of a name fail.
"""

import ctypes
import enum
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GRANULARITY = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NONE, _READ_WRITE, _FIXED = 0, mmap.PROT_READ | mmap.PROT_WRITE, 0x10


class Result(enum.IntEnum):
    """The codes of CUresult that matter here."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = Result.CUDA_SUCCESS


class Attribute(enum.IntEnum):
    """The values of CUdevice_attribute that moecomm asks for."""

    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


def _struct(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


@dataclass
class FakeDriver:
    """`gpus`: numbers of the GPUs that this process sees, by ordinal; number n has a uuid made of n.

    `unreachable`: pairs of numbers without peer access. `failing`: by call, (which call of it counting from
    1, the code it returns). `free_bytes`: what cuMemGetInfo says, and the most that cuMemCreate gives.
    """

    gpus: list[int] = field(default_factory=lambda: [0])
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    failing: dict[str, tuple[int, Result]] = field(default_factory=dict)
    free_bytes: int = 1 << 30
    posix_fd: bool = True

    CUresult = Result
    CUdevice_attribute = Attribute
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __post_init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.handles: dict[int, int] = {}  # handle -> memfd
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.contexts = 0  # retained
        self.stack: list[Any] = []  # current contexts
        self.torn_down = False
        self._next = 1000

    def alive(self) -> dict[str, int]:
        """Counts of what is not freed."""
        counts = {
            "handles": len(self.handles),
            "reservations": len(self.reservations),
            "mappings": len(self.mappings),
            "contexts": self.contexts,
            "current contexts": len(self.stack),
        }
        return {name: count for name, count in counts.items() if count}

    def names(self) -> list[str]:
        """Calls so far, in order."""
        return [entry[0] for entry in self.log]

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu") or name.startswith("cuGetError") or not callable(value):
            return value

        def counted(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            self.counts[name] += 1
            if self.torn_down:
                return (Result.CUDA_ERROR_DEINITIALIZED, None)
            when, code = self.failing.get(name, (0, OK))
            if self.counts[name] == when:
                return (code, None)
            return value(*arguments)

        return counted

    # -- structs ---------------------------------------------------------------------------------------------

    def CUmemAllocationProp(self) -> Any:
        return _struct(type=0, requestedHandleTypes=0, location=_struct(type=0, id=-1))

    def CUmemAccessDesc(self) -> Any:
        return _struct(location=_struct(type=0, id=-1), flags=0)

    # -- errors, devices, contexts ---------------------------------------------------------------------------

    def cuGetErrorName(self, code: Result) -> tuple[Any, ...]:
        return OK, code.name.encode()

    def cuGetErrorString(self, code: Result) -> tuple[Any, ...]:
        return OK, code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, len(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if not 0 <= ordinal < len(self.gpus):
            return Result.CUDA_ERROR_INVALID_DEVICE, None
        return OK, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, (f"0000:{self.gpus[device]:02x}:00.0".encode() + b"\0").ljust(length, b" ")

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        return OK, _struct(bytes=bytes([self.gpus[device]]) * 16)

    def cuDeviceGetAttribute(self, attribute: Attribute, device: int) -> tuple[Any, ...]:
        if attribute == Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
            return OK, int(self.posix_fd)
        return OK, 1

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:
        return OK, int((self.gpus[device], self.gpus[peer]) not in self.unreachable)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.contexts += 1
        return OK, f"context {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.contexts -= 1
        return (OK,)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return OK, self.stack.pop()

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        assert self.stack, "no current context"
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        assert self.stack, "no current context"
        return OK, self.free_bytes, 1 << 40

    # -- memory ----------------------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        return OK, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        assert size % GRANULARITY == 0
        assert properties.type == 1
        assert properties.location.id in range(len(self.gpus))
        if size > self.free_bytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        memory = os.memfd_create("fake-gpu")
        os.ftruncate(memory, size)
        return OK, self._handle(memory)

    def _handle(self, memory: int) -> int:
        self._next += 1
        self.handles[self._next] = memory
        return self._next

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        os.close(self.handles.pop(handle))
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        return OK, os.dup(self.handles[handle])

    def cuMemImportFromShareableHandle(self, shared: int, kind: int) -> tuple[Any, ...]:
        return OK, self._handle(os.dup(shared))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        address = _libc.mmap(None, size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reservations[address] = size
        return OK, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.reservations.pop(address) == size
        inside = [mapped for mapped in self.mappings if address <= mapped < address + size]
        assert not inside, "the range is still mapped"
        _libc.munmap(address, size)
        return (OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        memory = self.handles[handle]
        if os.fstat(memory).st_size != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        _libc.mmap(address, size, _NONE, mmap.MAP_SHARED | _FIXED, memory, 0)
        self.mappings[address] = size
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert (len(access), count) == (1, 1) and access[0].flags == 3 and access[0].location.type == 1
        assert self.mappings[address] == size
        _libc.mprotect(address, size, _READ_WRITE)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mappings.pop(address) == size
        _libc.mmap(address, size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Any, ...]:
        assert self.stack, "no current context"
        ctypes.memset(address, value, size)
        return (OK,)
