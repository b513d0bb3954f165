"""Rows that a rank sends, receives and adds, expected for random routing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from bench.costmodel.shape import Shape
from moecomm import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows of one rank in a dispatch, and so, backwards, in a combine.

    A row here is one (source, token) pair unless said otherwise.
    """

    nodes_per_token: float  # different nodes that a token's experts are on, its own among them
    ranks_per_token: float  # different ranks, its own among them
    sent_rows: float
    """Over the rail in a dispatch: once for each other node that needs the token. As many are received, whose
    sums go back in a combine."""
    sent_puts: float  # chunks that the rows to each node make in a dispatch
    returned_puts: float  # chunks of the sums in a combine
    needed_rows: float  # rows of all sources that the rank's experts need, each once
    foreign_rows: float  # those of other ranks' tokens
    link_rows: float  # between ranks of the node: pulled from others, or by others, whichever is more
    relay_rows: float
    """Combine: partial sums of the node's ranks that this one adds up for other nodes, its own too."""
    home_rows: float
    """Combine: what comes home for this rank's tokens, from ranks of its node and from other nodes."""
    expert_rows: float  # (token, expert) pairs of the rank's experts: rows that a dispatch writes
    foreign_expert_rows: float  # those of other ranks' tokens


def expected(shape: Shape) -> Traffic:
    """Random routing: every choice of experts is equally likely; with groups every choice of groups is, and
    within them every choice of experts.

    Exact in the mean, but for the puts: those are counted as if every node needed the mean number of rows.
    """
    nodes, local, ranks, tokens = shape.nodes, shape.ranks_per_node, shape.ranks, shape.tokens
    per_token_nodes = expected_owners(shape, nodes)
    per_token_ranks = expected_owners(shape, ranks)
    on_rail = tokens * per_token_nodes * (nodes - 1) / nodes
    to_one_node = on_rail / (nodes - 1) if nodes > 1 else 0.0
    needed = tokens * per_token_ranks
    foreign_share = (ranks - 1) / ranks
    return Traffic(
        nodes_per_token=per_token_nodes,
        ranks_per_token=per_token_ranks,
        sent_rows=on_rail,
        sent_puts=(nodes - 1) * _pieces(to_one_node, shape.chunk_rows(shape.wire_row_bytes)),
        returned_puts=(nodes - 1) * _pieces(to_one_node, shape.chunk_rows(shape.row_bytes)),
        needed_rows=needed,
        foreign_rows=needed * foreign_share,
        link_rows=needed * (local - 1) / local,
        relay_rows=needed * (nodes - 1) / nodes,
        home_rows=needed * (local - 1) / ranks + on_rail,
        expert_rows=float(tokens * shape.top_k),
        foreign_expert_rows=tokens * shape.top_k * foreign_share,
    )


def expected_owners(shape: Shape, owners: int) -> float:
    """Expected number of different owners of a token's experts, where `owners` hold equal parts of them in
    order of their ids; owners=shape.nodes counts nodes.

    Without groups an owner of E/O experts is untouched with probability C(E - E/O, K) / C(E, K). With M of G
    groups of S experts it is the mean of C(M S - v, K) / C(M S, K), v being how many of the owner's experts
    lie in the chosen groups.

    Example: top-8 of 256 experts on 8 nodes touches 8 (1 - C(224, 8) / C(256, 8)) = 5.29 nodes; limited to 4
    of 8 groups, which are the nodes, 4 (1 - C(96, 8) / C(128, 8)) = 3.63.
    """
    if shape.experts % owners:
        raise InvalidArgument(f"owners is {owners}, must be a divisor of experts={shape.experts}")
    groups, chosen = shape.num_groups or 1, shape.topk_groups or 1
    share, size = shape.experts // owners, shape.experts // groups
    total = 0.0
    for owner in range(owners):
        begin, end = owner * share, (owner + 1) * share
        overlaps = tuple(
            sorted(
                min(end, (group + 1) * size) - max(begin, group * size)
                for group in range(begin // size, -(-end // size))
            )
        )
        total += 1 - _untouched(overlaps, groups, chosen, size, shape.top_k)
    return total


@lru_cache(maxsize=4096)
def _untouched(overlaps: tuple[int, ...], groups: int, chosen: int, size: int, top_k: int) -> float:
    """Probability that a token has no expert of an owner with `overlaps[i]` experts in its i-th group."""
    # ways[j, v]: subsets of the owner's groups that have j members and v experts of the owner.
    ways = {(0, 0): 1}
    for overlap in overlaps:
        grown = dict(ways)
        for (members, experts), number in ways.items():
            key = (members + 1, experts + overlap)
            grown[key] = grown.get(key, 0) + number
        ways = grown
    within = chosen * size
    others = groups - len(overlaps)
    favourable = sum(
        number * math.comb(others, chosen - members) * math.comb(within - experts, top_k)
        for (members, experts), number in ways.items()
        if members <= chosen
    )
    # Integers of thousands of bits divide to the nearest float.
    return favourable / (math.comb(groups, chosen) * math.comb(within, top_k))


def _pieces(rows: float, chunk_rows: int) -> float:
    # A mean a hair above a whole number of chunks is one by rounding.
    return float(math.ceil(rows / chunk_rows - 1e-9))
