"""`python -m bench.costmodel`: predicted times of dispatch and combine over the number of nodes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from bench.costmodel.machine import MACHINES, Machine
from bench.costmodel.predict import Prediction, predict
from bench.costmodel.shape import MODELS, Experts, Shape
from moecomm import InvalidArgument

TITLES = ("nodes", "ranks", "nodes/token", "ranks/token", "MB sent", "puts", "dispatch us", "held by",
          "combine us", "held by")  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.costmodel",
        description="Predicted times of dispatch and combine (docs/model.md), a line a number of nodes.",
        epilog=f"Machines: {', '.join(MACHINES)}. Models: {', '.join(MODELS)}. What --set can change: "
        f"{', '.join(field.name for field in fields(Machine))}.",
    )
    add = parser.add_argument
    add("--nodes", default="1,2,4,8,16,32,64,128", metavar="N,N,..", help="numbers of nodes (%(default)s)")
    add("-l", "--ranks-per-node", type=int, default=8, metavar="L", help="ranks of a node (%(default)s)")
    add("-b", "--tokens", type=int, default=4096, metavar="T", help="tokens of a rank (%(default)s)")
    add("--machine", choices=MACHINES, default="h200", help="rates to begin with (%(default)s)")
    add("--set", action="append", default=[], metavar="FIELD=NUMBER", help="another rate: nic_GBps=50")
    add("--model", choices=MODELS, default="deepseek-v3", help="experts to begin with (%(default)s)")
    add("--no-groups", action="store_true", help="routing that is not limited to groups")
    add("--limit-nodes", type=int, metavar="M", help="routing to at most M nodes a token: nodes are groups")
    add("--wire", choices=("fp8",), help="format of rows in a dispatch")
    return parser


def _machine(options: argparse.Namespace) -> Machine:
    changes = {}
    known = {field.name for field in fields(Machine)}
    for item in options.set:
        name, _, number = item.partition("=")
        if name not in known:
            raise InvalidArgument(
                f"--set {item}: no rate {name!r}, expected one of {', '.join(sorted(known))}"
            )
        try:
            changes[name] = float(number)
        except ValueError:
            raise InvalidArgument(f"--set {item}: {number!r} is no number") from None
    return replace(MACHINES[options.machine], **changes)


def _shape(options: argparse.Namespace, nodes: int) -> Shape:
    experts: Experts = MODELS[options.model].copy()
    if options.no_groups or options.limit_nodes is not None:
        experts["num_groups"] = experts["topk_groups"] = None
    if options.limit_nodes is not None and options.limit_nodes < nodes:
        experts["num_groups"], experts["topk_groups"] = nodes, options.limit_nodes
    return Shape(
        nodes=nodes,
        ranks_per_node=options.ranks_per_node,
        tokens=options.tokens,
        wire=options.wire,
        **experts,
    )


def _line(prediction: Prediction) -> list[str]:
    shape, traffic = prediction.shape, prediction.traffic
    dispatch, combine = prediction.dispatch, prediction.combine
    return [
        str(shape.nodes),
        str(shape.ranks),
        f"{traffic.nodes_per_token:.2f}",
        f"{traffic.ranks_per_token:.2f}",
        f"{dispatch.sent_bytes / 1e6:.1f}",
        f"{dispatch.puts:.0f}",
        f"{dispatch.seconds * 1e6:.0f}",
        dispatch.bottleneck,
        f"{combine.seconds * 1e6:.0f}",
        combine.bottleneck,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0, or 2 for arguments that cannot be followed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        machine = _machine(options)
        numbers = [int(word) for word in options.nodes.split(",")]
    except InvalidArgument as problem:
        parser.error(str(problem))
    except ValueError:
        parser.error(f"--nodes {options.nodes}: expected numbers separated by commas")
    lines, refused = [], []
    for nodes in numbers:
        try:
            prediction = predict(machine, _shape(options, nodes))
        except InvalidArgument as problem:
            refused.append(f"{nodes} nodes: {problem}")
            continue
        lines.append(_line(prediction))
    if lines:
        widths = [max(map(len, column)) for column in zip(TITLES, *lines, strict=True)]
        for line in (TITLES, *lines):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for reason in refused:
        print(reason, file=sys.stderr)
    return 0 if lines else 2


if __name__ == "__main__":
    sys.exit(main())
