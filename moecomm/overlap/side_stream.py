"""The stream on which transfers overlap with products."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from moecomm.communicator import Communicator
from moecomm.device.cuda_device import CudaDevice


class SideStream:
    """A context for transfers of `comm` that overlap with work on the caller's stream.

        with (side := SideStream(comm)):
            rows = comm.redispatch(grad, handle)    # after the caller's work so far
        ...                                         # the caller's products
        side.join(rows)                             # the caller's later work comes after the transfers

    The block runs on comm.stream. Its inputs and results must stay alive until `join`. With wanted=False, and
    on the CPU, the block runs on the caller's stream, and `join` does nothing. After an error in the block
    the caller's stream waits for the work that the block has issued.
    """

    def __init__(self, comm: Communicator, *, wanted: bool = True) -> None:
        self._receives = False
        self._stream = comm.stream if wanted else None
        self._gpu = CudaDevice(comm.device.index) if self._stream is not None else None
        self._caller: torch.cuda.Stream | None = None
        self._on_stream: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    @property
    def separate(self) -> bool:
        """True if the block runs on a separate stream."""
        return self._stream is not None

    def receiving(self) -> SideStream:
        """Returns the context for a block that receives what the previous block has sent. The block does not
        wait for work that the caller has issued since, and must not read the results of that work."""
        self._receives = True
        return self

    def __enter__(self) -> SideStream:
        if self._gpu is not None:
            assert self._stream is not None
            self._caller = self._gpu.stream()
            if not self._receives:
                self._stream.wait_event(self._gpu.record_event(self._caller))
            self._on_stream = self._gpu.on(self._stream)
            self._on_stream.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._gpu is not None:
            assert self._caller is not None
            self._on_stream.__exit__(None, None, None)
        if error is not None:
            self.join()
        self._receives = False

    def join(self, *results: Any) -> None:
        """Makes the caller's stream wait for the transfers. Later work on that stream may then use the
        transfers' `results` (tensors or None)."""
        if self._gpu is None or self._caller is None:
            return
        self._caller.wait_event(self._gpu.record_event(self._stream))
        with self._gpu.current():
            capturing = self._gpu.capturing()
        if capturing:
            return  # a graph owns its memory, and later work on the side stream waits for the caller
        for result in results:
            if result is not None:
                result.record_stream(self._caller)
