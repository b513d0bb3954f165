"""How long the stages of a layer take, by a few rates; and from that in how many parts its rows should
travel, and with how many SMs.

A layer's products are held by the rate of the GPU's matrix units, its activation by memory, and the way of
its rows by what `moecomm.model` says of dispatch and combine, or by the SMs that move them. In parts the
first part of a dispatch, and the last of a combine, has most rows (docs/overlap.md).

    from moecomm.model import MACHINES, MODELS, Shape
    from moecomm.overlap import LayerShape, H200, choose

    shape = LayerShape(Shape(nodes=1, ranks_per_node=4, tokens=4096, **MODELS["deepseek-v3"]), ffn=2048)
    choice = choose(shape, MACHINES["h200"], H200)
    print(choice)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from moecomm.errors import InvalidArgument
from moecomm.model import Machine, Shape, predict
from moecomm.overlap.moe import Keep, Split, backward_schedule, forward_schedule
from moecomm.overlap.schedule import SMS, Schedule, Stage
from moecomm.overlap.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU computes, and what it takes to keep its links busy. Raises InvalidArgument for a rate of
    zero.

    Attributes:
        products_TFLOPs: grouped products of rows with weights, of experts with very many rows.
        products_rows: rows of an expert with which they reach half of that.
        weights_TFLOPs: grouped products of rows with rows, the gradients of weights, of experts with very
            many rows.
        weights_rows: rows of an expert with which they reach half of that.
        memory_GBps: read and written bytes together.
        sms: SMs of the GPU.
        dispatch_GBps: bytes of expert rows that one SM of a dispatch brings to their places, where links do
            not hold it.
        combine_GBps: bytes of expert rows that one SM of a combine adds up, where links do not hold it.
        reduce_GBps: bytes of expert rows that one SM adds up for their homes, where a combine has few SMs.
        home_GBps: bytes of tokens that one SM brings home and adds up there, where a combine has few SMs.
        part_us: what each part of a transfer after the first costs one SM to find its rows among all.
        product_us: what each grouped product costs beside its rows: its launch, and its last wave of tiles.
    """

    products_TFLOPs: float
    products_rows: float
    weights_TFLOPs: float
    weights_rows: float
    memory_GBps: float
    sms: int
    dispatch_GBps: float
    combine_GBps: float
    reduce_GBps: float
    home_GBps: float
    part_us: float
    product_us: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InvalidArgument(f"Rates.{field.name} is {value!r}, must be above 0")


H200 = Rates(
    products_TFLOPs=760.0,
    products_rows=115.0,
    weights_TFLOPs=720.0,
    weights_rows=200.0,
    memory_GBps=4143.0,
    sms=132,
    dispatch_GBps=35.0,
    combine_GBps=22.0,
    reduce_GBps=41.0,
    home_GBps=6.0,
    part_us=5000.0,
    product_us=8.0,
)
"""Of one H200 with torch 2.11 (docs/performance.md)."""


@dataclass(frozen=True)
class LayerShape:
    """A layer: its exchange, and what its experts compute.

    Attributes:
        exchange: who sends how many rows to whom.
        ffn: F: inner width of an expert.
        gated: swiglu: the first product is 2F wide.
        shared_ffn: inner width of the shared experts together.
    """

    exchange: Shape
    ffn: int
    gated: bool = True
    shared_ffn: int = 0

    @property
    def inner(self) -> int:
        """I: width of the first product."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def local_experts(self) -> int:
        """L."""
        return self.exchange.experts // self.exchange.ranks

    @property
    def rows(self) -> float:
        """P: rows of a rank's experts in the mean."""
        return self.exchange.tokens * self.exchange.top_k


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `choose` found best.

    Attributes:
        comm_sms: SMs of the communicator's operations.
        forward: schedule of the layer's forward.
        backward: schedule of its backward.
    """

    parts: int
    comm_sms: int
    forward: Schedule
    backward: Schedule

    @property
    def seconds(self) -> float:
        """Of forward and backward as planned."""
        return self.forward.plan().seconds + self.backward.plan().seconds

    def timelines(self) -> dict[str, Timeline]:
        """As planned."""
        return {"forward": self.forward.plan(), "backward": self.backward.plan()}

    def __str__(self) -> str:
        exposed = sum(timeline.exposed_seconds for timeline in self.timelines().values())
        return (
            f"{self.parts} parts, {self.comm_sms} SMs for communication: {self.seconds * 1e6:.0f} us, "
            f"{exposed / self.seconds:.1%} exposed"
        )


def part_shares(exchange: Shape, parts: int) -> tuple[float, ...]:
    """Of the rows that a rank gets, those that come with each part; random routing without groups.

    A token is among the first p parts of a rank, s = p L / parts experts, with the probability that not all
    of its K choices of E experts miss them. Example: 4 ranks of 64 experts, top-8, 2 parts: 0.73, 0.27.
    """
    experts, local = exchange.experts, exchange.experts // exchange.ranks

    def reached(count: int) -> float:
        missed = 1.0
        for choice in range(exchange.top_k):
            missed *= max(experts - count - choice, 0) / (experts - choice)
        return 1.0 - missed

    ends = [0, *(-(-(part + 1) * local // parts) for part in range(parts))]
    return tuple((reached(b) - reached(a)) / reached(local) for a, b in itertools.pairwise(ends))


def _flops_a_second(peak_TFLOPs: float, half_rows: float, rows: float) -> float:
    """Of a grouped product of groups of `rows` rows, which reaches half of its peak with `half_rows`."""
    return peak_TFLOPs * 1e12 * rows / (rows + half_rows)


@lru_cache(maxsize=256)
def planned(
    shape: LayerShape, machine: Machine, rates: Rates, parts: int, comm_sms: int, keep: Keep = "all"
) -> tuple[Schedule, Schedule]:
    """The forward and backward schedules of a layer with the time and the SMs of each stage.

    With more than half of the SMs transfers have nothing beside them, as in MoELayer.
    """
    transfers = predict(machine, shape.exchange)
    hidden, inner, ffn, item = shape.exchange.hidden, shape.inner, shape.ffn, shape.exchange.element_bytes
    tokens, rows, shared = shape.exchange.tokens, shape.rows, shape.shared_ffn
    shared_inner = shared * (2 if shape.gated else 1)
    there = part_shares(shape.exchange, parts)
    back = tuple(reversed(there))
    split = Split(rates.sms, comm_sms) if 2 * comm_sms <= rates.sms else None
    each = rows / shape.local_experts

    def product(count: float, width: float, depth: float, peak: float, half: float, own: float) -> float:
        """On all SMs; `own`: rows of one weight."""
        return 2.0 * count * width * depth / _flops_a_second(peak, half, own) + rates.product_us * 1e-6

    def by_weights(count: float, width: float, depth: float, own: float = each) -> float:
        return product(count, width, depth, rates.products_TFLOPs, rates.products_rows, own)

    def by_rows(count: float, width: float, depth: float, own: float = each) -> float:
        return product(count, width, depth, rates.weights_TFLOPs, rates.weights_rows, own)

    def pass_over(count: float, columns: float) -> float:
        return count * columns * item / (rates.memory_GBps * 1e9)

    by_sm = rows * hidden * item / (comm_sms * 1e9)  # seconds, times GB/s of an SM
    more = rates.part_us * 1e-6 / comm_sms

    def dispatched(part: int) -> float:
        """As the links allow, or the SMs. Signals and plan go with the first part."""
        fixed = machine.dispatch_fixed_us * 1e-6
        time = max(transfers.dispatch.seconds - fixed, by_sm / rates.dispatch_GBps) * there[part]
        return time + (fixed if part == 0 else more)

    def combined(part: int) -> float:
        """Signals, and half of what SMs add up, the sums at home, go with the last part."""
        fixed, last = machine.combine_fixed_us * 1e-6, part + 1 == parts
        by_links = (transfers.combine.seconds - fixed) * back[part]
        by_sms = by_sm / rates.combine_GBps * (back[part] + float(last)) / 2
        return max(by_links, by_sms) + (fixed if last else more)

    def seconds(stage: Stage) -> float:
        words = stage.name.split()
        part = int(words.pop()) if words[-1].isdigit() else 0
        name, slice_rows = " ".join(words), rows / parts
        if name in ("dispatch", "gradient rows", "rows again"):
            return dispatched(part)
        if name in ("combine", "home"):
            return combined(part)
        computed = {
            "publish": 0.0,
            "shared experts": by_weights(tokens, shared_inner, hidden, tokens)
            + by_weights(tokens, hidden, shared, tokens),
            "shared backward": by_weights(tokens, shared_inner, hidden, tokens)
            + by_weights(tokens, hidden, shared, tokens)
            + by_rows(tokens, shared_inner, hidden, tokens)
            + by_rows(tokens, hidden, shared, tokens),
            "up": by_weights(slice_rows, inner, hidden),
            "up again": by_weights(slice_rows, inner, hidden),
            "up backward": by_weights(slice_rows, inner, hidden),
            "down": by_weights(slice_rows, ffn, hidden),
            "down backward": by_weights(slice_rows, ffn, hidden),
            "activation": pass_over(slice_rows, inner + ffn),
            "activation backward": pass_over(slice_rows, 2 * inner + 2 * ffn),
            "up weights": by_rows(rows, inner, hidden),
            "down weights": by_rows(rows, ffn, hidden),
            "sum": pass_over(tokens, 3 * hidden),
        }
        return computed[name]

    def with_costs(schedule: Schedule) -> Schedule:
        stages = []
        for stage in schedule.stages:
            used = stage.uses.get(SMS, comm_sms if stage.communicates else rates.sms)
            slower = 1.0 if stage.communicates else rates.sms / used
            stages.append(
                dataclasses.replace(stage, seconds=seconds(stage) * slower, uses={SMS: float(used)})
            )
        return Schedule(stages, streams=schedule.streams, resources={SMS: float(rates.sms)})

    has_shared = shared > 0
    return (
        with_costs(forward_schedule(shared=has_shared, parts=parts, split=split)),
        with_costs(
            backward_schedule(shared=has_shared, keep=keep, home=True, weights=True, parts=parts, split=split)
        ),
    )


def choose(
    shape: LayerShape,
    machine: Machine,
    rates: Rates,
    *,
    most_parts: int = 8,
    sms: tuple[int, ...] = (16, 24, 32, 48, 64, 99),
    keep: Keep = "all",
) -> Choice:
    """The number of parts, and of SMs for communication, with the shortest planned forward and backward; the
    fewest parts, then the fewest SMs, of those that are equal. Pure arithmetic; raises InvalidArgument for
    SMs that the GPU does not have."""
    for count in sms:
        if not 0 < count < rates.sms:
            raise InvalidArgument(f"sms has {count}, must be from 1 to {rates.sms - 1}")
    choices = []
    for parts in range(1, min(most_parts, shape.local_experts) + 1):
        for count in sorted(sms):
            forward, backward = planned(shape, machine, rates, parts, count, keep)
            choices.append(Choice(parts=parts, comm_sms=count, forward=forward, backward=backward))
    return min(choices, key=lambda choice: choice.seconds)


def sms_beside_weights(shape: LayerShape, machine: Machine, rates: Rates) -> int | None:
    """SMs with which the way home of the gradients takes about as long as the product beside which it lies,
    the gradients of the experts' first weights; None: that product would lose more by leaving them than the
    way home takes on the default SMs with nothing beside it, or they are more than a quarter of the GPU.

    Beside a product a transfer takes half as long again as alone, and with fewer than eight SMs much longer
    (docs/performance.md).
    """
    product = _product_seconds(shape, rates.weights_TFLOPs, rates.weights_rows, shape.inner)
    alone = predict(machine, shape.exchange).combine.seconds
    return _sms_beside(_home_on_one_sm(shape, rates), product, alone, rates.sms)


def sms_in_turns(shape: LayerShape, machine: Machine, rates: Rates) -> dict[str, int]:
    """SMs for transfers beside products of another program of `interleave`, by stage, of those for which that
    pays; as `sms_beside_weights`. A backward goes first: then the rows of a forward come beside the backward
    of a second product, and go home beside the gradients of first weights. Where a forward goes first the
    gradients' rows come beside its first product.
    """
    exchange = shape.exchange
    machine_says = predict(machine, exchange)
    row_GB = exchange.hidden * exchange.element_bytes * 1e-9
    there = row_GB * shape.rows / rates.dispatch_GBps  # on one SM
    up, down = (
        _product_seconds(shape, rates.products_TFLOPs, rates.products_rows, width)
        for width in (shape.inner, shape.ffn)
    )
    ways = {
        "dispatch": _sms_beside(there, down, machine_says.dispatch.seconds, rates.sms),
        "gradient rows": _sms_beside(there, up, machine_says.dispatch.seconds, rates.sms),
        "combine": sms_beside_weights(shape, machine, rates),
    }
    ways["publish"] = ways["dispatch"]  # its first half
    return {name: sms for name, sms in ways.items() if sms is not None}


def _home_on_one_sm(shape: LayerShape, rates: Rates) -> float:
    """Seconds of a combine's sums, here and at home, if one SM did them all."""
    exchange = shape.exchange
    row_GB = exchange.hidden * exchange.element_bytes * 1e-9
    return row_GB * (shape.rows / rates.reduce_GBps + exchange.tokens / rates.home_GBps)


def _product_seconds(shape: LayerShape, peak_TFLOPs: float, half_rows: float, width: float) -> float:
    """A product of all rows between `hidden` and `width` columns on the whole GPU."""
    flops = 2.0 * shape.rows * shape.exchange.hidden * width
    return flops / _flops_a_second(peak_TFLOPs, half_rows, shape.rows / shape.local_experts)


def _sms_beside(one_sm: float, product: float, alone: float, sms_of_gpu: int) -> int | None:
    """SMs with which a transfer that takes `one_sm` seconds on one takes about as long as a product beside
    it; None: the product would lose more than the `alone` seconds that the transfer takes with nothing
    beside it, or they are more than a quarter of the GPU."""
    sms = max(8, 2 * math.ceil(1.5 * one_sm / product / 2))
    lost = product * sms / (sms_of_gpu - sms)
    return sms if 4 * sms <= sms_of_gpu and lost < alone else None
