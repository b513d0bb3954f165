#!/usr/bin/env python3
"""Savings of group-limited routing between nodes: rows and puts counted from the ids of a random router.

A TopKRouter (sigmoid scores, normalised) with random weights routes random tokens on every rank of a job:
without a limit, with the groups of DeepSeek-V3 (4 of 8, whatever the nodes), and with limits on the nodes.
Needs no GPU and no ranks. --write puts the table into docs/model.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.costmodel import MODELS, Shape, Traffic, count, expected
from moecomm.nn import MoEConfig, TopKRouter

PAGE = Path(__file__).resolve().parents[1] / "docs" / "model.md"
_ROUTER_HIDDEN = 64  # width of the tokens that the router sees; rows that travel have the model's
_MARKS = ("<!-- group limits -->\n", "<!-- /group limits -->")
TITLES = (
    "nodes",
    "routing",
    "nodes a token",
    "by `expected`",
    "most nodes of a token",
    "rows sent a token",
    "MB sent a rank",
    "puts a rank",
    "bytes beside no limit",
)


@dataclass(frozen=True)
class Counted:
    """One line of the table."""

    shape: Shape
    limit: str
    traffic: Traffic
    most_nodes: int

    @property
    def sent_bytes(self) -> float:
        """Rows of the rank that sends most, without metadata."""
        return self.traffic.sent_rows * self.shape.wire_row_bytes


def limits(nodes: int, limit_nodes: Sequence[int]) -> dict[str, tuple[int | None, int | None]]:
    """(num_groups, topk_groups) by what the table calls them."""
    found: dict[str, tuple[int | None, int | None]] = {
        "no limit": (None, None),
        "4 of 8 groups": (8, 4),
    }
    for limit in limit_nodes:
        if limit < nodes:
            found[f"{limit} of {nodes} nodes"] = (nodes, limit)
    return found


def counted(
    nodes: int, limit: str, groups: tuple[int | None, int | None], *, local: int, tokens: int, seed: int
) -> Counted:
    """Routes `tokens` tokens on every rank of `nodes` x `local` ranks, and counts."""
    model = MODELS["deepseek-v3"]
    shape = Shape(
        nodes=nodes,
        ranks_per_node=local,
        tokens=tokens,
        hidden=model["hidden"],
        top_k=model["top_k"],
        experts=model["experts"],
        num_groups=groups[0],
        topk_groups=groups[1],
    )
    torch.manual_seed(seed)  # every line has the same router and tokens
    config = MoEConfig(
        hidden=_ROUTER_HIDDEN,
        ffn_hidden=1,
        num_experts=shape.experts,
        top_k=shape.top_k,
        score_function="sigmoid",
        normalize_topk=True,
        num_groups=groups[0],
        topk_groups=groups[1],
    )
    router = TopKRouter(config, device="cpu")
    with torch.no_grad():
        ids_RTK = torch.stack(
            [router(torch.randn(tokens, _ROUTER_HIDDEN)).topk_idx_TK for _ in range(shape.ranks)]
        )
    node_of_choice = ids_RTK.flatten(0, 1) // (shape.experts // nodes)
    touched_TN = torch.zeros(len(node_of_choice), nodes, dtype=torch.bool)
    touched_TN.scatter_(1, node_of_choice.long(), True)
    return Counted(shape, limit, count(shape, list(ids_RTK.numpy())), int(touched_TN.sum(dim=1).max()))


def lines(counts: Sequence[Counted]) -> list[list[str]]:
    """The table's cells; the bytes beside those of the line without a limit on as many nodes."""
    whole = {each.shape.nodes: each.sent_bytes for each in counts if each.shape.num_groups is None}
    return [
        [
            str(each.shape.nodes),
            each.limit,
            f"{each.traffic.nodes_per_token:.2f}",
            f"{expected(each.shape).nodes_per_token:.2f}",
            str(each.most_nodes),
            f"{each.traffic.sent_rows / each.shape.tokens:.2f}",
            f"{each.sent_bytes / 1e6:.1f}",
            f"{each.traffic.sent_puts:.0f}",
            f"{each.sent_bytes / whole[each.shape.nodes]:.0%}",
        ]
        for each in counts
    ]


def table(cells: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    rows = [TITLES, ["---"] * len(TITLES), *cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it if asked."""
    parser = argparse.ArgumentParser(prog="group_limits.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[4, 8, 16, 32], metavar="N", help="numbers of nodes")
    add("--limits", type=int, nargs="+", default=[4, 2], metavar="M", help="limits on nodes")
    add("-l", "--ranks-per-node", type=int, default=8, metavar="L", help="ranks of a node (%(default)s)")
    add("-b", "--tokens", type=int, default=1024, metavar="T", help="tokens of a rank (%(default)s)")
    add("--seed", type=int, default=20240817, help="of the router and the tokens (%(default)s)")
    add("--write", action="store_true", help="put the table into docs/model.md")
    given = parser.parse_args(arguments)
    found = [
        counted(nodes, limit, groups, local=given.ranks_per_node, tokens=given.tokens, seed=given.seed)
        for nodes in given.nodes
        for limit, groups in limits(nodes, given.limits).items()
    ]
    text = table(lines(found))
    print(text, end="")
    if given.write:
        begin, end = _MARKS
        page, places = re.subn(
            f"{begin}.*?{end}", lambda _: begin + text + end, PAGE.read_text(), flags=re.DOTALL
        )
        if places != 1:
            print(f"{PAGE.name} has no place for the table ({begin.strip()})", file=sys.stderr)
            return 1
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
