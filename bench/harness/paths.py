"""A path: one way of doing the operation, as the harness calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Path:
    """`call` is what is timed. `check(round)` runs it on fresh data and returns this rank's count of wrong
    values.

    `before` is run, untimed, before each timed call. `remote` says whether bytes travel between ranks, `note`
    ends up in the JSON row.
    """

    name: str
    call: Callable[[], object]
    check: Callable[[int], int]
    before: Callable[[], None] | None = None
    remote: bool = True
    note: str = ""
