"""Checks whether a step had room: found on the device and agreed upon between ranks, with one wait of the
host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from moecomm.types import Group, GroupReference


class Overflow(NamedTuple):
    """The largest overflow that any rank has found."""

    rows: int
    """Rows that a dispatch would have needed, if one overflowed; else 0."""
    bytes: int
    """Bytes that the pool would have needed, if it did not suffice; else 0."""
    lost: bool
    """True if rows were restored that the pool did not have any more."""


class OverflowCheck:
    """Words on the device that a step writes, and their maximum over the ranks of a group (None: this rank
    alone). With NCCL the device takes the maximum, so that the host waits once; with another backend the
    hosts take it afterwards."""

    def __init__(self, device: torch.device, group: Group | None) -> None:
        self.rows = torch.zeros((), dtype=torch.int32, device=device)
        """Rows that a dispatch would have needed; the layers write it (`MoELayer._overflow`)."""
        self.pool = torch.zeros(2, dtype=torch.int64, device=device)
        """The two words that ActivationPool.record writes."""
        self._words = torch.zeros(3, dtype=torch.int64, device=device)
        self._group = GroupReference(group if group is not None and dist.get_world_size(group) > 1 else None)
        self._on_gpu = device.type == "cuda"
        self._on_host = torch.zeros(3, dtype=torch.int64, pin_memory=self._on_gpu)
        backends = "" if self._group() is None else dist.get_backend_config(group)
        self._reduces_on_gpu = self._on_gpu and "cuda:nccl" in backends

    def clear(self) -> None:
        """Sets the words to zero; it belongs to the start of a step."""
        self.rows.zero_()
        self.pool.zero_()

    def read(self, rows_on_host: int) -> Overflow:
        """Waits for the step and returns the overflow. rows_on_host: rows of an overflow that the host knows
        of already."""
        words, group = self._words, self._group()
        words[:1].copy_(self.rows.view(1))
        words[1:].copy_(self.pool)
        if self._reduces_on_gpu:
            dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
        self._on_host.copy_(words, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream(words.device).synchronize()
        self._on_host[0] = max(int(self._on_host[0]), rows_on_host)
        if group is not None and not self._reduces_on_gpu:
            dist.all_reduce(self._on_host, dist.ReduceOp.MAX, group=group)
        rows, needed, lost = self._on_host.tolist()
        return Overflow(rows, needed, bool(lost))
