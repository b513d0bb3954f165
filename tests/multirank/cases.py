"""tests/cases.py, and its check by tests/oracle.py."""

from __future__ import annotations

from collections.abc import Sequence

from tests.cases import *  # noqa: F403
from tests.cases import Case
from tests.oracle import assert_none, play

__all__ = ["play"]
Arrays = list[str]


def verify(case: Case, results: Sequence[Sequence[str]]) -> None:
    assert_none(results)
