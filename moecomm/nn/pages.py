"""The pages of an ActivationPool: on a GPU by kernels, elsewhere by torch, with the same outcome.

Both keep the same words. A pool's state is eight int64: free pages on the device and in host memory, pages
held (also by handles that did not get theirs), the most held, whether a handle failed, whether rows were
asked for that were gone, the serial of the last handle, and that at the last reset
(csrc/kernels/pool/pages.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moecomm import _C
from moecomm.device.cuda_device import CudaDevice, StreamOrder, no_kernels
from moecomm.errors import OutOfMemory

STATE_WORDS = 8
FREE_DEVICE, FREE_HOST, HELD, PEAK, FAILED, LOST, SERIAL, RESET = range(STATE_WORDS)

TABLE_WORDS = 8
"""int32 words of a handle's table before its pages' numbers: the serial (two of them), then those below.
(csrc/kernels/pool/pages.hpp calls the table a ticket.)"""
_STATUS, _ROWS, _PAGES, _DEVICE_PAGES = 2, 3, 4, 5
_TAKEN, _FAILED, _GIVEN_BACK = 1, 2, 3


class Pages(Protocol):
    """The pages of a pool and their owners. Tensors are contiguous (P, C), at multiples of 16 bytes."""

    state: Tensor
    """(STATE_WORDS,) int64, the words FREE_DEVICE to RESET."""

    def stash(self, tensors: Sequence[Tensor], ends_L: Tensor | None, table: Tensor) -> None:
        """Takes pages for the real rows, copies the rows there, and fills the handle's `table`."""

    def restore(self, tensors: Sequence[Tensor], table: Tensor) -> None:
        """Copies the rows into `tensors`, and frees their pages."""

    def drop(self, table: Tensor) -> None:
        """Frees the pages."""

    def reset(self) -> None:
        """Frees all pages; handles from before have none."""

    def follow(self) -> None:
        """Makes later work of the caller with `state` come after all of the above."""

    def capture(self) -> int:
        """Returns the number of the CUDA graph capture that the caller is in; 0 if it is in none."""


def make_pages(device: torch.device, device_pages: int, host_pages: int, page_bytes: int) -> Pages:
    """Makes the pages. Raises OutOfMemory, or Unsupported where there are no kernels for the device."""
    try:
        if device.type == "cuda":
            return CudaPages(device, device_pages, host_pages, page_bytes)
        return HostPages(device_pages, host_pages, page_bytes)
    except torch.OutOfMemoryError as error:
        needed = (device_pages + host_pages) * page_bytes
        raise OutOfMemory(f"no memory for a pool of {needed} bytes: {error}", needed=needed) from error


def count_pages(rows: int, row_bytes: Sequence[int], page_bytes: int) -> int:
    """Returns the pages of tensors with so many rows: each tensor begins with a page of its own."""
    return sum(-(-rows * each // page_bytes) for each in row_bytes)


def row_bytes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the bytes of one row of each tensor."""
    return [each.shape[1] * each.element_size() for each in tensors]


class CudaPages:
    """Pages on a GPU, by the kernels of csrc/kernels/pool. Launches follow each other, also from several
    streams."""

    def __init__(self, device: torch.device, device_pages: int, host_pages: int, page_bytes: int) -> None:
        if not hasattr(_C, "PagePool"):
            raise no_kernels(f"device is {device}")
        assert _C.PagePool.ticket_words == TABLE_WORDS
        self._gpu = CudaDevice(device.index)
        with self._gpu.current():
            pages = device_pages + host_pages
            self._memory = torch.empty(device_pages * page_bytes, dtype=torch.uint8, device=device)
            # Pinned memory has one address for the host and the device.
            of_host: dict[str, Any] = {"device": "cpu", "pin_memory": host_pages > 0}
            self._host = torch.empty(host_pages * page_bytes, dtype=torch.uint8, **of_host)
            self.state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
            self._free = torch.empty(pages, dtype=torch.int32, device=device)
            self._owner = torch.empty(pages, dtype=torch.int64, device=device)
            self._native = _C.PagePool(
                state=self.state.data_ptr(),
                free=self._free.data_ptr(),
                owner=self._owner.data_ptr(),
                device=self._memory.data_ptr(),
                host=self._host.data_ptr() if host_pages else 0,
                device_pages=device_pages,
                host_pages=host_pages,
                page_bytes=page_bytes,
            )
            self._order = StreamOrder(self._gpu)
            self.reset()

    def stash(self, tensors: Sequence[Tensor], ends_L: Tensor | None, table: Tensor) -> None:
        """Launches two kernels: one takes the pages, one copies the rows."""
        ends_L = None if ends_L is None else ends_L.contiguous()
        with self._gpu.current():
            self._native.push(
                _described(tensors),
                tensors[0].shape[0],
                0 if ends_L is None else ends_L.data_ptr(),
                0 if ends_L is None else ends_L.shape[0],
                table.data_ptr(),
                table.shape[0] - TABLE_WORDS,
                self._stream(),
            )

    def restore(self, tensors: Sequence[Tensor], table: Tensor) -> None:
        """Launches two kernels: one copies the rows, one frees the pages."""
        with self._gpu.current():
            rows = tensors[0].shape[0]
            self._native.pop(_described(tensors), rows, table.data_ptr(), self._stream())

    def drop(self, table: Tensor) -> None:
        """Launches one kernel, which frees the pages."""
        with self._gpu.current():
            self._native.drop(table.data_ptr(), self._stream())
            table.record_stream(self._gpu.stream())

    def reset(self) -> None:
        """Launches one kernel, which frees all pages."""
        with self._gpu.current():
            self._native.reset(self._stream())

    def follow(self) -> None:
        """Makes the current stream wait for the pool's work, if that was on another one."""
        with self._gpu.current():
            self._stream()

    def capture(self) -> int:
        """Returns the number that the CUDA runtime gives the capture; 0 without one."""
        with self._gpu.current():
            return _C.PagePool.capture(self._gpu.raw_stream()) if self._gpu.capturing() else 0

    def _stream(self) -> int:
        """Returns the current stream and makes it wait for the pool's work so far; within a capture, for the
        captured work."""
        raw_stream = self._gpu.raw_stream()
        self._order.follow(raw_stream, self._gpu.capturing())
        return raw_stream


def _described(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(each.data_ptr(), size) for each, size in zip(tensors, row_bytes_of(tensors), strict=True)]


class HostPages:
    """Pages on the CPU; work is done at once. Host pages are pages like the others, taken last. Like the
    kernels, it writes tables that autograd has saved without autograd's knowing."""

    def __init__(self, device_pages: int, host_pages: int, page_bytes: int) -> None:
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64)
        self._counts = (device_pages, host_pages)
        self._page_bytes = page_bytes
        self._memory = torch.empty(device_pages + host_pages, page_bytes, dtype=torch.uint8)
        self._owner = [0] * (device_pages + host_pages)
        self._free: tuple[list[int], list[int]] = ([], [])
        self.reset()

    def stash(self, tensors: Sequence[Tensor], ends_L: Tensor | None, table: Tensor) -> None:
        """Takes pages and copies the rows there, as the kernels do."""
        table, rows = table.data, tensors[0].shape[0]
        count = rows if ends_L is None else max(0, min(rows, int(ends_L[-1])))
        sizes = row_bytes_of(tensors)
        needed = count_pages(count, sizes, self._page_bytes)
        state = self.state
        state[SERIAL] += 1
        state[HELD] += needed
        state[PEAK] = max(int(state[PEAK]), int(state[HELD]))
        on_device, in_host = self._free
        fits = needed <= len(on_device) + len(in_host)
        serial = int(state[SERIAL])
        table[:2].view(torch.int64)[0] = serial
        table[_STATUS] = _TAKEN if fits else _FAILED
        table[_ROWS], table[_PAGES] = count, needed
        table[_DEVICE_PAGES] = min(needed, len(on_device)) if fits else 0
        if not fits:
            state[FAILED] = 1
            return
        pages = [on_device.pop() if on_device else in_host.pop() for _ in range(needed)]
        table[TABLE_WORDS : TABLE_WORDS + needed] = torch.tensor(pages, dtype=torch.int32)
        for page in pages:
            self._owner[page] = serial
        self._count()
        for piece, stored in self._pieces(tensors, table):
            stored.copy_(piece)

    def restore(self, tensors: Sequence[Tensor], table: Tensor) -> None:
        """Copies the rows back and frees their pages, as the kernels do."""
        if self._has_rows(table):
            for piece, stored in self._pieces(tensors, table):
                piece.copy_(stored)
        self.drop(table)

    def drop(self, table: Tensor) -> None:
        """Frees the pages, as the kernels do."""
        table = table.data
        status = int(table[_STATUS])
        table[_STATUS] = _GIVEN_BACK
        serial, pages = self._serial(table), self._pages(table)
        if status not in (_TAKEN, _FAILED) or serial <= int(self.state[RESET]):
            return
        if status == _TAKEN and pages and self._owner[pages[0]] != serial:
            self.state[LOST] = 1
            return
        self.state[HELD] -= int(table[_PAGES])
        if status == _TAKEN:
            on_device = int(table[_DEVICE_PAGES])
            for free, given in zip(self._free, (pages[:on_device], pages[on_device:]), strict=True):
                free += reversed(given)
            for page in pages:
                self._owner[page] = 0
            self._count()

    def reset(self) -> None:
        """Frees all pages, as the kernel does."""
        on_device, in_host = self._counts
        self._free = (
            list(range(on_device - 1, -1, -1)),
            list(range(on_device + in_host - 1, on_device - 1, -1)),
        )
        self._owner = [0] * (on_device + in_host)
        self.state[HELD : LOST + 1] = 0
        self.state[RESET] = self.state[SERIAL]
        self._count()

    def follow(self) -> None:
        """Does nothing: all work is done at once."""

    def capture(self) -> int:
        """Returns 0: there are no captures on the CPU."""
        return 0

    def _count(self) -> None:
        self.state[FREE_DEVICE], self.state[FREE_HOST] = len(self._free[0]), len(self._free[1])

    def _has_rows(self, table: Tensor) -> bool:
        status = int(table[_STATUS])
        if status == _FAILED:
            return False
        serial = self._serial(table)
        known = status == _TAKEN and serial > int(self.state[RESET])
        if known and all(self._owner[page] == serial for page in self._pages(table)):
            return True
        self.state[LOST] = 1
        return False

    def _serial(self, table: Tensor) -> int:
        return int(table[:2].view(torch.int64)[0])

    def _pages(self, table: Tensor) -> list[int]:
        if int(table[_STATUS]) == _FAILED:
            return []
        pages: list[int] = table[TABLE_WORDS : TABLE_WORDS + int(table[_PAGES])].tolist()
        return pages

    def _pieces(self, tensors: Sequence[Tensor], table: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the parts of the tensors, each with its place in a page."""
        pages, count = self._pages(table), int(table[_ROWS])
        found = []
        for tensor in tensors:
            data = tensor[:count].reshape(-1).view(torch.uint8)
            for begin in range(0, data.numel(), self._page_bytes):
                piece = data[begin : begin + self._page_bytes]
                found.append((piece, self._memory[pages.pop(0)][: piece.numel()]))
        return found
