"""The printed tables: header lines, one aligned row per path and size, and the comparison at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from . import machine
from .options import Options
from .record import Missing, Row

_Cell = TypeVar("_Cell")
CEILINGS = ("fabric", "sm-push", "memcpy")  # the first of these that ran is what shares are of
_TITLES = ("size", "count", "type", "path", "time", "min", "algbw", "busbw", "#wrong")
_UNITS = ("(B)", "(tokens)", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
_WIDTHS = (12, 10, 9, 11, 12, 12, 8, 8, 8)
_WIRE_TITLES, _WIRE_WIDTHS = ("wire", "sent", "puts"), (8, 8, 8)
_WIRE_UNITS = ("(GB/s)", "(/least)", "(a rank)")
_GPU_TITLES, _GPU_UNITS, _GPU_WIDTHS = ("SMs", "host"), ("", "(us)"), (5, 9)


def _columns(
    common: Sequence[_Cell], wire: Sequence[_Cell], gpu: Sequence[_Cell], options: Options
) -> tuple[_Cell, ...]:
    """The columns of a CPU's table, and before the last those of several nodes and of GPUs."""
    more = (*(wire if options.nodes > 1 else ()), *(gpu if options.device == "cuda" else ()))
    return (*common[:-1], *more, common[-1])


def _line(cells: Sequence[str], widths: Sequence[int], lead: str = " ") -> str:
    return lead + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def header(options: Options, flush_bytes: int, calibrations: Sequence[str] = ()) -> str:
    """What is run and on what, as comment lines, then the column titles."""
    routing = {"zipf": f"zipf({options.zipf:g})", "trace": f"trace {options.trace}"}.get(
        options.routing, options.routing
    )
    lines = [
        *machine.heading(options.operation),
        f"# ranks {options.ranks}  threads/rank {options.threads}  hidden {options.hidden}"
        f"  experts {options.experts}  topk {options.topk}  routing {routing}  ids {options.ids}",
        f"# layout {options.layout}  alignment {options.alignment}  capacity {options.capacity or 'exact'}"
        f"  input {options.input}  tokens/rank {options.sizes[0]} .. {options.sizes[-1]}",
        f"# iters {options.iters}  warmup {options.warmup}  check {options.checks}  seed {options.seed}"
        f"  flushed {flush_bytes / 2**20:.0f} MiB/rank",
    ]
    if options.device == "cuda":
        lines.append(
            f"{machine.heading_of_gpus()}"
            f"  wire {options.wire or 'as it is'}{'' if options.dequantize else ', handed on'}"
            f"{f'  kept handle {options.kept_handle}' if options.kept_handle else ''}"
            f"{'  graph' if options.graph else ''}"
        )
    if options.baselines and (options.alignment != 1 or options.capacity is not None):
        lines.append("# the baselines run with alignment 1 and exact sizes")
    lines += list(calibrations)
    if options.nodes > 1:
        limit = f"  at most {options.limit_nodes} a token" if options.limit_nodes else ""
        lines.append(
            f"# nodes {options.nodes} of {options.ranks_per_node} ranks{limit}"
            f"  provider {options.fabric_provider or 'chosen'}"
        )
    widths = _columns(_WIDTHS, _WIRE_WIDTHS, _GPU_WIDTHS, options)
    lines += ["#", _line(_columns(_TITLES, _WIRE_TITLES, _GPU_TITLES, options), widths, "#")]
    lines += [_line(_columns(_UNITS, _WIRE_UNITS, _GPU_UNITS, options), widths, "#")]
    return "\n".join(lines)


def table_row(row: Row | Missing, options: Options) -> str:
    """One aligned line of the main table; for a baseline that did not run, a comment with the reason."""
    if isinstance(row, Missing):
        return f"# {row.tokens} {row.dtype} {row.path}: n/a: {row.reason}"
    cells = (
        str(row.size_bytes),
        str(row.tokens),
        row.dtype,
        row.path,
        f"{row.time_s * 1e6:.1f}",
        f"{row.min_s * 1e6:.1f}",
        f"{row.algbw_GBps:.2f}",
        "-" if row.busbw_GBps is None else f"{row.busbw_GBps:.2f}",
        "N/A" if row.wrong is None else str(row.wrong),
    )
    gpu = (
        "-" if row.sms is None else str(row.sms),
        "-" if row.host_s is None else f"{row.host_s * 1e6:.1f}",
    )
    wire = (
        "-" if row.wire_GBps is None else f"{row.wire_GBps:.2f}",
        "-" if not row.least_bytes or row.sent_bytes is None else f"{row.sent_bytes / row.least_bytes:.3f}",
        "-" if row.sent_puts is None else f"{row.sent_puts / options.ranks:.1f}",
    )
    return _line(_columns(cells, wire, gpu, options), _columns(_WIDTHS, _WIRE_WIDTHS, _GPU_WIDTHS, options))


def ceiling_of(paths: Sequence[str]) -> str | None:
    """The ceiling among the paths that ran."""
    return next((name for name in CEILINGS if name in paths), None)


def comparison(rows: Sequence[Row]) -> str:
    """moecomm next to each baseline of the same run: times, how many times faster, share of the ceiling.

    Empty when no baseline ran; "n/a" where one ran at other sizes only.
    """
    names = list(dict.fromkeys(row.path for row in rows))
    ceiling = ceiling_of(names)
    baselines = [name for name in names if name not in ("moecomm", ceiling)]
    if not baselines and ceiling is None:
        return ""
    several = len({row.place[:4] for row in rows}) > 1
    titles, units = ["count", "type", "moecomm"], ["(tokens)", "", "(us)"]
    if several:
        titles, units = ["experts", "topk", "skew", "SMs", *titles], ["", "", "", "", *units]
    for name in baselines:
        titles += [name, "faster"]
        units += ["(us)", "(times)"]
    if ceiling is not None:
        titles += [ceiling, "ceiling"]
        units += ["(us)", "(share)"]
    widths = [max(10, len(title) + 1) for title in titles]
    lines = ["# comparison, same run: median time of one call"]
    if ceiling is not None:
        lines[0] += f"; 'ceiling' is {ceiling}'s time / moecomm's"
    lines += [_line(titles, widths, "#"), _line(units, widths, "#")]
    found = {(row.place, row.path): row for row in rows}
    for own in (row for row in rows if row.path == "moecomm"):
        cells = [str(own.tokens), own.dtype, f"{own.time_s * 1e6:.1f}"]
        if several:
            skew = "-" if own.zipf is None else f"{own.zipf:g}"
            sms = "auto" if own.num_sms is None else str(own.num_sms)
            cells = [str(own.experts), str(own.topk), skew, sms, *cells]
        for name in (*baselines, *([] if ceiling is None else [ceiling])):
            other = found.get((own.place, name))
            if other is None:
                cells += ["n/a", "-"]
            elif name == ceiling:
                cells += [f"{other.time_s * 1e6:.1f}", f"{100 * other.time_s / own.time_s:.0f}%"]
            else:
                cells += [f"{other.time_s * 1e6:.1f}", f"{other.time_s / own.time_s:.2f}x"]
        lines.append(_line(cells, widths))
    return "\n".join(lines)


def footer(rows: Sequence[Row]) -> str:
    """Verdict of the checks and the mean bus bandwidth of moecomm over the sizes."""
    checked = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in checked)
    verdict = "not checked" if not checked else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    busbw = [row.busbw_GBps or 0.0 for row in rows if row.path == "moecomm"]
    return f"# wrong values: {verdict}\n# mean busbw of moecomm: {sum(busbw) / max(len(busbw), 1):.3f} GB/s"
