"""Timelines; stages and their times; transfers on a stream of their own, and on how many SMs."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.overlap import SideStream, Span, Stages, Timeline
from tests.unit.loopback import FakeGpu, FakeStream

STREAMS = ("compute", "comm")


def _timeline() -> Timeline:
    return Timeline(
        [
            Span("experts", "compute", 12e-6, 20e-6),
            Span("dispatch", "comm", 10e-6, 15e-6, True),
            Span("combine", "comm", 18e-6, 25e-6, True),
        ],
        streams=STREAMS,
    )


def test_what_is_exposed() -> None:
    timeline = _timeline()
    assert timeline.seconds == pytest.approx(15e-6)
    assert timeline.exposed_seconds == pytest.approx(7e-6)  # 10 to 12, 20 to 25
    nothing = Timeline([], streams=STREAMS)
    assert nothing.seconds == nothing.exposed_seconds == nothing.exposed_share == 0


# -- stages --------------------------------------------------------------------------------------------------
class Gpu(FakeGpu):
    """A fake GPU whose events are numbered in the order of their recording."""

    def __init__(self, index: int | None) -> None:
        super().__init__(index)
        self.events = 0

    def record_event(self, stream: FakeStream | None = None, *, timed: bool = False) -> Any:
        stream = stream or self.now
        self.events += 1
        self.log.append(f"record {stream.number}{' timed' if timed else ''}")
        at = float(self.events)
        return SimpleNamespace(
            stream=stream, at=at, elapsed_time=lambda other: other.at - at, synchronize=lambda: None
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The fake GPU that all of moecomm.overlap sees."""
    fake = Gpu(0)
    for module in ("side_stream", "stages"):
        monkeypatch.setattr(f"moecomm.overlap.{module}.CudaDevice", lambda index: fake)
    return fake


def test_stages_on_the_host() -> None:
    stages = Stages(torch.device("cpu"), record=True)
    with stages("dispatch", stream="comm", communicates=True):
        pass
    with pytest.raises(KeyError), stages("fc1"):
        raise KeyError
    first, second = stages.timeline().spans
    assert (first.name, first.stream, first.communicates) == ("dispatch", "comm", True)
    assert (second.name, second.stream, second.communicates) == ("fc1", "compute", False)
    assert 0 == first.begin <= first.end <= second.begin <= second.end
    assert Stages(torch.device("cpu"), record=True).timeline().spans == ()


def test_a_timeline_begins_with_the_stage_that_began_first() -> None:
    stages = Stages(torch.device("cpu"), record=True)
    with stages("outer"), stages("inner"):  # the inner one ends, and is noted, first
        pass
    spans = {span.name: span for span in stages.timeline().spans}
    assert spans["outer"].begin == 0 < spans["inner"].begin < spans["inner"].end < spans["outer"].end


def test_stages_on_a_gpu(gpu: Gpu) -> None:
    stages = Stages(torch.device("cuda", 0), record=True)
    with stages("dispatch", stream="comm", communicates=True), stages("inner"):
        pass
    assert gpu.ranges == ["moecomm dispatch", "moecomm inner", "pop", "pop"]
    assert gpu.log == ["record 100 timed"] * 4
    spans = {span.name: (span.begin, span.end) for span in stages.timeline().spans}
    assert {name: end - begin for name, (begin, end) in spans.items()} == {
        "inner": pytest.approx(1e-3),
        "dispatch": pytest.approx(3e-3),
    }
    with Stages(torch.device("cuda", 0), record=False)("fc1"):
        pass
    assert gpu.log == ["record 100 timed"] * 4 and gpu.ranges[4:] == ["moecomm fc1", "pop"]


def test_a_profiler_sees_the_stages() -> None:
    stages = Stages(torch.device("cpu"), record=False)
    with stages("before"):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with stages("fc1"):
            torch.ones(3).sum()
        with pytest.raises(KeyError), stages("fc2"):
            raise KeyError
    with stages("after"):
        pass
    found = {event.name: event.time_range for event in profile.events() or ()}
    assert {name for name in found if name.startswith("moecomm")} == {"moecomm fc1", "moecomm fc2"}
    assert found["moecomm fc1"].start <= found["aten::sum"].start <= found["aten::sum"].end
    assert found["aten::sum"].end <= found["moecomm fc1"].end <= found["moecomm fc2"].start


def test_no_record_while_a_graph_is_captured(gpu: Gpu) -> None:
    gpu.captures.add(100)
    Stages(torch.device("cuda", 0), record=False)
    with pytest.raises(moecomm.InvalidArgument, match="record is True within a CUDA graph capture"):
        Stages(torch.device("cuda", 0), record=True)


# -- transfers beside products -------------------------------------------------------------------------------
class Result:
    """A tensor that notes the streams which keep it."""

    def __init__(self) -> None:
        self.kept_for: list[int] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.kept_for.append(stream.number)


def test_transfers_beside_products(gpu: Gpu) -> None:
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), stream=gpu.new_stream())
    side, result = SideStream(comm), Result()
    with side:
        assert gpu.now is comm.stream
    assert gpu.now.number == 100 and side.separate
    assert gpu.log == ["record 100", "101 waits for 100"]
    with side:  # once more: what the caller has issued since comes first
        pass
    side.join(result, None)
    assert gpu.log[2:] == ["record 100", "101 waits for 100", "record 101", "100 waits for 101"]
    assert result.kept_for == [100]
    with side.receiving():  # what the block before has sent: nothing of the caller's is read
        assert gpu.now is comm.stream
    assert gpu.now.number == 100 and len(gpu.log) == 6
    with side:
        pass
    assert gpu.log[6:] == ["record 100", "101 waits for 100"]
    gpu.captures.add(100)
    with side:
        pass
    side.join(captured := Result())
    assert captured.kept_for == []  # the graph owns the memory


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_device_is_the_caller_s_again(gpu: Gpu, error: type[Exception] | None) -> None:
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), stream=gpu.new_stream())
    gpu.device_is_current = False
    with contextlib.suppress(KeyError), SideStream(comm):
        assert gpu.device_is_current
        if error is not None:
            raise error
    assert not gpu.device_is_current


def test_an_error_beside_products(gpu: Gpu) -> None:
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), stream=gpu.new_stream())
    with pytest.raises(KeyError), SideStream(comm):
        raise KeyError
    assert gpu.now.number == 100
    assert gpu.log == ["record 100", "101 waits for 100", "record 101", "100 waits for 101"]


@pytest.mark.parametrize("wanted", [False, True])
def test_nothing_beside(gpu: Gpu, wanted: bool) -> None:
    """Without a wish for a stream of its own, and where there are no streams, the caller's is used."""
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), stream=None if wanted else gpu.new_stream())
    side, result = SideStream(comm, wanted=wanted), Result()
    with side:
        assert gpu.now.number == 100
    side.join(result)
    assert gpu.log == [] and result.kept_for == [] and not side.separate
