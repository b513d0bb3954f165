"""`python -m moecomm.parallel`: which ranks form the groups of attention and of the experts, drawn."""

from __future__ import annotations

import argparse
import sys

from moecomm.errors import InvalidArgument
from moecomm.parallel.drawing import describe_rank, draw
from moecomm.parallel.fitting import DEFAULT_ORDER
from moecomm.parallel.folding import ParallelFolding

_SIZES = {
    "tp": "tensor parallel (attention)",
    "cp": "context parallel",
    "pp": "pipeline stages",
    "ep": "expert parallel",
    "etp": "tensor parallel within an expert",
}


def main(arguments: list[str] | None = None) -> int:
    """Prints the groups and the grids of a mapping, or those of one rank; returns 0. A mapping that does not
    fit ends the program with status 2 and the reason."""
    parser = argparse.ArgumentParser(prog="python -m moecomm.parallel", description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, required=True, metavar="W", help="ranks of the job")
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{meaning} (default 1)")
    parser.add_argument(
        "--order", default=DEFAULT_ORDER, help=f"dimensions, the innermost first (default {DEFAULT_ORDER})"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="ranks of a node (default 8)"
    )
    parser.add_argument(
        "--stage", type=int, default=0, metavar="S", help="the pipeline stage to draw (default 0)"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="describe this rank and all its groups instead")
    parser.add_argument("--whole", action="store_true", help="leave nothing out of large grids and groups")
    options = parser.parse_args(arguments)
    try:
        folding = ParallelFolding(
            world_size=options.world,
            **{name: getattr(options, name) for name in _SIZES},
            order=options.order,
        )
        shown = {"gpus_per_node": options.gpus_per_node, "whole": options.whole}
        if options.rank is None:
            print(draw(folding, stage=options.stage, **shown))
        else:
            print(describe_rank(folding, options.rank, **shown))
    except InvalidArgument as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
