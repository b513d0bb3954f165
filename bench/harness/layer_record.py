"""Rows of the layer benchmark and its JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .layer_options import LayerOptions
from .layer_presets import Preset
from .record import heading
from .timing import Timing

Span = tuple[str, str, float, float, bool]
"""A stage: name, stream, begin and end in seconds, whether it communicates."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the ways of one comparison have in common."""

    preset: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    dtype: str
    tokens: int  # a rank
    routing: str
    zipf: float | None  # None: the routing has no exponent
    graphs: bool  # the ways around graph replay
    rows: int  # (token, expert) pairs over all ranks
    most_rows: int  # of the fullest rank


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Recorded steps: the one of median length on each rank, means over ranks."""

    forward_share: float
    step_share: float
    step_s: float  # exposed, of a step
    forward_spans: tuple[Span, ...]  # rank 0's
    backward_spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class LayerRow(Point):
    """One way at one point. Times in seconds; flops are means over ranks."""

    way: str
    forward_s: float
    forward_min_s: float
    step_s: float
    step_min_s: float
    forward_flops: float | None  # None: it computes nothing
    step_flops: float | None
    forward_tflops: float | None  # TFLOP/s
    step_tflops: float | None
    dense_tflops: float  # of the dense product beside it
    forward_share: float | None  # of that
    step_share: float | None
    forward_ratio: float | None  # to compute only; None: that did not run
    step_ratio: float | None
    exposed: Exposed | None  # None: not recorded
    memory_bytes: int | None  # a step's peak over what was there; None: not known
    peak_bytes: int | None  # all that was allocated at that peak, largest of the ranks
    kept_bytes: int | None  # between a forward and its backward, without the result
    host_s: float | None  # CPU time to issue a step
    wrong: int | None  # None: not checked
    worst: float | None  # largest deviation, of a value's magnitude plus its row's root mean square
    same_bits: bool | None  # y, dw_in, dw_out as of serial; None: not compared
    note: str
    forward_samples_s: tuple[float, ...]
    step_samples_s: tuple[float, ...]

    @property
    def place(self) -> tuple[object, ...]:
        """What ways that are compared have in common."""
        return (self.preset, self.dtype, self.tokens, self.routing, self.zipf, self.graphs)


@dataclass(frozen=True, kw_only=True)
class LayerMissing:
    """A way, or with way "all" a whole preset, that did not run. `failed`: it should have."""

    preset: str
    tokens: int
    routing: str
    way: str
    reason: str
    failed: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of one way beside its times."""

    wrong: int | None = None
    worst: float | None = None
    same_bits: bool | None = None
    exposed: Exposed | None = None
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    host_s: float | None = None


def point_of(
    preset: Preset,
    options: LayerOptions,
    tokens: int,
    routed: tuple[str, float | None],
    rows_R: Sequence[int],
    *,
    graphs: bool,
) -> Point:
    """The point of a case."""
    return Point(
        preset=preset.name,
        hidden=preset.hidden,
        ffn=preset.ffn,
        experts=preset.experts,
        topk=preset.topk,
        dtype=options.dtype,
        tokens=tokens,
        routing=routed[0],
        zipf=routed[1],
        graphs=graphs,
        rows=sum(rows_R),
        most_rows=max(rows_R),
    )


def dense_flops(dense: tuple[int, int, int]) -> float:
    """Of one product."""
    rows, inner, columns = dense
    return 2.0 * rows * inner * columns


def make_row(
    *,
    preset: Preset,
    point: Point,
    ranks: int,
    way: str,
    computes: bool,
    note: str,
    forward: Timing,
    step: Timing,
    compute: tuple[Timing, Timing] | None,
    dense_tflops: float,
    measured: Measured,
) -> LayerRow:
    """Joins times with the work behind them. `compute`: forward and step of compute only."""
    rows = point.rows / ranks
    flops = (preset.forward_flops(rows), preset.step_flops(rows)) if computes else (None, None)
    rates = [
        None if work is None else work / timing.median / 1e12
        for work, timing in zip(flops, (forward, step), strict=True)
    ]
    shares = [None if rate is None else rate / dense_tflops for rate in rates]
    ratios = (
        (None, None)
        if compute is None
        else (forward.median / compute[0].median, step.median / compute[1].median)
    )
    return LayerRow(
        **asdict(point),
        way=way,
        forward_s=forward.median,
        forward_min_s=forward.fastest,
        step_s=step.median,
        step_min_s=step.fastest,
        forward_flops=flops[0],
        step_flops=flops[1],
        forward_tflops=rates[0],
        step_tflops=rates[1],
        dense_tflops=dense_tflops,
        forward_share=shares[0],
        step_share=shares[1],
        forward_ratio=ratios[0],
        step_ratio=ratios[1],
        # Not by asdict: Exposed stays what it is.
        exposed=measured.exposed,
        memory_bytes=measured.memory_bytes,
        peak_bytes=measured.peak_bytes,
        kept_bytes=measured.kept_bytes,
        host_s=measured.host_s,
        wrong=measured.wrong,
        worst=measured.worst,
        same_bits=measured.same_bits,
        note=note,
        forward_samples_s=forward.slowest_I,
        step_samples_s=step.slowest_I,
    )


def document(
    options: LayerOptions,
    rows: Sequence[LayerRow],
    missing: Sequence[LayerMissing],
    stats: dict[str, Any],
) -> dict[str, Any]:
    """The whole record as plain values. `stats` are rank 0's Communicator.stats(), by preset."""
    checked = [row.wrong for row in rows if row.wrong is not None]
    return {
        **heading(options),
        "rows": [asdict(row) for row in rows],
        "missing": [asdict(each) for each in missing],
        "stats": stats,
        "wrong": sum(checked) if checked else None,
    }
