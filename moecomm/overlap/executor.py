"""Runs a schedule: each stage on its stream, after what it depends on, the host never waiting for the
device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import InvalidArgument
from moecomm.overlap.interleave import in_turns, others_go_on, pause, sms_to_leave
from moecomm.overlap.schedule import SMS, Schedule, Stage
from moecomm.overlap.timeline import Span, Timeline
from moecomm.types import DispatchOutput


class Results:
    """The results of the stages of a run, by their names; a stage takes its inputs from here.

    A tensor of another stream is kept from reuse for as long as the stage's stream still works with it.
    """

    def __init__(self, order: _Order, schedule: Schedule) -> None:
        self._order, self._schedule = order, schedule
        self._values: dict[str, Any] = {}
        self._stage: Stage | None = None
        self._held: set[str] = set()  # results that only this object keeps alive

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if self._order.apart:
            taker = self._schedule.streams[0] if self._stage is None else self._stage.stream
            if self._schedule[name].stream != taker and not self._order.take(taker, value):
                self._held.add(name)
        return value

    def drop(self, name: str) -> None:
        """Forgets a result that no stage needs any more, so that its memory can be used again. Within a
        capture, a result that another stream's work reads stays until the end of the run."""
        if name not in self._held:
            del self._values[name]

    def timeline(self) -> Timeline:
        """Returns when the stages ran. Waits for the last of them. Raises InvalidArgument if the run did not
        record."""
        return self._order.timeline()

    @property
    def recorded(self) -> Recorded:
        """The object that gives the timeline later; it holds no result."""
        return self._order


class Recorded(Protocol):
    """The recording of a run with `record`."""

    def timeline(self) -> Timeline:
        """Returns the timeline, as `Results.timeline` does."""


LimitSms = Callable[[int], contextlib.AbstractContextManager[Any]]
_NO_LIMIT = contextlib.nullcontext()

Work = Mapping[str, Callable[[Results], Any]]
"""The function of each stage, by its name: it puts work on the current stream, and returns what later stages
take."""


class Executor:
    """Runs schedules on the streams of one device; on the CPU one stage after another.

    A schedule in which nothing lies beside anything else (`Schedule.is_chain`) runs on the caller's stream
    alone, which takes the host less; not so in a program of `interleave`, where another one's stages lie
    beside these.

    Args:
        device: the device of the work.
        streams: CUDA streams that stages name, such as a communicator's; the first stream of a schedule is
            always the caller's current one, and streams that are not given are made here.
        limit_sms: returns a context in which communication takes so many SMs: `Communicator.limit_sms`. It is
            used for stages that say how many they use.
        settle: in a program of `interleave`, called before a stage that communicates, so that what another
            program has begun is not behind what that stage's stream waits for: `Communicator.settle`.

    Attributes:
        waits: True: the host waits for the device at the end of each run outside a capture, so that memory
            which several streams have used is free again at once. A host that runs ahead takes more for each
            run.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Mapping[str, torch.cuda.Stream | None] | None = None,
        limit_sms: LimitSms | None = None,
        settle: Callable[[], None] | None = None,
    ):
        self.device = device
        self._limit_sms, self._settle = limit_sms, settle
        self._gpu = CudaDevice(device.index) if device.type == "cuda" else None
        self._streams = {name: stream for name, stream in (streams or {}).items() if stream is not None}
        self.waits = False

    def run(
        self,
        schedule: Schedule,
        work: Work,
        *,
        record: bool = False,
        in_turns_sms: Mapping[str, int] | None = None,
    ) -> Results:
        """Runs each stage of `schedule` once. What the caller puts on its current stream afterwards comes
        after all of it, also if a stage raises; that error is raised here, and later stages are not begun.

        record: measures the stages, for `Results.timeline`; not within a CUDA graph capture.

        in_turns_sms: in a program of `interleave`, SMs on which a stage communicates, by its name, where
        another program goes on with a product meanwhile. That product leaves them, if it can
        (`Stage.leaves_sms`). The first program has nobody beside its first transfer.

        Raises InvalidArgument where work and stages do not have the same names.
        """
        if work.keys() != schedule.names:
            difference = work.keys() ^ schedule.names
            raise InvalidArgument(
                f"work and the schedule's stages do not have the same names: {sorted(difference)} is in one "
                "of them only"
            )
        gpu = self._gpu
        with contextlib.nullcontext() if gpu is None or gpu.is_current() else gpu.current():
            order = self._order(schedule, record)
            results = Results(order, schedule)
            try:
                travelling = 0  # SMs of a transfer of this turn, if it was given few
                for stage in schedule.stages:
                    results._stage = stage
                    if stage.communicates and self._settle is not None and in_turns():
                        self._settle()
                    sms = self._sms(stage, in_turns_sms)
                    order.begin(stage, sms_to_leave() if stage.leaves_sms else 0)
                    with self._limited(sms):
                        results._values[stage.name] = work[stage.name](results)
                    order.end(stage)
                    if stage.communicates:
                        travelling = sms or 0
                    if stage.yields:
                        pause(travelling)
                        travelling = 0
            finally:
                results._stage = None
                order.close()
            if self.waits and gpu is not None and not gpu.capturing():
                gpu.stream().synchronize()
        return results

    def _limited(self, sms: int | None) -> contextlib.AbstractContextManager[Any]:
        return _NO_LIMIT if sms is None or self._limit_sms is None else self._limit_sms(sms)

    def _sms(self, stage: Stage, in_turns_sms: Mapping[str, int] | None) -> int | None:
        """Returns the SMs on which a stage is to communicate; None for the setting of the communicator."""
        if not stage.communicates or self._limit_sms is None:
            return None
        if SMS in stage.uses:
            return int(stage.uses[SMS])
        if in_turns_sms is None or stage.name not in in_turns_sms or not others_go_on():
            return None
        return in_turns_sms[stage.name]

    def _order(self, schedule: Schedule, record: bool) -> _Order:
        if self._gpu is None:
            return _HostOrder(schedule, record)
        if record and self._gpu.capturing():
            raise InvalidArgument("record is True within a CUDA graph capture, must be False")
        if schedule.is_chain and not in_turns():
            return _StreamOrder(self._gpu, {}, schedule, record)
        for name in schedule.streams[1:]:
            if name not in self._streams:
                self._streams[name] = self._gpu.new_stream()
        streams = {name: self._streams[name] for name in schedule.streams[1:]}
        return _StreamOrder(self._gpu, streams, schedule, record, shared=in_turns())


class _Order(Protocol):
    """The order of the stages of one run, on the streams of a device."""

    apart: bool
    """True if tensors of one stream may be used on another."""

    def begin(self, stage: Stage, leave: int) -> None:
        """Begins a stage: later work belongs to it, and its products leave at least `leave` SMs."""

    def end(self, stage: Stage) -> None:
        """Ends a stage: all of its work has been issued."""

    def take(self, stream: str, value: Any) -> bool:
        """Notes that work on `stream` uses the tensors in `value`, which another stream has made. Returns
        True if their memory is kept for it from now on, also if nobody holds them any more."""

    def close(self) -> None:
        """Makes the caller continue after all work that was issued, also within a stage that has failed."""

    def timeline(self) -> Timeline:
        """Returns the timeline that was recorded."""


class _HostOrder:
    apart = False

    def __init__(self, schedule: Schedule, record: bool) -> None:
        self._schedule, self._record = schedule, record
        self._spans: list[Span] = []
        self._start = self._began = time.perf_counter()

    def begin(self, stage: Stage, leave: int) -> None:
        self._began = time.perf_counter()

    def end(self, stage: Stage) -> None:
        times = (self._began - self._start, time.perf_counter() - self._start)
        self._spans.append(Span(stage.name, stage.stream, *times, stage.communicates))

    def take(self, stream: str, value: Any) -> bool:
        return True

    def close(self) -> None:
        pass

    def timeline(self) -> Timeline:
        _require_recorded(self._record)
        return Timeline(self._spans, streams=self._schedule.streams)


class _StreamOrder:
    """Stages on CUDA streams; side streams that are not given are the caller's. Streams are switched between
    stages and not for the time of each: to switch there and back takes the host longer than most other work
    here.

    `shared`: other runs put work on the same streams between the stages of this one; the caller does not wait
    for theirs at the end."""

    def __init__(
        self,
        gpu: CudaDevice,
        streams: dict[str, torch.cuda.Stream],
        schedule: Schedule,
        record: bool,
        shared: bool = False,
    ) -> None:
        self._gpu, self._schedule, self._record = gpu, schedule, record
        self._caller = self._now = gpu.stream()
        self._side, self.apart = streams, bool(streams)
        self._ends: dict[str, torch.cuda.Event] = {}
        self._begins: dict[str, torch.cuda.Event] = {}
        self._begun: set[str] = set()  # side streams that have work of this run
        self._shared = shared
        self._last: dict[str, torch.cuda.Event] = {}  # the end of this run's work on shared side streams
        self._whole = schedule.resources.get(SMS, 0.0)
        self._left: int | None = None  # SMs that products outside this run leave
        self._leaving = self._open = False
        self._fork = self._event(self._caller) if record or streams else None

    def begin(self, stage: Stage, leave: int) -> None:
        stream = self._side.get(stage.stream, self._caller)
        if self.apart:
            self._follow(stage, stream)
        self._gpu.push_range(f"moecomm {stage.name}")
        self._open = True
        if self._record:
            self._begins[stage.name] = self._event(stream)
        if stream is not self._now:
            self._gpu.switch(stream)
            self._now = stream
        leave = max(leave, int(self._whole - stage.uses.get(SMS, self._whole)))
        if leave > 0 and not stage.communicates:
            self._left, self._leaving = self._gpu.leave_sms(leave), True

    def end(self, stage: Stage) -> None:
        self._leave()
        last = self._shared and stage.stream in self._side
        if self._record or last or (self.apart and stage.name in self._schedule.awaited):
            self._ends[stage.name] = self._event(self._now)
            if last:
                self._last[stage.stream] = self._ends[stage.name]

    def take(self, stream: str, value: Any) -> bool:
        if self._gpu.capturing():
            return False  # the graph owns the memory for as long as it lives
        for tensor in _tensors(value):
            if tensor.is_cuda:
                tensor.record_stream(self._side.get(stream, self._caller))
        return True

    def close(self) -> None:
        failed = self._open  # a stage has failed, which may have put work on its stream
        self._leave()
        if self._now is not self._caller:
            self._gpu.switch(self._caller)
        for name, stream in self._side.items():
            if name in self._begun:
                known = None if failed else self._last.get(name)
                self._caller.wait_event(self._event(stream) if known is None else known)

    def timeline(self) -> Timeline:
        _require_recorded(self._record)
        assert self._fork is not None
        self._caller.synchronize()
        spans = []
        for stage in self._schedule.stages:
            begin, end = (
                self._fork.elapsed_time(events[stage.name]) * 1e-3 for events in (self._begins, self._ends)
            )
            spans.append(Span(stage.name, stage.stream, begin, end, stage.communicates))
        return Timeline(spans, streams=self._schedule.streams)

    def _follow(self, stage: Stage, stream: torch.cuda.Stream) -> None:
        """Makes the stage's stream wait for the stages that the stage needs."""
        if stage.stream in self._side and stage.stream not in self._begun:
            assert self._fork is not None
            stream.wait_event(self._fork)
            self._begun.add(stage.stream)
        for other in stage.after:
            if self._schedule[other].stream != stage.stream:
                stream.wait_event(self._ends[other])

    def _leave(self) -> None:
        """Ends the stage that is under way, if one is."""
        if self._leaving:
            self._gpu.leave_sms(self._left)
            self._leaving = False
        if self._open:
            self._gpu.pop_range()
            self._open = False

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return self._gpu.record_event(stream, timed=self._record)


def _require_recorded(record: bool) -> None:
    if not record:
        raise InvalidArgument("the run has no timeline: record was False, must be True")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a result of a stage: tensors, in tuples, lists and dicts too, and outputs of
    dispatches."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, DispatchOutput):
        yield from _tensors((value.tokens, value.weights, value.topk_idx, value.scales, value.offsets))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
