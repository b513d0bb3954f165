"""A grid of ranks: a rank's position is its number, written in digits of mixed bases. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

Ranks = tuple[int, ...]
"""Numbers of ranks in the default group."""


@dataclass(frozen=True)
class Grid:
    """All ranks, laid out over named dimensions. The innermost, whose ranks are consecutive, comes first.

    Example: names ("tp", "dp", "pp") with sizes (2, 3, 4) put rank tp + 2 * dp + 6 * pp at (tp, dp, pp).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def stride(self, name: str) -> int:
        """Returns the distance between neighbours in a dimension, in ranks."""
        return math.prod(self.sizes[: self.names.index(name)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of a rank in each dimension."""
        found = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            rank, found[name] = divmod(rank, size)
        return found

    def rank_of(self, place: Mapping[str, int]) -> int:
        """Returns the rank at a position; omitted dimensions count as 0."""
        return sum(self.stride(name) * at for name, at in place.items())

    def groups(self, dims: Collection[str]) -> tuple[Ranks, ...]:
        """Returns the groups of ranks that differ only in `dims`, by first rank; ranks ascend within each."""
        offsets = self._ranks_over(dims)
        firsts = self._ranks_over([name for name in self.names if name not in dims])
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def group_of(self, dims: Collection[str], rank: int) -> Ranks:
        """Returns the group of `groups(dims)` that contains `rank`."""
        place = self.coordinates(rank)
        first = self.rank_of({name: at for name, at in place.items() if name not in dims})
        return tuple(first + offset for offset in self._ranks_over(dims))

    def _ranks_over(self, dims: Collection[str]) -> list[int]:
        """Returns the ranks whose position is 0 in all dimensions other than `dims`, ascending."""
        ranks = [0]
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in dims:
                stride = self.stride(name)
                ranks = [stride * at + rank for at in range(size) for rank in ranks]
        return ranks
