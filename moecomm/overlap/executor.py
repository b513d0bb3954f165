"""Runs a schedule: each stage on its stream, after what it depends on, the host never waiting for the
device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from moecomm.backends.device import CudaDevice
from moecomm.errors import InvalidArgument
from moecomm.overlap.interleave import pause
from moecomm.overlap.schedule import SMS, Schedule, Stage
from moecomm.overlap.timeline import Span, Timeline
from moecomm.types import DispatchOutput


class Results:
    """What the stages of a run have returned, by their names; a stage takes what it needs from here.

    A tensor of another stream is kept from reuse for as long as the stage's stream still works with it.
    """

    def __init__(self, order: _Order, schedule: Schedule) -> None:
        self._order, self._schedule = order, schedule
        self._values: dict[str, Any] = {}
        self._stage: Stage | None = None

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        taker = self._schedule.streams[0] if self._stage is None else self._stage.stream
        if self._schedule[name].stream != taker:
            self._order.take(taker, value)
        return value

    def drop(self, name: str) -> None:
        """Forgets a result that no stage needs any more, so that its memory can be used again."""
        del self._values[name]

    def timeline(self) -> Timeline:
        """When the stages ran. Waits for the last of them. Raises InvalidArgument if the run did not
        record."""
        return self._order.timeline()

    @property
    def recorded(self) -> Recorded:
        """What gives the timeline later, and holds no result."""
        return self._order


class Recorded(Protocol):
    """Of a run with `record`."""

    def timeline(self) -> Timeline:
        """As `Results.timeline`."""


Work = Mapping[str, Callable[[Results], Any]]
"""What to do in each stage, by its name: puts work on the current stream, and returns what later stages take.
"""


class Executor:
    """Runs schedules on the streams of one device; on the CPU one stage after another.

    Args:
        device: where the work is.
        streams: CUDA streams that stages name, such as a communicator's; the first stream of a schedule is
            always the caller's current one, and streams that are not given are made here.
    """

    def __init__(self, device: torch.device, streams: Mapping[str, torch.cuda.Stream | None] | None = None):
        self.device = device
        self._gpu = CudaDevice(device.index) if device.type == "cuda" else None
        self._streams = {name: stream for name, stream in (streams or {}).items() if stream is not None}
        self.waits = False
        """True: the host waits for the device at the end of each run outside a capture, so that memory which
        several streams have used is free again at once. A host that runs ahead takes more for each run."""

    def run(self, schedule: Schedule, work: Work, *, record: bool = False) -> Results:
        """Runs each stage of `schedule` once. What the caller puts on its current stream afterwards comes
        after all of it, also if a stage raises; that error is raised here, and later stages are not begun.

        record: measure, for `Results.timeline`; not within a CUDA graph capture.

        Raises InvalidArgument where work and stages do not have the same names.
        """
        if work.keys() != schedule.names:
            difference = work.keys() ^ schedule.names
            raise InvalidArgument(
                f"work and the schedule's stages do not have the same names: {sorted(difference)} is in one "
                "of them only"
            )
        with contextlib.nullcontext() if self._gpu is None else self._gpu.current():
            order = self._order(schedule, record)
            results = Results(order, schedule)
            try:
                for stage in schedule.stages:
                    results._stage = stage
                    with order.stage(stage):
                        results._values[stage.name] = work[stage.name](results)
                    if stage.yields:
                        pause()
            finally:
                results._stage = None
                order.end()
            if self.waits and self._gpu is not None and not self._gpu.capturing():
                self._gpu.stream().synchronize()
        return results

    def _order(self, schedule: Schedule, record: bool) -> _Order:
        if self._gpu is None:
            return _HostOrder(schedule, record)
        if record and self._gpu.capturing():
            raise InvalidArgument("record is True within a CUDA graph capture, must be False")
        for name in schedule.streams[1:]:
            if name not in self._streams:
                self._streams[name] = self._gpu.new_stream()
        return _StreamOrder(self._gpu, self._streams, schedule, record)


class _Order(Protocol):
    """How the stages of one run follow each other."""

    def stage(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Within it a stage is issued."""

    def take(self, stream: str, value: Any) -> None:
        """Work on `stream` uses the tensors in a value that another one has made."""

    def end(self) -> None:
        """The caller goes on after all stages."""

    def timeline(self) -> Timeline:
        """What was recorded."""


class _HostOrder:
    def __init__(self, schedule: Schedule, record: bool) -> None:
        self._schedule, self._record = schedule, record
        self._spans: list[Span] = []
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        self._spans.append(
            Span(stage.name, stage.stream, begin - self._start, end - self._start, stage.communicates)
        )

    def take(self, stream: str, value: Any) -> None:
        pass

    def end(self) -> None:
        pass

    def timeline(self) -> Timeline:
        _require_recorded(self._record)
        return Timeline(self._spans, streams=self._schedule.streams)


class _StreamOrder:
    def __init__(
        self, gpu: CudaDevice, streams: Mapping[str, torch.cuda.Stream], schedule: Schedule, record: bool
    ) -> None:
        self._gpu, self._schedule, self._record = gpu, schedule, record
        self._caller = gpu.stream()
        self._streams = {name: streams[name] for name in schedule.streams[1:]}
        self._streams[schedule.streams[0]] = self._caller
        self._ends: dict[str, torch.cuda.Event] = {}
        self._times: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._begun: dict[str, None] = {}  # side streams, in order
        self._fork = self._event(self._caller)

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        stream = self._streams[stage.stream]
        if stream is not self._caller and stage.stream not in self._begun:
            stream.wait_event(self._fork)
            self._begun[stage.stream] = None
        for other in stage.after:
            if self._schedule[other].stream != stage.stream:
                stream.wait_event(self._ends[other])
        self._gpu.push_range(f"moecomm {stage.name}")
        try:
            begin = self._event(stream) if self._record else None
            # To switch streams takes the host longer than most of what else there is here.
            there = contextlib.nullcontext() if stream is self._caller else self._gpu.on(stream)
            with there, self._leaving(stage):
                yield
            if begin is not None or stage.name in self._schedule.awaited:
                self._ends[stage.name] = self._event(stream)
            if begin is not None:
                self._times[stage.name] = (begin, self._ends[stage.name])
        finally:
            self._gpu.pop_range()

    def _leaving(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Of the SMs those that the schedule does not give to the stage."""
        whole = self._schedule.resources.get(SMS, 0.0)
        used = stage.uses.get(SMS, whole)
        if stage.communicates or used >= whole:
            return contextlib.nullcontext()
        return self._gpu.leaving(int(whole - used))

    def take(self, stream: str, value: Any) -> None:
        if self._gpu.capturing():
            return  # a graph's memory is its own until the graph goes
        for tensor in _tensors(value):
            if tensor.is_cuda:
                tensor.record_stream(self._streams[stream])

    def end(self) -> None:
        for name in self._begun:
            self._caller.wait_event(self._event(self._streams[name]))

    def timeline(self) -> Timeline:
        _require_recorded(self._record)
        self._caller.synchronize()
        spans = []
        for stage in self._schedule.stages:
            begin, end = (self._fork.elapsed_time(event) * 1e-3 for event in self._times[stage.name])
            spans.append(Span(stage.name, stage.stream, begin, end, stage.communicates))
        return Timeline(spans, streams=self._schedule.streams)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return self._gpu.record_event(stream, timed=self._record)


def _require_recorded(record: bool) -> None:
    if not record:
        raise InvalidArgument("the run has no timeline: record was False, must be True")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those that a stage may return: tensors, in tuples, lists and dicts too, and outputs of dispatches."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, DispatchOutput):
        yield from _tensors((value.tokens, value.weights, value.topk_idx, value.scales, value.offsets))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
