"""The printed tables of the layer benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from . import machine
from .layer_options import (
    BASELINE,
    COMPUTE,
    FIXED,
    GRAPH,
    GRAPHED,
    INTERLEAVED,
    OVERLAPPED,
    PLAIN,
    SERIAL,
    TUNED,
    LayerOptions,
)
from .layer_record import LayerMissing, LayerRow, Point
from .layer_reference import BOUNDS

_TITLES = ("way", "forward", "min", "ratio", "step", "min", "ratio", "TFLOP/s", "of dense", "exposed")
_UNITS = ("", "(us)", "(us)", "", "(us)", "(us)", "", "(step)", "(step)", "(step)")
_GPU_TITLES, _GPU_UNITS = ("memory", "host"), ("(GB)", "(us)")
_LAST_TITLES, _LAST_UNITS = ("error", "#wrong"), ("", "")
_WIDTH, _WAY_WIDTH = 10, 24


def _line(cells: Sequence[str], lead: str = " ") -> str:
    return f"{lead} {cells[0]:<{_WAY_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells[1:])


def header(options: LayerOptions, flush_bytes: int) -> str:
    """What is run and on what, as comment lines."""
    rows, inner, columns = options.dense
    lines = [
        *machine.heading(options.operation),
        f"# ranks {options.ranks}  threads/rank {options.threads}  type {options.dtype}"
        f"  SMs {options.num_sms or 'chosen'}  dense {rows} x {inner} x {columns}",
        f"# iters {options.iters}  warmup {options.warmup}  check {options.checks} (bound"
        f" {BOUNDS[options.dtype]:.3g})  seed {options.seed}  flushed {flush_bytes / 2**20:.0f} MiB/rank",
    ]
    if options.device == "cuda":
        lines.append(machine.heading_of_gpus())
    return "\n".join(lines)


def skew_of(routing: str, zipf: float | None) -> str:
    """A routing in words: "zipf 1"."""
    return routing if zipf is None else f"{routing} {zipf:g}"


def point_header(point: Point, options: LayerOptions) -> str:
    """One comparison's comment line and column titles."""
    gpu = options.device == "cuda"
    titles = (*_TITLES, *(_GPU_TITLES if gpu else ()), *_LAST_TITLES)
    units = (*_UNITS, *(_GPU_UNITS if gpu else ()), *_LAST_UNITS)
    return "\n".join(
        [
            "#",
            f"# {point.preset}: hidden {point.hidden}  ffn {point.ffn}  experts {point.experts}"
            f"  topk {point.topk}  tokens/rank {point.tokens}  {skew_of(point.routing, point.zipf)}"
            f"  rows/rank {point.rows / options.ranks:.0f}, most {point.most_rows}",
            _line(titles, "#"),
            _line(units, "#"),
        ]
    )


def _number(value: float | None, digits: int, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value, 1, "%")


def table_row(row: LayerRow | LayerMissing, options: LayerOptions) -> str:
    """One aligned line; for a way that did not run, a comment with the reason."""
    if isinstance(row, LayerMissing):
        return f"# {row.preset} {row.way}: {'FAILED' if row.failed else 'n/a'}: {row.reason}"
    cells = [
        row.way,
        f"{row.forward_s * 1e6:.1f}",
        f"{row.forward_min_s * 1e6:.1f}",
        _number(row.forward_ratio, 3),
        f"{row.step_s * 1e6:.1f}",
        f"{row.step_min_s * 1e6:.1f}",
        _number(row.step_ratio, 3),
        # Of tiny layers on CPUs, too.
        "-" if row.step_tflops is None else f"{row.step_tflops:.4g}",
        _percent(row.step_share),
        _percent(row.exposed.step_share if row.exposed else None),
    ]
    if options.device == "cuda":
        cells.append(_number(None if row.memory_bytes is None else row.memory_bytes / 1e9, 2))
        cells.append(_number(None if row.host_s is None else row.host_s * 1e6, 1))
    cells.append("-" if row.worst is None else f"{row.worst:.2g}")
    cells.append("N/A" if row.wrong is None else str(row.wrong))
    return _line(cells)


def _times(rows: dict[str, LayerRow], name: str, other: str) -> str | None:
    if name not in rows or other not in rows:
        return None
    forward = rows[other].forward_s / rows[name].forward_s
    return f"{name} {rows[other].step_s / rows[name].step_s:.2f} ({forward:.2f}) times as fast as {other}"


def comparison(rows: Sequence[LayerRow]) -> str:
    """The ratios of one point, of a step and in brackets of a forward, as comment lines."""
    found = {row.way: row for row in rows}
    pairs = (
        (OVERLAPPED, SERIAL),
        (INTERLEAVED, OVERLAPPED),
        (OVERLAPPED, BASELINE),
        (OVERLAPPED, TUNED),
        (COMPUTE, PLAIN),
        (GRAPH, OVERLAPPED),
        (GRAPH, FIXED),
        (GRAPHED, OVERLAPPED),
    )
    lines = [f"# {text}" for pair in pairs if (text := _times(found, *pair))]
    different = [row.way for row in rows if row.same_bits is False]
    if different:
        lines.append(f"# other bits than {SERIAL} in y, dw_in or dw_out: {'; '.join(different)}")
    return "\n".join(lines)


def footer(rows: Sequence[LayerRow], missing: Sequence[LayerMissing]) -> str:
    """Verdict of the checks."""
    checked = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in checked)
    verdict = "not checked" if not checked else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    failed = sum(each.failed for each in missing)
    return f"# wrong values: {verdict}" + (f"; {failed} ways failed" if failed else "")
