"""The printed tables of all programs: header, one aligned line per row, comparisons, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import machine
from .options import MOECOMM, OVERLAPPED, WIDE, Options, Point
from .record import Row, comparisons, wrong_values

CEILINGS = ("fabric", "sm-push", "memcpy")  # the first of these that ran is what shares are of


class Column(NamedTuple):
    """A column: two lines of title, a width, and what stands in it."""

    title: str
    unit: str
    width: int
    cell: Callable[[Row], str]


def number(value: float | None, scale: float = 1.0, digits: int = 1, suffix: str = "") -> str:
    """A scaled number, "-" for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


def wrong_words(row: Mapping[str, Any]) -> str:
    """The column #wrong."""
    return "N/A" if row["wrong"] is None else str(row["wrong"])


def skew_words(row: Mapping[str, Any]) -> str:
    """A routing in words: "zipf 1"."""
    return str(row["routing"]) if row["zipf"] is None else f"{row['routing']} {row['zipf']:g}"


def _value(name: str, scale: float = 1.0, digits: int = 1, suffix: str = "") -> Callable[[Row], str]:
    return lambda row: number(row.get(name), scale, digits, suffix)


_STEPS_ON_GPUS = [
    Column("clock", "(MHz)", 7, _value("sm_mhz", digits=0)),
    Column("power", "(W)", 6, _value("power_W", digits=0)),
]


def columns(options: Options) -> list[Column]:
    """The columns that a program has with these options."""
    times = [
        Column("time", "(us)", 12, _value("time_s", 1e6)),
        Column("min", "(us)", 12, _value("min_s", 1e6)),
    ]
    host = Column("host", "(us)", 9, _value("host_s", 1e6))
    on_gpu = options.device == "cuda"
    if options.is_layer:
        found = [
            Column("path", "", 24 if options.ways == ("layer",) else 34, lambda row: row["path"]),
            Column("phase", "", 10, lambda row: row["phase"]),
            *times,
            Column("ratio", "", 8, _value("ratio", digits=3)),
            Column("TFLOP/s", "", 9, lambda row: "-" if row["tflops"] is None else f"{row['tflops']:.4g}"),
            Column("of dense", "", 9, _value("share", 100, 1, "%")),
            Column("exposed", "", 8, _value("exposed_share", 100, 1, "%")),
            *([Column("memory", "(GB)", 8, _value("memory_bytes", 1e-9, 2)), host] if on_gpu else []),
            *(_STEPS_ON_GPUS if on_gpu and options.ways != ("layer",) else []),
            Column("error", "", 8, lambda row: "-" if row.get("worst") is None else f"{row['worst']:.2g}"),
        ]
    else:
        found = [
            Column("size", "(B)", 12, lambda row: str(row["size_bytes"])),
            Column("count", "(tokens)", 10, lambda row: str(row["tokens"])),
            Column("type", "", 9, lambda row: row["dtype"]),
            Column("path", "", 11, lambda row: row["path"]),
            *times,
            Column("algbw", "(GB/s)", 8, _value("algbw_GBps", digits=2)),
            Column("busbw", "(GB/s)", 8, _value("busbw_GBps", digits=2)),
        ]
        if options.nodes > 1:
            found += [
                Column("wire", "(GB/s)", 8, _value("wire_GBps", digits=2)),
                Column("sent", "(/least)", 8, lambda row: sent_over_least(row)),
                Column("puts", "(a rank)", 8, _value("sent_puts", 1 / options.ranks)),
            ]
        if on_gpu:
            found += [Column("SMs", "", 5, lambda row: number(row["sms"], digits=0)), host]
    return [*found, Column("#wrong", "", 8, wrong_words)]


def sent_over_least(row: Mapping[str, Any]) -> str:
    """Formats the ratio of all bytes sent to other nodes to the bytes that the routing needs."""
    return f"{row['sent_bytes'] / row['least_bytes']:.3f}" if row.get("least_bytes") else "-"


def _line(cells: Sequence[str], found: Sequence[Column], lead: str = " ") -> str:
    return lead + "".join(f" {cell:>{each.width}}" for cell, each in zip(cells, found, strict=True))


def machine_words(hardware: Mapping[str, Any], gpus: Mapping[str, Any] | None) -> str:
    """Formats a record's `hardware` and `gpus`."""
    words = f"{hardware['cpu']}, {hardware['architecture']}, {hardware['cores']} cores, "
    words += f"{hardware['memory_bytes'] / 2**30:.1f} GiB memory"
    if not gpus:
        return words
    model = f"{gpus['names'][0]} ({gpus['sms']} SMs, {gpus['memory_bytes'] / 2**30:.0f} GiB)"
    links = f"links {gpus['links'] or 'unknown'}, driver {gpus['driver'] or 'unknown'}"
    return f"{len(gpus['names'])} x {model}, {links}; {words}"


def header(options: Options, flush_bytes: int) -> str:
    """Formats the command, what of it was found out here, and the machine as comment lines."""
    made = "  ".join(f"{name} {version}" for name, version in machine.versions(options.device).items())
    gpus = machine.describe_gpus() if options.device == "cuda" else None
    flushed = f"{flush_bytes / 2**20:.0f} MiB/rank"
    lines = [
        f"# {options.command}",
        f"# {made}",
        f"# {machine_words(machine.describe(), gpus)}",
        f"# ranks {options.ranks}  threads/rank {options.threads}  seed {options.seed}  flushed {flushed}",
    ]
    if options.nodes > 1:
        provider = options.fabric_provider or "chosen"
        lines.append(f"# nodes {options.nodes} of {options.ranks_per_node} ranks  provider {provider}")
    return "\n".join(lines)


def titles(point: Point, options: Options) -> str:
    """Formats what a group of rows has in common, and the titles of the columns."""
    found = columns(options)
    name = f"shape of {point.preset}  " if point.preset else ""
    name += "(four experts a rank, as wide expert parallelism leaves)  " if point.preset in WIDE else ""
    ffn = "" if point.ffn is None else f"  ffn {point.ffn}"
    sms = "" if point.num_sms is None else f"  SMs {point.num_sms}"
    where = f"  tokens {point.tokens}" if options.is_layer else ""
    where += f"  microbatches {point.microbatches}" if point.microbatches else ""
    return "\n".join(
        [
            f"#\n# {name}hidden {point.hidden}{ffn}  experts {point.experts}  topk {point.topk}"
            f"  {skew_words(vars(point))}{sms}{where}",
            _line([each.title for each in found], found, "#"),
            _line([each.unit for each in found], found, "#"),
        ]
    )


def table_row(row: Row, options: Options) -> str:
    """Formats a row as an aligned line; for a path that did not run, as a comment with the reason."""
    if "reason" in row:
        name = "" if row["preset"] is None else f"{row['preset']} "
        failed = "FAILED" if row["failed"] else "n/a"
        return f"# {name}{row['tokens']} {row['dtype']} {row['path']}: {failed}: {row['reason']}"
    found = columns(options)
    return _line([each.cell(row) for each in found], found)


def ceiling_of(paths: Sequence[str] | Mapping[str, Any]) -> str | None:
    """The ceiling among the paths that ran."""
    return next((name for name in CEILINGS if name in paths), None)


def comparison(rows: Sequence[Row]) -> str:
    """A comment line for each comparison: how many times faster moecomm is than each other path of the same
    run, and its share of the ceiling.
    """
    lines = []
    for paths in comparisons(rows):
        own = paths.get(MOECOMM) or paths.get(OVERLAPPED)
        if own is None or len(paths) == 1:
            continue
        ceiling = None if own.get("preset") else ceiling_of(paths)
        faster = [
            f"{name} {row['time_s'] / own['time_s']:.2f}x"
            for name, row in paths.items()
            if row is not own and name != ceiling and "dense" not in name
        ]
        where = f"top-{own['topk']} of {own['experts']}"
        if own.get("preset"):
            where = f"{own['preset']} {own['phase']}"
        sms = "" if own["num_sms"] is None else f", {own['num_sms']} SMs"
        line = f"# {own['tokens']} {own['dtype']} {where}{sms}: {own['path']} {own['time_s'] * 1e6:.1f} us"
        if ceiling is not None:
            line += f", {100 * paths[ceiling]['time_s'] / own['time_s']:.0f}% of the ceiling {ceiling}"
        lines.append(line + (f"; times / this: {', '.join(faster)}" if faster else ""))
    return "\n".join(["# comparison, same run:", *lines]) if lines else ""


def footer(rows: Sequence[Row], missing: Sequence[Row]) -> str:
    """Verdict of the checks, and of operations the mean bus bandwidth of moecomm over the sizes."""
    wrong = wrong_values(rows)
    verdict = "not checked" if wrong is None else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    failed = sum(each["failed"] for each in missing)
    lines = [f"# wrong values: {verdict}" + (f"; {failed} paths failed" if failed else "")]
    busbw = [row["busbw_GBps"] for row in rows if row["path"] == MOECOMM]
    if busbw:
        lines.append(f"# mean busbw of moecomm: {sum(busbw) / len(busbw):.3f} GB/s")
    return "\n".join(lines)
