"""Bytes behind algbw and busbw: functions of the top-k ids, the same for every path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .routing import Ids


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call; `useful_R` per rank, the others summed over ranks."""

    useful_R: tuple[int, ...]
    remote: int

    @property
    def useful(self) -> int:
        return sum(self.useful_R)


def pairs(ids_R: Sequence[Ids], experts: int) -> npt.NDArray[np.int64]:
    """(R, R): tokens of the first rank that want an expert of the second, each counted once.

    Example: 2 ranks, experts 0, 1 | 2, 3, token of rank 0 with ids [0, 2], token of rank 1 with ids [0, 1]:
    [[1, 1], [1, 0]].
    """
    local = experts // len(ids_R)
    found = np.zeros((len(ids_R), len(ids_R)), dtype=np.int64)
    for home, ids_TK in enumerate(ids_R):
        owner_TK = ids_TK // local  # -1 stays -1
        for rank in range(len(ids_R)):
            found[home, rank] = int((owner_TK == rank).any(axis=1).sum())
    return found


def node_rows(ids_R: Sequence[Ids], experts: int, ranks_per_node: int) -> npt.NDArray[np.int64]:
    """(R, N): tokens of a rank that want an expert of another node, each counted once; 0 for its own node.

    Example: 2 nodes of 2 ranks, an expert a rank, one token each, with ids [1, 2], [2, 3], [0, 1], [-1, 3]:
    [[0, 1], [0, 1], [1, 0], [0, 0]].
    """
    per_node = experts // len(ids_R) * ranks_per_node
    nodes = len(ids_R) // ranks_per_node
    found = np.zeros((len(ids_R), nodes), dtype=np.int64)
    for home, ids_TK in enumerate(ids_R):
        node_TK = ids_TK // per_node  # -1 stays -1
        for node in range(nodes):
            if node != home // ranks_per_node:
                found[home, node] = int((node_TK == node).any(axis=1).sum())
    return found


def traffic(
    ids_R: Sequence[Ids], experts: int, row_bytes: int, layout: str, wire_row_bytes: int | None = None
) -> Traffic:
    """Useful and remote bytes of one dispatch (combine: the same rows the other way).

    Useful: rows of the result of `row_bytes` each, one per (token, expert), or one per (token, owner rank) in
    the rank layout. Remote: one row of `wire_row_bytes` (if not given: `row_bytes`) per (token, owner rank
    other than the token's own).
    Example: 2 ranks, experts 0, 1 | 2, 3, token of rank 0 with ids [0, 2], token of rank 1 with ids [0, 1]:
    expert rows 3 on rank 0 and 1 on rank 1; remote 1 row each way.
    """
    ranks = len(ids_R)
    found = pairs(ids_R, experts)
    if layout == "rank":
        useful = found.sum(axis=0)
    else:
        useful = np.zeros(ranks, dtype=np.int64)
        for ids_TK in ids_R:
            owner = ids_TK[ids_TK >= 0] // (experts // ranks)
            useful += np.bincount(owner.ravel(), minlength=ranks)
    remote = int(found.sum() - np.trace(found))
    travelling = row_bytes if wire_row_bytes is None else wire_row_bytes
    return Traffic(tuple(int(n) * row_bytes for n in useful), remote * travelling)
