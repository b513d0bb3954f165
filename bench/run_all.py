#!/usr/bin/env python3
"""The reference table: every program with all baselines at the sizes that docs/results.md shows.

Prints each run's comparison as it goes and one summary at the end. Only --write changes files:
docs/results/*.json, one a run, and docs/results.md. With the defaults it takes two to four minutes on two
cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Run:
    """One run of the plan: a program and its flags."""

    name: str
    program: str
    flags: tuple[str, ...]
    about: str


def plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """The reference case, then a small sweep around it."""
    steady = ("-g", str(ranks), "-n", str(iters), "-w", str(warmup), "--baselines")
    reference = ("-b", "2048", "--hidden", "4096", "-d", "float32", "--experts", "32", "--topk", "4")
    bfloat16 = ("-b", "2048", "--hidden", "2048", "-d", "bfloat16", "--experts", "64", "--topk", "8")
    small = ("-b", "32", "-e", "512", "-f", "4", "--hidden", "4096", "--experts", "32", "--topk", "4")
    runs = []
    for operation in ("dispatch", "combine"):
        runs.append(Run(f"{operation}-reference", operation, (*reference, *steady), "the reference case"))
    for operation in ("dispatch", "combine"):
        runs += [
            Run(f"{operation}-small", operation, (*small, *steady), "fewer tokens"),
            Run(
                f"{operation}-bfloat16",
                operation,
                (*bfloat16, *steady),
                "bfloat16, top-8 of 64",
            ),
            Run(
                f"{operation}-zipf",
                operation,
                ("-b", "1024", "--hidden", "2048", "--routing", "zipf", *steady),
                "skewed routing",
            ),
        ]
    runs.append(Run("alltoall", "alltoall", ("-b", "256", "-e", "4096", "-f", "4", *steady), "raw exchange"))
    return runs


def execute(run: Run, folder: Path) -> dict[str, Any]:
    """Runs one program, passes its output through, returns its record. Raises SystemExit when it fails."""
    target = folder / f"{run.name}.json"
    program = f"bench/{run.program}_perf.py"
    print(f"\n== {run.name}: {run.about}\n$ python {program} {shlex.join(run.flags)}", flush=True)
    status = subprocess.run(
        [sys.executable, program, *run.flags, "-J", str(target)], cwd=ROOT, check=False
    ).returncode
    if status:
        raise SystemExit(f"run_all.py: {run.name} ended with status {status}")
    record: dict[str, Any] = json.loads(target.read_text())
    # The record shows the command a reader would type, without the folder this run happened to use.
    record["command"] = f"python {program} {shlex.join(run.flags)}"
    record["options"]["command"] = record["command"]
    record["options"]["json"] = None
    return record


def summary(records: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of the summary: one per run and size, moecomm next to the baselines of the same run."""
    lines = []
    for name, record in records.items():
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for row in record["rows"]:
            found.setdefault(row["tokens"], {})[row["path"]] = row
        for tokens, paths in found.items():
            own = paths["moecomm"]

            def faster(path: str, paths: dict[str, dict[str, Any]] = paths) -> str:
                return f"{paths[path]['time_s'] / paths['moecomm']['time_s']:.2f}x" if path in paths else "-"

            ceiling = paths["memcpy"]["time_s"]
            lines.append(
                [
                    name,
                    str(tokens),
                    own["dtype"],
                    f"{own['time_s'] * 1e3:.2f}",
                    f"{own['algbw_GBps']:.2f}",
                    faster("gloo"),
                    faster("gloo-tuned"),
                    f"{ceiling * 1e3:.2f}",
                    f"{100 * ceiling / own['time_s']:.0f}%",
                    str(sum(row["wrong"] or 0 for row in paths.values())),
                ]
            )
    return lines


TITLES = (
    "run",
    "tokens/rank",
    "type",
    "moecomm ms",
    "algbw GB/s",
    "faster than gloo",
    "than gloo-tuned",
    "memcpy ms",
    "of ceiling",
    "#wrong",
)


def table(lines: Sequence[Sequence[str]]) -> str:
    """The summary as a Markdown table with aligned columns, so that a terminal shows it well too."""
    widths = [max(len(row[column]) for row in (TITLES, *lines)) for column in range(len(TITLES))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths))
    return "\n".join([line(TITLES), f"|{rule}|", *(line(row) for row in lines)])


def page(records: dict[str, dict[str, Any]], command: str) -> str:
    """docs/results.md."""
    first = next(iter(records.values()))
    hardware, versions, git = first["hardware"], first["versions"], first["git"]
    machine = (
        f"{hardware['cpu']}, {hardware['architecture']}, {hardware['cores']} cores, "
        f"{hardware['memory_bytes'] / 2**30:.1f} GiB memory, "
        f"{hardware['last_level_cache_bytes'] / 2**20:.0f} MiB last-level cache"
    )
    commands = "\n".join(record["command"] for record in records.values())
    state = " (with changes that are not committed)" if git["dirty"] else ""
    return f"""# Measured results

Made by `{command}`; the records behind it, with every sample, are in [results/](results/). Not edited by
hand.

- machine: {machine}
- software: moecomm {versions["moecomm"]}, torch {versions["torch"]}, numpy {versions["numpy"]},
  Python {versions["python"]}, commit `{git["commit"]}`{state}
- {first["ranks"]} ranks of {first["threads"]} compute thread each for every path, seed {first["seed"]},
  {first["time"]}

{table(summary(records))}

Times are medians over iterations of the slowest rank, with cold caches; the paths of one line alternate
within the same run. *gloo* is `all_to_all_single` between torch permutes as a plain framework does it,
*gloo-tuned* the same with all buffers kept and a fused weighted sum: the difference is mostly what fresh
memory costs. *memcpy* is the ceiling: all ranks at once copy as many bytes as the operation gives them, into
memory that they own already. For combine those are the expert rows that are summed. It reads them and writes
fewer; dispatch reads fewer than it writes; so either may come out above 100 %.
The columns are defined in [bench/README.md](../bench/README.md).

The commands:

```
{commands}
```
"""


def main() -> int:
    """Runs the plan, prints the summary, and writes the results if asked."""
    parser = argparse.ArgumentParser(prog="run_all.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/results/*.json and docs/results.md")
    parser.add_argument("-g", "--ranks", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("-n", "--iters", type=int, default=15, metavar="N", help="timed iterations (15)")
    parser.add_argument("-w", "--warmup", type=int, default=3, metavar="N", help="untimed iterations (3)")
    parser.add_argument("--only", metavar="WORD", default="", help="only runs whose name contains WORD")
    given = parser.parse_args()
    runs = [run for run in plan(given.ranks, given.iters, given.warmup) if given.only in run.name]
    if not runs:
        names = ", ".join(run.name for run in plan(given.ranks, given.iters, given.warmup))
        parser.exit(2, f"run_all.py: error: --only {given.only!r} matches none of {names}\n")
    if given.write and given.only:
        parser.exit(2, "run_all.py: error: --write wants the whole table; leave --only out\n")
    with tempfile.TemporaryDirectory() as folder:
        records = {run.name: execute(run, Path(folder)) for run in runs}
    print("\n" + table(summary(records)), flush=True)
    if given.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        command = shlex.join(["python", "bench/run_all.py", *sys.argv[1:]])
        RESULTS.with_suffix(".md").write_text(page(records, command))
        print(f"written: docs/results.md and {len(records)} records in docs/results/")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
