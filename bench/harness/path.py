"""A path: one way of doing what is timed, as the harness calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

CALL = "call"  # the one phase of an operation
FORWARD, STEP = "forward", "step"  # those of a layer; a step is a forward and its backward
# Those of microbatches: all of a step in a row, their weights' gradients added to what is there; and the
# whole step, from weights without gradients on.
IN_A_ROW, WHOLE = "in a row", "whole step"
_Made = TypeVar("_Made")


class Verdict(NamedTuple):
    """Values of one result that are wrong, and of layers the largest deviation, in the terms of
    verify.BOUNDS.
    """

    wrong: int
    worst: float | None = None


@dataclass(frozen=True, kw_only=True)
class Path:
    """`calls` are what is timed, by phase. `check(round)` runs the path on fresh data.

    `before` is run, untimed, before each timed call. `remote` says whether bytes travel between ranks,
    `computes` whether a layer's products are made, `sms` how many SMs of a GPU are at work (None: not known);
    `note` goes into the record. `blocks` says that a call waits for the GPU; `waited`, if there is one, gives
    the seconds that all calls so far spent so. `own` says that it is moecomm's: that it cannot run is a
    failure. `more` measures, after the times, what else is said of each phase. `times`: how often a call does
    what is timed, as the replay of a graph with several does; times are divided by it.
    """

    name: str
    calls: Mapping[str, Callable[[], object]]
    check: Callable[[int], Verdict]
    before: Callable[[], None] | None = None
    remote: bool = True
    computes: bool = True
    sms: int | None = None
    note: str = ""
    blocks: bool = False
    waited: Callable[[], float] | None = None
    own: bool = False
    times: int = 1
    more: Callable[[], dict[str, dict[str, Any]]] = field(default=dict)


class NotMeasured(Exception):
    """A yardstick could not be measured; the text says why."""


@dataclass(frozen=True)
class Yardstick:
    """A time that is not that of a call here, but worked out from a measurement beside it.

    `sample()`, on all ranks, measures once and returns the seconds that this rank's call would take; it
    raises NotMeasured on all ranks alike. `describe()` is the row's note, after the samples.
    """

    name: str
    sample: Callable[[], float]
    describe: Callable[[], str]


@dataclass(frozen=True)
class NotRun:
    """A path that could not run, and why; `failed`: it should have."""

    name: str
    reason: str
    failed: bool = False


def attempt(make: Callable[[], _Made]) -> tuple[_Made | None, str]:
    """Calls `make`; returns its result and "" or, if it fails on any rank, None and the reason in a line."""
    made, problem = None, ""
    try:
        made = make()
    except Exception as error:  # this path is left out, the others are measured
        problem = f"{type(error).__name__}: {error}"
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    reason = " ".join(next((text for text in found if text), "").split())[:200]
    return (None, reason) if reason else (made, "")
