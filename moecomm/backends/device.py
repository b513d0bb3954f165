"""What the CUDA backend asks of torch.cuda: streams and events of one GPU, at little cost on the host."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class CudaDevice:
    """One GPU. Current streams are those of this GPU, whichever is the current device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        # What torch.cuda.current_stream(index).cuda_stream returns, without making an object of it.
        self._raw_stream = torch._C._cuda_getCurrentRawStream

    def is_current(self) -> bool:
        """True if a call that names no device means this one."""
        return torch.cuda.current_device() == self.index

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this the current device for a block."""
        return torch.cuda.device(self.index)

    def raw_stream(self) -> int:
        """The current stream as the CUDA runtime knows it."""
        return self._raw_stream(self.index)

    def stream(self) -> torch.cuda.Stream:
        """The current stream."""
        return torch.cuda.current_stream(self.index)

    def new_stream(self) -> torch.cuda.Stream:
        """A stream of high priority: the few blocks of a transfer get their SMs before the many of a GEMM."""
        return torch.cuda.Stream(self.index, priority=-1)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Makes `stream`, and its device, current for a block."""
        return torch.cuda.stream(stream)

    def capturing(self) -> bool:
        """True if the current stream is recording a CUDA graph. This has to be the current device."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Waits for all work of this process on this GPU."""
        torch.cuda.synchronize(self.index)

    def free_bytes(self, wanted: int) -> int:
        """Memory that can be allocated; if it is less than `wanted`, torch gives back what it only caches."""
        free = int(torch.cuda.mem_get_info(self.index)[0])
        if free < wanted:
            torch.cuda.empty_cache()
            free = int(torch.cuda.mem_get_info(self.index)[0])
        return free

    def uuid(self) -> str:
        """Names the GPU on this host, whatever its index in this process."""
        return str(torch.cuda.get_device_properties(self.index).uuid)

    def push_range(self, name: str) -> None:
        """Opens an NVTX range: a few tens of nanoseconds when no profiler listens."""
        torch.cuda.nvtx.range_push(name)

    def pop_range(self) -> None:
        """Closes the last NVTX range of this thread."""
        torch.cuda.nvtx.range_pop()
