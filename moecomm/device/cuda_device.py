"""Streams and events of one GPU, at low cost on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


class CudaDevice:
    """One GPU. A current stream is always that of this GPU, whichever device is current.

    Frequent queries call functions of torch._C, since their wrappers in torch.cuda cost the host more time.
    The wrappers also initialise CUDA, which has happened once a communicator has memory on the GPU.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._current_device = torch._C._cuda_getDevice
        self.raw_stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)
        """Returns the handle (cudaStream_t) of the current stream."""
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        """Returns True if the current stream is recording a CUDA graph; this GPU has to be the current
        device."""
        self.push_range: Callable[[str], int] = torch._C._nvtx.rangePushA
        """Opens an NVTX range: a few tens of nanoseconds when no profiler listens."""
        self.pop_range: Callable[[], int] = torch._C._nvtx.rangePop
        """Closes the last NVTX range of this thread."""

    def is_current(self) -> bool:
        """Returns True if this GPU is the current device, used by calls that name no device."""
        return self._current_device() == self.index

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which this GPU is the current device."""
        return torch.cuda.device(self.index)

    def launch(self, launcher: Callable[..., None], *arguments: Any) -> None:
        """Calls a launcher of the extension. Tensors become addresses (0 for None and for tensors without
        elements), other arguments stay, and the current stream of this GPU comes last."""
        given = (
            _address(each) if each is None or isinstance(each, torch.Tensor) else each for each in arguments
        )
        if self.is_current():
            launcher(*given, self.raw_stream())
        else:
            with self.current():
                launcher(*given, self.raw_stream())

    def stream(self) -> torch.cuda.Stream:
        """Returns the current stream of this GPU."""
        return torch.cuda.current_stream(self.index)

    def new_stream(self) -> torch.cuda.Stream:
        """Returns a new stream of high priority, so that the few blocks of a transfer get SMs before the many
        blocks of a GEMM."""
        return torch.cuda.Stream(self.index, priority=-1)

    def record_event(
        self, stream: torch.cuda.Stream | None = None, *, timed: bool = False
    ) -> torch.cuda.Event:
        """Returns an event recorded after the present work of `stream` (None: the current stream). `timed`:
        the event can be used with `elapsed_time`."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.stream() if stream is None else stream)
        return event

    def switch(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` and its device current."""
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A context in which `stream` and its device are current."""
        with contextlib.nullcontext() if self.is_current() else self.current():
            before = self.stream()
            self.switch(stream)
            try:
                yield
            finally:
                self.switch(before)

    def synchronize(self) -> None:
        """Waits for all work of this process on this GPU."""
        torch.cuda.synchronize(self.index)

    def free_bytes(self, wanted: int) -> int:
        """Returns how many bytes of the GPU are free. If they are fewer than `wanted`, first makes torch free
        its cached memory."""
        free = int(torch.cuda.mem_get_info(self.index)[0])
        if free < wanted:
            torch.cuda.empty_cache()
            free = int(torch.cuda.mem_get_info(self.index)[0])
        return free

    def uuid(self) -> str:
        """Returns the GPU's UUID, which identifies it on this host, whatever its index in this process."""
        return str(torch.cuda.get_device_properties(self.index).uuid)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


class StreamOrder:
    """Orders work on several streams of one GPU: `follow` makes later work of the current stream wait for the
    work of all streams for which it was called before. Within a capture it waits for captured work only; the
    caller orders replays of the graph and other work.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        # (Handle, stream) of the last `follow`, outside of captures (False) and within one (True).
        self._last: dict[bool, tuple[int, torch.cuda.Stream | None]] = {False: (-1, None), True: (-1, None)}

    def follow(self, raw_stream: int, capturing: bool) -> None:
        """Makes the current stream, whose handle is `raw_stream`, wait for the stream of the last call if
        that is another stream. `capturing`: whether the current stream records a CUDA graph."""
        last_raw, last = self._last[capturing]
        if raw_stream == last_raw:
            return
        gpu = self._gpu
        stream = gpu.stream()
        if capturing and last is not None:
            with gpu.on(last):
                if not gpu.capturing():  # the last work was in an earlier capture
                    last = None
        self._last[capturing] = raw_stream, stream
        if last is not None:
            stream.wait_event(last.record_event())
