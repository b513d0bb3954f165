"""A model of the pipe of warps that moves rows (csrc/kernels/gpu/move_pipe.cuh), and a search of its states.

A lister hands lists of entries to a loader, which has each entry loaded into the next stage of a ring;
workers, if there are any, change it there; a storer has it stored to its places and sets the flags of lists
behind what is in place. Loads and stores are under way for any time, and end in any order. Barriers are
waited for by the parity of a phase, as in the product: who is two phases behind takes one for another.

    python -m tests.protocol.move        # the searches of the tests, with their counts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.protocol import states
from tests.protocol.states import require

Lists = tuple[tuple[tuple[int, ...], bool], ...]
"""Of each list the number of places of its entries, and whether it has a flag."""


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """The pipe to search. The fields from `held` on are as in the product, other values make a mutant."""

    lists: Lists
    stages: int
    slots: int = 2
    """Places for lists."""
    workers: int = 0
    awaits: tuple[tuple[int, int], ...] = ()
    """(list, earlier list): the one is listed when the flag of the other is set."""
    lag: int = 1
    """Groups of stores that may be under way when flags are set."""
    together: int = 2
    """Groups between two fences, unless nothing else comes."""
    held: int = 1
    """Stages that stores may be reading while the storer goes on."""
    takers: frozenset[str] = frozenset({"loader", "storer", "workers"})
    """Those who say that they are done with a list, before another one takes its place."""
    reads_are_awaited: bool = True
    """A stage is released when its store has read it."""
    idle_releases: bool = True
    """The storer releases all stages where it has to wait."""
    idle_flags: bool = True
    """The storer sets flags where nothing else comes."""
    flags_wait: bool = True
    """Flags are set when all stores before them are in place."""
    all_workers: bool = True
    """An entry is ready when all workers have changed it, not one."""
    first: tuple[int, ...] = field(init=False)
    """The first entry of each list, and of the last one, which only ends the pipe; then the number of all."""
    places: tuple[int, ...] = field(init=False)
    """The number of places of each entry."""

    def __post_init__(self) -> None:
        first, places = [0], []
        for entries, _ in self.lists:
            places += entries
            first.append(len(places))
        object.__setattr__(self, "first", (*first, len(places)))
        object.__setattr__(self, "places", tuple(places))

    @property
    def last(self) -> int:
        """The list that ends the pipe."""
        return len(self.lists)

    def list_of(self, entry: int) -> int:
        return next(number for number in range(self.last) if entry < self.first[number + 1])


class State(NamedTuple):
    slots: tuple[int, ...]
    """The list that each slot holds; -1: none yet."""
    worked: tuple[int, ...]
    """Entries that each worker has changed,"""
    worker_lists: tuple[int, ...]
    """and lists that it is done with."""
    listed: int = 0
    """Lists that were handed over."""
    loader_lists: int = 0
    """Lists that the loader is done with,"""
    issued: int = 0
    """entries whose loads were begun,"""
    loading: frozenset[int] = frozenset()
    """and those of them that are under way."""
    storer_lists: int = 0
    stored: int = 0
    """Entries whose stores were begun,"""
    reading: frozenset[int] = frozenset()
    """those of them whose stage is still being read,"""
    storing: frozenset[int] = frozenset()
    """and those that are not in place."""
    released: int = 0
    """Entries whose stage was released."""
    fenced: int = 0
    """Entries that were stored when flags were set last,"""
    flagged: int = 0
    """and lists whose flags were set, or that have none."""
    ended: bool = False


def _passes(completed: int, phase: int) -> bool:
    """True where a wait for the parity of `phase` ends at a barrier that has completed so many phases."""
    return completed % 2 != phase % 2


def _rounds(count: int, place: int, places: int) -> int:
    """How often one of `places` places has had its turn, of `count` turns in all."""
    return (count - place + places - 1) // places


def _listed(pipe: Pipe, state: State, number: int) -> bool:
    """True where one that waits for a list finds it handed over; the slot holds what it then reads."""
    slot = number % pipe.slots
    if not _passes(_rounds(state.listed, slot, pipe.slots), number // pipe.slots):
        return False
    require(state.slots[slot] == number, "another list was read")
    return True


def _taken(pipe: Pipe, state: State) -> int:
    """Lists that all those are done with who say so."""
    done = {"loader": [state.loader_lists], "storer": [state.storer_lists], "workers": [*state.worker_lists]}
    return min(lists for party in pipe.takers for lists in done[party] or [state.listed])


def _lister(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    number, slot = state.listed, state.listed % pipe.slots
    if number > pipe.last:
        return
    if not _passes(_rounds(_taken(pipe, state), slot, pipe.slots), number // pipe.slots + 1):
        return
    if any(later == number and state.flagged <= earlier for later, earlier in pipe.awaits):
        return
    old = number - pipe.slots
    done = min(state.loader_lists, state.storer_lists, *state.worker_lists, number)
    require(old < done, "a list was written over before all were done with it")
    slots = (*state.slots[:slot], number, *state.slots[slot + 1 :])
    yield f"list {number}", state._replace(listed=number + 1, slots=slots)


def _loader(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    number, entry = state.loader_lists, state.issued
    if number >= pipe.last or not _listed(pipe, state, number):
        return
    if entry == pipe.first[number + 1]:
        yield f"the loader takes list {number}", state._replace(loader_lists=number + 1)
        return
    before = entry - pipe.stages
    if not _passes(_rounds(state.released, entry % pipe.stages, pipe.stages), entry // pipe.stages + 1):
        return
    if before >= 0:
        require(min(state.worked, default=entry) > before, "a stage was loaded before all had changed it")
        read = before < state.stored and before not in state.reading
        require(read, "a stage was loaded before its store had read it")
    yield f"load {entry}", state._replace(issued=entry + 1, loading=state.loading | {entry})


def _loaded(pipe: Pipe, state: State, entry: int) -> bool:
    stage = entry % pipe.stages
    loads = sum(each % pipe.stages == stage and each not in state.loading for each in range(state.issued))
    return _passes(loads, entry // pipe.stages)


def _workers(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    for worker, (entry, number) in enumerate(zip(state.worked, state.worker_lists, strict=True)):
        if number >= pipe.last or not _listed(pipe, state, number):
            continue
        if entry == pipe.first[number + 1]:
            lists = (*state.worker_lists[:worker], number + 1, *state.worker_lists[worker + 1 :])
            yield f"worker {worker} takes list {number}", state._replace(worker_lists=lists)
        elif _loaded(pipe, state, entry):
            require(entry < state.issued and entry not in state.loading, "a worker found another entry")
            require(entry >= state.stored, "a worker changed what was stored")
            worked = (*state.worked[:worker], entry + 1, *state.worked[worker + 1 :])
            yield f"worker {worker} changes {entry}", state._replace(worked=worked)


def _ready(pipe: Pipe, state: State, entry: int) -> bool:
    if pipe.workers == 0:
        return _loaded(pipe, state, entry)
    done = min(state.worked) if pipe.all_workers else max(state.worked)
    return _passes(_rounds(done, entry % pipe.stages, pipe.stages), entry // pipe.stages)


def _flag(pipe: Pipe, state: State, entries: int) -> State:
    """Sets the flags of all lists whose last entry is among so many."""
    lists = state.flagged
    while lists < state.storer_lists and pipe.first[lists + 1] <= entries:
        lists += 1
    under_way = any(entry < pipe.first[lists] for entry in state.storing)
    require(not under_way, "a flag was set before what it stands for")
    return state._replace(flagged=lists, fenced=state.stored)


def _storer(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    if state.ended:
        return
    number, entry, oldest = state.storer_lists, state.stored, state.released
    if entry - oldest > pipe.held:  # all but the newest have to be read
        if oldest not in state.reading or not pipe.reads_are_awaited:
            yield f"release {oldest}", state._replace(released=oldest + 1)
        return
    waits = state.flagged < number
    due = entry - pipe.lag
    if waits and entry - state.fenced >= pipe.together:
        if not pipe.flags_wait or not any(each < due for each in state.storing):
            yield f"flags up to entry {due}", _flag(pipe, state, due)
        return
    here = _listed(pipe, state, number)
    if here and number == pipe.last:
        if not state.storing:
            yield "end", _flag(pipe, state, entry)._replace(ended=True)
        return
    if here and entry == pipe.first[number + 1]:
        yield f"the storer takes list {number}", state._replace(storer_lists=number + 1)
        return
    if here and _ready(pipe, state, entry):
        require(entry < state.issued and entry not in state.loading, "another entry was stored")
        changed = min(state.worked, default=entry + 1) > entry
        require(changed, "an entry was stored before all had changed it")
        more = frozenset({entry} if pipe.places[entry] > 0 else ())
        yield (
            f"store {entry}",
            state._replace(stored=entry + 1, reading=state.reading | more, storing=state.storing | more),
        )
        return
    if pipe.idle_releases and oldest < entry and not state.reading:
        yield "release all", state._replace(released=entry)
    if pipe.idle_flags and waits and not state.storing:
        yield "flags, since nothing comes", _flag(pipe, state, entry)


def _steps(pipe: Pipe, state: State) -> Iterator[tuple[str, State]]:
    yield from _lister(pipe, state)
    yield from _loader(pipe, state)
    yield from _workers(pipe, state)
    yield from _storer(pipe, state)
    yield from states.copies(state)


def _ended(pipe: Pipe, state: State) -> bool:
    others = min(state.loader_lists, *state.worker_lists, pipe.last)
    done = state.flagged == pipe.last and state.stored == len(pipe.places) and not state.storing
    require(not state.ended or done, "the pipe ended before its work")
    return state.ended and others == pipe.last


def search(pipe: Pipe) -> int:
    """Returns the number of states; raises Violation as states.search does."""
    start = State(slots=(-1,) * pipe.slots, worked=(0,) * pipe.workers, worker_lists=(0,) * pipe.workers)
    return states.search(start, lambda state: _steps(pipe, state), lambda state: _ended(pipe, state))


_USUAL = Pipe(lists=(((1, 2), True), ((1,), True), ((0, 1), False)), stages=2)
_WORKS = Pipe(lists=(((0, 1), True), ((1,), True), ((1,), True)), stages=2, workers=2)
_FLAGS = Pipe(lists=(((1,), True), ((), True), ((1,), True), ((), True)), stages=2)
_AWAITS = Pipe(lists=(((1, 1), True), ((1,), True), ((1,), True)), stages=3, awaits=((2, 0), (2, 1)))
QUICK: dict[str, tuple[Pipe, int]] = {
    "rows to some places": (_USUAL, 953),
    "rows that are changed": (_WORKS, 4536),
    "lists of flags alone": (_FLAGS, 617),
    "lists that wait for flags": (_AWAITS, 507),
    "flags alone, with workers": (replace(_FLAGS, workers=1), 1571),
    "more rows than stages, three slots": (
        Pipe(lists=(((1, 1, 1), True), ((1, 1), False), ((1,), True)), stages=2, slots=3),
        2290,
    ),
}
"""Searches of the tests, with the number of states that each finds."""
_NO_LOADER, _NO_WORKERS = frozenset({"storer", "workers"}), frozenset({"storer", "loader"})
MUTANTS: dict[str, tuple[Pipe, str]] = {
    "lists are taken without the loader": (replace(_FLAGS, takers=_NO_LOADER), "a list was written over"),
    "lists are taken without the workers": (
        replace(_FLAGS, workers=1, takers=_NO_WORKERS),
        "a list was written over",
    ),
    "stages are released before they are read": (
        replace(_USUAL, reads_are_awaited=False),
        "before its store had read it",
    ),
    "stages are kept until the next store": (
        replace(_USUAL, stages=1, idle_releases=False),
        "all wait",
    ),
    "flags wait for the next row": (replace(_AWAITS, idle_flags=False), "all wait"),
    "flags do not wait": (replace(_USUAL, flags_wait=False, lag=0), "a flag was set before"),
    "one worker is enough": (replace(_WORKS, all_workers=False), "before all had changed it"),
}


if __name__ == "__main__":
    states.report(search, QUICK, MUTANTS)
