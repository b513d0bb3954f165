"""The time of a dispatch and of a combine, by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.costmodel.machine import Machine
from bench.costmodel.shape import Shape
from bench.costmodel.traffic import Traffic, expected


@dataclass(frozen=True)
class Stage:
    """A part of an operation, as if it ran alone."""

    name: str
    seconds: float
    bound: str
    """What holds it: "NIC", "put rate", "command rate", "node links", "memory", "staging", "reduce", "fixed
    cost", "latency"."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A dispatch or a combine of the slowest rank."""

    name: str
    seconds: float
    stages: tuple[Stage, ...]
    """In order. Those of rows run at the same time, so their sum is more than `seconds`."""
    bottleneck: str
    """The bound of the longest stage; "metadata" where that is the exchange of ids."""
    sent_bytes: float  # over the rail: rows and metadata
    row_bytes: float  # over the rail: rows alone
    puts: float
    link_bytes: float  # rows between ranks of a node

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.seconds * 1e6:.1f} us, held by {self.bottleneck}; a rank sends "
            f"{self.sent_bytes / 1e6:.2f} MB in {self.puts:.0f} puts over its rail and "
            f"{self.link_bytes / 1e6:.2f} MB within its node"
        ]
        lines += [
            f"  {stage.name:<10} {stage.seconds * 1e6:>10.1f} us  {stage.bound}" for stage in self.stages
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The result of `predict`. `str()` gives a table of the stages."""

    shape: Shape
    traffic: Traffic
    dispatch: Operation
    combine: Operation

    def __str__(self) -> str:
        shape, traffic = self.shape, self.traffic
        return (
            f"{shape.nodes} nodes x {shape.ranks_per_node} ranks, {shape.tokens} tokens a rank: "
            f"a token needs {traffic.nodes_per_token:.2f} nodes, {traffic.ranks_per_token:.2f} ranks\n"
            f"{self.dispatch}\n{self.combine}"
        )


def predict(machine: Machine, shape: Shape) -> Prediction:
    """Times of one dispatch and one combine of `shape` on `machine`, with random routing.

    Every stage is an alpha-beta term with a bound by rate beside it:

        time = max((bytes + puts * half) / rate, puts / put rate, commands / command rate)

    with rate = nic_GBps * nic_share / ranks_per_nic and half = nic_half_bytes on the wire, and without the
    last two inside a node. Stages that take rows on chunk by chunk run at the same time: n chunks through
    stages of t_1 .. t_s seconds take

        flow = max over i of (t_i + sum of the others / n)

    that is the longest stage and one chunk through each other one. Then

        dispatch = fixed + latency + metadata + flow(staging, wire, pull after plan)
        combine  = fixed + latency + records  + flow(reduce, relay sum, staging, wire, home sum)

    On one node nothing but fixed, pull, reduce and home sum is left. docs/model.md has a worked example.
    """
    traffic = expected(shape)
    return Prediction(
        shape=shape,
        traffic=traffic,
        dispatch=_dispatch(machine, shape, traffic),
        combine=_combine(machine, shape, traffic),
    )


def _dispatch(machine: Machine, shape: Shape, traffic: Traffic) -> Operation:
    others, row = shape.nodes - 1, shape.wire_row_bytes
    metadata_puts, metadata_bytes = others * shape.metadata_puts, others * shape.metadata_bytes
    foreign_ids = (shape.ranks - shape.ranks_per_node) * shape.ids_bytes
    plan = Stage("plan", _seconds(foreign_ids, machine.node_GBps), "node links")
    read_and_written = traffic.needed_rows * row + traffic.expert_rows * shape.row_bytes
    pull = _longest(
        "pull",
        ("node links", _seconds(traffic.link_rows * row, machine.node_GBps)),
        ("memory", _seconds(read_and_written, machine.memory_GBps)),
    )
    ahead = (
        Stage("fixed", machine.dispatch_fixed_us * 1e-6, "fixed cost"),
        Stage("latency", machine.round_s if others else 0.0, "latency"),
        _wire(machine, shape, "metadata", metadata_bytes, metadata_puts, 0.0),
    )
    flowing = (
        _staging(machine, traffic.sent_rows * row),
        _wire(machine, shape, "wire", traffic.sent_rows * row, traffic.sent_puts, traffic.sent_rows),
        pull,
    )
    chunks = traffic.sent_puts if others else _chunks_of_node(shape)
    seconds = sum(stage.seconds for stage in ahead) + _flow(flowing, chunks, before_last=plan.seconds)
    return Operation(
        name="dispatch",
        seconds=seconds,
        stages=(*ahead, *flowing[:2], plan, pull),
        bottleneck=_bottleneck((*ahead, *flowing, plan)),
        sent_bytes=metadata_bytes + traffic.sent_rows * row,
        row_bytes=traffic.sent_rows * row,
        puts=metadata_puts + traffic.sent_puts,
        link_bytes=traffic.link_rows * row,
    )


def _combine(machine: Machine, shape: Shape, traffic: Traffic) -> Operation:
    others, row = shape.nodes - 1, shape.row_bytes
    gathered = (traffic.foreign_expert_rows + traffic.foreign_rows) * row
    reduce = _longest(
        "reduce",
        ("node links", _seconds(traffic.link_rows * row, machine.node_GBps)),
        ("reduce", _seconds(gathered, machine.reduce_GBps)),
    )
    # A rank that is alone in its node sums straight into staging.
    relayed = traffic.relay_rows + traffic.sent_rows if shape.ranks_per_node > 1 else 0.0
    relay = Stage("relay sum", _seconds(relayed * row, machine.memory_GBps), "memory")
    home = Stage(
        "home sum", _seconds((traffic.home_rows + shape.tokens) * row, machine.memory_GBps), "memory"
    )
    ahead = (
        Stage("fixed", machine.combine_fixed_us * 1e-6, "fixed cost"),
        Stage("latency", machine.round_s if others else 0.0, "latency"),
        _wire(machine, shape, "records", others * shape.record_bytes, others, 0.0),
    )
    flowing = (
        reduce,
        relay,
        _staging(machine, traffic.sent_rows * row),
        _wire(machine, shape, "wire", traffic.sent_rows * row, traffic.returned_puts, traffic.sent_rows),
        home,
    )
    chunks = traffic.returned_puts if others else _chunks_of_node(shape)
    return Operation(
        name="combine",
        seconds=sum(stage.seconds for stage in ahead) + _flow(flowing, chunks),
        stages=(*ahead, *flowing),
        bottleneck=_bottleneck((*ahead, *flowing)),
        sent_bytes=others * shape.record_bytes + traffic.sent_rows * row,
        row_bytes=traffic.sent_rows * row,
        puts=others + traffic.returned_puts,
        link_bytes=traffic.link_rows * row,
    )


def _flow(stages: Sequence[Stage], chunks: float, *, before_last: float = 0.0) -> float:
    """Stages that work at the same time on `chunks` chunks; the last one begins `before_last` late."""
    pieces = max(chunks, 1.0)
    total = sum(stage.seconds for stage in stages)
    last = stages[-1]
    return max(
        stage.seconds + (total - stage.seconds) / pieces + (before_last if stage is last else 0.0)
        for stage in stages
    )


def _wire(machine: Machine, shape: Shape, name: str, size: float, puts: float, rows: float) -> Stage:
    commands = rows / shape.rows_per_command if rows and shape.rows_per_command is not None else puts
    return _longest(
        name,
        ("NIC", (size + puts * machine.nic_half_bytes) / machine.rail_bytes_per_s),
        ("put rate", puts / machine.put_rate),
        ("command rate", commands / machine.command_rate),
    )


def _staging(machine: Machine, size: float) -> Stage:
    return Stage("staging", _seconds(size, machine.staging_GBps), "staging")


def _longest(name: str, *bounds: tuple[str, float]) -> Stage:
    bound, seconds = max(bounds, key=lambda each: each[1])
    return Stage(name, seconds, bound)


def _bottleneck(stages: Sequence[Stage]) -> str:
    longest = max(stages, key=lambda stage: stage.seconds)
    return longest.name if longest.name in ("metadata", "plan") else longest.bound


def _chunks_of_node(shape: Shape) -> float:
    # Within a node rows are passed on by the token, or by a few.
    return float(-(-shape.tokens // 8))


def _seconds(size: float, GBps: float) -> float:
    return size / (GBps * 1e9)
