"""The section "Layers" of docs/results.md, from the records layers-*.json and cuda-layers-*.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import results
from .layer_options import (
    BASELINE,
    COMM,
    COMPUTE,
    FIXED,
    FP8_ANEW,
    FP8_COMPUTE,
    FP8_OVERLAPPED,
    GRAPH,
    GRAPHED,
    INTERLEAVED,
    OVERLAPPED,
    PLAIN,
    SERIAL,
    TUNED,
)
from .layer_report import skew_of

Record = dict[str, Any]
Records = Mapping[str, Record]
Ways = Mapping[str, Record]
"""The rows of one point, by way."""

_STEP_TITLES = (
    "layer",
    "tokens/rank",
    "routing",
    "compute only ms",
    "overlapped ms",
    "ratio",
    "serial",
    "interleaved",
    "communication only ms",
    "exposed",
    "TFLOP/s",
    "of dense",
    "faster than baseline",
    "than tuned",
    "compute only faster than plain",
    "memory GB",
)
_FORWARD_TITLES = (
    "layer",
    "tokens/rank",
    "routing",
    "compute only ms",
    "overlapped ms",
    "ratio",
    "serial",
    "communication only ms",
    "exposed",
    "faster than baseline",
    "than tuned",
)
_GRAPH_TITLES = (
    "layer",
    "tokens/rank",
    "eager ms",
    "fixed ms",
    "graph ms",
    "graphed step ms",
    "graph than eager",
    "than fixed",
    "graphed step than eager",
)
_KEEP_TITLES = (
    "layer",
    "tokens/rank",
    "kept",
    "step ms",
    "ratio",
    "memory GB",
    "kept GB",
    "kept bytes/token",
)
_PARTS_TITLES = ("layer", "tokens/rank", "SMs", "parts", "forward ms", "step ms", "ratio", "exposed")
_FP8_TITLES = (
    "layer",
    "tokens/rank",
    "overlapped ms",
    "in fp8 ms",
    "faster",
    "weights anew",
    "compute only",
    "memory GB",
)
_WAY_TITLES = (
    "layer",
    "tokens/rank",
    "routing",
    "way",
    "forward us",
    "step us",
    "ratio",
    "TFLOP/s",
    "host us",
    "memory GB",
    "error",
    "#wrong",
)
_STAGE_TITLES = ("layer", "tokens/rank", "routing", "pass", "stages, us", "whole us")


def is_one(name: str) -> bool:
    """Whether a record is of this section."""
    return name.startswith(("layers-", "cuda-layers-"))


def points(record: Record) -> list[dict[str, Record]]:
    """The rows of a record, by way, for each comparison."""
    names = ("preset", "dtype", "tokens", "routing", "zipf", "graphs")
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in record["rows"]:
        found.setdefault(tuple(row[name] for name in names), {})[row["way"]] = row
    return list(found.values())


def _layer(row: Record) -> str:
    return f"{row['preset']} ({row['hidden']}, {row['ffn']}, {row['experts']}, {row['topk']})"


def _place(row: Record) -> list[str]:
    return [_layer(row), str(row["tokens"]), skew_of(row["routing"], row["zipf"])]


def _ms(ways: Ways, name: str, key: str) -> str:
    return f"{ways[name][key] * 1e3:.3f}" if name in ways else "-"


def _faster(ways: Ways, name: str, other: str, key: str = "step_s") -> str:
    return f"{ways[other][key] / ways[name][key]:.2f}x" if name in ways and other in ways else "-"


def _number(value: float | None, scale: float = 1.0, digits: int = 3, suffix: str = "") -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


def _exposed(row: Record, key: str) -> str:
    return _number(row["exposed"][key], 100, 1, "%") if row["exposed"] else "-"


def _of_points(records: Records, make: Callable[[Ways], list[list[str]]]) -> list[list[str]]:
    return [line for record in records.values() for ways in points(record) for line in make(ways)]


def _is_graphs(ways: Ways) -> bool:
    return any(row["graphs"] for row in ways.values())


def step_lines(records: Records) -> list[list[str]]:
    """Forward and backward of overlapped beside the others, a line a point."""

    def lines(ways: Ways) -> list[list[str]]:
        if _is_graphs(ways) or OVERLAPPED not in ways:
            return []
        own, serial = ways[OVERLAPPED], ways.get(SERIAL)
        return [
            [
                *_place(own),
                _ms(ways, COMPUTE, "step_s"),
                _ms(ways, OVERLAPPED, "step_s"),
                _number(own["step_ratio"]),
                _number(serial["step_ratio"] if serial else None),
                _number(ways[INTERLEAVED]["step_ratio"] if INTERLEAVED in ways else None),
                _ms(ways, COMM, "step_s"),
                _exposed(own, "step_share"),
                f"{own['step_tflops']:.4g}",
                _number(own["step_share"], 100, 1, "%"),
                _faster(ways, OVERLAPPED, BASELINE),
                _faster(ways, OVERLAPPED, TUNED),
                _faster(ways, COMPUTE, PLAIN),
                _number(own["memory_bytes"], 1e-9, 2),
            ]
        ]

    return _of_points(records, lines)


def forward_lines(records: Records) -> list[list[str]]:
    """The same of the forward alone."""

    def lines(ways: Ways) -> list[list[str]]:
        if _is_graphs(ways) or OVERLAPPED not in ways:
            return []
        own, serial = ways[OVERLAPPED], ways.get(SERIAL)
        return [
            [
                *_place(own),
                _ms(ways, COMPUTE, "forward_s"),
                _ms(ways, OVERLAPPED, "forward_s"),
                _number(own["forward_ratio"]),
                _number(serial["forward_ratio"] if serial else None),
                _ms(ways, COMM, "forward_s"),
                _exposed(own, "forward_share"),
                _faster(ways, OVERLAPPED, BASELINE, "forward_s"),
                _faster(ways, OVERLAPPED, TUNED, "forward_s"),
            ]
        ]

    return _of_points(records, lines)


def graph_lines(records: Records) -> list[list[str]]:
    """Steps of few tokens, eager and replayed."""

    def lines(ways: Ways) -> list[list[str]]:
        if not _is_graphs(ways) or OVERLAPPED not in ways:
            return []
        own = ways[OVERLAPPED]
        return [
            [
                _layer(own),
                str(own["tokens"]),
                *(_ms(ways, name, "step_s") for name in (OVERLAPPED, FIXED, GRAPH, GRAPHED)),
                _faster(ways, GRAPH, OVERLAPPED),
                _faster(ways, GRAPH, FIXED),
                _faster(ways, GRAPHED, OVERLAPPED),
            ]
        ]

    return _of_points(records, lines)


def keep_lines(records: Records) -> list[list[str]]:
    """Time and memory by what a forward keeps, where more than one choice ran; others beside them."""

    def lines(ways: Ways) -> list[list[str]]:
        choices = [name for name in ways if name.startswith(f"{OVERLAPPED}, keep ")]
        if not choices:
            return []
        words = {name: name.rpartition(" keep ")[2] for name in choices} | {OVERLAPPED: "all"}
        beside = {name: name for name in (SERIAL, BASELINE)}
        return [
            [
                _layer(row),
                str(row["tokens"]),
                (words | beside)[name],
                f"{row['step_s'] * 1e3:.3f}",
                _number(row["step_ratio"]),
                _number(row["memory_bytes"], 1e-9, 2),
                _number(row.get("kept_bytes"), 1e-9, 3),
                _number(row.get("kept_bytes"), 1 / row["tokens"], 0),
            ]
            for name, row in ways.items()
            if name in words | beside
        ]

    return _of_points(records, lines)


def parts_lines(records: Records) -> list[list[str]]:
    """By the number of parts and of SMs, where more than one number of parts ran; serial beside them."""
    found = []
    for record in records.values():
        sms = record["options"]["num_sms"]
        for ways in points(record):
            each = {name: row for name, row in ways.items() if name.endswith(" parts")}
            if not each:
                continue
            each = {name: ways[name] for name in (SERIAL, OVERLAPPED) if name in ways} | each
            found += [
                [
                    _layer(row),
                    str(row["tokens"]),
                    "chosen" if sms is None else str(sms),
                    {SERIAL: "1, serial", OVERLAPPED: "1"}.get(
                        name, name.split()[1] if "," in name else name
                    ),
                    f"{row['forward_s'] * 1e3:.3f}",
                    f"{row['step_s'] * 1e3:.3f}",
                    _number(row["step_ratio"]),
                    _exposed(row, "step_share"),
                ]
                for name, row in each.items()
            ]
    return found


def fp8_lines(records: Records) -> list[list[str]]:
    """Steps with products in fp8 beside those without."""

    def lines(ways: Ways) -> list[list[str]]:
        if FP8_OVERLAPPED not in ways or OVERLAPPED not in ways:
            return []
        own = ways[FP8_OVERLAPPED]
        return [
            [
                _layer(own),
                str(own["tokens"]),
                _ms(ways, OVERLAPPED, "step_s"),
                _ms(ways, FP8_OVERLAPPED, "step_s"),
                _faster(ways, FP8_OVERLAPPED, OVERLAPPED),
                _faster(ways, FP8_ANEW, OVERLAPPED),
                _faster(ways, FP8_COMPUTE, COMPUTE),
                _number(own["memory_bytes"], 1e-9, 2),
            ]
        ]

    return _of_points(records, lines)


def way_lines(records: Records) -> list[list[str]]:
    """Every way of every point."""
    return _of_points(
        records,
        lambda ways: [
            [
                *_place(row),
                name,
                f"{row['forward_s'] * 1e6:.1f}",
                f"{row['step_s'] * 1e6:.1f}",
                _number(row["step_ratio"]),
                "-" if row["step_tflops"] is None else f"{row['step_tflops']:.4g}",
                _number(row["host_s"], 1e6, 1),
                _number(row["memory_bytes"], 1e-9, 2),
                "-" if row["worst"] is None else f"{row['worst']:.2g}",
                "N/A" if row["wrong"] is None else str(row["wrong"]),
            ]
            for name, row in ways.items()
        ],
    )


def stage_lines(records: Records) -> list[list[str]]:
    """What the recorded stages of overlapped took on rank 0; in brackets those that communicate."""

    def lines(ways: Ways) -> list[list[str]]:
        found = []
        for row in ways.values():
            if row["way"] != OVERLAPPED or not row["exposed"]:
                continue
            for name in ("forward", "backward"):
                spans = row["exposed"][f"{name}_spans"]
                stages = [
                    f"({stage} {(end - begin) * 1e6:.0f})" if talks else f"{stage} {(end - begin) * 1e6:.0f}"
                    for stage, _, begin, end, talks in spans
                ]
                whole = max(span[3] for span in spans) - min(span[2] for span in spans)
                found.append([*_place(row), name, ", ".join(stages), f"{whole * 1e6:.0f}"])
        return found

    return _of_points(records, lines)


def missing(records: Records) -> list[str]:
    """What did not run, and why."""
    found = {
        (name, each["preset"], each["tokens"], each["way"], each["reason"]): each["failed"]
        for name, record in records.items()
        for each in record["missing"]
    }
    return [
        f"- {name}: {preset}, {tokens} tokens, {way}: {'failed: ' if failed else ''}{reason}"
        for (name, preset, tokens, way, reason), failed in found.items()
    ]


def summary(records: Records) -> str:
    """The tables of all runs, for the terminal."""
    found = [
        (_STEP_TITLES, step_lines(records)),
        (_FORWARD_TITLES, forward_lines(records)),
        (_GRAPH_TITLES, graph_lines(records)),
        (_KEEP_TITLES, keep_lines(records)),
        (_PARTS_TITLES, parts_lines(records)),
        (_FP8_TITLES, fp8_lines(records)),
    ]
    return "\n\n".join(results.table(titles, lines) for titles, lines in found if lines)


def _by_ranks(records: Records) -> list[tuple[int, dict[str, Record]]]:
    """By the number of ranks, most first, and within that by label."""
    found = results.grouped(records, lambda record, label: (-int(record["ranks"]), label))
    return [(-ranks, found[ranks, label]) for ranks, label in sorted(found)]


def _device_part(title: str, records: Records) -> str:
    first = next(iter(records.values()))
    host = results.machine(first)
    where = f"{results.gpu_words(first['gpus'])}, {host}" if first["gpus"] else host
    rows, inner, columns = first["options"]["dense"]
    dense = sorted(row["dense_tflops"] for record in records.values() for row in record["rows"])
    parts = [
        f"""### {title}

- machine: {where}
{results.software(records)}
- {first["ranks"]} ranks of {first["threads"]} compute threads each; type {first["options"]["dtype"]}; a dense
  product of {rows} x {inner} x {columns} makes {dense[0]:.4g} to {dense[-1]:.4g} TFLOP/s in these runs""",
        "Forward and backward:",
        results.table(_STEP_TITLES, step_lines(records)),
        "Forward:",
        results.table(_FORWARD_TITLES, forward_lines(records)),
    ]
    for text, titles, lines in (
        (
            "Few tokens, forward and backward, eager and replayed from a graph:",
            _GRAPH_TITLES,
            graph_lines(records),
        ),
        ("By what a forward keeps for its backward:", _KEEP_TITLES, keep_lines(records)),
        ("By parts, and the SMs of an operation:", _PARTS_TITLES, parts_lines(records)),
        (
            "Products in fp8, times as fast as without (weights quantised beforehand, and in every step):",
            _FP8_TITLES,
            fp8_lines(records),
        ),
        (
            "Stages of a recorded step on rank 0, in brackets those that communicate:",
            _STAGE_TITLES,
            stage_lines(records),
        ),
        ("Every way:", _WAY_TITLES, way_lines(records)),
    ):
        if lines:
            parts += [text, results.table(titles, lines)]
    if absent := missing(records):
        parts.append("Not run:\n\n" + "\n".join(absent))
    parts.append(results.commands(records))
    return "\n\n".join(parts)


def part(records: Records, command: str) -> str:
    """This section of the page."""
    gpu = {name: record for name, record in records.items() if record["gpus"]}
    cpu = {name: record for name, record in records.items() if not record["gpus"]}
    parts = [
        f"""## Layers

Made by `{command}`.

A layer is (hidden, ffn, experts, top-k), SwiGLU experts shared by the ranks, its routing given: the router is
in no time. *Compute only* are its grouped products and activation on the rows that the routing brings,
without communication or permutes; *ratio* is time over that, *serial* the same of the layer in order, and
*plain* compute the same products by torch alone. *Baseline* is a plain framework's layer:
`all_to_all_single` between torch permutes and grouped products under autograd; *tuned* has gathers for the
backward of its permutes. *Exposed* is the part of a recorded step in which something communicates and
nothing computes. Times are medians over iterations of the slowest rank, with cold caches; ways take turns
within a run, each verified against an independent computation first. Every column is defined in
[bench/README.md](../bench/README.md)."""
    ]
    groups = _by_ranks(gpu)
    for ranks, of_ranks in groups:
        title = "Layers on GPUs" if len(groups) == 1 else f"Layers on {ranks} GPUs"
        parts.append(_device_part(title, of_ranks))
    if cpu:
        parts.append(_device_part("Layers on CPU ranks", cpu))
    return "\n\n".join(parts)
