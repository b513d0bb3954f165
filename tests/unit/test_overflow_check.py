"""The check of a GraphedStep: overflows are known behind its last note, however many the one before had."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch

from moecomm.graphs.overflow_check import OverflowCheck

CPU = torch.device("cpu")


def run(check: OverflowCheck, overflows: Sequence[int]) -> None:
    """A step with a dispatch for each of these."""
    check.start()
    for each in overflows:
        check.note_dispatch(torch.tensor(each, dtype=torch.int32))
    check.finish()


@pytest.mark.parametrize("before", [0, 1, 3, 5])
@pytest.mark.parametrize("overflows", [[], [0], [7], [0, 0, 9], [9, 0, 4], [0, 0, 0]])
def test_the_largest_overflow_of_a_step(before: int, overflows: list[int]) -> None:
    check = OverflowCheck(CPU, None)
    run(check, [5] * before)
    assert check.read(0) == (5 if before else 0)
    run(check, overflows)
    assert check.read(0) == max(overflows, default=0)
    assert check.read(11) == max([11, *overflows])


def test_it_is_known_before_the_step_ends() -> None:
    check = OverflowCheck(CPU, None)
    run(check, [0, 0])
    check.start()
    for overflow, known in ((3, 0), (0, 3), (4, 4)):  # one more than the step before had
        check.note_dispatch(torch.tensor(overflow, dtype=torch.int32))
        assert check.read(0) == known
    check.finish()
    assert check.read(0) == 4
    check.start()
    assert check.read(0) == 0


class Stream:
    """A GPU's stream that knows what it comes after: the work put on it and on those it has waited for."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.done |= event.done


class Event:
    def __init__(self, external: bool = False) -> None:
        self.done: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.done |= stream.done


@pytest.mark.parametrize("steps", [["one"], ["one", "other"], ["other", "one"], ["other", "one", "other"]])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_dispatches_on_several_streams(
    before: int, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published behind the last note is behind all others too, on whichever stream they are. All
    points that a graph has stay alive with the check."""
    check = OverflowCheck(CPU, None)
    run(check, [0] * before)
    check._on_gpu = True
    streams = {"one": Stream(), "other": Stream()}
    current = streams["one"]
    points: list[tuple[set[str], weakref.ref[Event]]] = []

    def event(external: bool = False) -> Event:
        made = Event(external)
        if external:
            points.append((made.done, weakref.ref(made)))
        return made

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "Event", event)
    check.start()
    for number, name in enumerate(steps):
        current = streams[name]
        current.done.add(f"dispatch {number}")
        check.note_dispatch(torch.tensor(0, dtype=torch.int32))
    current = streams["one"]
    check.finish()
    everything = {f"dispatch {number}" for number in range(len(steps))}
    assert points[-1][0] == everything
    assert all(alive() is not None for _, alive in points)
