"""Which sizes and orders make a folding, and what is nearest to those that do not. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument
from moecomm.parallel.grid import Grid

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_ORDER_NAMES = DEFAULT_ORDER.split("-")
# The argument that is the size of each dimension; DP and EDP are what is left of the world.
_DENSE = {"pp": "pp", "tp": "tp", "cp": "cp"}
_EXPERT = {"pp": "pp", "tp": "etp", "ep": "ep"}
_EXPERT_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}

Arguments = dict[str, Any]
"""The arguments of a ParallelFolding by name: the sizes, which are integers, and the order."""


def require_fit(arguments: Arguments) -> None:
    """Raises InvalidArgument for arguments that make no folding; the text names the nearest that do."""
    for name, value in arguments.items():
        if name != "order":
            require_integer(name, value, 1)
    order = arguments["order"]
    if not isinstance(order, str) or sorted(order.split("-")) != sorted(_ORDER_NAMES):
        raise InvalidArgument(
            f"order is {order!r}, expected each of {', '.join(_ORDER_NAMES)} once, joined by '-', the "
            f"innermost first, such as {DEFAULT_ORDER!r}; one of size 1 may stand anywhere"
        )
    found = _misfit(arguments)
    if found is not None:
        argument, reason = found
        raise InvalidArgument(f"{reason}. Nearest that fit: {' or '.join(_nearest(arguments, argument))}")


def smallest_world(arguments: Arguments) -> int:
    """Returns the fewest ranks on which both grids have whole DP and EDP: every fitting world is a multiple
    of it. It is PP * max(TP * CP, ETP * EP) where one of the two products divides the other."""
    model = arguments["tp"] * arguments["cp"]
    experts = arguments["etp"] * arguments["ep"]
    return int(arguments["pp"] * math.lcm(model, experts))


def grids(arguments: Arguments) -> tuple[Grid, Grid]:
    """Returns the dense and the expert grid of sizes that divide the world.

    Both follow `order`, as Megatron-Core's two RankGenerators do: the dense grid leaves `ep` out; the expert
    grid leaves `cp` out, and has ETP in the place of TP and EDP in that of DP.
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


def _misfit(arguments: Arguments) -> tuple[str, str] | None:
    """Returns the argument that does not fit and why; None if all do."""
    for sizes, rest in ((_DENSE, "DP"), (_EXPERT, "EDP")):
        left, divided = arguments["world_size"], ""
        for name in sizes.values():
            if left % arguments[name]:
                whole = f"world_size / ({divided})" if divided else "world_size"
                return name, (
                    f"{name} is {arguments[name]}, expected a divisor of {whole} = {left}, for {rest} = "
                    f"world_size / ({' * '.join(sizes.values())}) to be a whole number"
                )
            left //= arguments[name]
            divided += f" * {name}" if divided else name
    dense, expert = (grid.stride("pp") for grid in grids(arguments))
    if arguments["pp"] > 1 and dense != expert:
        return "order", (
            f"order is {arguments['order']!r}, which gives attention and experts different pipeline groups: "
            f"neighbouring stages are {dense} ranks apart in the dense grid and {expert} in the expert grid, "
            "expected equally many"
        )
    return None


def _nearest(arguments: Arguments, argument: str) -> list[str]:
    """Returns changes after which the arguments fit: of `argument`, and of the world. Where no value fits in
    the order as it is, the change makes the stages outermost as well."""
    order = "-".join([name for name in arguments["order"].split("-") if name != "pp"] + ["pp"])
    if argument == "order":
        return [f"order={order}"]
    found = []
    for name in (argument, "world_size"):
        values = list(_neighbours(arguments, name))
        found += [f"{name}={value}" for value in values]
        if not values:
            values = list(_neighbours({**arguments, "order": order}, name))
            found += [f"order={order}, {name}={value}" for value in values]
    return found


def _neighbours(arguments: Arguments, name: str) -> Iterator[int]:
    """Yields the nearest value below and the nearest above with which argument `name` fits, if any."""
    given, world = arguments[name], arguments["world_size"]
    if name == "world_size":
        step = smallest_world(arguments)
        candidates = [world // step * step, (world // step + 1) * step]
    else:
        small = [each for each in range(1, math.isqrt(world) + 1) if world % each == 0]
        candidates = sorted({*small, *(world // each for each in small)})
    fitting = [
        value
        for value in candidates
        if 0 < value < 2**31 and value != given and _misfit({**arguments, name: value}) is None
    ]
    yield from [value for value in fitting if value < given][-1:]
    yield from [value for value in fitting if value > given][:1]
