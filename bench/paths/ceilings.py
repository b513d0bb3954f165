"""Ceilings: the rows that have to cross between ranks, moved without any other work, and plain copies.

Every rank sends each other rank as many rows as the operation does, as contiguous blocks: by the copy
engines, by a kernel of bulk copies (push.cu), or by a bare all_to_all_single.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ..harness.case import Case, poison
from ..harness.inputs import payload
from ..harness.path import CALL, Path, Verdict
from ..harness.timing import Clock, fastest, sum_over_ranks
from .captured import in_graph
from .push_kernel import push_kernel, ring

SM_COUNTS = (9, 16, 24, 32, 64, 96, 132)  # tried for the push kernel, and all that the GPU has
FEW_SMS = (1, 2, 4)  # and for the exchange of few rows
LINE = 128  # bytes of a line of memory
_PIECE = 16  # bytes of which bulk copies move multiples


class PeerMemory:
    """The same number of bytes on each rank that all ranks of the host can write to, from torch's symmetric
    memory; building it is a collective call.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        world: Any = dist.group.WORLD
        self._handle: Any = symmetric.rendezvous(self.own, world)
        self.pointers: list[int] = [int(pointer) for pointer in self._handle.buffer_ptrs]
        self.ranks: list[torch.Tensor] = [
            self.own if rank == dist.get_rank() else self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(dist.get_world_size())
        ]


_held: list[PeerMemory] = []  # one for the whole run: it is made again only to grow


class Blocks:
    """The blocks that one rank sends and gets: random bytes, known to both ends.

    `sent` is one buffer, blocks in the order of the ranks they go to. What arrives from each rank lies in a
    segment of its own, `segment` bytes apart: the same distance on all ranks, so that senders know it.
    """

    def __init__(self, case: Case) -> None:
        self.rank, self.ranks = case.rank, case.options.ranks
        # Whole pieces of bulk copies: a row's scales may end within one.
        self.row_bytes, self.device = -(-case.wire_row_bytes // _PIECE) * _PIECE, case.device
        self._seed, self._inject_error = case.options.seed, case.options.inject_error
        self.rows = case.rows_between()
        if not any(any(rows) for rows in self.rows):
            raise ValueError("no row crosses between ranks")
        self.send_splits = [rows * self.row_bytes for rows in self.rows[self.rank]]
        self.receive_splits = [self.rows[source][self.rank] * self.row_bytes for source in range(self.ranks)]
        self.segment = -(-max(map(max, self.rows)) * self.row_bytes // LINE) * LINE
        self.starts = [sum(self.send_splits[:peer]) for peer in range(self.ranks)]
        self.sent = torch.empty(sum(self.send_splits), dtype=torch.uint8, device=self.device)
        self.fill(0)

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first: no two ranks begin with the same one."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def fill(self, round: int) -> None:
        """Other bytes to send."""
        for peer, (start, size) in enumerate(zip(self.starts, self.send_splits, strict=True)):
            self.sent[start : start + size] = payload(self._seed, round, self.rank, peer, size, self.device)

    def checker(
        self, call: Callable[[], object], arrived: torch.Tensor, spread: bool
    ) -> Callable[[int], Verdict]:
        """The path's check. What arrives lies in segments (`spread`), or without gaps."""

        def check(round: int) -> Verdict:
            self.fill(round)
            poison(arrived)
            _synchronize(self.device)  # the peers' buffers are poisoned, too
            call()
            _synchronize(self.device)
            if self._inject_error and any(self.receive_splits):
                first = next(n for n, size in enumerate(self.receive_splits) if size)
                arrived[self._place(first, spread)] ^= 1
            wrong = 0
            for source, size in enumerate(self.receive_splits):
                at = self._place(source, spread)
                want = payload(self._seed, round, source, self.rank, size, self.device)
                wrong += int(torch.count_nonzero(arrived[at : at + size] != want))
            return Verdict(wrong)

        return check

    def _place(self, source: int, spread: bool) -> int:
        return source * self.segment if spread else sum(self.receive_splits[:source])


def _synchronize(device: torch.device) -> None:
    """Waits until the work of all ranks is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    sum_over_ranks(0)


def _memory(blocks: Blocks) -> PeerMemory:
    num_bytes = blocks.ranks * blocks.segment
    if not _held or _held[0].num_bytes < num_bytes:
        _held.clear()
        _held.append(PeerMemory(num_bytes, blocks.device))
    return _held[0]


def push_pieces(blocks: Blocks) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a piece, and (peer, offset in its block) of every piece sent, peers taking turns, so that
    no link waits for another.

    A piece is a row in whole lines of 128 bytes, which links carry faster than rows that share lines. The
    last piece of a block covers its end and a part of the piece before. Example: rank 0 of 3 sends 2 rows of
    160 bytes to rank 1 and 3 to rank 2: 256 and (1, 0), (2, 0), (1, 64), (2, 224).
    """
    piece = -(-blocks.row_bytes // LINE) * LINE
    if any(0 < size < piece for size in blocks.send_splits):
        piece = blocks.row_bytes
    counts = {peer: -(-blocks.send_splits[peer] // piece) for peer in blocks.peers}
    return piece, [
        (peer, min(i * piece, blocks.send_splits[peer] - piece))
        for i in range(max(counts.values()))
        for peer in blocks.peers
        if i < counts[peer]
    ]


def sm_push_path(case: Case, clock: Clock) -> Path:
    """The push kernel on the number of SMs that a short trial finds to be fastest."""
    return _pushed(case, clock, flags=False)


def sm_exchange_path(case: Case, clock: Clock) -> Path:
    """The same kernel with a flag to each peer behind the rows, and a wait for the flags of all peers."""
    return _pushed(case, clock, flags=True)


class Flags:
    """A flag of each peer on this rank, and where this rank's flags are on the peers."""

    def __init__(self, blocks: Blocks) -> None:
        self._memory = PeerMemory(blocks.ranks * LINE, blocks.device)
        self._memory.own.zero_()
        _synchronize(blocks.device)  # no flag comes before
        own = self._memory.pointers[blocks.rank]
        there = [self._memory.pointers[peer] + blocks.rank * LINE for peer in blocks.peers]
        self.flags_P = torch.tensor(there, dtype=torch.int64, device=blocks.device)
        here = [own + peer * LINE for peer in blocks.peers]
        self.own_P = torch.tensor(here, dtype=torch.int64, device=blocks.device)
        self.counters = torch.zeros(2, dtype=torch.int64, device=blocks.device)


def _pushed(case: Case, clock: Clock, *, flags: bool) -> Path:
    blocks = Blocks(case)
    memory = _memory(blocks)
    kernel = push_kernel(blocks.device)
    piece, pieces = push_pieces(blocks)
    for size in (blocks.row_bytes, piece):
        ring(size, kernel.shared_bytes)  # raises for rows that cannot be pushed
    order = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 2)
    starts = torch.tensor(blocks.starts)[order[:, 0]]
    targets = torch.tensor(memory.pointers)[order[:, 0]] + blocks.rank * blocks.segment
    from_N = (blocks.sent.data_ptr() + starts + order[:, 1]).to(blocks.device)
    to_N = (targets + order[:, 1]).to(blocks.device)

    signals = Flags(blocks) if flags else None

    def on(sms: int) -> Callable[[], None]:
        if signals is None:
            return lambda: kernel.push(from_N, to_N, piece, sms)
        # The call keeps the flags' memory, which peers write to, with the addresses in it.
        return lambda: kernel.exchange(
            from_N, to_N, piece, sms, signals.flags_P, signals.own_P, signals.counters
        )

    there = torch.cuda.get_device_properties(blocks.device).multi_processor_count
    counts = {*SM_COUNTS, there, *(FEW_SMS if flags else ())}
    trials = {str(sms): on(sms) for sms in sorted(counts) if sms <= there}
    best = int(fastest(trials, clock))
    timed = in_graph(on(best), case.options.graph)
    checked = blocks.checker(timed, memory.own, spread=True)

    def check(round: int) -> Verdict:
        verdict = checked(round)
        kernel.require_done()
        return verdict

    return Path(
        name="sm-exchange" if flags else "sm-push",
        calls={CALL: timed},
        check=check,
        sms=best,
        note=f"best of {', '.join(trials)} SMs",
        times=case.options.calls_at_once,
    )


def bare_rows_path(case: Case) -> Path:
    """all_to_all_single of the rows that cross, and of nothing else, into a buffer that is kept."""
    blocks = Blocks(case)
    arrived = torch.empty(sum(blocks.receive_splits), dtype=torch.uint8, device=blocks.device)

    def call() -> None:
        dist.all_to_all_single(arrived, blocks.sent, blocks.receive_splits, blocks.send_splits)

    backend = "nccl" if blocks.device.type == "cuda" else "gloo"
    timed = in_graph(call, case.options.graph)
    return Path(
        name=f"{backend}-rows",
        calls={CALL: timed},
        check=blocks.checker(timed, arrived, spread=False),
        times=case.options.calls_at_once,
    )


def memcpy_path(case: Case, clock: Clock) -> Path:
    """A copy of as many bytes as the operation gives this rank, into memory on its own device.

    Nothing that ends with these bytes in ordinary memory can be faster than writing them. On the CPU it is
    the faster of torch's copy_ and libc's memmove, chosen by a short trial on all ranks.
    """
    source = torch.empty(case.useful_R[case.rank], dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    copies: dict[str, Callable[[], object]] = {"torch.Tensor.copy_": lambda: target.copy_(source)}
    if case.device.type == "cpu":
        copies["memmove"] = lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

    def check(round: int) -> Verdict:
        source.copy_(payload(case.options.seed, round, case.rank, case.rank, source.numel(), case.device))
        target.zero_()  # no byte of a payload is
        copies[note]()
        case.maybe_corrupt(target)
        return Verdict(int(torch.count_nonzero(target != source)))

    for each in (source, target):
        each.fill_(1)  # so that all pages are there
    note = fastest(copies, clock)
    return Path(name="memcpy", calls={CALL: copies[note]}, check=check, remote=False, note=note)
