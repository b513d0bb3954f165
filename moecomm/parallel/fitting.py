"""Checks which sizes and orders make a folding. Pure arithmetic."""

from __future__ import annotations

import math
from typing import Any

from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument
from moecomm.parallel.grid import Grid

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_ORDER_NAMES = DEFAULT_ORDER.split("-")
# The argument with the size of each dimension; DP and EDP follow from the size of the world.
_DENSE = {"pp": "pp", "tp": "tp", "cp": "cp"}
_EXPERT = {"pp": "pp", "tp": "etp", "ep": "ep"}
_EXPERT_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}

Arguments = dict[str, Any]
"""The arguments of a ParallelFolding by name: the sizes, which are integers, and the order."""


def require_fit(arguments: Arguments) -> None:
    """Raises InvalidArgument for arguments that do not make a folding."""
    for name, value in arguments.items():
        if name != "order":
            require_integer(name, value, 1)
    order = arguments["order"]
    if not isinstance(order, str) or sorted(order.split("-")) != sorted(_ORDER_NAMES):
        raise InvalidArgument(
            f"order is {order!r}, expected each of {', '.join(_ORDER_NAMES)} once, joined by '-', the "
            f"innermost first, such as {DEFAULT_ORDER!r}; one of size 1 may stand anywhere"
        )
    for sizes, rest in ((_DENSE, "DP"), (_EXPERT, "EDP")):
        left, divided = arguments["world_size"], ""
        for name in sizes.values():
            if left % arguments[name]:
                whole = f"world_size / ({divided})" if divided else "world_size"
                raise InvalidArgument(
                    f"{name} is {arguments[name]}, expected a divisor of {whole} = {left}, for {rest} = "
                    f"world_size / ({' * '.join(sizes.values())}) to be a whole number. These sizes fit a "
                    f"world_size that is a multiple of {smallest_world(arguments)}"
                )
            left //= arguments[name]
            divided += f" * {name}" if divided else name
    dense, expert = (grid.stride("pp") for grid in grids(arguments))
    if arguments["pp"] > 1 and dense != expert:
        raise InvalidArgument(
            f"order is {order!r}, which gives attention and experts different pipeline groups: neighbouring "
            f"stages are {dense} ranks apart in the dense grid and {expert} in the expert grid, expected "
            "equally many, as they are in any order that ends with pp"
        )


def smallest_world(arguments: Arguments) -> int:
    """Returns the fewest ranks for which DP and EDP are whole numbers; every valid world is a multiple of it.
    It is PP * max(TP * CP, ETP * EP) if one of the two products divides the other."""
    model = arguments["tp"] * arguments["cp"]
    experts = arguments["etp"] * arguments["ep"]
    return int(arguments["pp"] * math.lcm(model, experts))


def grids(arguments: Arguments) -> tuple[Grid, Grid]:
    """Returns the dense and the expert grid of sizes that divide the world.

    Both follow `order`, like Megatron-Core's two RankGenerators: the dense grid leaves out `ep`; the expert
    grid leaves out `cp`, and has ETP in place of TP and EDP in place of DP.
    """
    order, world = arguments["order"].split("-"), arguments["world_size"]
    dense = {name: arguments[each] for name, each in _DENSE.items()}
    expert = {name: arguments[each] for name, each in _EXPERT.items()}
    for sizes in (dense, expert):
        sizes["dp"] = world // math.prod(sizes.values())
    in_dense = [name for name in order if name in dense]
    in_expert = [name for name in order if name in expert]
    return (
        Grid(tuple(in_dense), tuple(dense[name] for name in in_dense)),
        Grid(tuple(_EXPERT_NAMES[name] for name in in_expert), tuple(expert[name] for name in in_expert)),
    )
