#!/usr/bin/env python3
"""The reference tables: every program with its baselines at the sizes that docs/results.md shows.

Runs operations, --layers whole layers, --training the microbatches of a training step, --nodes what is
between nodes that are emulated on this host; on GPUs if there are any (--device). Prints each run as it goes
and the tables at the end. Only --write changes files of the repository: docs/results/*.json, one a run, and
docs/results.md; --into keeps the records elsewhere, and --page makes the page of the records that are there.
With the defaults it takes two to four minutes on two cores, --nodes about ten.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import launch, native, plan, record
from bench.harness.command_line import find_device, parse
from bench.harness.options import Options
from bench.harness.plan import NATIVE, Run
from bench.results import page

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
_MOST_FAILURES = 3  # in a row, after which it is not the run that is at fault


def _options(run: Run, file: Path, commit: str | None) -> Options:
    given = parse(run.program, [*run.flags, "-J", str(file)])
    # The record shows the command a reader would type, without the folder this run happened to use.
    command = shlex.join(["python", f"bench/{run.program}_perf.py", *run.flags])
    return dataclasses.replace(given, command=command, commit=commit or given.commit)


def _together(first: Run, second: Run) -> bool:
    """Returns whether one set of ranks can do both runs, which saves starting them for each."""
    if first.alone or second.alone or second.program in NATIVE:
        return False
    return parse(first.program, first.flags).ranks == parse(second.program, second.flags).ranks


def execute(runs: Sequence[Run], files: Mapping[str, Path], commit: str | None) -> None:
    """Makes the records of the runs, in the files that have their names. When a run fails, the ranks
    are ended and started again for those behind it."""
    waiting, failures = list(runs), 0
    while waiting and failures < _MOST_FAILURES:
        batch = [waiting.pop(0)]
        if batch[0].program in NATIVE:
            _execute_native(batch[0], files[batch[0].name], commit)
            continue
        while waiting and _together(batch[0], waiting[0]):
            batch.append(waiting.pop(0))
        status = launch.run([_options(run, files[run.name], commit) for run in batch])
        done = [run for run in batch if files[run.name].exists()]
        left = batch[len(done) :]
        if status > 128:
            return
        if left:
            print(f"run_all.py: {left[0].name} failed", file=sys.stderr, flush=True)
            failures = failures + 1 if not done else 1
        waiting = [*left[1:], *waiting]


def _execute_native(run: Run, file: Path, commit: str | None) -> None:
    print(f"\n$ {shlex.join((run.program, *run.flags))}", flush=True)
    try:
        content = native.document(run.program, run.flags, commit)
    except RuntimeError as problem:
        print(f"run_all.py: {run.name} failed: {problem}", file=sys.stderr, flush=True)
        return
    print("\n".join(json.dumps(row) for row in content["rows"]), flush=True)
    record.write(file, content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_all.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layers", action="store_true", help="whole layers, forward and backward")
    what.add_argument("--training", action="store_true", help="microbatches of a training step")
    what.add_argument("--nodes", action="store_true", help="between emulated nodes; CPUs unless --device")
    add("--label", metavar="WORD", help="keeps these records apart from those of other machines")
    add("--write", action="store_true", help="write docs/results/ and docs/results.md")
    add("--into", metavar="FOLDER", help="keep the records there")
    add("--page", action="store_true", help="run nothing: renew the page of the records in docs/results/")
    add("-g", "--ranks", type=int, metavar="N", help="ranks (2; on GPUs as many as there are)")
    add("-n", "--iters", type=int, metavar="N", help="timed iterations (15; on GPUs 20)")
    add("-w", "--warmup", type=int, metavar="N", help="untimed iterations (3; on GPUs 5)")
    add("--only", metavar="WORDS", default="", help="only runs whose name contains one of WORDS (a,b)")
    add("--flags", default="", metavar="WORDS", help="more flags of every run: --flags='--products quack'")
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    return parser


def _plan(given: argparse.Namespace) -> list[Run]:
    """Returns the runs that the options allow; raises ValueError for a device that this machine lacks."""
    device = "cpu" if given.nodes and given.device == "auto" else find_device(given.device)
    on_gpus = device == "cuda"
    times = (
        given.iters if given.iters is not None else (20 if on_gpus else 15),
        given.warmup if given.warmup is not None else (5 if on_gpus else 3),
    )
    if given.nodes and not on_gpus:
        return plan.nodes_cpu(*times)
    ranks = given.ranks if given.ranks is not None else parse("alltoall", ["--device", device]).ranks
    if given.nodes:
        return plan.nodes_cuda(ranks, *times)
    if given.layers or given.training:
        if not on_gpus:
            raise ValueError("--layers and --training need GPUs")
        return (plan.training_cuda if given.training else plan.layers_cuda)(ranks, *times)
    return (plan.operations_cuda if on_gpus else plan.operations_cpu)(ranks, *times)


def _write_page() -> None:
    records = page.read_all(RESULTS)
    RESULTS.with_suffix(".md").write_text(page.page(records))
    print(f"written: docs/results.md of {len(records)} records in docs/results/")


def main() -> int:
    """Runs the plan, prints its tables, and writes the results if asked."""
    parser = _parser()
    given = parser.parse_args()
    if given.page:
        _write_page()
        return 0
    try:
        runs = _plan(given)
        if given.label and not given.label.isalnum():
            raise ValueError(f"--label {given.label!r} has to be a word of letters and digits")
        runs = [dataclasses.replace(run, flags=(*run.flags, *shlex.split(given.flags))) for run in runs]
        wanted = [run for run in runs if any(word in run.name for word in given.only.split(","))]
        if not wanted:
            raise ValueError(f"--only {given.only!r} matches none of {', '.join(run.name for run in runs)}")
    except ValueError as problem:
        parser.exit(2, f"run_all.py: error: {problem}\n")
    end = f".{given.label}.json" if given.label else ".json"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.into or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = {run.name: folder / f"{run.name}{end}" for run in wanted}
        for file in files.values():
            file.unlink(missing_ok=True)
        execute(wanted, files, given.commit)
        records = {name: record.read(file) for name, file in files.items() if file.exists()}
    print("\n" + page.summary(records), flush=True)
    if given.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, content in records.items():
            record.write(RESULTS / f"{name}{end}", content)
        _write_page()
    failed = [run.name for run in wanted if run.name not in records]
    wrong = [
        name
        for name, content in records.items()
        if content["wrong"] or any(each["failed"] for each in content.get("missing", ()))
    ]
    if failed or wrong:
        text = f"run_all.py: not run or failed: {failed}; wrong or failed in: {wrong}"
        print(text, file=sys.stderr, flush=True)
    return int(bool(failed or wrong))


if __name__ == "__main__":
    raise SystemExit(launch.quietly(main))
