"""A model of the protocol between the GPUs of one node (docs/protocol.md), and a search of all its states.

Every rank runs one operation after another without end: it announces a record to every peer, brings chunks of
rows to them, waits for the records of all, reads the chunks that come, and gives a credit for each. It may
give an operation up instead of receiving it. A rank may be lost at any point. What is shared are words: two
records a pair of ranks, an arrival flag and a credit a chunk, and two row buffers with places that chunks use
in turn. Each step reads or writes the words of one pair of ranks.

    python -m tests.protocol.model                    # the searches of a minute, with their counts
    python -m tests.protocol.model --ranks 3          # a larger one

A rank may run both sides of an operation in one kernel: rows go out before it has announced itself, and
chunks are read before the records of all are there, as in a combine, whose plan says what comes. With starts
operations are dispatches: a rank announces what it brings in a word that holds its epoch, before its record,
and goes by such words of others, in one kernel or in two; who gives an operation up waits for records. A
dispatch in one kernel may find no room for its rows: it has announced and sent all then, and reads nothing.
Either it reads once it has ended, which is one of the orders of a dispatch that reads, or it is given up
after that.

Epochs have no bound: a state is kept relative to the least epoch that somebody can still ask for, so the
number of states is finite and the search covers runs of every length.
"""

import argparse
import graphlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

RECEIVES, GIVES_UP, FUSED, LEFT = 0, 1, 2, 3
RUNNING, LOST, FAILED = 0, 1, 2
OLD = -8
"""A word of an epoch that nobody asks for any more."""
_WRAP = 4


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The protocol to search. Fields from `buffers` on are as in the product; other values make a mutant."""

    ranks: int
    chunks: int = 1
    """An operation of a rank brings none or so many chunks to each peer."""
    places: int = 1
    """Chunks of one source that a row buffer holds; later chunks wait for credits."""
    streams: bool = False
    """The work for different peers runs independently; else a rank sends, and receives, in a fixed order."""
    always_brings: bool = False
    """Every operation brings chunks."""
    gives_up: bool = True
    """A rank may give an operation up."""
    loss: bool = True
    """One rank may be lost."""
    fused: bool = False
    """A rank may run an operation in one kernel. Without starts, as a plan that all know would say,
    operations bring chunks in odd epochs then, and none in even ones, and none is given up."""
    starts: bool = False
    """Operations are announced in words that hold their epoch, before their records."""
    leaves: bool = False
    """With starts: a rank whose own chunks have places may leave an operation in one kernel for want of room,
    and give it up then."""
    tells: bool = False
    """Where chunks take turns: an operation says so if the one before was given up, and who has read chunks
    of that looks for it."""
    buffers: int = 2
    abandon_waits: bool = True
    """Giving up waits for the records of all."""
    credit_first: bool = False
    """A credit is given before the chunk is read."""
    wrapped_flags: bool = False
    """Flags hold two bits of the epoch, and are compared by the sign of the difference."""
    fused_meets: bool = True
    """An operation of one kernel ends only when the records, or starts, of all are there."""
    starts_hold_epoch: bool = True
    """A start is taken in its own epoch only."""
    left_frees: bool = True
    """Giving up what was left gives the credits of all chunks."""
    giving_up_told: bool = True
    """What tells does is done."""


class Action(NamedTuple):
    """One step of a thread."""

    name: str
    peer: int = 0
    """Relative to the rank: 1 is the next one."""
    chunk: int = 0


class Rank(NamedTuple):
    """The state of a rank. Without threads it has ended `epoch` and not begun the next one."""

    epoch: int
    kind: int
    chunks: int
    threads: tuple[int, ...]
    """Steps that each thread has done."""
    status: int
    told: int = 0
    """1: this operation says that the one before was given up."""
    missed: int = 0
    """The peers (a bit each, relative to the rank) that gave up chunks which this operation has read."""
    lacks: int = 0
    """The same of the operation before: these have to say so."""


Memory = tuple[int, ...]
State = tuple[tuple[Rank, ...], Memory]


class Violation(Exception):
    """A property does not hold. `trace` has the steps that lead there; ranks are numbered anew after each."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.trace: list[str] = []


class Model:
    """The steps of a protocol."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        p = protocol
        self.amounts = (p.chunks,) if p.always_brings else (0, p.chunks)
        assert not p.tells or p.chunks > p.places
        assert not p.fused or p.starts or not (p.always_brings or p.gives_up)
        assert p.fused or not p.starts
        assert p.starts or not p.leaves
        # The words of a pair (writer, holder), from `at[writer, holder]` on: records (8 epoch + chunks, and
        # chunks + 1 if `told`); flags (8 epoch + 1 if the chunk was given up); rows (8 epoch + chunk) by
        # buffer and place; credits, which the holder writes at the writer; starts (8 epoch + chunks), as
        # records in turn. Pairs are in the order of writers, each writer's in that of the holders after it,
        # so that a rotation of the ranks rotates them.
        self.flags = p.buffers
        self.rows = self.flags + p.chunks
        self.credits = self.rows + p.buffers * p.places
        self.starts = self.credits + p.chunks
        self.words = self.starts + p.buffers * p.starts
        self.at = {
            (w, (w + ahead) % p.ranks): (w * (p.ranks - 1) + ahead - 1) * self.words
            for w in range(p.ranks)
            for ahead in range(1, p.ranks)
        }
        self.programs = {
            (kind, chunks): self._program(kind, chunks)
            for kind in (RECEIVES, GIVES_UP, FUSED, LEFT)
            for chunks in self.amounts
        }

    def _planned(self, epoch: int) -> int:
        """The chunks of an operation with a plan."""
        return self.protocol.chunks if epoch % 2 else 0

    def start(self) -> State:
        """Returns the state before the first operation, whose epoch is 1."""
        ranks = tuple(Rank(0, RECEIVES, 0, (), RUNNING) for _ in range(self.protocol.ranks))
        return self._normal(list(ranks), [0] * (self.words * len(self.at)))

    def _program(self, kind: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
        """The threads of an operation. The first one meets the others; those that read wait for it."""
        p = self.protocol
        peers = range(1, p.ranks)
        at_once = min(chunks, p.places) if kind == GIVES_UP else chunks

        def announce(to: list[int]) -> list[Action]:
            return [Action("announce", peer) for peer in to]

        def start(to: list[int]) -> list[Action]:
            return [Action("start", peer) for peer in to] if p.starts else []

        def send(to: list[int]) -> list[Action]:
            return [Action(name, peer, c) for c in range(at_once) for peer in to for name in ("row", "flag")]

        def receive(sources: list[int]) -> list[Action]:
            names: tuple[str, ...] = ("read",)
            if p.chunks > p.places:
                names = ("credit", "read") if p.credit_first else ("read", "credit")
            return [Action(name, s, c) for c in range(p.chunks) for s in sources for name in names]

        def give_up() -> list[Action]:
            void = [Action("void", peer, c) for c in range(at_once, chunks) for peer in peers]
            free = [Action("free", peer, c) for c in range(p.chunks) for peer in peers]
            return void + (free if p.chunks > p.places else [])

        meeting = [Action("meet")] if kind == RECEIVES or p.abandon_waits else []
        before = give_up() if kind == GIVES_UP else []
        apart = [[peer] for peer in peers] if p.streams else [list(peers)]
        if kind in (FUSED, LEFT):
            threads = [[Action("meet")] * p.fused_meets, start(list(peers)) + announce(list(peers))]
            threads += [send(some) for some in apart]
            threads += [receive(some) for some in apart] if kind == FUSED else [give_up() * p.left_frees]
            return tuple(tuple(thread) for thread in threads)
        threads = [before + meeting, *(start(some) + announce(some) + send(some) for some in apart)]
        if kind == RECEIVES:
            threads += [receive(some) for some in apart]
        return tuple(tuple(thread) for thread in threads)

    def steps(self, state: State) -> Iterator[tuple[int, str, State]]:
        """Yields each next step: its rank, its name, and the state after it. Raises Violation."""
        ranks, memory = state
        moved = False
        stopped = any(each.status != RUNNING for each in ranks)
        for r, rank in enumerate(ranks):
            if rank.status != RUNNING:
                continue
            for name, after in self._steps_of(r, ranks, memory):
                moved = True
                yield r, name, after
        if not moved and any(each.status == RUNNING for each in ranks):
            raise Violation("deadlock")
        if self.protocol.loss and not stopped:
            for r in range(len(ranks)):
                yield r, "is lost", self._with(ranks, memory, r, status=LOST)

    def _steps_of(self, r: int, ranks: tuple[Rank, ...], memory: Memory) -> Iterator[tuple[str, State]]:
        rank = ranks[r]
        if not rank.threads:
            epoch = rank.epoch + 1
            if any(epoch > other.epoch + 1 for other in ranks if other.status == RUNNING):
                raise Violation("a rank begins an epoch two ahead of another rank's")
            p = self.protocol
            kinds = (RECEIVES, *(GIVES_UP,) * p.gives_up, *(FUSED,) * p.fused, *(LEFT,) * p.leaves)
            planned = self.protocol.fused and not self.protocol.starts
            amounts = (self._planned(epoch),) if planned else self.amounts
            for kind in kinds:
                for chunks in amounts:
                    if kind == LEFT and chunks > p.places:
                        continue
                    begun = rank._replace(epoch=epoch, kind=kind, chunks=chunks)
                    begun = begun._replace(threads=tuple(0 for _ in self.programs[kind, chunks]))
                    yield (
                        f"begins epoch {epoch} with {chunks} chunks"
                        + ("", ", to give it up", " in one kernel", " in one kernel, without room")[kind],
                        self._with(ranks, memory, r, **begun._asdict()),
                    )
            return
        p, program = self.protocol, self.programs[rank.kind, rank.chunks]
        for number, (done, thread) in enumerate(zip(rank.threads, program, strict=True)):
            if done == len(thread):
                continue
            action = thread[done]
            reads = action.name in ("read", "credit")
            if reads and number > 0 and rank.kind != FUSED and rank.threads[0] < len(program[0]):
                continue  # behind the meeting
            if (
                rank.kind == LEFT
                and number == len(program) - 1
                and any(a < len(b) for a, b in zip(rank.threads[:-1], program[:-1], strict=True))
            ):
                continue  # the kernel has ended when its operation is given up
            written = list(memory)
            missing = self._do(action, r, rank, memory, written)
            if missing is None:
                threads = list(rank.threads)
                threads[number] = done + 1
                ended = all(a == len(b) for a, b in zip(threads, program, strict=True))
                change = rank._replace(threads=() if ended else tuple(threads))
                if action.name == "read" and self._given_up(action, r, rank, memory):
                    change = change._replace(missed=change.missed | 1 << action.peer)
                if ended:
                    told = int(p.tells and p.giving_up_told and rank.kind in (GIVES_UP, LEFT))
                    change = change._replace(kind=RECEIVES, chunks=0)
                    change = change._replace(told=told, missed=0, lacks=change.missed)
                yield (
                    f"{action.name} {action.peer} {action.chunk}",
                    self._normal([change if i == r else each for i, each in enumerate(ranks)], written),
                )
            elif any(ranks[peer].status != RUNNING for peer in missing):
                yield "fails: a peer is lost", self._with(ranks, memory, r, status=FAILED)

    def _do(
        self, action: Action, r: int, rank: Rank, memory: Memory, written: list[int]
    ) -> tuple[int, ...] | None:
        """Carries an action out; or the ranks whose signal is missing, which it waits for."""
        p, n, name, c = self.protocol, rank.epoch, action.name, action.chunk
        if name == "meet":
            late = []
            for peer in range(p.ranks):
                if peer == r:
                    continue
                record = memory[self.at[peer, r] + n % p.buffers] >> 3
                start = None if rank.kind == GIVES_UP else self._start(memory, peer, r, n)
                if start is None and record < n:
                    late.append(peer)
                elif start is None and record > n:
                    raise Violation(f"a rank finds a record of epoch {record} in epoch {n}")
                elif rank.lacks >> (peer - r) % p.ranks & 1:
                    word = memory[self.at[peer, r] + n % p.buffers] if start is None else start
                    if (word & 7) // (p.chunks + 1) != 1:
                        raise Violation("a rank has read a chunk that was given up, and nobody says so")
            return tuple(late) or None
        peer = (r + action.peer) % p.ranks
        out, into = self.at[r, peer], self.at[peer, r]
        if name == "start":
            self._raise(written, out + self.starts + n % p.buffers, n, self._announced(rank))
        elif name == "announce":
            self._raise(written, out + n % p.buffers, n, self._announced(rank))
        elif name == "row":
            for before in range(c - p.places, -1, -p.places):
                if not self._arrived(memory[out + self.credits + before], n):
                    return (peer,)
            written[out + self.rows + n % p.buffers * p.places + c % p.places] = 8 * n + c
        elif name in ("flag", "void"):
            self._raise(written, out + self.flags + c, n, int(name == "void"))
        elif name == "free":
            self._raise(written, into + self.credits + c, n, 0)
        else:
            record = memory[into + n % p.buffers]
            chunks = (record & 7) % (p.chunks + 1)
            if p.starts:
                start = self._start(memory, peer, r, n)
                if start is None:
                    return (peer,)
                chunks = (start & 7) % (p.chunks + 1)
            elif rank.kind == FUSED:
                chunks = self._planned(n)
            elif record >> 3 != n:
                raise Violation(f"a rank reads tables of epoch {record >> 3} in epoch {n}")
            if c >= chunks:
                return None  # nothing comes
            flag = memory[into + self.flags + c]
            if not self._arrived(flag, n):
                return (peer,)
            if name == "credit":
                self._raise(written, into + self.credits + c, n, 0)
            elif not flag & 1:
                row = memory[into + self.rows + n % p.buffers * p.places + c % p.places]
                if row != 8 * n + c:
                    raise Violation(
                        f"a rank reads chunk {row & 7} of epoch {row >> 3} for chunk {c} of epoch {n}"
                    )
        return None

    def _announced(self, rank: Rank) -> int:
        return rank.chunks + (self.protocol.chunks + 1) * rank.told

    def _given_up(self, action: Action, r: int, rank: Rank, memory: Memory) -> bool:
        """Returns whether a chunk that is read was given up, and not sent."""
        if not self.protocol.tells:
            return False
        into = self.at[(r + action.peer) % self.protocol.ranks, r]
        return memory[into + self.flags + action.chunk] == 8 * rank.epoch + 1

    def _start(self, memory: Memory, writer: int, holder: int, epoch: int) -> int | None:
        """The start of an operation; None if it is not there, or its writer has none."""
        if not self.protocol.starts:
            return None
        word = memory[self.at[writer, holder] + self.starts + epoch % self.protocol.buffers]
        taken = word >> 3 == epoch if self.protocol.starts_hold_epoch else word != 0
        return word if taken else None

    def _arrived(self, word: int, epoch: int) -> bool:
        if self.protocol.wrapped_flags:
            return ((word >> 3) - epoch) % _WRAP < _WRAP // 2
        return word >> 3 >= epoch

    def _raise(self, written: list[int], at: int, epoch: int, low: int) -> None:
        """Writes a word that only grows."""
        if not self.protocol.wrapped_flags and written[at] >> 3 > epoch:
            raise Violation(f"epoch {epoch} is written over epoch {written[at] >> 3}")
        written[at] = 8 * epoch + low

    def _with(self, ranks: tuple[Rank, ...], memory: Memory, r: int, **changes: object) -> State:
        changed = ranks[r]._replace(**changes)  # type: ignore[arg-type]
        return self._normal([changed if i == r else each for i, each in enumerate(ranks)], list(memory))

    def _normal(self, ranks: list[Rank], memory: list[int]) -> State:
        """Relative to the least epoch that a running rank can still ask for. That keeps its parity, and with
        wrapped flags its low two bits."""
        asked = [each.epoch + (not each.threads) for each in ranks if each.status == RUNNING]
        if not asked:  # nobody does anything any more
            return tuple(Rank(0, 0, 0, (), each.status) for each in ranks), ()
        least = min(asked)
        wrapped = self.protocol.wrapped_flags
        unit = _WRAP if wrapped else 2
        base = (least - 1) // unit * unit
        seen = [
            each._replace(epoch=each.epoch - base)
            if each.status == RUNNING
            else Rank(0, 0, 0, (), each.status)
            for each in ranks
        ]
        words = [
            word - 8 * base
            if word >= 8 * least
            else 8 * (word // 8 % _WRAP - _WRAP) + word % 8
            if wrapped
            else OLD
            for word in memory
        ]
        # Ranks do the same, so states that differ by a rotation of the ranks count as one.
        each = len(words) // len(seen)
        return min(
            (tuple(seen[i:] + seen[:i]), tuple(words[i * each :] + words[: i * each]))
            for i in range(len(seen))
        )


def search(protocol: Protocol) -> int:
    """The number of states that can be reached. Raises Violation, with the shortest way to it."""
    model = Model(protocol)
    first = model.start()
    came: dict[State, tuple[State, str] | None] = {first: None}
    after_loss: dict[State, list[State]] = {}
    level = [first]
    while level:
        following = []
        for state in level:
            stopped = any(each.status != RUNNING for each in state[0])
            follow = after_loss.setdefault(state, []) if stopped else []
            try:
                for rank, name, after in model.steps(state):
                    follow.append(after)
                    if after not in came:
                        came[after] = (state, f"rank {rank} {name}")
                        following.append(after)
            except Violation as violation:
                at: State = state
                while (before := came[at]) is not None:
                    at, name = before
                    violation.trace.insert(0, name)
                raise
        level = following
    _require_ends(after_loss)
    return len(came)


def _require_ends(after_loss: dict[State, list[State]]) -> None:
    """Raises Violation if ranks can go on for ever once one is lost: states follow each other in a circle
    then."""
    try:
        graphlib.TopologicalSorter(after_loss).prepare()
    except graphlib.CycleError:
        raise Violation("after a loss ranks go on for ever") from None


_FUSED = Protocol(ranks=2, chunks=2, gives_up=False, streams=True, fused=True)
_STARTS = replace(_FUSED, starts=True)
_TELLS = Protocol(ranks=2, chunks=2, tells=True, loss=False)

QUICK: dict[str, tuple[Protocol, int]] = {
    "two ranks": (Protocol(ranks=2, chunks=2, streams=True), 15615),
    "two ranks, a place for every chunk": (Protocol(ranks=2, chunks=2, places=2, streams=True), 4483),
    "three ranks": (Protocol(ranks=3, always_brings=True, gives_up=False), 7417),
    "three ranks, of which none is lost": (Protocol(ranks=3, always_brings=True, loss=False), 39382),
    "two ranks, in one kernel or two": (_FUSED, 1850),
    "three ranks, in one kernel or two": (
        replace(_FUSED, ranks=3, chunks=1, streams=False, loss=False),
        29318,
    ),
    "two ranks that start in one kernel or two": (_STARTS, 15939),
    "two ranks that start, or give up": (replace(_STARTS, gives_up=True), 72403),
    "two ranks that may have no room": (replace(_STARTS, leaves=True), 28881),
    "two ranks that tell what they gave up": (_TELLS, 49736),
}
"""The searches of a minute, with the number of states of each (docs/protocol.md)."""

MUTANTS: dict[str, tuple[Protocol, str]] = {
    "giving up does not wait": (Protocol(ranks=2, abandon_waits=False), "two ahead"),
    "the credit comes before the reads": (Protocol(ranks=2, chunks=2, credit_first=True), "reads chunk 1"),
    "one buffer": (Protocol(ranks=2, buffers=1), "finds a record of epoch 2 in epoch 1"),
    "flags of two bits": (Protocol(ranks=2, wrapped_flags=True), "for chunk 0 of epoch 3"),
    "one kernel ends without the records of all": (replace(_FUSED, fused_meets=False), "two ahead"),
    "one kernel goes by starts of any epoch": (replace(_STARTS, starts_hold_epoch=False), "two ahead"),
    "what was left gives no credits": (replace(_STARTS, leaves=True, left_frees=False), "deadlock"),
    "giving up is told to nobody": (
        replace(_TELLS, giving_up_told=False),
        "given up, and nobody says so",
    ),
}
"""Each is wrong in one point, and what is found of it."""


def main() -> None:
    """Searches from the command line."""
    parser = argparse.ArgumentParser(description="Search all states of the model of the protocol.")
    parser.add_argument("--ranks", type=int, help="one search with so many ranks, not the quick ones")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--places", type=int, default=1)
    parser.add_argument("--streams", action="store_true", help="work for different peers is independent")
    parser.add_argument("--starts", action="store_true", help="in one kernel or two; none is given up")
    parser.add_argument("--no-loss", action="store_true", help="no rank is lost")
    arguments = parser.parse_args()
    searches = {name: protocol for name, (protocol, _) in QUICK.items()}
    if arguments.ranks is not None:
        one = Protocol(
            ranks=arguments.ranks,
            chunks=arguments.chunks,
            places=arguments.places,
            fused=arguments.starts,
            starts=arguments.starts,
            gives_up=not arguments.starts,
        )
        searches = {"chosen": replace(one, streams=arguments.streams, loss=not arguments.no_loss)}
    for name, protocol in searches.items():
        start = time.monotonic()
        try:
            print(f"{name}: {search(protocol)} states, {time.monotonic() - start:.1f} s", flush=True)
        except Violation as violation:
            print(f"{name}: {violation}", *violation.trace, sep="\n    ")
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
