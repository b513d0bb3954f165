"""Exceptions as results: what a call raised on a rank, in a form that travels back to the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Caught:
    """An exception as it travels back to the test."""

    name: str
    bases: tuple[str, ...]
    text: str
    needed: int = 0
    available: int = 0
    capacity: int = 0


def catch(call: Callable[[], Any]) -> Caught | None:
    try:
        call()
    except Exception as error:
        names = tuple(each.__name__ for each in type(error).__mro__)
        extra = {name: getattr(error, name, 0) for name in ("needed", "available", "capacity")}
        return Caught(type(error).__name__, names, str(error), **extra)
    return None
