"""Exceptions as results: what a call raised on a rank, in a form that travels back to the test, and asserts
of them."""

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
    peer: int = -1


def catch(call: Callable[[], Any]) -> Caught | None:
    try:
        call()
    except Exception as error:
        names = tuple(each.__name__ for each in type(error).__mro__)
        extra = {name: getattr(error, name, 0) for name in ("needed", "available", "capacity")}
        return Caught(type(error).__name__, names, str(error), **extra, peer=getattr(error, "peer", -1))
    return None


def refused(call: Callable[[], Any], *says: str, begins: str = "", name: str = "InvalidArgument") -> Caught:
    """Asserts that a call raises an error of this name, whose text begins so and has these parts."""
    found = catch(call)
    require(found, *says, begins=begins, name=name)
    assert found is not None
    return found


def require(found: Caught | None, *says: str, begins: str = "", name: str = "InvalidArgument") -> None:
    """Asserts the same of an error that was caught before."""
    assert found is not None and found.name == name, found
    assert found.text.startswith(begins), found.text
    assert all(each in found.text for each in says), found.text
