"""Bytes behind algbw and busbw: functions of the top-k ids, the same for every path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .routing import Ids


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call; `useful_R` per rank, the others summed over ranks."""

    useful_R: tuple[int, ...]
    remote: int

    @property
    def useful(self) -> int:
        return sum(self.useful_R)


def traffic(ids_R: Sequence[Ids], experts: int, row_bytes: int, layout: str) -> Traffic:
    """Useful and remote bytes of one dispatch (combine: the same rows the other way).

    Useful: rows of the result, one per (token, expert), or one per (token, owner rank) in the rank layout.
    Remote: one row per (token, owner rank other than the token's own).
    Example: 2 ranks, experts 0, 1 | 2, 3, token of rank 0 with ids [0, 2], token of rank 1 with ids [0, 1]:
    expert rows 3 on rank 0 and 1 on rank 1; remote 1 row each way.
    """
    ranks = len(ids_R)
    useful = np.zeros(ranks, dtype=np.int64)
    remote = 0
    for home, ids_TK in enumerate(ids_R):
        owner_TK = ids_TK // (experts // ranks)  # -1 stays -1
        for rank in range(ranks):
            wanted = owner_TK == rank
            pairs = int(wanted.any(axis=1).sum())
            useful[rank] += pairs if layout == "rank" else int(wanted.sum())
            remote += pairs if rank != home else 0
    return Traffic(tuple(int(n) * row_bytes for n in useful), remote * row_bytes)
