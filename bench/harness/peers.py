"""Memory of every rank that all ranks of the host can write to, from torch's symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric


class PeerMemory:
    """The same number of bytes on each rank; building it is a collective call."""

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


def peer_memory(num_bytes: int, device: torch.device) -> PeerMemory:
    """At least `num_bytes` on every rank; all ranks call it with the same number."""
    if not _held or _held[0].num_bytes < num_bytes:
        _held.clear()
        _held.append(PeerMemory(num_bytes, device))
    return _held[0]
