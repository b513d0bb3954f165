"""A model of the pipe of warps that makes sums (csrc/kernels/gpu/sum_pipe.cuh), and a search of its states.

A lister hands lists of tokens to a loader, which writes an item for each token and has a piece of each of
its sources loaded into the next stage of a ring; adders take the pieces in order and leave the sum in the
stage of the item's last one; a storer has it stored from there and sets flags. Loads and stores are under
way for any time, and end in any order.

    python -m tests.protocol.pipe        # the searches of the tests, with their counts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.protocol import states
from tests.protocol.states import require

Lists = tuple[tuple[int, ...], ...]
"""The numbers of sources of the tokens of each list; a token without sources has a stage all the same."""


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """The pipe to search. The fields from `places` on are as in the product, other values make a mutant."""

    lists: Lists
    stages: int
    adders: int = 2
    """Warps that add."""
    awaits: tuple[tuple[int, int], ...] = ()
    """(list, earlier list): the one is listed when the flags of the other are set, as between nodes."""
    lag: int = 1
    """Items whose stores may be under way when flags are set."""
    together: int = 2
    """Items whose flags are set behind one fence."""
    places: int = 0
    """Places for items; 0: one for each stage and one for each token of the longest list."""
    lister_waits: bool = True
    """A list is written when the loader has taken the one that was there."""
    last_is_kept: bool = True
    """The adders leave an item's last stage to the storer, which releases it when it has been read."""
    idle_releases: bool = True
    """The storer releases the stage of its last store also where no other item is there yet."""
    idle_flags: bool = True
    """The storer sets flags also where no other item is there yet."""
    flags_wait: bool = True
    """Flags are set when the stores of their items, and of all before, are in place."""
    items: tuple[tuple[int, int], ...] = field(init=False)
    """The first and the last source of each item, counted over all lists; the last one ends the pipe."""
    last_of_list: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        items, last_of_list, first = [], [], 0
        for tokens in (*self.lists, (0,)):
            for sources in tokens:
                items.append((first, first + max(sources, 1) - 1))
                first = items[-1][1] + 1
            last_of_list.append(len(items) - 1)
        object.__setattr__(self, "items", tuple(items))
        object.__setattr__(self, "last_of_list", tuple(last_of_list))
        if self.places == 0:
            object.__setattr__(self, "places", self.stages + max(map(len, (*self.lists, (0,)))))


class State(NamedTuple):
    listed: int = 0
    """Lists that were handed over."""
    buffers: tuple[int, int] = (-1, -1)
    """The list that each of the two buffers holds."""
    taken: int = 0
    """Lists that the loader is done with."""
    written: tuple[int, ...] = ()
    """The item in each place."""
    issued: int = 0
    """Sources whose loads were begun,"""
    loading: frozenset[int] = frozenset()
    """and those of them that are under way."""
    added: tuple[int, ...] = ()
    """Sources that each adder has taken."""
    stored: int = 0
    """Items whose stores were begun,"""
    reading: frozenset[int] = frozenset()
    """those of them whose stage is still being read,"""
    storing: frozenset[int] = frozenset()
    """and those that are not in place."""
    released: int = 0
    """Items whose last stage was released,"""
    flagged: int = 0
    """and whose flags were set."""
    ended: bool = False


def _item_of(pipe: Pipe, source: int) -> int:
    return next(i for i, (_, last) in enumerate(pipe.items) if source <= last)


def _released(pipe: Pipe, state: State, source: int) -> bool:
    """True where the stage of a source is free again by the barriers that the loader waits at."""
    item = _item_of(pipe, source)
    taken = min(state.added) > source
    if source < pipe.items[item][1] or not pipe.last_is_kept:
        return taken
    return state.released > item


def _loader(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    number = state.taken
    if number == len(pipe.last_of_list):
        return
    first_item = pipe.last_of_list[number - 1] + 1 if number > 0 else 0
    last_item = pipe.last_of_list[number]
    first, last = pipe.items[first_item][0], pipe.items[last_item][1]
    if state.issued > last:
        yield f"take list {number}", state._replace(taken=number + 1)
        return
    if state.issued == first and state.written[first_item % pipe.places] != first_item:
        if state.listed <= number:
            return
        require(state.buffers[number % 2] == number, "a list was written over before it was taken")
        written = list(state.written)
        for item in range(first_item, last_item + 1):
            before = written[item % pipe.places]
            require(before < state.released or before < 0, "an item was written over before it was stored")
            written[item % pipe.places] = item
        yield f"write items of list {number}", state._replace(written=tuple(written))
        return
    source, before = state.issued, state.issued - pipe.stages
    if before >= 0:
        if not _released(pipe, state, before):
            return
        require(min(state.added) > before, "a stage was loaded again before all had added it")
        item = _item_of(pipe, before)
        stored = before < pipe.items[item][1] or (item < state.stored and item not in state.reading)
        require(stored, "a stage was loaded again before its sum was stored")
    yield f"load {source}", state._replace(issued=source + 1, loading=state.loading | {source})


def _adders(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    for adder, source in enumerate(state.added):
        if source >= state.issued or source in state.loading:
            continue
        item = _item_of(pipe, source)
        require(state.written[item % pipe.places] == item, "an adder found another item")
        added = (*state.added[:adder], source + 1, *state.added[adder + 1 :])
        yield f"adder {adder} takes {source}", state._replace(added=added)


def _storer(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    item = state.stored
    if state.ended:
        return
    newest = item - 1
    if state.released < newest:  # all but the newest store have to be read
        if state.released not in state.reading:
            yield f"release {state.released}", state._replace(released=state.released + 1)
        return
    # After every `together` items flags are set, of all but the newest `lag`.
    due = item // pipe.together * pipe.together - pipe.lag
    if item % pipe.together == 0 and state.flagged < due:
        if not pipe.flags_wait or not any(each < due for each in state.storing):
            yield f"flags up to {due}", _flag(state, due)
        return
    if min(state.added) > pipe.items[item][1]:
        require(state.written[item % pipe.places] == item, "the storer found another item")
        if item + 1 == len(pipe.items):
            if not state.storing:
                yield "end", _flag(state, item)._replace(ended=True)
            return
        under_way = {"reading": state.reading | {item}, "storing": state.storing | {item}}
        yield f"store {item}", state._replace(stored=item + 1, **under_way)
        return
    if pipe.idle_releases and state.released == newest and newest >= 0 and newest not in state.reading:
        yield f"release {newest}, idle", state._replace(released=item)
    if pipe.idle_flags and state.flagged < item and not state.storing:
        yield f"flags up to {item}, idle", _flag(state, item)


def _flag(state: State, items: int) -> State:
    require(not any(each < items for each in state.storing), "a flag was set before its sum was in place")
    return state._replace(flagged=items)


def _lister(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    number = state.listed
    if number == len(pipe.last_of_list) or (pipe.lister_waits and number - state.taken >= 2):
        return
    if any(later == number and state.flagged <= pipe.last_of_list[earlier] for later, earlier in pipe.awaits):
        return
    buffers = (number, state.buffers[1]) if number % 2 == 0 else (state.buffers[0], number)
    yield f"list {number}", state._replace(listed=number + 1, buffers=buffers)


def _steps(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    yield from _lister(pipe, state)
    yield from _loader(pipe, state)
    yield from _adders(pipe, state)
    yield from _storer(pipe, state)
    yield from states.copies(state)


def _ended(pipe: Pipe, state: State) -> bool:
    done = state.flagged + 1 == len(pipe.items) and not state.storing
    require(not state.ended or done, "the pipe ended before its work")
    return state.ended


def search(pipe: Pipe) -> int:
    """Returns the number of states; raises Violation as states.search does."""
    start = State(written=(-1,) * pipe.places, added=(0,) * pipe.adders)
    return states.search(start, lambda state: _steps(pipe, state), lambda state: _ended(pipe, state))


_USUAL = Pipe(lists=((2, 1), (1,), (0, 3)), stages=3)
_SINGLE = Pipe(lists=((1, 1), (1, 1), (1,)), stages=2)
_NODES = Pipe(lists=((1, 1), (2,), (1,)), stages=3, awaits=((2, 0),))
QUICK: dict[str, tuple[Pipe, int]] = {
    "rows of some tokens": (_USUAL, 7408),
    "a row each": (_SINGLE, 3686),
    "more rows than stages": (Pipe(lists=((5,), (4, 1)), stages=2), 1614),
    "lists that wait for flags": (_NODES, 2578),
    "one adder, three lists under way": (Pipe(lists=((1, 1), (2,), (1,), (1,)), stages=4, adders=1), 9738),
}
"""Searches of the tests, with the number of states that each finds."""
MUTANTS: dict[str, tuple[Pipe, str]] = {
    "a place less for items": (replace(_SINGLE, places=_SINGLE.places - 1), "an item was written over"),
    "the lister does not wait": (replace(_SINGLE, lister_waits=False), "a list was written over"),
    "adders release the last stage": (replace(_USUAL, last_is_kept=False), "before its sum was stored"),
    "the last stage is kept until the next store": (
        replace(_USUAL, lists=((1,), (2,)), stages=1, idle_releases=False),
        "all wait",
    ),
    "flags wait for the next item": (replace(_NODES, idle_flags=False), "all wait"),
    "flags do not wait": (replace(_USUAL, flags_wait=False), "a flag was set before"),
}


if __name__ == "__main__":
    states.report(search, QUICK, MUTANTS)
