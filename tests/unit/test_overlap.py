"""Schedules: what is refused, the order of issue; timelines; and runs, in order and on streams."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.overlap import (
    Executor,
    Results,
    Schedule,
    Span,
    Split,
    Stage,
    Timeline,
    backward_schedule,
    forward_schedule,
    interleave,
    sms_beside_products,
)
from moecomm.overlap.schedule import SMS
from tests.unit.loopback import FakeGpu, FakeStream

STREAMS = ("compute", "comm")


def _stage(name: str, *after: str, on: str = "compute", **uses: float) -> Stage:
    return Stage(name=name, stream=on, after=after, uses=uses, communicates=on == "comm")


def _names(schedule: Schedule) -> list[str]:
    return [stage.name for stage in schedule.stages]


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([_stage("a", "a")], "stages wait for each other: a after a"),
        (
            [
                _stage("first"),
                _stage("a", "first", "c"),
                _stage("b", "a"),
                _stage("c", "b"),
                _stage("d", "c"),
            ],
            "stages wait for each other: a after c after b after a",
        ),
        ([_stage("a"), _stage("a")], "two stages are called 'a'"),
        ([_stage("a", "b")], "stage 'a' comes after 'b', which is no stage"),
        ([_stage("a", on="copy")], "stage 'a' is on stream 'copy', there are 'compute', 'comm'"),
        ([_stage("a", copy=1)], "stage 'a' uses 'copy', there are 'sms'"),
        ([_stage("a", sms=133)], "stage 'a' uses 133 of 'sms', there is 132"),
        ([_stage("a", sms=-1)], "stage 'a' uses -1 of 'sms', there is 132"),
    ],
)
def test_refused_by_name(stages: list[Stage], text: str) -> None:
    with pytest.raises(moecomm.InvalidSchedule) as caught:
        Schedule(stages, streams=STREAMS, resources={"sms": 132})
    assert str(caught.value) == text


def test_a_resource_of_nothing_is_refused() -> None:
    with pytest.raises(moecomm.InvalidSchedule, match="there is 0 of the resource 'sms', must be above 0"):
        Schedule([], streams=STREAMS, resources={"sms": 0})


# -- order ---------------------------------------------------------------------------------------------------


def test_the_first_listed_that_can_goes_first() -> None:
    schedule = Schedule(
        [_stage("late", "early"), _stage("free"), _stage("early"), _stage("end", "late", "free")],
        streams=STREAMS,
    )
    assert _names(schedule) == ["free", "early", "late", "end"]
    assert schedule["late"].after == ("early",) and "late" in schedule and "other" not in schedule


# -- timelines -----------------------------------------------------------------------------------------------


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


def test_chrome_trace(tmp_path: Path) -> None:
    _timeline().chrome_trace(tmp_path / "trace.json", process="rank 3")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "compute", 1: "comm"}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 3"]
    spans = [
        (event["name"], event["cat"], event["tid"], round(event["ts"], 6), round(event["dur"], 6))
        for event in events
        if event["ph"] == "X"
    ]
    assert spans == [
        ("dispatch", "communication", 1, 0, 5),
        ("experts", "compute", 0, 2, 8),
        ("combine", "communication", 1, 8, 7),
    ]


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    _timeline().picture(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    _timeline().picture(tmp_path / "timeline.svg", title="one layer")
    assert "one layer" in (tmp_path / "timeline.svg").read_text()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(moecomm.Unsupported, match="pip install matplotlib"):
        _timeline().picture(tmp_path / "timeline.png")


# -- runs ----------------------------------------------------------------------------------------------------

SCHEDULE = Schedule(
    [
        _stage("dispatch", on="comm"),
        _stage("shared"),
        _stage("experts", "dispatch"),
        _stage("combine", "experts", on="comm"),
        _stage("sum", "combine", "shared"),
    ],
    streams=STREAMS,
)


def _work(log: list[str], **changes: Callable[[Results], Any]) -> dict[str, Callable[[Results], Any]]:
    def step(name: str) -> Callable[[Results], Any]:
        def run(results: Results) -> str:
            taken = [results[other] for other in SCHEDULE[name].after]
            log.append(name)
            return f"{name}({', '.join(taken)})"

        return run

    return {stage.name: step(stage.name) for stage in SCHEDULE.stages} | changes


def test_on_the_cpu_one_after_another() -> None:
    log: list[str] = []
    results = Executor(torch.device("cpu")).run(SCHEDULE, _work(log), record=True)
    assert log == ["dispatch", "shared", "experts", "combine", "sum"]
    assert results["sum"] == "sum(combine(experts(dispatch())), shared())"
    spans = results.timeline().spans
    assert [span.name for span in spans] == log and spans[0].communicates and not spans[1].communicates
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))


def test_a_result_that_was_dropped_is_gone() -> None:
    log: list[str] = []

    def last(results: Results) -> Any:
        results.drop("combine")
        return results["combine"]

    with pytest.raises(KeyError, match="combine"):
        Executor(torch.device("cpu")).run(SCHEDULE, _work(log, sum=last))


def test_no_timeline_without_a_record() -> None:
    results = Executor(torch.device("cpu")).run(SCHEDULE, _work([]))
    with pytest.raises(moecomm.InvalidArgument, match="record was False"):
        results.timeline()


def test_work_has_to_fit() -> None:
    work = _work([])
    del work["shared"]
    work["other"] = work["sum"]
    with pytest.raises(moecomm.InvalidArgument, match=r"\['other', 'shared'\] is in one of them only"):
        Executor(torch.device("cpu")).run(SCHEDULE, work)


class Gpu(FakeGpu):
    """A fake GPU with events that can be recorded and asked for times."""

    left: int | None = 7

    def record_event(self, stream: FakeStream, *, timed: bool = False) -> Any:
        self.log.append(f"record {stream.number}")
        at = float(len(self.log))
        return SimpleNamespace(
            stream=stream, at=at, elapsed_time=lambda other: (other.at - at) if timed else None
        )

    def leave_sms(self, sms: int | None) -> int | None:
        before, self.left = self.left, sms
        return before


class Tensor(torch.Tensor):
    """A tensor that says that it is on a GPU, and which streams keep it."""

    kept_for: list[int]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:
        self.kept_for.append(stream.number)


def _tensor() -> Tensor:
    tensor = torch.zeros(1).as_subclass(Tensor)
    tensor.kept_for = []
    return tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Executor]:
    monkeypatch.setattr("moecomm.overlap.executor.CudaDevice", Gpu)
    return lambda: Executor(torch.device("cuda", 0))


def test_streams_wait_for_what_is_needed_and_no_more(gpu: Callable[[], Executor]) -> None:
    executor, log = gpu(), FakeGpu.last.log
    executor.run(SCHEDULE, {name: (lambda _, name=name: log.append(name)) for name in _names(SCHEDULE)})
    assert log == [
        "record 100",  # the caller's work so far
        "101 waits for 100",
        "dispatch",
        "record 101",
        "shared",
        "100 waits for 101",
        "experts",
        "record 100",
        "101 waits for 100",
        "combine",
        "record 101",
        "100 waits for 101",
        "sum",
        "record 101",  # the caller goes on after all
        "100 waits for 101",
    ]
    assert FakeGpu.last.ranges[:3] == ["moecomm dispatch", "pop", "moecomm shared"]
    log.clear()
    executor.run(SCHEDULE, _work([]))
    assert len(FakeGpu.last.streams) == 2  # the same side stream again


def test_products_leave_what_the_schedule_does_not_give_them(gpu: Callable[[], Executor]) -> None:
    executor = gpu()
    split = Split(sms=132, comm=24)
    left: dict[str, int] = {}

    def look(name: str) -> Callable[[Results], None]:
        return lambda _: left.__setitem__(name, FakeGpu.last.left)  # type: ignore[attr-defined]

    for schedule in (
        forward_schedule(shared=True, split=split),
        backward_schedule(shared=False, keep="all", home=True, weights=True, split=split),
    ):
        executor.run(schedule, {name: look(name) for name in _names(schedule)})
    beside = {"shared experts", "down weights"}
    assert {name for name, sms in left.items() if sms == 24} == beside
    assert all(sms == 7 for name, sms in left.items() if name not in beside)  # nothing travels: as it was

    def fail(_: Results) -> None:
        raise ValueError("mine")

    schedule = forward_schedule(shared=True, split=split)
    work = {name: look(name) for name in _names(schedule)} | {"shared experts": fail}
    with pytest.raises(ValueError, match="mine"):
        executor.run(schedule, work)
    assert FakeGpu.last.left == 7  # type: ignore[attr-defined]


CHAIN = Schedule(
    [_stage("dispatch", on="comm"), _stage("experts", "dispatch"), _stage("combine", "experts", on="comm")],
    streams=STREAMS,
)


def test_what_is_a_chain() -> None:
    assert CHAIN.is_chain and not SCHEDULE.is_chain
    assert forward_schedule(shared=False).is_chain
    for is_chain, options in (
        (True, {}),
        (True, {"weights": False}),
        (False, {"shared": True}),
        (False, {"keep": "rows"}),  # the first product is made again while the gradients are on their way
        (False, {"split": Split(sms=132, comm=24)}),
        (False, {"pool": True}),
    ):
        all_options: Any = {"shared": False, "keep": "all", "home": True, "weights": True} | options
        assert backward_schedule(**all_options).is_chain is is_chain, options


def test_a_chain_needs_no_other_stream(gpu: Callable[[], Executor]) -> None:
    executor, fake = gpu(), FakeGpu.last
    rows, log = _tensor(), fake.log
    work = {
        "dispatch": lambda _: rows,
        "experts": lambda r: r["dispatch"],
        "combine": lambda _: log.append("end"),
    }
    executor.run(CHAIN, work)
    assert log == ["end"] and rows.kept_for == [] and len(fake.streams) == 1
    assert fake.ranges == ["moecomm dispatch", "pop", "moecomm experts", "pop", "moecomm combine", "pop"]


def test_a_chain_beside_another_program_has_its_streams(gpu: Callable[[], Executor]) -> None:
    executor, fake = gpu(), FakeGpu.last
    seen: list[int] = []
    work = {name: (lambda _: seen.append(fake.now.number)) for name in _names(CHAIN)}
    interleave(lambda: executor.run(CHAIN, work))
    assert seen == [101, 100, 101]


def test_a_recorded_chain(gpu: Callable[[], Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    executor = gpu()
    monkeypatch.setattr(FakeStream, "synchronize", lambda self: None, raising=False)
    work = {name: (lambda _: None) for name in _names(CHAIN)}
    spans = executor.run(CHAIN, work, record=True).timeline().spans
    assert [(span.name, span.stream) for span in spans] == [(s.name, s.stream) for s in CHAIN.stages]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))


def test_given_streams_are_used(gpu: Callable[[], Executor]) -> None:
    gpu()
    fake = FakeGpu.last
    mine = FakeStream(fake, 7)
    executor = Executor(torch.device("cuda", 0), {"comm": mine, "other": None})  # type: ignore[dict-item]
    seen: dict[str, int] = {}

    def look(name: str) -> Callable[[Results], None]:
        return lambda _: seen.__setitem__(name, FakeGpu.last.now.number)

    FakeGpu.last.streams[0].number = 100
    executor.run(SCHEDULE, {name: look(name) for name in _names(SCHEDULE)})
    assert seen == {"dispatch": 7, "shared": 100, "experts": 100, "combine": 7, "sum": 100}


def test_tensors_of_other_streams_are_kept(gpu: Callable[[], Executor]) -> None:
    executor = gpu()
    rows, pair, own = _tensor(), (_tensor(), [_tensor(), None, {"a": _tensor()}]), _tensor()

    def experts(results: Results) -> Any:
        assert results["dispatch"] is rows
        return pair

    def add(results: Results) -> Any:
        assert results["shared"] is own
        results["combine"]

    work = _work([], dispatch=lambda _: rows, shared=lambda _: own, experts=experts, sum=add)
    work["combine"] = lambda results: results["experts"] and "done"
    executor.run(SCHEDULE, work)
    assert rows.kept_for == [100] and own.kept_for == []
    assert [each.kept_for for each in (pair[0], pair[1][0], pair[1][2]["a"])] == [[101]] * 3  # type: ignore


def test_what_is_left_at_the_end_is_kept_for_the_caller(gpu: Callable[[], Executor]) -> None:
    y = _tensor()
    work = _work([], combine=lambda _: y, sum=lambda _: None)
    results = gpu().run(SCHEDULE, work)
    assert results["combine"] is y and y.kept_for == [100]


def test_an_error_leaves_the_streams_in_order(gpu: Callable[[], Executor]) -> None:
    executor, log = gpu(), FakeGpu.last.log
    names: list[str] = []

    def fail(_: Results) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        executor.run(SCHEDULE, _work(names, experts=fail))
    assert names == ["dispatch", "shared"]
    assert log[-2:] == ["record 101", "100 waits for 101"]
    assert FakeGpu.last.now.number == 100 and FakeGpu.last.ranges.count("pop") == 3
    executor.run(SCHEDULE, _work(names))
    assert names[2:] == ["dispatch", "shared", "experts", "combine", "sum"]


def test_recorded_times(gpu: Callable[[], Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    executor = gpu()
    monkeypatch.setattr(FakeStream, "synchronize", lambda self: None, raising=False)
    spans = {span.name: span for span in executor.run(SCHEDULE, _work([]), record=True).timeline().spans}
    assert spans.keys() == set(_names(SCHEDULE))
    for stage in SCHEDULE.stages:
        assert spans[stage.name].end > spans[stage.name].begin > 0
        assert all(spans[other].end <= spans[stage.name].begin for other in stage.after)


def test_another_device_may_be_current(gpu: Callable[[], Executor]) -> None:
    executor, fake, seen = gpu(), FakeGpu.last, []
    fake.device_is_current = False
    executor.run(SCHEDULE, {name: (lambda _: seen.append(fake.is_current())) for name in _names(SCHEDULE)})
    assert seen == [True] * 5 and not fake.is_current()


def test_no_record_while_a_graph_is_captured(gpu: Callable[[], Executor]) -> None:
    executor = gpu()
    FakeGpu.last.captures.add(100)
    with pytest.raises(moecomm.InvalidArgument, match="record is True within a CUDA graph capture"):
        executor.run(SCHEDULE, _work([]), record=True)
    FakeGpu.last.captures.add(101)  # the side stream joins the capture
    rows, taken = _tensor(), []
    work = {name: (lambda _: None) for name in _names(SCHEDULE)}
    work |= {"dispatch": lambda _: rows, "experts": lambda results: taken.append(results["dispatch"])}
    executor.run(SCHEDULE, work)
    assert taken == [rows] and rows.kept_for == []


@pytest.mark.parametrize("captured", [False, True])
def test_what_another_stream_reads_is_not_let_go_within_a_capture(
    gpu: Callable[[], Executor], captured: bool
) -> None:
    executor = gpu()
    if captured:
        FakeGpu.last.captures |= {100, 101}
    rows = _tensor()

    def combine(results: Results) -> None:
        assert results["experts"] is rows
        results.drop("experts")
        results.drop("dispatch")  # which no other stream has taken

    work = _work([], experts=lambda _: rows, combine=combine, sum=lambda _: None)
    results = executor.run(SCHEDULE, work)
    assert ("experts" in results._values) is captured and "dispatch" not in results._values
    assert rows.kept_for == ([] if captured else [101])


# -- the layer's ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_forward_of_a_layer(shared: bool) -> None:
    names = _names(forward_schedule(shared=shared))
    assert names[0] == "publish" and names[-1] == ("sum" if shared else "combine")
    if shared:  # is issued between the halves of a dispatch, whose second keeps the host waiting
        assert names.index("publish") < names.index("shared experts") < names.index("dispatch")


@pytest.mark.parametrize("keep", ["all", "rows", "nothing"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_backward_of_a_layer(keep: Any, shared: bool, home: bool, weights: bool) -> None:
    names = _names(backward_schedule(shared=shared, keep=keep, home=home, weights=weights))
    assert ("rows again" in names) == (keep == "nothing") and ("up again" in names) == (keep != "all")
    assert ("home" in names) == home and ("down weights" in names) == weights
    if home and weights:
        apart, beside = ("down weights", "up backward", "home", "up weights"), Split(sms=132, comm=24)
        assert [name for name in names if name in apart] == list(apart)
        schedule = backward_schedule(shared=shared, keep=keep, home=home, weights=weights, split=beside)
        order = _names(schedule)  # both are issued while gradients travel home, and run then
        assert order.index("home") < order.index("down weights") < order.index("up weights")
        assert "home" not in schedule["down weights"].after
    if shared and home:
        assert names[-1] == "sum"
    own = Split(sms=132, comm=8)
    apart = backward_schedule(shared=shared, keep=keep, home=home, weights=weights, home_split=own)
    assert _names(apart) == names
    if not (home and weights):
        assert apart.resources == {}
        return
    assert apart["home"].stream == "comm" and apart["home"].uses == {SMS: 8.0}
    assert apart["up weights"].uses == {SMS: 124.0} and "home" not in apart["up weights"].after
    assert {stage.name for stage in apart.stages if stage.uses} == {"home", "up weights"}
    others = {stage.stream for stage in apart.stages if stage.name != "home"}
    assert others == ({"compute", "comm"} if shared or keep == "nothing" else {"compute"})
    options: Any = {"shared": shared, "keep": keep, "home": True, "weights": True}
    split = Split(sms=132, comm=24)  # of all transfers
    assert (
        backward_schedule(**options, split=split, home_split=own).stages
        == backward_schedule(**options, split=split).stages
    )


GPU = {"sms": 132, "ranks": 4, "top_k": 8, "row_bytes": 14336}


def test_sms_beside_products() -> None:
    example = {"publish": 14, "dispatch": 14, "gradient rows": 8, "combine": 10, "home": 10}
    assert sms_beside_products(**GPU, inner=4096, ffn=2048) == example
    by_width = [
        sms_beside_products(**GPU, inner=2 * ffn, ffn=ffn)["home"] for ffn in (1024, 1536, 2048, 3072)
    ]
    assert by_width == sorted(by_width, reverse=True) and len(set(by_width)) > 2
    assert all(8 <= sms <= 33 and sms % 2 == 0 for sms in by_width)
    # Another GPU: the same share of its SMs.
    assert sms_beside_products(**{**GPU, "sms": 264}, inner=3072, ffn=1536)["home"] == 28
    # Few experts a token: what is summed at home weighs more.
    few = sms_beside_products(**{**GPU, "top_k": 2}, inner=4096, ffn=2048)
    assert few["home"] > 10 and few["dispatch"] == 14


def test_transfers_that_are_better_alone() -> None:
    assert sms_beside_products(**GPU, inner=128, ffn=64) == {}  # a quarter of the GPU would not do
    assert "dispatch" not in sms_beside_products(**GPU, inner=1024, ffn=512)
    assert sms_beside_products(**GPU, inner=32768, ffn=16384) == {}  # eight SMs cost more than they hide
    assert sms_beside_products(**{**GPU, "ranks": 1}, inner=4096, ffn=2048) == {}
    two = {**GPU, "ranks": 2}
    assert sms_beside_products(**two, inner=4096, ffn=2048).keys() == {"publish", "dispatch"}
    assert "home" in sms_beside_products(**{**two, "row_bytes": 8192}, inner=4096, ffn=2048)


@pytest.mark.parametrize("shared", [False, True])
def test_in_turns_products_leave_what_travels_beside_them(gpu: Callable[[], Executor], shared: bool) -> None:
    gpu()
    limits: list[int | None] = [None]
    seen: dict[str, tuple[int | None, int | None]] = {}

    @contextlib.contextmanager
    def limit(sms: int) -> Iterator[None]:
        limits.append(sms)
        yield
        limits.pop()

    executor = Executor(torch.device("cuda", 0), limit_sms=limit)
    sms = {"publish": 8, "dispatch": 8, "gradient rows": 10, "combine": 20}
    own = Split(sms=132, comm=12)
    forward = forward_schedule(shared=shared, in_turns=True)
    backward = backward_schedule(
        shared=shared, keep="all", home=True, weights=True, home_split=own, in_turns=True
    )

    def program(name: str, schedule: Schedule) -> Callable[[], None]:
        def look(stage: str) -> Callable[[Results], None]:
            found = f"{name} {stage}"
            return lambda _: seen.update({found: (limits[-1], FakeGpu.last.left)})  # type: ignore[attr-defined]

        work = {stage: look(stage) for stage in schedule.names}
        return lambda: executor.run(schedule, work, in_turns_sms=sms) and None

    def limited() -> dict[str, int]:
        return {name: each[0] for name, each in seen.items() if each[0] is not None}

    def left() -> dict[str, int]:
        return {name: each[1] for name, each in seen.items() if each[1] != 7}

    # A backward first: all that comes after its rows lies beside a product of the other program, which leaves
    # what is on its way.
    interleave(program("b", backward), program("f", forward))
    assert limited() == {"f publish": 8, "f dispatch": 8, "b home": 12, "f combine": 20}
    first = "f shared experts" if shared else "f up"
    assert left() == {"b down backward": 8, first: 12, "b up weights": 20}
    order = list(seen)
    before = "b shared backward" if shared else "b gradient rows"
    assert order[order.index(before) + 1] == "f publish"  # which lies under the gradients' rows
    assert order[order.index("f publish") + 1] == "b down backward"
    assert order[order.index("b home") + 1] == ("f shared experts" if shared else "f dispatch")
    assert order[order.index("f combine") + 1] == "b up weights"

    # The first dispatch has nothing beside it, and the forward is over when the gradients go home.
    seen.clear()
    interleave(program("f", forward), program("b", backward))
    assert limited() == {"b gradient rows": 10, "f dispatch": 8, "f combine": 20, "b home": 12}
    assert left() == {first: 10, "b down backward": 20, "b up weights": 12}

    # Two halves of a step: the second one's rows travel beside the first one's products. That the first one
    # has nothing more to do at the end nobody can know.
    seen.clear()
    interleave(program("one", forward), program("two", forward))
    assert limited() == {
        "two publish": 8,
        "one dispatch": 8,
        "two dispatch": 8,
        "one combine": 20,
        "two combine": 20,
    }
    one, two = ("one shared experts", "two shared experts") if shared else ("one up", "two up")
    assert left() == {one: 8, two: 20}

    # Alone nothing is limited that a schedule does not limit.
    seen.clear()
    program("alone", forward)()
    assert all(each == (None, 7) for each in seen.values())


class ThreadedGpu(Gpu):
    """A fake GPU where each thread has its own current stream, as in torch."""

    def __init__(self, index: int | None) -> None:
        self._here = threading.local()
        super().__init__(index)

    @property
    def now(self) -> FakeStream:  # type: ignore[override]
        stream: FakeStream = getattr(self._here, "stream", self.streams[0])
        return stream

    @now.setter
    def now(self, stream: FakeStream) -> None:
        self._here.stream = stream


def test_in_turns_nobody_waits_for_what_others_have_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecomm.overlap.executor.CudaDevice", ThreadedGpu)
    executor = Executor(torch.device("cuda", 0), settle=lambda: log.append("settle"))
    log = FakeGpu.last.log
    forward, chain = forward_schedule(shared=False), CHAIN

    def program(name: str, schedule: Schedule) -> Callable[[], object]:
        def note(stage: str) -> Callable[[Results], None]:
            return lambda _: log.append(f"{name} {stage}")

        return lambda: executor.run(schedule, {stage: note(stage) for stage in schedule.names})

    backward = backward_schedule(shared=False, keep="all", home=True, weights=True, in_turns=True)
    interleave(program("f", forward), program("b", backward))
    # The forward comes to its end while gradients are on their way home: its caller waits for its combine, as
    # it was recorded, and not for what the stream has by now.
    home = log.index("b home")
    assert log.index("f combine") < home
    combined = log.index("record 101", log.index("f combine"))
    assert combined < home
    until_next = log[home + 1 : log.index("b up weights")]
    assert until_next.count("100 waits for 101") == 2, (
        until_next
    )  # for the combine; and "up weights" for home
    assert until_next.count("record 101") == 1, until_next  # at the end of home

    # What others have begun comes before what the communicator's stream waits for, as it does for home.
    up_to_home = log[log.index("b up backward") : home]
    assert up_to_home.index("settle") < up_to_home.index("101 waits for 100")

    # A stage that fails may have put anything on its stream.
    def fail(_: Results) -> None:
        raise ValueError("mine")

    log.clear()
    work: Any = {name: (lambda _: None) for name in chain.names}
    first_aside = next(stage.name for stage in chain.stages if stage.stream != chain.streams[0])
    with pytest.raises(ValueError, match="mine"):
        interleave(lambda: executor.run(chain, work | {first_aside: fail}))
    assert log[-2:] == ["record 101", "100 waits for 101"]

    # Outside nobody else has begun anything.
    log.clear()
    program("alone", backward)()
    assert "settle" not in log


def test_stages_say_on_how_many_sms_to_travel(gpu: Callable[[], Executor]) -> None:
    gpu()  # the fake one
    now: list[int | None] = [None]
    seen: dict[str, int | None] = {}

    @contextlib.contextmanager
    def limit(sms: int) -> Iterator[None]:
        now.append(sms)
        yield
        now.pop()

    executor = Executor(torch.device("cuda", 0), limit_sms=limit)
    own = Split(sms=132, comm=8)
    schedule = backward_schedule(shared=True, keep="all", home=True, weights=True, home_split=own)
    executor.run(schedule, {name: lambda _, n=name: seen.update({n: now[-1]}) for name in _names(schedule)})
    assert seen.pop("home") == 8 and set(seen.values()) == {None}
