"""The record of a run: one JSON document, complete enough to make the run again.

A row is one phase of one path at one point: the fields of Point, `path`, `phase`, times in seconds, and what
else was measured of it, under names that say their unit. The same for operations and layers; programs in C++
have rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path as FilePath
from typing import Any

from . import machine
from .options import Options, Point
from .path import CALL, STEP, NotRun, Path, Yardstick
from .timing import Timing

SCHEMA = 2
Row = dict[str, Any]
Record = dict[str, Any]
# What paths that are compared have in common; absent in a row where a program does not know it.
PLACE = (
    "preset", "experts", "topk", "dtype", "tokens", "routing", "zipf", "num_sms", "graphs", "microbatches",
    "phase",
)  # fmt: skip


def make_row(
    path: Path | Yardstick, phase: str, point: Point, timing: Timing, wrong: int | None, **found: Any
) -> Row:
    """Joins a timing with what belongs to it. wrong None: not checked."""
    return {
        **asdict(point),
        "path": path.name,
        "phase": phase,
        "time_s": timing.median,
        "min_s": timing.fastest,
        "wrong": wrong,
        "note": path.note if isinstance(path, Path) else path.describe(),
        "sms": path.sms if isinstance(path, Path) else None,
        **found,
        "samples_s": list(timing.slowest_I),
    }


def make_missing(path: NotRun, point: Point) -> Row:
    """Makes the record's row for a path that did not run."""
    return {**asdict(point), "path": path.name, "reason": path.reason, "failed": path.failed}


def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The comparison that a row belongs to."""
    return tuple(row.get(name) for name in PLACE)


def comparisons(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The rows by path, for each comparison in its order."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(place(row), {})[row["path"]] = row
    return list(found.values())


def wrong_values(rows: Iterable[Row]) -> int | None:
    """Wrong values of all paths; None where nothing was checked. The check of a layer is one for all its
    phases, and is said with each.
    """
    checked = [row["wrong"] for row in rows if row["wrong"] is not None and row["phase"] in (CALL, STEP)]
    return sum(checked) if checked else None


def document(
    options: Options, rows: Sequence[Row], missing: Sequence[Row] = (), stats: Mapping[str, Any] | None = None
) -> Record:
    """The whole record as plain values. `stats` are rank 0's Communicator.stats() at the end, by setup."""
    return {
        **heading(f"{options.program}_perf", options.command, options.commit, options.device),
        "seed": options.seed,
        "ranks": options.ranks,
        "threads": options.threads,
        "options": {**asdict(options), "json": None},  # not the place of this record
        "wrong": wrong_values(rows),
        "stats": dict(stats or {}),
        "missing": list(missing),
        "rows": list(rows),
    }


def heading(program: str, command: str, commit: str | None, device: str) -> Record:
    """Makes the fields that begin every program's record: command, commit, machine, versions."""
    found, dirty = (commit, None) if commit else machine.git_commit()
    return {
        "schema": SCHEMA,
        "program": program,
        "command": command,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": {"commit": found, "dirty": dirty},
        "hardware": machine.describe(),
        "gpus": machine.describe_gpus() if device == "cuda" else None,
        "versions": machine.versions(device),
    }


def text_of(content: Record) -> str:
    """The JSON, a line for each row and each other part."""
    lines = []
    for name, value in content.items():
        if name in ("rows", "missing") and value:
            inner = ",\n".join(f"  {json.dumps(each)}" for each in value)
            lines.append(f" {json.dumps(name)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(path: str | FilePath, content: Record) -> None:
    """Writes `content`, replacing the file only once all of it is there."""
    target = FilePath(path)
    part = target.with_name(target.name + ".part")
    part.write_text(text_of(content))
    part.replace(target)


def read(path: str | FilePath) -> Record:
    """A record that was written. Raises ValueError for one of another schema."""
    content: Record = json.loads(FilePath(path).read_text())
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')}, not {SCHEMA}: measure it again")
    return content
