"""A folding as text: its groups and which of them stay inside a node, its two grids, one rank's groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from moecomm.arguments import require_integer
from moecomm.parallel.fitting import grids
from moecomm.parallel.folding import ParallelFolding
from moecomm.parallel.grid import Grid

_GROUPS = ("tp", "cp", "tp-cp", "dp", "dp-cp", "etp", "ep", "etp-ep", "edp", "pp")
"""The sets of dimensions that are described (docs/folding.md says what each is for)."""
_MOST = 16
"""A table has no more columns than this, and of more rows it shows the first half as many and the last."""
_GAP = -1
"""Stands for what is not shown."""


def draw(folding: ParallelFolding, *, gpus_per_node: int = 8, stage: int = 0, whole: bool = False) -> str:
    """Returns the groups of a folding, with what stays inside a node, and a drawing of both grids of one
    pipeline stage.

    Rank r is on node r // gpus_per_node. A grid is a table: the columns are the innermost dimension of more
    than one rank, a row is a place in the others; a dimension of more than 16 ranks goes over several rows.
    Long tables are shortened, unless `whole` is set.
    Raises InvalidArgument for a `stage` or `gpus_per_node` out of bounds.
    """
    require_integer("stage", stage, 0, folding.pp - 1)
    lines = [*_heading(folding, gpus_per_node), ""]
    lines += [_crossing(folding, dims, gpus_per_node) for dims in _GROUPS]
    for title, grid in _grids(folding):
        lines += ["", f"{title} grid, pipeline stage {stage} of {folding.pp}"]
        lines += _table(grid, stage, gpus_per_node, whole)
    return "\n".join(lines)


def describe_rank(folding: ParallelFolding, rank: int, *, gpus_per_node: int = 8, whole: bool = False) -> str:
    """Returns the coordinates of a rank in both grids and the ranks of all its groups, as text; groups of
    many ranks are shortened, unless `whole` is set. Raises InvalidArgument for a `rank` or `gpus_per_node`
    out of bounds."""
    require_integer("rank", rank, 0, folding.world_size - 1)
    lines = [*_heading(folding, gpus_per_node), ""]
    lines.append(f"rank {rank}: node {rank // gpus_per_node}, GPU {rank % gpus_per_node} there")
    for title, grid in _grids(folding):
        at = grid.coordinates(rank)
        lines.append(f"  {title + ':':<10} {'  '.join(f'{name} {at[name]}' for name in grid.names)}")
    for dims in _GROUPS:
        ranks = _shortened(folding.group_of(dims, rank), whole)
        shown = " ".join("..." if each == _GAP else str(each) for each in ranks)
        lines.append(f"  {_label(folding, dims) + ':':<10} {shown}")
    return "\n".join(lines)


def _grids(folding: ParallelFolding) -> Iterable[tuple[str, Grid]]:
    return zip(("dense", "expert"), grids(asdict(folding)), strict=True)


def _heading(folding: ParallelFolding, gpus_per_node: int) -> list[str]:
    require_integer("gpus_per_node", gpus_per_node, 1)
    nodes = math.ceil(folding.world_size / gpus_per_node)
    return [
        f"world:  {folding.world_size} ranks, order {folding.order} (innermost first)",
        f"nodes:  {nodes} of {gpus_per_node} GPUs",
        *(
            f"{title + ':':<7} {' x '.join(_label(folding, name) for name in grid.names)}"
            for title, grid in _grids(folding)
        ),
        f"smallest world of these sizes: {folding.smallest_world}",
    ]


def _label(folding: ParallelFolding, dims: str) -> str:
    return f"{dims.upper()} {folding.size(dims)}"


def _crossing(folding: ParallelFolding, dims: str, gpus_per_node: int) -> str:
    """Returns a line that says on how many nodes the groups over `dims` are."""
    counts = [len({rank // gpus_per_node for rank in ranks}) for ranks in folding.groups(dims)]
    inside, least, most = counts.count(1), min(counts), max(counts)
    if most == 1:
        where = "inside a node"
    elif least == most:
        where = f"crosses {most} nodes"
    else:
        where = f"crosses up to {most} nodes"
        if inside:
            where += f" ({inside} of {len(counts)} groups inside a node)"
    return f"{_label(folding, dims)}: {where}"


def _table(grid: Grid, stage: int, gpus_per_node: int, whole: bool) -> list[str]:
    """Returns the rows of one stage of a grid.

    The columns are the innermost dimension of more than one rank; a wide one goes over several rows, a node
    each. Of the other dimensions those of more than one rank are shown.
    """
    sizes = {name: size for name, size in zip(grid.names, grid.sizes, strict=True) if name != "pp"}
    column = next((name for name, size in sizes.items() if size > 1), next(iter(sizes)))
    size = step = sizes.pop(column)
    if size > _MOST:
        step = gpus_per_node if _MOST // 4 <= gpus_per_node <= _MOST else _MOST
    others = [name for name in reversed(sizes) if sizes[name] > 1]
    places = list(itertools.product(*(range(sizes[name]) for name in others), range(0, size, step)))
    if step < size:
        labels, columns = [*others, column], [f"+{each}" for each in range(step)]
    else:
        labels, columns = others, [f"{column} 0", *(str(each) for each in range(1, step))]
    wide = max(len(str(math.prod(grid.sizes) - 1)), len(columns[0]))
    rows = [_row(labels, columns, "nodes", wide)]
    for number in _shortened(range(len(places)), whole):
        if number == _GAP:
            rows.append("  ...")
            continue
        *at, first = places[number]
        start = grid.rank_of({**dict(zip(others, at, strict=True)), column: first, "pp": stage})
        ranks = [start + grid.stride(column) * each for each in range(min(step, size - first))]
        cells = [str(rank) for rank in ranks] + [""] * (step - len(ranks))
        shown = map(str, places[number][: len(labels)])
        rows.append(_row(shown, cells, _span(sorted({rank // gpus_per_node for rank in ranks})), wide))
    return rows


def _row(labels: Iterable[str], cells: Iterable[str], nodes: str, wide: int) -> str:
    left = (f"{each:>3}" for each in labels)
    return " ".join(["  ", *left, "|", *(f"{each:>{wide}}" for each in cells), "|", nodes])


def _span(nodes: Sequence[int]) -> str:
    """Returns ascending numbers of nodes in few words."""
    if 1 < len(nodes) == nodes[-1] - nodes[0] + 1:
        return f"{nodes[0]}-{nodes[-1]}"
    named = [str(node) for node in nodes]
    return ",".join(named if len(named) <= 4 else [*named[:2], "...", named[-1]])


def _shortened(numbers: Sequence[int], whole: bool) -> list[int]:
    if whole or len(numbers) <= _MOST:
        return list(numbers)
    return [*numbers[: _MOST // 2], _GAP, numbers[-1]]
