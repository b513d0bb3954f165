#!/usr/bin/env python3
"""The reference tables: every program with its baselines at the sizes that docs/results.md shows.

Runs on the GPUs if there are any (--device). --layers runs whole layers instead, forward and backward.
--nodes runs what is between nodes instead, emulated on this host: dispatch and combine over each provider,
the provider by itself, and the proxy by itself. Prints each run as it goes and one summary at the end. Only
--write changes files of the repository: docs/results/*.json, one a run, pictures of the sweeps, and its own
part of docs/results.md; --into keeps the records elsewhere, and --page makes the page of the records that are
there. With the defaults it takes two to four minutes on two cores, --nodes about seven.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import launch, layer_results, native, node_results, results
from bench.harness.entry import Given, parse, ranks_main
from bench.harness.layer_plan import layers_cpu_plan, layers_cuda_plan
from bench.harness.node_plan import PROVIDERS, NativeRun, native_plan, nodes_cpu_plan, nodes_cuda_plan
from bench.harness.options import find_device
from bench.harness.plan import Run, cpu_plan, cuda_plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
_NO_LIMIT = 1e9
_MOST_FAILURES = 3  # in a row, after which it is not the run that is at fault


def _same_ranks(first: Run, second: Run) -> bool:
    """Can one set of ranks do both?"""
    if first.alone or second.alone:
        return False
    return parse(first.program, first.flags).ranks == parse(second.program, second.flags).ranks


def execute(runs: Sequence[Run], folder: Path, limit: float, commit: str | None) -> dict[str, dict[str, Any]]:
    """The records of the runs, those that came to their end within `limit` seconds.

    Runs of equally many ranks share them, which saves starting them for each. When a run fails, the ranks are
    ended and started again for those behind it.
    """
    begun = time.monotonic()
    waiting, records = list(runs), {}
    failures = 0
    while waiting:
        batch = [waiting.pop(0)]
        while waiting and _same_ranks(batch[0], waiting[0]):
            batch.append(waiting.pop(0))
        while batch:
            targets = {run.name: folder / f"{run.name}.json" for run in batch}
            plan = tuple(_options(run, targets[run.name], commit) for run in batch)
            left_s = limit - (time.monotonic() - begun)
            status = launch.run(partial(ranks_main, plan, left_s), plan[0])
            done = [run for run in batch if targets[run.name].exists()]
            for run in done:
                records[run.name] = _read(run, targets[run.name])
            left = batch[len(done) :]
            if status == 130:
                return records
            if left and status == 0:
                print(f"run_all.py: out of time, not run: {', '.join(run.name for run in left)}", flush=True)
                return records
            if left:
                print(f"run_all.py: {left[0].name} failed", file=sys.stderr, flush=True)
                failures = failures + 1 if not done else 1
                if failures == _MOST_FAILURES:
                    return records
            batch = left[1:]
    return records


def execute_native(
    runs: Sequence[NativeRun], folder: Path, limit: float, commit: str | None
) -> dict[str, dict[str, Any]]:
    """The records of the runs of C++ programs, one after the other; those begun within `limit` seconds."""
    begun = time.monotonic()
    records: dict[str, dict[str, Any]] = {}
    for place, run in enumerate(runs):
        if time.monotonic() - begun > limit:
            print(f"run_all.py: out of time, not run: {', '.join(each.name for each in runs[place:])}")
            break
        print(f"\n$ {shlex.join((run.program, *run.flags))}", flush=True)
        try:
            record = native.document(run.program, run.flags, commit)
        except RuntimeError as problem:
            print(f"run_all.py: {run.name} failed: {problem}", file=sys.stderr, flush=True)
            continue
        print("\n".join(json.dumps(line) for line in record["lines"]), flush=True)
        (folder / f"{run.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        records[run.name] = record
    return records


def _options(run: Run, target: Path, commit: str | None) -> Given:
    given = parse(run.program, [*run.flags, "-J", str(target)])
    # The record shows the command a reader would type, without the folder this run happened to use.
    command = f"python bench/{run.program}_perf.py {shlex.join(run.flags)}"
    return dataclasses.replace(given, command=command, commit=commit or given.commit)


def _read(run: Run, target: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(target.read_text())
    record["about"] = run.about
    return record


def _draw(records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Pictures of the sweeps beside their records: file by run."""
    from bench.harness import plot
    from bench.harness.record import Row

    drawn = {}
    for name, record in records.items():
        if results.pictured(record):
            rows = [Row(**{**row, "samples_s": tuple(row["samples_s"])}) for row in record["rows"]]
            options = record["options"]
            drawn[name] = f"{name}.svg"
            plot.draw(
                str(RESULTS / drawn[name]),
                rows,
                title=f"{options['operation']}: {options['ranks']} ranks, hidden {options['hidden']}",
                remote=options["device"] == "cuda",
            )
    return drawn


def _write_page(plan: Sequence[Run], device: str, command: str) -> None:
    """This device's part of docs/results.md, of the records that are in docs/results/."""
    found = {run.name: RESULTS / f"{run.name}.json" for run in plan}
    records = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    if device == "cuda":
        part = results.gpu_part(records, command, _draw(records))
    else:
        part = results.cpu_part(records, command)
    _renew(device, part, len(records))


def _write_nodes_page(command: str) -> None:
    """The part between nodes, of all such records in docs/results/: of CPUs and GPUs, and of any label."""
    if records := _recorded(node_results.is_one, "between nodes"):
        _renew("nodes", node_results.part(records, command), len(records))


def _write_layers_page(command: str) -> None:
    """The part of layers, of all such records in docs/results/: of CPUs and GPUs."""
    if records := _recorded(layer_results.is_one, "of layers"):
        _renew("layers", layer_results.part(records, command), len(records))


def _recorded(is_one: Callable[[str], bool], words: str) -> dict[str, dict[str, Any]]:
    """The records of one part that are in docs/results/, in the order in which they were made, which is the
    plan's."""
    paths = [path for path in RESULTS.glob("*.json") if is_one(path.stem)]
    if not paths:
        print(f"run_all.py: docs/results/ has no records {words}", file=sys.stderr)
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    return dict(sorted(found.items(), key=lambda each: (each[1]["time"], each[0])))


def _renew(name: str, part: str, count: int) -> None:
    target = RESULTS.with_suffix(".md")
    target.write_text(results.renewed(target.read_text() if target.exists() else "", name, part))
    print(f"written: docs/results.md of {count} records in docs/results/")


def _recorded_ranks() -> int:
    """How many ranks the largest runs on one node had whose records are in docs/results/."""
    other = (node_results.is_one, layer_results.is_one)
    paths = [path for path in RESULTS.glob("*.json") if not any(is_one(path.stem) for is_one in other)]
    return max((json.loads(path.read_text())["ranks"] for path in paths), default=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_all.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    add("--layers", action="store_true", help="whole layers, forward and backward")
    add(
        "--nodes",
        action="store_true",
        help="what is between nodes, emulated on this host; CPUs unless --device",
    )
    add("--providers", default=",".join(PROVIDERS), metavar="LIST", help="with --nodes (%(default)s)")
    add(
        "--label",
        metavar="WORD",
        help="with --nodes or --layers: keeps these records apart from those of other machines",
    )
    add("--write", action="store_true", help="write docs/results/ and this part of docs/results.md")
    add("--into", metavar="FOLDER", help="keep the records there")
    add("--page", action="store_true", help="run nothing: renew the page of the records in docs/results/")
    add("-g", "--ranks", type=int, metavar="N", help="ranks (2; on GPUs as many as there are)")
    add("-n", "--iters", type=int, metavar="N", help="timed iterations (15; on GPUs 20)")
    add("-w", "--warmup", type=int, metavar="N", help="untimed iterations (3; on GPUs 5)")
    add("--only", metavar="WORDS", default="", help="only runs whose name contains one of WORDS (a,b)")
    add("--quick", action="store_true", help="only the reference cases")
    add("--limit", type=float, default=_NO_LIMIT, metavar="S", help="begin no run after this many seconds")
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    return parser


def _plan(given: argparse.Namespace, device: str) -> tuple[list[Run], list[NativeRun]]:
    """What may be run; raises ValueError for what this machine cannot be."""
    on_gpus = device == "cuda"
    iters = given.iters or (20 if on_gpus else 15)
    warmup = given.warmup if given.warmup is not None else (5 if on_gpus else 3)
    if not given.nodes:
        here = _recorded_ranks() if given.page else parse("dispatch", ["--device", device]).ranks
        if given.layers:
            plan = layers_cuda_plan if on_gpus else layers_cpu_plan
            return plan(given.ranks or here, iters, warmup), []
        return (cuda_plan if on_gpus else cpu_plan)(given.ranks or here, iters, warmup), []
    providers = [word for word in given.providers.split(",") if word]
    if not providers:
        raise ValueError("--providers is empty")
    if not on_gpus:
        return nodes_cpu_plan(providers, iters, warmup), native_plan(providers)
    gpus = given.ranks or parse("dispatch", ["--device", device]).ranks
    if gpus < 2 or gpus % 2:
        raise ValueError(f"two nodes need an even number of GPUs, not {gpus}: use -g")
    return nodes_cuda_plan(gpus, providers, iters, warmup), native_plan(providers)


def _command(given: argparse.Namespace, device: str) -> str:
    """What makes this part of the page again."""
    what = ["--nodes"] if given.nodes else ["--device", device]
    if given.layers:
        what = ["--layers", *what]
    return shlex.join(["python", "bench/run_all.py", *what, "--write"])


def main() -> int:
    """Runs the plan, prints the summary, and writes the results if asked."""
    parser = _parser()
    given = parser.parse_args()
    if given.label and not ((given.nodes or given.layers) and given.label.isalnum()):
        parser.exit(
            2, "run_all.py: error: --label is a word of letters and digits, for --nodes or --layers\n"
        )
    if given.layers and given.nodes:
        parser.exit(2, "run_all.py: error: --layers and --nodes are plans of their own: give one of them\n")
    device = "cpu" if given.nodes and given.device == "auto" else find_device(given.device)
    if given.page and (given.nodes or given.layers):
        (_write_nodes_page if given.nodes else _write_layers_page)(_command(given, device))
        return 0
    try:
        plan, native_runs = _plan(given, device)
    except ValueError as problem:
        parser.exit(2, f"run_all.py: error: {problem}\n")
    if given.page:
        _write_page(plan, device, _command(given, device))
        return 0
    words = given.only.split(",")

    def wanted(run: Run | NativeRun) -> bool:
        return any(word in run.name for word in words) and (run.quick or not given.quick)

    runs, natives = [run for run in plan if wanted(run)], [run for run in native_runs if wanted(run)]
    everything: list[Run | NativeRun] = [*runs, *natives]
    if not everything:
        names = ", ".join([run.name for run in plan] + [run.name for run in native_runs])
        parser.exit(2, f"run_all.py: error: --only {given.only!r} matches none of {names}\n")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.into or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for run in everything:
            (folder / f"{run.name}.json").unlink(missing_ok=True)
        records = execute(runs, folder, given.limit, given.commit)
        records |= execute_native(natives, folder, given.limit - (time.monotonic() - begun), given.commit)
        end = f".{given.label}.json" if given.label else ".json"
        for name in records:
            (folder / f"{name}.json").rename(folder / f"{name}{end}")
    summary = node_results.summary if given.nodes else results.summary
    missing = results.missing
    if given.layers:
        summary, missing = layer_results.summary, layer_results.missing
    print("\n" + summary(records), flush=True)
    print("\n".join(missing(records)), flush=True)
    if given.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            (RESULTS / f"{name}{end}").write_text(json.dumps(record, indent=1) + "\n")
        if given.nodes or given.layers:
            (_write_nodes_page if given.nodes else _write_layers_page)(_command(given, device))
        else:
            _write_page(plan, device, _command(given, device))
    failed = [run.name for run in everything if run.name not in records]
    wrong = [name for name, record in records.items() if record.get("wrong")]
    if failed or wrong:
        print(f"run_all.py: not run or failed: {failed}; wrong values: {wrong}", file=sys.stderr, flush=True)
    return int(bool(failed or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
