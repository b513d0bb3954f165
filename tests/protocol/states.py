"""A search of all states of a model: what each of its parties may do next, until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

State = TypeVar("State")
Model = TypeVar("Model")


class Violation(Exception):
    """A state that must not be, and the steps to it."""

    def __init__(self, text: str, trace: tuple[str, ...]) -> None:
        super().__init__(f"{text} after {len(trace)} steps")
        self.trace = trace


class Wrong(Exception):
    """A step that must not be possible."""


def require(right: bool, text: str) -> None:
    if not right:
        raise Wrong(text)


def copies(state: Any) -> Iterator[tuple[str, Any]]:
    """The ends of bulk copies, in any order: of loads, and of stores, which read their stage before."""
    for each in state.loading:
        yield f"loaded {each}", state._replace(loading=state.loading - {each})
    for each in state.reading:
        yield f"read {each}", state._replace(reading=state.reading - {each})
    for each in state.storing - state.reading:
        yield f"in place {each}", state._replace(storing=state.storing - {each})


def search(
    start: State, steps_of: Callable[[State], Iterable[tuple[str, State]]], ended: Callable[[State], bool]
) -> int:
    """Returns the number of states. `steps_of` gives the steps from a state, with their names, and raises
    Wrong for one that must not be; `ended` tells whether a state may be the last, and raises Wrong if it must
    not. Raises Violation for the first state that is wrong, or from which nothing goes on.
    """
    found: dict[State, tuple[State, str] | None] = {start: None}
    todo = [start]

    def trace(state: State) -> tuple[str, ...]:
        names: list[str] = []
        came = found[state]
        while came is not None:
            names.append(came[1])
            came = found[came[0]]
        return tuple(reversed(names))

    for state in todo:
        try:
            steps = list(steps_of(state))
            if not ended(state):
                require(bool(steps), "all wait")
        except Wrong as wrong:
            raise Violation(str(wrong), trace(state)) from None
        for name, after in steps:
            if after not in found:
                found[after] = (state, name)
                todo.append(after)
    return len(found)


def report(
    search: Callable[[Model], int],
    quick: Mapping[str, tuple[Model, int]],
    mutants: Mapping[str, tuple[Model, str]],
) -> None:
    """Prints what the searches of some models find, and those of their mutants."""
    for name, (model, _) in quick.items():
        print(f"{name}: {search(model)} states")
    for name, (mutant, _) in mutants.items():
        try:
            print(f"{name}: not found in {search(mutant)} states")
        except Violation as violation:
            print(f"{name}: {violation}")
