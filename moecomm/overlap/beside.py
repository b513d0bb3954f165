"""Transfers beside products: the stream that they run on, and how many SMs they take there."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch

from moecomm.communicator import Communicator
from moecomm.device.cuda_device import CudaDevice

_SMS_TIMES_COLUMNS = 210
"""The share of a GPU's SMs for a transfer, times the columns of the product beside it."""
_HOME_SUMS = 4
"""The cost on few SMs of sending a token's gradient back and adding it up, in expert rows."""


def sms_beside_wgrad(*, sms: int, ranks: int, top_k: int, row_bytes: int, inner: int) -> int | None:
    """Returns the SMs on which gradients of tokens travel home beside the weight gradient of the experts'
    first product (`inner` columns, I), so many that both take about the same time; None where the transfer
    runs better alone, on the communicator's SMs.

    Both the bytes of the transfer and the product's operations grow with rows times H, so the share of the
    SMs follows from the product's columns alone; the transfer also sums a token's rows, which is one more row
    a token. A transfer on fewer than eight SMs takes much longer; docs/history.md has the measurements.

    None is for a share of more than a quarter of the GPU, or of less than 3 % (leaving eight SMs costs such a
    long product more than the transfer takes alone), for one rank, and for two ranks with rows above 8 KiB:
    half of their rows stay where they are.

    Example: 132 SMs, 4 ranks, top-8, rows of 14336 bytes, I = 4096: 10.
    """
    share = (1 + _HOME_SUMS / top_k) * _SMS_TIMES_COLUMNS / inner
    if ranks == 1 or (ranks == 2 and row_bytes > 8192) or not 0.03 <= share <= 0.25:
        return None
    return max(8, 2 * round(share * sms / 2))


class Beside:
    """A context for transfers of `comm` beside what the caller puts on its own stream meanwhile.

        with (side := Beside(comm)):
            rows = comm.redispatch(grad, handle)    # after the caller's work so far
        ...                                         # the caller's products
        side.join(rows)                             # the caller's later work comes after the transfers

    The block runs on comm.stream. What it reads and returns must stay alive until `join`. With wanted=False,
    and on the CPU, it runs on the caller's stream, and `join` does nothing. An error in the block makes the
    caller's stream wait for what the block has issued.
    """

    def __init__(self, comm: Communicator, *, wanted: bool = True) -> None:
        self._receives = False
        self._stream = comm.stream if wanted else None
        self._gpu = CudaDevice(comm.device.index) if self._stream is not None else None
        self._caller: torch.cuda.Stream | None = None
        self._on_stream: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    @property
    def apart(self) -> bool:
        """True if the block runs on a stream of its own."""
        return self._stream is not None

    def receiving(self) -> Beside:
        """Returns the context for a block that receives what the block before has sent. It does not wait for
        what the caller has issued since, which it must not read."""
        self._receives = True
        return self

    def __enter__(self) -> Beside:
        if self._gpu is not None:
            assert self._stream is not None
            self._caller = self._gpu.stream()
            if not self._receives:
                self._stream.wait_event(self._gpu.record_event(self._caller))
            self._on_stream = self._gpu.on(self._stream)
            self._on_stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gpu is not None:
            assert self._caller is not None
            self._on_stream.__exit__(None, None, None)
        if error is not None:
            self.join()
        self._receives = False

    def join(self, *results: Any) -> None:
        """Makes the caller's later work come after the transfers, whose `results` (tensors or None) it may
        use."""
        if self._gpu is None or self._caller is None:
            return
        self._caller.wait_event(self._gpu.record_event(self._stream))
        with self._gpu.current():
            capturing = self._gpu.capturing()
        if capturing:
            return  # a graph owns its memory, and what comes later on the stream waits for the caller
        for result in results:
            if result is not None:
                result.record_stream(self._caller)
