"""Checks whether a step has enough room: the device finds the answer, and ranks agree on it while the rest of
the step still runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from moecomm.types import Group, GroupReference


class OverflowCheck:
    """A word (one integer) on the device: the rows that the largest overflowing dispatch of the step needed
    (0: all fitted). `read` returns its maximum over a group (None: this rank). With NCCL the device takes the
    maximum, and the host waits once; else the hosts take the maximum.

    A step publishes the word (copies it for `read`, which waits for the copy) after as many dispatches as the
    previous step had, and after each further one. The first step, or one with fewer, does so at its end."""

    def __init__(self, device: torch.device, group: Group | None) -> None:
        self._device = device
        self._rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._published_rows = torch.zeros(1, dtype=torch.int64, device=device)
        self._group = GroupReference(group if group is not None and dist.get_world_size(group) > 1 else None)
        self._on_gpu = device.type == "cuda"
        self._on_host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self._on_gpu)
        backends = "" if self._group() is None else dist.get_backend_config(group)
        self._reduces_on_gpu = self._on_gpu and "cuda:nccl" in backends
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._published: list[torch.cuda.Event] = []
        """Events recorded after each publishing of the word; `read` waits for the last event."""
        self._noted: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        """The stream of the step's last note_dispatch(), and an event recorded after that call."""
        self._notes, self._published_notes = 0, -1
        self._last_note = 0
        """The number of dispatches that the previous step noted."""
        self._has_read = False

    def start(self) -> None:
        """Sets the word and its published copy to 0 at the start of a step."""
        self._notes, self._published_notes = 0, -1
        self._published, self._noted = [], None
        self._rows.zero_()
        self._published_rows.zero_()

    @_disable_dynamo
    def note_dispatch(self, overflow: Tensor) -> None:
        """Raises the word to `overflow` if that is more. overflow: 0-d int32 on the device, the rows that a
        dispatch needed if they exceeded its capacity, else 0."""
        self._follow()
        torch.maximum(self._rows, overflow.view(1), out=self._rows)
        self._notes += 1
        if self._notes >= self._last_note > 0:
            self._publish()
        if self._on_gpu:
            stream, event = torch.cuda.current_stream(self._device), torch.cuda.Event()
            event.record(stream)
            self._noted = stream, event

    def finish(self) -> None:
        """Ends a step. Publishes its result unless that was done after the last dispatch."""
        self._follow()
        if self._published_notes != self._notes:
            self._publish()
        self._last_note = self._notes

    def read(self, rows_on_host: int) -> int:
        """Waits until a step has published its word; the first call waits for the whole step. Returns the
        rows that the largest overflowing dispatch of any rank needed, 0 if all fitted. rows_on_host: rows of
        an overflow that the host already knows, else 0."""
        if self._stream is None:
            self._reduce_to_host()
        else:
            if not self._has_read or not self._published:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            else:
                self._stream.wait_event(self._published[-1])
            with torch.cuda.stream(self._stream):
                self._reduce_to_host()
            self._stream.synchronize()
        self._has_read = True
        self._on_host[0] = max(int(self._on_host[0]), rows_on_host)
        group = self._group()
        if group is not None and not self._reduces_on_gpu:
            dist.all_reduce(self._on_host, dist.ReduceOp.MAX, group=group)
        return int(self._on_host)

    def most(self, number: float) -> float:
        """Returns the maximum of `number` over the group, whose ranks all call this."""
        group = self._group()
        if group is None:
            return number
        where = self._device if self._reduces_on_gpu else "cpu"
        found = torch.tensor(number, device=where, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found.item()

    def _follow(self) -> None:
        """Makes the current stream wait for the last note_dispatch() if that was on another stream."""
        if self._noted is not None:
            stream, event = self._noted
            current = torch.cuda.current_stream(self._device)
            if current != stream:
                current.wait_event(event)

    def _publish(self) -> None:
        """Copies the word for `read`, and on a GPU records an event after the copy."""
        self._published_notes = self._notes
        self._published_rows.copy_(self._rows)
        if self._on_gpu:
            # In a capture each event becomes a node of the graph, which every replay runs.
            event = torch.cuda.Event(external=True)
            event.record(torch.cuda.current_stream(self._device))
            self._published.append(event)

    def _reduce_to_host(self) -> None:
        if self._reduces_on_gpu:
            dist.all_reduce(self._published_rows, dist.ReduceOp.MAX, group=self._group())
        self._on_host.copy_(self._published_rows, non_blocking=True)
