"""A test that is one function, which runs on ranks:

@on_ranks(3)
def test_sums(rank: int, world_size: int, seed: int) -> None:
    ...
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Body:
    """The function of a test, found by name on a rank."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).body(*args)


def on_ranks(
    ranks: int | str = "world_size", **environment: str
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that runs on so many ranks of the fixture `pool`, with `environment`.

    `ranks` may be the name of a parameter or fixture that says how many. The arguments of the function after
    the first two are parameters and fixtures of the test. Each rank returns None, or a list of what is wrong
    that has to be empty.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)[2:]

        def test(**given: Any) -> None:
            size = ranks if isinstance(ranks, int) else given[ranks]
            ranks_here = given["pool"](size, **environment)
            found = ranks_here(_Body(body.__module__, body.__name__), *(given[n] for n in names))
            problems = [text for each in found for text in each or ()]
            assert not problems, "\n".join(map(str, problems[:12]))

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]
        needed = dict.fromkeys(["pool", *([ranks] if isinstance(ranks, str) else []), *names])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in needed])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate
