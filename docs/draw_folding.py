"""Draws a parallel folding: its groups and which of them stay inside a node, and its two grids of ranks.

    python docs/draw_folding.py --world 256 --tp 4 --cp 2 --pp 4 --ep 64
    python docs/draw_folding.py --world 256 --tp 4 --cp 2 --pp 4 --ep 64 --rank 70     one rank's groups

Rank r is on node r // gpus_per_node. A grid is a table: the columns are the innermost dimension of more than
one rank, a row is a place in the others; a dimension of more than 16 ranks goes over several rows. Long
tables and groups are shortened, unless --whole is given. A mapping that does not fit ends the program with
status 2 and the reason. docs/folding.md says what each group is for.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence

from moecomm import InvalidArgument
from moecomm.parallel import ParallelFolding
from moecomm.parallel.grid import Grid

SIZES = {
    "tp": "tensor parallel (attention)",
    "cp": "context parallel",
    "pp": "pipeline stages",
    "ep": "expert parallel",
    "etp": "tensor parallel within an expert",
}
GROUPS = ("tp", "cp", "tp-cp", "dp", "dp-cp", "etp", "ep", "etp-ep", "edp", "pp")
MOST = 16
"""A table has no more columns than this, and of more rows it shows the first half as many and the last."""
GAP = -1
"""Stands for what is not shown."""


def draw(folding: ParallelFolding, per_node: int, stage: int, whole: bool) -> Iterable[str]:
    """Yields the lines of a folding's groups and of both grids of a pipeline stage."""
    for dims in GROUPS:
        yield crossing(folding, dims, per_node)
    for title, names in grids(folding).items():
        yield from ("", f"{title} grid, pipeline stage {stage} of {folding.pp}")
        yield from table(folding, names, stage, per_node, whole)


def describe_rank(folding: ParallelFolding, rank: int, per_node: int, whole: bool) -> Iterable[str]:
    """Yields the lines of a rank's places in both grids and of the ranks of all its groups."""
    yield f"rank {rank}: node {rank // per_node}, GPU {rank % per_node} there"
    place = vars(folding.coordinates(rank))
    for title, names in grids(folding).items():
        yield f"  {title + ':':<10} {'  '.join(f'{name} {place[name]}' for name in names)}"
    for dims in GROUPS:
        ranks = shortened(folding.group_of(dims, rank), whole)
        shown = " ".join("..." if each == GAP else str(each) for each in ranks)
        yield f"  {label(folding, dims) + ':':<10} {shown}"


def grids(folding: ParallelFolding) -> dict[str, list[str]]:
    """Returns the dimensions of both grids, the innermost first."""
    return {"dense": ["tp", "cp", "dp", "pp"], "expert": ["etp", "ep", "edp", "pp"]}


def heading(folding: ParallelFolding, per_node: int) -> Iterable[str]:
    yield f"world:  {folding.world_size} ranks, the innermost dimensions first"
    yield f"nodes:  {math.ceil(folding.world_size / per_node)} of {per_node} GPUs"
    for title, names in grids(folding).items():
        yield f"{title + ':':<7} {' x '.join(label(folding, name) for name in names)}"
    yield from (f"smallest world of these sizes: {folding.smallest_world}", "")


def label(folding: ParallelFolding, dims: str) -> str:
    return f"{dims.upper()} {folding.size(dims)}"


def crossing(folding: ParallelFolding, dims: str, per_node: int) -> str:
    """Returns a line that says on how many nodes the groups over `dims` are."""
    counts = [len({rank // per_node for rank in ranks}) for ranks in folding.groups(dims)]
    inside, least, most = counts.count(1), min(counts), max(counts)
    if most == 1:
        where = "inside a node"
    elif least == most:
        where = f"crosses {most} nodes"
    else:
        where = f"crosses up to {most} nodes"
        if inside:
            where += f" ({inside} of {len(counts)} groups inside a node)"
    return f"{label(folding, dims)}: {where}"


def table(
    folding: ParallelFolding, names: Sequence[str], stage: int, per_node: int, whole: bool
) -> Iterable[str]:
    """Yields the rows of one stage of a grid. Dimensions of one rank are left out, unless all have one."""
    sizes = {name: folding.size(name) for name in names}
    grid = Grid(tuple(sizes), tuple(sizes.values()))
    del sizes["pp"]
    column = next((name for name, size in sizes.items() if size > 1), next(iter(sizes)))
    size = step = sizes.pop(column)
    if size > MOST:  # over several rows, a node each if that is about as wide
        step = per_node if MOST // 4 <= per_node <= MOST else MOST
    others = [name for name in reversed(sizes) if sizes[name] > 1]
    places = list(itertools.product(*(range(sizes[name]) for name in others), range(0, size, step)))
    if step < size:
        labels, columns = [*others, column], [f"+{each}" for each in range(step)]
    else:
        labels, columns = others, [f"{column} 0", *(str(each) for each in range(1, step))]
    wide = max(len(str(folding.world_size - 1)), len(columns[0]))
    yield row(labels, columns, "nodes", wide)
    for number in shortened(range(len(places)), whole):
        if number == GAP:
            yield "  ..."
            continue
        *at, first = places[number]
        place = {**dict(zip(others, at, strict=True)), "pp": stage}
        ends = min(first + step, size)
        ranks = [grid.rank_of({**place, column: each}) for each in range(first, ends)]
        cells = [str(rank) for rank in ranks] + [""] * (step - len(ranks))
        nodes = sorted({rank // per_node for rank in ranks})
        yield row(map(str, places[number][: len(labels)]), cells, span(nodes), wide)


def row(labels: Iterable[str], cells: Iterable[str], nodes: str, wide: int) -> str:
    left = (f"{each:>3}" for each in labels)
    return " ".join(["  ", *left, "|", *(f"{each:>{wide}}" for each in cells), "|", nodes])


def span(nodes: Sequence[int]) -> str:
    """Returns ascending numbers of nodes in few words."""
    if 1 < len(nodes) == nodes[-1] - nodes[0] + 1:
        return f"{nodes[0]}-{nodes[-1]}"
    named = [str(node) for node in nodes]
    return ",".join(named if len(named) <= 4 else [*named[:2], "...", named[-1]])


def shortened(numbers: Sequence[int], whole: bool) -> list[int]:
    if whole or len(numbers) <= MOST:
        return list(numbers)
    return [*numbers[: MOST // 2], GAP, numbers[-1]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="draw_folding.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", type=int, required=True, metavar="W", help="ranks of the job")
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{meaning} (default 1)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--stage", type=int, default=0, metavar="S", help="the pipeline stage to draw")
    parser.add_argument("--rank", type=int, metavar="R", help="describe this rank and all its groups instead")
    parser.add_argument("--whole", action="store_true", help="leave nothing out of large grids and groups")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in SIZES}
    per_node, whole = options.gpus_per_node, options.whole
    if per_node < 1:
        parser.error(f"--gpus-per-node is {per_node}, expected an integer from 1")
    try:
        folding = ParallelFolding(world_size=options.world, **sizes)
        if not 0 <= options.stage < folding.pp:
            parser.error(f"--stage is {options.stage}, expected an integer from 0 to {folding.pp - 1}")
        if options.rank is None:
            lines = draw(folding, per_node, options.stage, whole)
        else:
            lines = describe_rank(folding, options.rank, per_node, whole)
        print("\n".join([*heading(folding, per_node), *lines]))
    except InvalidArgument as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
