"""A path: one way of doing the operation, as the harness calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Path:
    """`call` is what is timed. `check(round)` runs it on fresh data and returns this rank's count of wrong
    values.

    `before` is run, untimed, before each timed call. `remote` says whether bytes travel between ranks, `sms`
    how many SMs of a GPU are at work (None: not known), `note` ends up in the JSON row. `blocks` says that
    the call waits for the GPU; `waited`, if there is one, gives the seconds that all calls so far spent so.
    """

    name: str
    call: Callable[[], object]
    check: Callable[[int], int]
    before: Callable[[], None] | None = None
    remote: bool = True
    sms: int | None = None
    note: str = ""
    blocks: bool = False
    waited: Callable[[], float] | None = None


@dataclass(frozen=True)
class Yardstick:
    """A time that is not that of a call here, but worked out from a measurement beside it.

    `sample()`, on all ranks, measures once and returns the seconds that this rank's call would take; it
    raises NotMeasured on all ranks alike. `describe()` is the JSON row's note, after the samples.
    """

    name: str
    sample: Callable[[], float]
    describe: Callable[[], str]
    remote: bool = True
    sms: int | None = None

    @property
    def note(self) -> str:
        return self.describe()


class NotMeasured(Exception):
    """A yardstick could not be measured; the text says why."""


@dataclass(frozen=True)
class NotRun:
    """A baseline that could not run, and why."""

    name: str
    reason: str
