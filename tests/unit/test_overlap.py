"""Schedules: what is refused, the order of issue, the planned times; timelines; and runs, in order and on
streams."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.model import MACHINES, Shape
from moecomm.overlap import (
    H200,
    Executor,
    LayerShape,
    Results,
    Schedule,
    Span,
    Split,
    Stage,
    Timeline,
    backward_schedule,
    forward_schedule,
    interleave,
    sms_beside_weights,
    sms_in_turns,
)
from moecomm.overlap.schedule import SMS
from tests.unit.loopback import FakeGpu, FakeStream

STREAMS = ("compute", "comm")


def _stage(name: str, *after: str, on: str = "compute", us: float = 0, **uses: float) -> Stage:
    return Stage(name=name, stream=on, after=after, seconds=us * 1e-6, uses=uses, communicates=on == "comm")


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
        ([_stage("a", us=-1)], "stage 'a' takes -1e-06 seconds, must be a number of at least 0"),
        ([_stage("a", us=float("nan"))], "stage 'a' takes nan seconds, must be a number of at least 0"),
    ],
)
def test_refused_by_name(stages: list[Stage], text: str) -> None:
    with pytest.raises(moecomm.InvalidSchedule) as caught:
        Schedule(stages, streams=STREAMS, resources={"sms": 132})
    assert str(caught.value) == text


def test_a_resource_of_nothing_is_refused() -> None:
    with pytest.raises(moecomm.InvalidSchedule, match="there is 0 of the resource 'sms', must be above 0"):
        Schedule([], streams=STREAMS, resources={"sms": 0})


# -- order and times -----------------------------------------------------------------------------------------


def test_the_first_listed_that_can_goes_first() -> None:
    schedule = Schedule(
        [_stage("late", "early"), _stage("free"), _stage("early"), _stage("end", "late", "free")],
        streams=STREAMS,
    )
    assert _names(schedule) == ["free", "early", "late", "end"]
    assert schedule["late"].after == ("early",) and "late" in schedule and "other" not in schedule


def _random_schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    streams = [f"s{i}" for i in range(draw.randint(1, 4))]
    names = [f"n{i}" for i in range(draw.randint(1, 30))]
    stages = []
    for i, name in enumerate(names):
        after = tuple(draw.sample(names[:i], min(i, draw.randint(0, 3))))
        uses = {"sms": draw.randint(0, 8)} if draw.random() < 0.7 else {}
        stages.append(
            Stage(
                name=name,
                stream=draw.choice(streams),
                after=after,
                uses=uses,
                seconds=draw.choice([0.0, draw.random()]),
            )
        )
    draw.shuffle(stages)
    return Schedule(stages, streams=streams, resources={"sms": 8})


@pytest.mark.parametrize("case", range(200))
def test_any_plan_keeps_the_rules(case: int, seed: int) -> None:
    """Order, streams and resources; and nothing starts later than it could."""
    schedule = _random_schedule(seed + case)
    issued = {stage.name: i for i, stage in enumerate(schedule.stages)}
    planned = {span.name: span for span in schedule.plan().spans}
    assert planned.keys() == issued.keys()
    last: dict[str, Span] = {}
    for stage in schedule.stages:
        span = planned[stage.name]
        assert span.end == span.begin + stage.seconds
        before = [planned[other] for other in stage.after]
        assert all(issued[other] < issued[stage.name] for other in stage.after)
        if stage.stream in last:
            before.append(last[stage.stream])
        last[stage.stream] = span
        ready = max((other.end for other in before), default=0.0)
        assert span.begin >= ready

        def free_at(time: float) -> float:
            held = [s for s in schedule.stages if planned[s.name].begin <= time < planned[s.name].end]
            return 8 - sum(s.uses.get("sms", 0) for s in held)

        assert free_at(span.begin) >= 0
        if span.begin > ready:  # it waited for SMs: just before it began there were too few
            ends = [other.end for other in planned.values() if other.end < span.begin]
            middle = (max(ends, default=0.0) + span.begin) / 2
            assert free_at(max(middle, ready)) < stage.uses["sms"]


def test_a_plan_by_hand() -> None:
    """dispatch under the shared experts; the experts' SMs are less while the combine runs."""
    schedule = Schedule(
        [
            _stage("dispatch", on="comm", us=30, sms=24),
            _stage("shared", us=50, sms=108),
            _stage("experts", "dispatch", us=100, sms=108),
            _stage("combine", "experts", on="comm", us=40, sms=24),
            _stage("all of it", "experts", us=10, sms=132),
        ],
        streams=STREAMS,
        resources={"sms": 132},
    )
    spans = {span.name: (round(span.begin * 1e6), round(span.end * 1e6)) for span in schedule.plan().spans}
    assert spans == {
        "dispatch": (0, 30),
        "shared": (0, 50),
        "experts": (50, 150),
        "combine": (150, 190),
        "all of it": (190, 200),
    }
    timeline = schedule.plan()
    assert timeline.seconds == pytest.approx(200e-6)
    assert timeline.exposed_seconds == pytest.approx(40e-6) and timeline.exposed_share == pytest.approx(0.2)
    assert timeline.busy_seconds("comm") == pytest.approx(70e-6)
    assert str(schedule).splitlines() == [
        "stage      stream   uses     begins   ends  after",
        "dispatch   comm     24 sms      0.0   30.0",
        "shared     compute  108 sms     0.0   50.0",
        "experts    compute  108 sms    50.0  150.0  dispatch",
        "combine    comm     24 sms    150.0  190.0  experts",
        "all of it  compute  132 sms   190.0  200.0  experts",
    ]


def test_amounts_that_are_no_binary_numbers_add_up() -> None:
    stages = [_stage(f"s{i}", on=f"stream {i}", us=1, link=0.1) for i in range(30)]
    schedule = Schedule(stages, streams=[stage.stream for stage in stages], resources={"link": 0.3})
    assert schedule.plan().seconds == pytest.approx(10e-6)


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
    """With events that can be recorded and asked for times."""

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
    """One that says it is on a GPU, and which streams keep it."""

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
        forward_schedule(shared=True, parts=2, split=split),
        backward_schedule(shared=False, keep="all", home=True, weights=True, split=split),
    ):
        executor.run(schedule, {name: look(name) for name in _names(schedule)})
    assert left.pop("sum") == left.pop("up weights") == 7  # nothing travels then: as it was
    beside = {"shared experts", "down weights"} | {
        f"{step} {part}" for step in ("up", "activation", "down") for part in (0, 1)
    }
    assert {name for name, sms in left.items() if sms == 24} == beside
    assert all(sms == 7 for name, sms in left.items() if name not in beside)

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
        (False, {"parts": 2}),
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


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_forward_of_a_layer(shared: bool, parts: int) -> None:
    schedule = forward_schedule(shared=shared, parts=parts)
    names = _names(schedule)
    first, last = ("dispatch", "combine") if parts == 1 else ("dispatch 0", f"combine {parts - 1}")
    assert names[0] == "publish" and names[-1] == ("sum" if shared else last)
    if shared:  # is issued between the halves of a dispatch, whose second keeps the host waiting
        assert names.index("publish") < names.index("shared experts") < names.index(first)


def test_parts_hide_what_travels() -> None:
    """With times as of a layer whose products take five times as long as its rows' way: of the way there and
    back a quarter each stays exposed in four parts."""

    def timed(schedule: Schedule, parts: int) -> Timeline:
        seconds = {"dispatch": 1.0, "combine": 1.0, "up": 6.0, "down": 4.0}
        stages = [
            dataclasses.replace(stage, seconds=seconds.get(stage.name.split()[0], 0.0) / parts)
            for stage in schedule.stages
        ]
        return Schedule(stages, streams=schedule.streams).plan()

    for parts in (1, 2, 4):
        timeline = timed(forward_schedule(shared=False, parts=parts), parts)
        assert timeline.seconds == pytest.approx(10 + 2 / parts)
        assert timeline.exposed_seconds == pytest.approx(2 / parts)


@pytest.mark.parametrize("keep", ["all", "rows", "nothing"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_backward_of_a_layer(keep: Any, shared: bool, home: bool, weights: bool) -> None:
    three = _names(backward_schedule(shared=shared, keep=keep, home=home, weights=weights, parts=3))
    for name in ("gradient rows", "down backward", "activation backward"):
        assert [three.index(f"{name} {part}") for part in range(3)] == sorted(
            three.index(f"{name} {part}") for part in range(3)
        )
    names = _names(backward_schedule(shared=shared, keep=keep, home=home, weights=weights))
    assert set(names) == {name.rstrip(" 012") for name in three}
    assert ("rows again" in names) == (keep == "nothing") and ("up again" in names) == (keep != "all")
    assert ("home" in names) == home and ("down weights" in names) == weights
    if home and weights:
        apart, beside = ("down weights", "up backward", "home", "up weights"), Split(sms=132, comm=24)
        assert [name for name in names if name in apart] == list(apart)
        schedule = backward_schedule(shared=shared, keep=keep, home=home, weights=weights, split=beside)
        order = _names(schedule)  # both are issued while gradients travel home, and run then
        assert order.index("home") < order.index("down weights") < order.index("up weights")
        assert "home" not in schedule["down weights"].after
        assert three.index("home 2") < three.index("down weights")
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
    for more in ({"split": Split(sms=132, comm=24)}, {"parts": 2}):
        options: Any = {"shared": shared, "keep": keep, "home": True, "weights": True} | more
        assert str(backward_schedule(**options, home_split=own)) == str(backward_schedule(**options))


def test_sms_beside_the_gradients_of_weights() -> None:
    machine = MACHINES["h200"]

    def found(ffn: int, tokens: int = 4096, experts: int = 128, top_k: int = 8) -> int | None:
        exchange = Shape(nodes=1, ranks_per_node=4, tokens=tokens, experts=experts, top_k=top_k, hidden=4096)
        return sms_beside_weights(LayerShape(exchange, ffn=ffn), machine, H200)

    assert found(64) is None  # a short product: a quarter of the GPU would not do
    assert found(65536) is None  # a long one, of which eight SMs are more than the way home takes
    assert found(16384, experts=8, top_k=2) is None
    known = [found(ffn) for ffn in (1024, 1536, 2048, 3072)]
    assert all(sms is not None and 8 <= sms <= 33 and sms % 2 == 0 for sms in known)
    assert known == sorted(known, key=lambda sms: -(sms or 0)) and len(set(known)) > 2
    # Weights that few rows share take longer.
    few, many = found(1536, tokens=256), found(1536)
    assert few is not None and many is not None and few < many


def test_sms_in_turns_are_those_of_the_product_beside() -> None:
    machine = MACHINES["h200"]
    exchange = Shape(nodes=1, ranks_per_node=4, tokens=4096, experts=256, top_k=8, hidden=7168)
    found = sms_in_turns(LayerShape(exchange, ffn=2048), machine, H200)
    assert found.keys() == {"publish", "dispatch", "gradient rows", "combine"}
    assert found["publish"] == found["dispatch"]
    # Beside half of the product it takes more; the way home lies beside what the gradients' does.
    assert 8 <= found["gradient rows"] < found["dispatch"] <= 33
    assert found["combine"] == sms_beside_weights(LayerShape(exchange, ffn=2048), machine, H200)
    # Where the product is too short there is nothing to lie under.
    assert "dispatch" not in sms_in_turns(LayerShape(exchange, ffn=512), machine, H200)
    assert sms_in_turns(LayerShape(exchange, ffn=64), machine, H200) == {}


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
    """Each thread has a current stream of its own, as in torch."""

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
