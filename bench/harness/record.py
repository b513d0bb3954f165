"""The JSON file: one document per run, complete enough to make the run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path as FilePath
from typing import Any, Protocol

from . import machine
from .options import Options
from .paths import Path, Yardstick
from .timing import Timing
from .traffic import Traffic
from .wire import Between

SCHEMA = 1


class Recorded(Protocol):
    """What a record says of a program's options."""

    @property
    def operation(self) -> str: ...
    @property
    def command(self) -> str: ...
    @property
    def commit(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: one path at one size. Times in seconds, bandwidths in GB/s (1e9 bytes), mean
    over ranks.
    """

    path: str
    dtype: str
    tokens: int
    size_bytes: int
    useful_bytes: int
    remote_bytes: int
    time_s: float
    min_s: float
    algbw_GBps: float
    busbw_GBps: float | None  # None: the path moves nothing between ranks
    wrong: int | None  # None: not checked
    note: str
    samples_s: tuple[float, ...]
    experts: int = 0
    topk: int = 0
    zipf: float | None = None  # None: the routing has no exponent
    num_sms: int | None = None  # asked for; None: moecomm's own choice
    sms: int | None = None  # at work, where that is known; 0: copy engines
    host_s: float | None = None  # CPU time to issue a call
    # Of one call, all ranks together, where moecomm's ranks are on several nodes.
    sent_bytes: int | None = None  # to other nodes
    sent_row_bytes: int | None = None  # of these, rows
    sent_puts: int | None = None
    least_bytes: int | None = None  # rows that the routing needs on other nodes
    least_puts: int | None = None  # puts of them, as large as moecomm's
    wire_GBps: float | None = None  # rows to other nodes

    @property
    def place(self) -> tuple[object, ...]:
        """What paths that are compared have in common."""
        return (self.experts, self.topk, self.zipf, self.num_sms, self.dtype, self.tokens)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A baseline that did not run at one size, and why."""

    path: str
    dtype: str
    tokens: int
    experts: int
    topk: int
    num_sms: int | None
    reason: str


def make_row(
    *,
    path: Path | Yardstick,
    options: Options,
    dtype: str,
    tokens: int,
    row_bytes: int,
    moved: Traffic,
    timing: Timing,
    host_s: float | None,
    wrong: int | None,
    between: Between | None = None,
) -> Row:
    """Joins a timing with the bytes behind it."""
    sent: dict[str, Any] = {} if between is None else asdict(between)
    per_rank = len(moved.useful_R) * timing.median * 1e9
    if between is not None:
        sent["wire_GBps"] = between.sent_row_bytes / per_rank
    return Row(
        path=path.name,
        dtype=dtype,
        tokens=tokens,
        size_bytes=tokens * row_bytes,
        useful_bytes=moved.useful,
        remote_bytes=moved.remote,
        time_s=timing.median,
        min_s=timing.fastest,
        algbw_GBps=moved.useful / per_rank,
        busbw_GBps=moved.remote / per_rank if path.remote else None,
        wrong=wrong,
        note=path.note,
        samples_s=timing.slowest_I,
        experts=options.experts,
        topk=options.topk,
        zipf=options.zipf if options.routing == "zipf" else None,
        num_sms=options.num_sms,
        sms=path.sms,
        host_s=host_s,
        **sent,
    )


def document(
    options: Options, rows: Sequence[Row], stats: dict[str, Any], missing: Sequence[Missing] = ()
) -> dict[str, Any]:
    """The whole record as plain values. `stats` are rank 0's Communicator.stats() at the end of the run."""
    checked = [row.wrong for row in rows if row.wrong is not None]
    return {
        **heading(options),
        "rows": [asdict(row) for row in rows],
        "missing": [asdict(each) for each in missing],
        "stats": stats,
        "wrong": sum(checked) if checked else None,
    }


def heading(options: Recorded) -> dict[str, Any]:
    """What every program's record begins with: command, commit, machine, versions, options."""
    commit, dirty = (options.commit, None) if options.commit else machine.git_commit()
    return {
        "schema": SCHEMA,
        "program": f"{options.operation}_perf",
        "command": options.command,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": {"commit": commit, "dirty": dirty},
        "hardware": asdict(machine.describe()),
        "gpus": asdict(machine.describe_gpus()) if options.device == "cuda" else None,
        "versions": machine.versions(options.device),
        "seed": options.seed,
        "ranks": options.ranks,
        "threads": options.threads,
        "options": {**options.as_dict(), "json": None},  # not the place of this record
    }


def write(path: str, content: dict[str, Any]) -> None:
    """Writes `content`, replacing the file only once all of it is there."""
    target = FilePath(path)
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(target)
