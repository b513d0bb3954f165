"""Tables in Markdown, and those of training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..harness.record import Record, Row
from ..harness.report import number, wrong_words

Records = Mapping[str, Record]
Cells = Sequence[tuple[str, Callable[[Any], str]]]
"""Columns: a title, and what stands in it."""


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, so that a terminal shows it well too; "" without lines."""
    if not lines:
        return ""
    widths = [max(len(row[column]) for row in (titles, *lines)) for column in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths))
    return "\n".join([line(titles), f"|{rule}|", *(line(row) for row in lines)])


def table_of(cells: Cells, things: Sequence[Any]) -> str:
    """The table of some columns, a line a thing, without columns in which nothing stands."""
    columns = [(title, [cell(each) for each in things]) for title, cell in cells]
    shown = [(title, values) for title, values in columns if set(values) != {"-"}]
    return table([title for title, _ in shown], list(zip(*(values for _, values in shown), strict=True)))


def titled(title: str, body: str) -> str:
    return f"{title}\n\n{body}" if body else ""


# -- training ------------------------------------------------------------------------------------------------


_TRAIN: Cells = (  # of a run's name, record and row
    ("run", lambda it: it[0]),
    ("model", lambda it: str(it[2]["model"])),
    ("layers", lambda it: str(it[2]["layers"])),
    ("ranks", lambda it: str(it[1]["folding"])),
    ("tokens a step", lambda it: str(it[2]["tokens"])),
    ("window", lambda it: str(it[2]["seq"])),
    ("variant", lambda it: it[2]["path"]),
    ("s a step", lambda it: number(it[2]["time_s"], 1, 4)),
    ("tokens/s", lambda it: number(it[2]["tokens_per_s"], 1, 0)),
    ("TFLOP/s", lambda it: number(it[2].get("tflops"), 1, 0)),
    ("MFU %", lambda it: number(it[2].get("mfu"), 100)),
    ("exposed %", lambda it: number(it[2].get("exposed_share"), 100)),
    ("busiest rank", lambda it: number(it[2].get("busiest_rank"), 1, 3)),
    ("memory GB", lambda it: number(it[2].get("memory_bytes"), 1e-9)),
    ("loss", lambda it: number(it[2]["losses"][-1], 1, 4)),
    ("#wrong", lambda it: wrong_words(it[2])),
)


def train_table(records: Records) -> str:
    """The table of `train_perf.py`: a line a variant of a run. The busiest rank's rows are over the average
    rank's, in the last step; the loss is that of the last step."""
    return table_of(_TRAIN, [(name, each, row) for name, each in records.items() for row in each["rows"]])


def profile_table(records: Records) -> str:
    """Where the time of a profiled step went on the first GPU, in milliseconds: a line a variant, a column a
    kind of kernels."""
    runs = [
        (name, row["path"], _profile(row))
        for name, content in records.items()
        for row in content["rows"]
        if row.get("profile")
    ]
    kinds = list(dict.fromkeys(kind for *_, profile in runs for kind in profile))
    lines = [[name, path, *(number(profile.get(kind)) for kind in kinds)] for name, path, profile in runs]
    return table(("run", "ms of", *kinds), lines)


def _profile(row: Row) -> dict[str, float]:
    """Returns the profile of a row. Records up to November 2026 have two kinds in the place of the last one,
    since kernels with "lambda" in their names were taken for an optimizer's."""
    from ..harness.profile import REST  # late: it imports torch

    found = dict(row["profile"])
    parts = [found.pop(kind, None) for kind in ("optimizer", "elementwise and others")]
    if any(part is not None for part in parts):
        found[REST] = sum(part or 0.0 for part in parts)
    return found
