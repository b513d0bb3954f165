"""Named stages of a forward or backward: ranges for profilers and, on request, the time of each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import InvalidArgument

COMPUTE, COMM = "compute", "comm"
"""Names of a timeline's streams: the caller's, and the communicator's."""


class Stages:
    """The stages of one forward or backward, in the order of their issue.

        stages = Stages(comm.device, record=True)
        with stages("fc1"):
            ...
        stages.timeline().exposed_seconds

    Each stage is a range "moecomm NAME" for torch.profiler, and on a GPU for NVTX. With `record` it is also
    timed: on the CPU by the host's clock, on a GPU by two CUDA events on the stream that is current in the
    block. A CUDA graph cannot contain timed events: `record` within a capture raises InvalidArgument.
    """

    def __init__(self, device: torch.device, *, record: bool) -> None:
        self._gpu = CudaDevice(device.index) if device.type == "cuda" else None
        self._record = record
        self._times: list[Any] = []  # Spans, with events of a GPU or times of the host's clock
        if record and self._gpu is not None and self._gpu.capturing():
            raise InvalidArgument("record is True within a CUDA graph capture, must be False")

    def __call__(self, name: str, *, stream: str = COMPUTE, communicates: bool = False) -> _Stage:
        """Returns the context of a stage. `stream`: name of its stream. `communicates`: see Span."""
        return _Stage(self, name, stream, communicates)

    def timeline(self) -> Timeline:
        """Returns when the stages ran. Waits until all stages have ended."""
        if self._gpu is not None:
            for each in self._times:
                each.end.synchronize()
        issued: Any = self._times[0].begin if self._times else None

        def seconds(of: Any) -> float:
            return float(issued.elapsed_time(of)) * 1e-3 if self._gpu is not None else float(of - issued)

        ran = [(seconds(each.begin), seconds(each.end)) for each in self._times]
        # On another stream a stage that was issued later may begin before the stage that was issued first.
        first = min((begin for begin, _ in ran), default=0.0)
        spans = [
            each._replace(begin=begin - first, end=end - first)
            for each, (begin, end) in zip(self._times, ran, strict=True)
        ]
        return Timeline(spans, streams=(COMPUTE, COMM))

    def _now(self) -> Any:
        return time.perf_counter() if self._gpu is None else self._gpu.record_event(timed=True)


class _Stage:
    """The context of one stage."""

    def __init__(self, stages: Stages, name: str, stream: str, communicates: bool) -> None:
        self._stages, self._name, self._stream, self._communicates = stages, name, stream, communicates
        self._begin: Any = None
        self._range: Any = None

    def __enter__(self) -> None:
        stages = self._stages
        if stages._gpu is not None:
            stages._gpu.push_range(f"moecomm {self._name}")
        if torch._C._autograd._profiler_enabled():  # a range takes microseconds even if no profiler is active
            self._range = torch.profiler.record_function(f"moecomm {self._name}")
            self._range.__enter__()
        if stages._record:
            self._begin = stages._now()

    def __exit__(self, *error: Any) -> None:
        stages = self._stages
        if stages._record:
            times = Span(self._name, self._stream, self._begin, stages._now(), self._communicates)
            stages._times.append(times)
        if self._range is not None:
            self._range.__exit__(*error)
        if stages._gpu is not None:
            stages._gpu.pop_range()


# -- timelines ---------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One stage on its stream, in seconds from the start.

    Attributes:
        name: name of the stage.
        stream: name of its stream.
        begin, end: seconds from the start of the run.
        communicates: whether it was a transfer, not a computation.
    """

    name: str
    stream: str
    begin: float
    end: float
    communicates: bool = False


class Timeline:
    """The stages of one recorded run (`Stages.timeline`, `MoELayer.timelines`), in the order of their begin.

    Attributes:
        spans: all stages.
        streams: names of all streams, including those without a span.
    """

    def __init__(self, spans: Iterable[Span], *, streams: Iterable[str]) -> None:
        self.spans: tuple[Span, ...] = tuple(sorted(spans, key=lambda span: (span.begin, span.end)))
        self.streams: tuple[str, ...] = tuple(streams)

    @property
    def seconds(self) -> float:
        """The time in seconds from the first begin to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - self.spans[0].begin

    @property
    def exposed_seconds(self) -> float:
        """The time in seconds during which some stage communicates and none computes."""
        edges = sorted({edge for span in self.spans for edge in (span.begin, span.end)})
        exposed = 0.0
        for begin, end in itertools.pairwise(edges):
            running = [span for span in self.spans if span.begin <= begin and end <= span.end]
            if running and all(span.communicates for span in running):
                exposed += end - begin
        return exposed

    @property
    def exposed_share(self) -> float:
        """The fraction exposed_seconds / seconds; 0 for an empty timeline."""
        return self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0
