"""A memory pool for tensors that layers of a fixed capacity keep for their backward; it holds their real rows
only."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecomm.errors import InvalidArgument, PoolExceeded
from moecomm.nn.pages import (
    FAILED,
    HELD,
    LOST,
    PEAK,
    TABLE_WORDS,
    count_pages,
    make_pages,
    row_bytes_of,
)

PAGE_BYTES = 1 << 16
LEAST_PAGE_BYTES, MOST_PAGE_BYTES = 1 << 12, 1 << 30
MOST_TENSORS = 4
"""The most tensors of one handle."""
_ALIGNMENT = 16


class PoolHandle(NamedTuple):
    """A reference to tensors that `stash` has put into the pool. Only `table` changes from one replay of a
    graph to the next."""

    table: Tensor
    """int32, on the pool's device: how many rows there are, and the numbers of their pages."""
    rows: int
    """P of the stashed tensors."""
    columns: tuple[tuple[int, torch.dtype], ...]
    """C and dtype of each stashed tensor."""


class PoolUse(NamedTuple):
    """The use of a pool in bytes, of whole pages."""

    held: int
    """Bytes of all handles that are not restored or dropped, also of those that did not get their pages."""
    peak: int
    """The most bytes held since the last `reset`, or the last error of `check`."""
    available: int
    """Bytes of the pool."""


class _Owner:
    """The memory of a table, for a tensor that shares it: that tensor's storage holds this object and frees
    it when the last tensor of the storage is gone."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.on_end: weakref.finalize[Any, _Owner]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self._table.shape),
            "typestr": "<i4",
            "data": (self._table.data_ptr(), False),
            "version": 3,
        }

    __cuda_array_interface__ = __array_interface__


class ActivationPool:
    """Pages of one size, which hold the real rows of tensors whose shape is sized for the worst case.

        pool = ActivationPool("cuda", 8 << 30)
        handle = pool.stash(rows_PH, inner_PI, ends=offsets_L)    # the first offsets_L[-1] rows of both
        rows_PH, inner_PI = pool.restore(handle)

    `stash` takes as many pages as the rows need, which only the device knows, from a stack of free ones; so a
    captured CUDA graph takes in each replay what that replay needs. The host waits for nothing, and the same
    calls take the same pages. Handles may be restored in any order. Work of several streams on one
    pool is put in the order of the calls.

    Where pages do not suffice `stash` takes and writes nothing, and `restore` leaves the rows unspecified.
    Nothing traps. The pool goes on counting as if the rows were there: `check` raises PoolExceeded with what
    all handles together would have needed.

    Args:
        device: device of the tensors. On the CPU torch does the same, step by step.
        bytes: size of the pages in the device's memory; rounded down to whole pages.
        page_bytes: a power of two from 4 KiB to 1 GiB. A tensor leaves half a page unused on average; a
            handle has 4 bytes a page of the worst case.
        spill_bytes: size of further pages in pinned host memory, which kernels read and write over the bus,
            and which are taken when there are no others. (torch's allocator of pinned memory rounds up to a
            power of two.)

    Raises InvalidArgument, OutOfMemory, and Unsupported on CUDA where this build has no CUDA part.

    Attributes:
        device_bytes: bytes of the pages in the device's memory.
        spill_bytes: bytes of the pages in pinned host memory.
    """

    def __init__(
        self,
        device: torch.device | str,
        bytes: int,
        *,
        page_bytes: int = PAGE_BYTES,
        spill_bytes: int = 0,
    ) -> None:
        self.device = _whole_device(device)
        power_of_two = isinstance(page_bytes, int) and page_bytes > 0 and page_bytes & (page_bytes - 1) == 0
        if not power_of_two or not LEAST_PAGE_BYTES <= page_bytes <= MOST_PAGE_BYTES:
            raise InvalidArgument(
                f"page_bytes is {page_bytes!r}, must be a power of two from {LEAST_PAGE_BYTES} to "
                f"{MOST_PAGE_BYTES}"
            )
        for name, value in (("bytes", bytes), ("spill_bytes", spill_bytes)):
            if not isinstance(value, int) or value < 0:
                raise InvalidArgument(f"{name} is {value!r}, must be a number of bytes, at least 0")
        self.page_bytes = page_bytes
        self.device_bytes = bytes // page_bytes * page_bytes
        self.spill_bytes = spill_bytes // page_bytes * page_bytes
        if self.bytes == 0:
            raise InvalidArgument(f"bytes is {bytes}, must be at least one page of {page_bytes}")
        self._pages = make_pages(
            self.device, self.device_bytes // page_bytes, self.spill_bytes // page_bytes, page_bytes
        )
        self._owners: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()
        """Owners of handles from `owned` that are not restored, by the addresses of their tables."""
        self._given_up: deque[tuple[Tensor, int]] = deque()
        """Tables whose owners are gone, and the captures that they belong to."""

    @property
    def bytes(self) -> int:
        """The bytes of all pages."""
        return self.device_bytes + self.spill_bytes

    def stash(self, *tensors: Tensor, ends: Tensor | None = None) -> PoolHandle:
        """Keeps the real rows of 1 to 4 tensors (P, C), each with its own C and dtype.

        ends: (L,) int32 on the device; rows from ends[-1] on are not real. None: all are.
        """
        self._check(tensors, ends)
        self._settle()
        handle = self._new_handle(tensors)
        self._pages.stash(tuple(_readable(each) for each in tensors), ends, handle.table)
        return handle

    def owned(self, handle: PoolHandle) -> PoolHandle:
        """Returns the same handle with a table whose memory owns the pages: they are freed with the last
        tensor that shares it, if they have not been restored or dropped before.

        So whoever saves the table, or an alias of it, keeps the pages, and nobody else does: neither a
        backward that never runs nor an exception leaves pages behind. They are free for the next call of this
        pool. Pages of a `stash` in a capture are freed within that capture or, in each replay, not at all.
        """
        owner = _Owner(handle.table)
        # The garbage collector may end an owner at any point of any thread, so this only takes a note.
        owner.on_end = weakref.finalize(owner, self._given_up.append, (handle.table, self._pages.capture()))
        owner.on_end.atexit = False
        self._owners[handle.table.data_ptr()] = owner
        if self.device.type == "cpu":
            return handle._replace(table=torch.from_numpy(np.asarray(owner)))
        return handle._replace(table=torch.as_tensor(owner, device=self.device))

    def blank(self, *tensors: Tensor) -> PoolHandle:
        """Returns a handle as `stash` of these tensors would, but keeps nothing and counts nothing. Restoring
        it is an error, as restoring a handle twice is."""
        self._check(tensors, None)
        handle = self._new_handle(tensors)
        handle.table[:TABLE_WORDS].zero_()
        return handle

    def restore(self, handle: PoolHandle) -> tuple[Tensor, ...]:
        """Returns the tensors (P, C) of a handle, contiguous, and frees their pages. Rows that were not real
        are unspecified. A handle can be restored once: the second time all rows are unspecified, and `check`
        raises InvalidArgument; the same holds after a `reset`."""
        table, rows, columns = handle
        self._settle()
        self._disown(table)
        tensors = tuple(torch.empty(rows, count, dtype=dtype, device=self.device) for count, dtype in columns)
        self._pages.restore(tensors, table)
        return tensors

    def drop(self, handle: PoolHandle) -> None:
        """Frees the pages of a handle without restoring its rows."""
        self._disown(handle.table)
        self._pages.drop(handle.table)

    def reset(self) -> None:
        """Frees all pages and clears all errors. Rows of earlier handles are gone: this belongs to the start
        of a step, where no backward is outstanding. It also frees rows whose backward never came. Can be
        captured."""
        self._pages.reset()

    def use(self) -> PoolUse:
        """Returns the use of the pool now. Waits for the device."""
        self._settle()
        self._pages.follow()
        held, peak = self._pages.state[HELD : PEAK + 1].tolist()
        return PoolUse(held * self.page_bytes, peak * self.page_bytes, self.bytes)

    def check(self) -> None:
        """Raises PoolExceeded, once, if a `stash` since the last check or reset did not get its pages;
        InvalidArgument, once, if rows were restored that were not there any more. Waits for the device."""
        self._settle()
        self._pages.follow()
        state = self._pages.state
        words = state.tolist()
        state[PEAK].copy_(state[HELD])
        state[FAILED : LOST + 1].zero_()
        if words[LOST]:
            raise lost_rows()
        if words[FAILED]:
            raise exceeded(words[PEAK] * self.page_bytes, self.bytes)

    def record(self, words: Tensor) -> None:
        """Writes two int64 words on the device, without a wait: bytes that all `stash` since the last reset
        would have needed at once, 0 if all got their pages; and 1 if rows were restored that were gone, else
        0."""
        self._settle()
        self._pages.follow()
        state = self._pages.state
        torch.mul(state[PEAK : PEAK + 1], state[FAILED : FAILED + 1] * self.page_bytes, out=words[:1])
        words[1:2].copy_(state[LOST : LOST + 1])

    def _disown(self, table: Tensor) -> None:
        owner = self._owners.pop(table.data_ptr(), None)
        if owner is not None:
            owner.on_end.detach()

    def _settle(self) -> None:
        """Frees the pages whose owners are gone."""
        capture = self._pages.capture()
        others = []
        while self._given_up:
            table, its_capture = self._given_up.popleft()
            if its_capture == capture:
                self._pages.drop(table)
            elif its_capture == 0:  # kept for a call outside: a replay must not free them once more
                others.append((table, its_capture))
        self._given_up.extend(others)

    def _new_handle(self, tensors: tuple[Tensor, ...]) -> PoolHandle:
        rows = tensors[0].shape[0]
        room = count_pages(rows, row_bytes_of(tensors), self.page_bytes)
        table = torch.empty(TABLE_WORDS + room, dtype=torch.int32, device=self.device)
        return PoolHandle(table, rows, tuple((each.shape[1], each.dtype) for each in tensors))

    def _check(self, tensors: tuple[Tensor, ...], ends: Tensor | None) -> None:
        if not 1 <= len(tensors) <= MOST_TENSORS:
            raise InvalidArgument(f"{len(tensors)} tensors were given, must be 1 to {MOST_TENSORS}")
        for number, each in enumerate(tensors):
            if each.dim() != 2 or each.shape[0] != tensors[0].shape[0] or each.shape[1] < 1:
                raise InvalidArgument(
                    f"tensor {number} has shape {tuple(each.shape)}, must be (P, C) with the P of the first, "
                    f"{tuple(tensors[0].shape)}, and C at least 1"
                )
            if each.device != self.device:
                raise InvalidArgument(f"tensor {number} is on {each.device}, must be on {self.device}")
        if ends is not None and (ends.dtype != torch.int32 or ends.dim() != 1 or ends.shape[0] < 1):
            raise InvalidArgument(
                f"ends is {ends.dtype} {tuple(ends.shape)}, must be (L,) int32 with L at least 1"
            )
        if ends is not None and ends.device != self.device:
            raise InvalidArgument(f"ends is on {ends.device}, must be on {self.device}")

    def __repr__(self) -> str:
        spill = f", {self.spill_bytes} in host memory" if self.spill_bytes else ""
        return (
            f"ActivationPool({self.device_bytes} bytes on {self.device}{spill}, pages of {self.page_bytes})"
        )


def exceeded(needed: int, available: int) -> PoolExceeded:
    """Returns the error of a pool that was too small."""
    return PoolExceeded(
        f"the activation pool has {available} bytes, what was kept at once needed {needed}: give it at least "
        "that, in device memory or as spill_bytes",
        needed=needed,
        available=available,
    )


def lost_rows() -> InvalidArgument:
    """Returns the error of a backward whose rows are not in the pool."""
    return InvalidArgument(
        "rows were asked for that are not in the activation pool any more: a backward ran twice "
        "(retain_graph), after pool.reset(), or on tensors that a hook had saved elsewhere"
    )


def _whole_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _readable(tensor: Tensor) -> Tensor:
    """Returns the tensor detached, contiguous, and at an address that kernels can read 16 bytes at a time."""
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
