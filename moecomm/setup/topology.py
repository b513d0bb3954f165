"""The nodes of a group. Ranks of a node share memory: rank = node * ranks_per_node + local index.

Between nodes rows travel on rails. A rail is the set of ranks that have the same local index, one a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from moecomm.errors import InvalidArgument, Unsupported

_NAMED = 6
"""The most hosts that an error text names one by one."""


@dataclass(frozen=True)
class NodeMap:
    """A division of the ranks into equally large nodes. Example: NodeMap(ranks=6, ranks_per_node=2) has the
    nodes 0 1 | 2 3 | 4 5; rank 3 is on node 1 with local index 1, and its rail is 1 3 5."""

    ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node != 0:
            raise InvalidArgument(
                f"ranks_per_node is {self.ranks_per_node} for {self.ranks} ranks, expected a divisor of "
                "their number: every node has the same number of ranks"
            )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Returns the node of `rank`."""
        return self._known(rank) // self.ranks_per_node

    def local_of(self, rank: int) -> int:
        """Returns the index of `rank` on its node."""
        return self._known(rank) % self.ranks_per_node

    def rail(self, rank: int) -> list[int]:
        """Returns the ranks with the local index of `rank`, by node, including `rank`."""
        return list(range(self.local_of(rank), self.ranks, self.ranks_per_node))

    def local_ranks(self, rank: int) -> list[int]:
        """Returns the ranks on the node of `rank`, by local index, including `rank`."""
        first = self.node_of(rank) * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise InvalidArgument(f"rank is {rank}, expected one of 0 to {self.ranks - 1}")
        return rank


def find_nodes(hosts: Sequence[str], ranks_per_node: int | None) -> NodeMap:
    """Returns the nodes of a group; the result depends on the arguments alone, so every rank finds the same.

    Args:
        hosts: a text per rank, equal for ranks that can share memory (`node` of `setup.handshake`).
        ranks_per_node: None makes each host a node, a number nodes of this many consecutive ranks (one node
            if there are no more ranks), which then do not share memory.

    Raises:
        Unsupported: ranks_per_node is None, and hosts have different numbers of ranks, or the ranks of a host
            are not consecutive.
        InvalidArgument: ranks_per_node does not divide the number of ranks, or puts two hosts on one node.
    """
    if not hosts:
        raise InvalidArgument("hosts is empty, expected that of each rank")
    if ranks_per_node is None:
        return NodeMap(len(hosts), _ranks_per_host(hosts))
    nodes = NodeMap(len(hosts), min(ranks_per_node, len(hosts)))
    for first in range(0, nodes.ranks, nodes.ranks_per_node):
        spans = _spans(hosts[first : first + nodes.ranks_per_node], first)
        if len(spans) > 1:
            raise InvalidArgument(
                f"ranks_per_node is {ranks_per_node}, but ranks {_text(first, nodes.ranks_per_node)}, which "
                f"would be one node, are on different hosts or containers ({_parts(spans)}); expected nodes "
                "within a host: pass ranks_per_node=None and unset MOECOMM_RANKS_PER_NODE to take each host "
                "for a node"
            )
    return nodes


def _ranks_per_host(hosts: Sequence[str]) -> int:
    spans = _spans(hosts, 0)
    seen: dict[str, tuple[int, int]] = {}
    for first, count in spans:
        before = seen.setdefault(hosts[first], (first, count))
        if before != (first, count):
            raise Unsupported(
                f"ranks of a host are not consecutive: {_text(*before)} and {_text(first, count)} share one, "
                f"and rank {first - 1} is on another; number the ranks host by host (torchrun does; Slurm: "
                "--distribution=block; else set RANK accordingly)"
            )
    counts = [count for _, count in spans]
    if len(set(counts)) > 1:
        common = math.gcd(*counts)
        raise Unsupported(
            f"hosts have different numbers of ranks ({_parts(spans)}), expected the same on each; start as "
            f"many ranks on every host, or pass ranks_per_node={common}, or set "
            f"MOECOMM_RANKS_PER_NODE={common}, for nodes smaller than a host"
        )
    return counts[0]


def _spans(hosts: Sequence[str], first: int) -> list[tuple[int, int]]:
    """Returns (first rank, count) of each run of ranks on one host; hosts[0] is the host of rank `first`."""
    spans = []
    for _, run in groupby(hosts):
        count = sum(1 for _ in run)
        spans.append((first, count))
        first += count
    return spans


def _text(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


def _parts(spans: list[tuple[int, int]]) -> str:
    """Returns a text like "4 ranks: 0-3; 1 rank: 4"."""
    named = [f"{count} rank{'s' * (count > 1)}: {_text(first, count)}" for first, count in spans[:_NAMED]]
    left = len(spans) - len(named)
    return "; ".join(named) + (f"; and {left} more" if left else "")
