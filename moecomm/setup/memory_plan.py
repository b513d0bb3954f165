"""The size of a window before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import moecomm._C as _C
from moecomm.arguments import require_integer
from moecomm.env import Env
from moecomm.errors import InvalidArgument

NATIVE_DTYPES: dict[torch.dtype, _C.DType] = {
    getattr(torch, name): native for name, native in _C.DType.__members__.items()
}
CUDA_DTYPES = tuple(dtype for dtype in NATIVE_DTYPES if dtype != torch.float64)
"""The dtypes of rows on GPUs, for the kernels of communicators and those of experts."""
_MOST_ROW_BYTES = 1 << 47  # a process can map no more; so sizes of windows fit 64 bits
_WHOLE_SOURCES = 8  # kWholeSources in csrc/layout/device_window.hpp


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sections of one rank's window. `str()` makes a table of them.

    A window for CUDA tensors is device memory, allocated as a whole when the communicator is built; a window
    for CPU tensors is shared memory. docs/memory.md has the sections with their sizes.

    Attributes:
        sections: (name, offset, bytes) in the order of the window.
        total_bytes: address space of the window.
        committed_bytes: memory allocated when the communicator is built; on the CPU all but the input rows.
        ranks: ranks of a node.
        host_bytes: with GPUs on several nodes: additional pinned host memory, for the network.
    """

    sections: tuple[tuple[str, int, int], ...]
    total_bytes: int
    committed_bytes: int
    ranks: int
    host_bytes: int = 0

    def __str__(self) -> str:
        rows: list[tuple[str, int | str, int | str]] = [("section", "offset", "bytes"), *self.sections]
        rows.append(("total", "", self.total_bytes))
        rows.append(("taken at once", "", self.committed_bytes))
        rows.append(("a node at once", "", self.committed_bytes * self.ranks))
        if self.host_bytes:
            rows.append(("pinned host memory", "", self.host_bytes))
        lines = [f"{name:<18} {offset:>14} {size:>14}" for name, offset, size in rows]
        return "\n".join([f"window of one rank ({self.ranks} ranks a node)", *lines])


def window_shape(
    *, ranks: int, hidden: int, dtype: torch.dtype, ranks_per_node: int | None = None, **others: int
) -> _C.WindowShape:
    """Returns the runtime's description of a window. `others`: top_k and max_tokens. Raises InvalidArgument
    for sizes that a window cannot have."""
    if dtype not in tuple(NATIVE_DTYPES):  # not everything can be hashed
        names = ", ".join(str(known) for known in NATIVE_DTYPES)
        raise InvalidArgument(f"dtype is {dtype!r}, expected one of {names}")
    for name, value in {"ranks": ranks, "hidden": hidden, **others}.items():
        require_integer(name, value, 1)
    if hidden * dtype.itemsize % 16 != 0:
        raise InvalidArgument(
            f"hidden is {hidden}: a row of {dtype} would have {hidden * dtype.itemsize} bytes, "
            "expected a multiple of 16"
        )
    row_bytes = hidden * dtype.itemsize * others["max_tokens"]
    if row_bytes >= _MOST_ROW_BYTES:
        raise InvalidArgument(
            f"max_tokens is {others['max_tokens']}: so many rows of {hidden} {dtype} have {row_bytes} bytes, "
            f"expected fewer than {_MOST_ROW_BYTES}; lower max_tokens or hidden"
        )
    return _C.WindowShape(
        ranks=ranks,
        hidden=hidden,
        dtype=NATIVE_DTYPES[dtype],
        ranks_per_node=ranks if ranks_per_node is None else ranks_per_node,
        **others,
    )


def whole_sources(env: Env) -> int:
    """Returns how many source ranks have memory for all their tokens in the staging section of a rank's
    window: as many as `env` says, or eight."""
    return _WHOLE_SOURCES if env.whole_sources is None else env.whole_sources


def device_shape(*, dtype: torch.dtype, wire: str | None, **sizes: int) -> _C.DeviceShape:
    """Returns the runtime's description of a window in device memory. sizes: those of `window_shape`,
    num_experts, and `whole_sources`."""
    return _C.DeviceShape(dtype=NATIVE_DTYPES[dtype], wire=getattr(_C.WireFormat, wire or "same"), **sizes)


def plan_device_memory(shape: _C.DeviceShape, ranks: int) -> MemoryPlan:
    """Returns the sections of a window of `shape` in device memory; `ranks`: ranks of a node."""
    total = _C.device_window_bytes(shape)
    return MemoryPlan(
        sections=tuple(_C.device_window_sections(shape)),
        total_bytes=total,
        committed_bytes=total,
        ranks=ranks,
        host_bytes=_C.device_host_bytes(shape),
    )


def plan_memory(shape: _C.WindowShape, ranks: int) -> MemoryPlan:
    """Returns the sections of a window of `shape`; `ranks`: ranks of a node."""
    total, committed = _C.window_bytes(shape)
    return MemoryPlan(
        sections=tuple(_C.window_sections(shape)), total_bytes=total, committed_bytes=committed, ranks=ranks
    )
