"""The printed tables: header lines, one aligned row per path and size, and the comparison at the end."""

from __future__ import annotations

from collections.abc import Sequence

from . import machine
from .options import Options
from .record import Row

CEILING = "memcpy"
_TITLES = ("size", "count", "type", "path", "time", "min", "algbw", "busbw", "#wrong")
_UNITS = ("(B)", "(tokens)", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
_WIDTHS = (12, 10, 9, 11, 12, 12, 8, 8, 8)


def _line(cells: Sequence[str], widths: Sequence[int], lead: str = " ") -> str:
    return lead + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def header(options: Options, flush_bytes: int, calibrations: Sequence[str] = ()) -> str:
    """What is run and on what, as comment lines, then the column titles."""
    host = machine.describe()
    made = machine.versions()
    routing = {"zipf": f"zipf({options.zipf:g})", "trace": f"trace {options.trace}"}.get(
        options.routing, options.routing
    )
    lines = [
        f"# {options.operation}_perf  moecomm {made['moecomm']}  torch {made['torch']}  numpy {made['numpy']}"
        f"  python {made['python']}",
        f"# {host.cpu}, {host.architecture}, {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB memory",
        f"# ranks {options.ranks}  threads/rank {options.threads}  hidden {options.hidden}"
        f"  experts {options.experts}  topk {options.topk}  routing {routing}  ids {options.ids}",
        f"# layout {options.layout}  alignment {options.alignment}  capacity {options.capacity or 'exact'}"
        f"  input {options.input}  tokens/rank {options.sizes[0]} .. {options.sizes[-1]}",
        f"# iters {options.iters}  warmup {options.warmup}  check {options.checks}  seed {options.seed}"
        f"  flushed {flush_bytes / 2**20:.0f} MiB/rank",
    ]
    if options.baselines and (options.alignment != 1 or options.capacity is not None):
        lines.append("# the baselines run with alignment 1 and exact sizes")
    lines += list(calibrations)
    lines += ["#", _line(_TITLES, _WIDTHS, "#"), _line(_UNITS, _WIDTHS, "#")]
    return "\n".join(lines)


def table_row(row: Row) -> str:
    """One aligned line of the main table."""
    busbw = "-" if row.busbw_GBps is None else f"{row.busbw_GBps:.2f}"
    return _line(
        (
            str(row.size_bytes),
            str(row.tokens),
            row.dtype,
            row.path,
            f"{row.time_s * 1e6:.1f}",
            f"{row.min_s * 1e6:.1f}",
            f"{row.algbw_GBps:.2f}",
            busbw,
            "N/A" if row.wrong is None else str(row.wrong),
        ),
        _WIDTHS,
    )


def comparison(rows: Sequence[Row]) -> str:
    """moecomm next to each baseline of the same run: times, how many times faster, share of the memcpy
    ceiling.

    Empty when no baseline ran.
    """
    baselines = [name for name in dict.fromkeys(row.path for row in rows) if name not in ("moecomm", CEILING)]
    has_ceiling = any(row.path == CEILING for row in rows)
    if not baselines and not has_ceiling:
        return ""
    titles, units = ["count", "type", "moecomm"], ["(tokens)", "", "(us)"]
    for name in baselines:
        titles += [name, "faster"]
        units += ["(us)", "(times)"]
    if has_ceiling:
        titles += [CEILING, "ceiling"]
        units += ["(us)", "(share)"]
    widths = [max(10, len(title) + 1) for title in titles]
    lines = [
        "# comparison, same run: median time of one call; 'ceiling' is memcpy's time / moecomm's",
        _line(titles, widths, "#"),
        _line(units, widths, "#"),
    ]
    found = {(row.dtype, row.tokens, row.path): row for row in rows}
    for dtype, tokens in dict.fromkeys((row.dtype, row.tokens) for row in rows):
        own = found[dtype, tokens, "moecomm"].time_s
        cells = [str(tokens), dtype, f"{own * 1e6:.1f}"]
        for name in baselines:
            theirs = found[dtype, tokens, name].time_s
            cells += [f"{theirs * 1e6:.1f}", f"{theirs / own:.2f}x"]
        if has_ceiling:
            ceiling = found[dtype, tokens, CEILING].time_s
            cells += [f"{ceiling * 1e6:.1f}", f"{100 * ceiling / own:.0f}%"]
        lines.append(_line(cells, widths))
    return "\n".join(lines)


def footer(rows: Sequence[Row]) -> str:
    """Verdict of the checks and the mean bus bandwidth of moecomm over the sizes."""
    checked = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in checked)
    verdict = "not checked" if not checked else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    busbw = [row.busbw_GBps or 0.0 for row in rows if row.path == "moecomm"]
    return f"# wrong values: {verdict}\n# mean busbw of moecomm: {sum(busbw) / max(len(busbw), 1):.3f} GB/s"
