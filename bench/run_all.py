#!/usr/bin/env python3
"""The reference tables: every program with its baselines at the sizes that docs/results.md shows.

Runs on the GPUs if there are any (--device). Prints each run as it goes and one summary at the end. Only
--write changes files of the repository: docs/results/*.json, one a run, pictures of the sweeps, and this
device's part of docs/results.md; --into keeps the records elsewhere, and --page makes the page of the records
that are there. With the defaults it takes two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import launch, results
from bench.harness.entry import ranks_main
from bench.harness.options import Options, find_device, parse

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
_NO_LIMIT = 1e9
_SWEEP_ITERS, _SWEEP_WARMUP = 10, 3  # most iterations of a point of a sweep on GPUs
_MOST_FAILURES = 3  # in a row, after which it is not the run that is at fault


@dataclass(frozen=True)
class Run:
    """One run of the plan: a program and its flags."""

    name: str
    program: str
    flags: tuple[str, ...]
    about: str
    quick: bool = False  # part of --quick
    alone: bool = False  # in ranks of its own


def cpu_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """The reference case, then a small sweep around it."""
    steady = ("--device", "cpu", "-g", str(ranks), "-n", str(iters), "-w", str(warmup), "--baselines")
    reference = ("-b", "2048", "--hidden", "4096", "-d", "float32", "--experts", "32", "--topk", "4")
    bfloat16 = ("-b", "2048", "--hidden", "2048", "-d", "bfloat16", "--experts", "64", "--topk", "8")
    small = ("-b", "32", "-e", "512", "-f", "4", "--hidden", "4096", "--experts", "32", "--topk", "4")
    zipf = ("-b", "1024", "--hidden", "2048", "--routing", "zipf")
    runs = []
    for operation in ("dispatch", "combine"):
        flags = (*reference, *steady)
        runs.append(Run(f"{operation}-reference", operation, flags, "the reference case", quick=True))
    for operation in ("dispatch", "combine"):
        runs += [
            Run(f"{operation}-small", operation, (*small, *steady), "fewer tokens"),
            Run(f"{operation}-bfloat16", operation, (*bfloat16, *steady), "bfloat16, top-8 of 64"),
            Run(f"{operation}-zipf", operation, (*zipf, *steady), "skewed routing"),
        ]
    runs.append(Run("alltoall", "alltoall", ("-b", "256", "-e", "4096", "-f", "4", *steady), "raw exchange"))
    return runs


def cuda_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """4096 tokens, hidden 7168, top-8 of 256 in every form, then what is around it, by importance."""
    shape = ("--hidden", "7168", "-d", "bfloat16")
    total = _shared_experts(256, ranks)
    usual_experts = ("--experts", total, "--topk", "8")
    point = ("-b", "4096", *shape, *usual_experts)
    few = ("-b", "512", *shape, *usual_experts)
    tokens = ("-b", "1", "-e", "32768", "-f", "8", *shape, *usual_experts)
    all_experts = ",".join(_shared_experts(each, ranks) for each in (32, 256, 896))
    experts = ("-b", "4096", *shape, "--experts", all_experts, "--topk", "8")
    topk = ("-b", "4096", *shape, "--experts", total, "--topk", "1,2,4,8,16")
    zipf = (*point, "--routing", "zipf", "--zipf", "0.5,1,1.5")
    one_hot = (*point, "--routing", "one-hot")
    sms = ("--num-sms", "8,24,48,132")
    fp8, handed_on = ("--wire", "fp8"), ("--wire", "fp8", "--no-dequantize")
    fixed, graph = ("--capacity", "auto"), ("--capacity", "auto", "--graph")
    everything, links = ("--baselines",), ("--baselines", "sm-push")
    usual, beside_nccl = ("--baselines", "sm-push,nccl"), ("--baselines", "sm-push,nccl,nccl-tuned")
    # torch's all_to_all_vdev_2d takes at most 16 experts a rank.
    few_experts = ("-b", "4096", *shape, "--experts", str(16 * ranks), "--topk", "8")
    symmetric = (*few_experts, "--baselines", "sm-push,torch-symm")

    def run(
        name: str,
        flags: Sequence[str],
        about: str,
        *,
        gpus: int = ranks,
        most_iters: int = iters,
        most_warmup: int = warmup,
        **more: bool,
    ) -> Run:
        operation = name.split("-")[0]
        program = "dispatch" if operation == "backward" else operation
        times = ("-n", str(min(iters, most_iters)), "-w", str(min(warmup, most_warmup)))
        steady = ("--device", "cuda", "-g", str(gpus), *times, "--timeout", "60")
        return Run(f"cuda-{name}", program, (*flags, *steady), about, **more)

    sweep = partial(run, most_iters=_SWEEP_ITERS, most_warmup=_SWEEP_WARMUP)

    def on_gpus(gpus: int) -> list[Run]:
        """What the model of how time grows is held against: a call that is nearly all fixed cost, and one
        that is nearly all transfer."""
        experts = _shared_experts(256, gpus)
        flags = ("-b", "8", "-e", "4096", "-f", "512", *shape, "--experts", experts, "--topk", "8", *fixed)
        about = f"on {gpus} GPUs" if experts == "256" else f"on {gpus} GPUs, which cannot share 256 experts"
        return [
            run(f"{operation}-on-{gpus}", (*flags, *links), about, gpus=gpus)
            for operation in ("dispatch", "combine")
        ]

    return [
        run("dispatch", (*point, *everything), "dispatch to expert-major, exact sizes", quick=True),
        run("dispatch-fp8", (*point, *fp8, *usual), "rows travel in fp8, arrive in bf16", quick=True),
        run("dispatch-fp8-on", (*point, *handed_on, *usual), "fp8 rows and scales handed on", quick=True),
        run("combine", (*point, *everything), "combine from expert-major with weights", quick=True),
        run("backward", (*point, "--kept-handle", "plain", *links), "along a kept handle", quick=True),
        run(
            "backward-weighted",
            (*point, "--kept-handle", "weighted", *links),
            "along a kept handle, times weights and with their gradients",
            quick=True,
        ),
        run(
            "dispatch-fixed",
            (*point, *fixed, *links),
            "fixed capacity: the host waits for nothing",
            quick=True,
        ),
        run("dispatch-512", (*few, *beside_nccl), "fewer tokens"),
        run("combine-512", (*few, *beside_nccl), "fewer tokens"),
        sweep("dispatch-sms", (*point, *sms, *links), "sweep over SMs"),
        sweep("combine-sms", (*point, *sms, *links), "sweep over SMs"),
        sweep("dispatch-experts", (*experts, *usual), "sweep over experts"),
        sweep("combine-experts", (*experts, *usual), "sweep over experts"),
        *(each for gpus in dict.fromkeys((ranks, 2, 3, 4)) if 1 < gpus <= ranks for each in on_gpus(gpus)),
        run("dispatch-graph", (*point, *graph, *links), "fixed capacity, replayed from a graph"),
        run("dispatch-fp8-graph", (*point, *fp8, *graph, *links), "fp8, replayed from a graph"),
        run("combine-graph", (*point, *graph, *links), "combine, replayed from a graph"),
        sweep("dispatch-graph-tokens", (*tokens, *graph, *links), "sweep over tokens in a graph"),
        sweep("combine-graph-tokens", (*tokens, *graph, *links), "sweep over tokens in a graph"),
        sweep("dispatch-tokens", (*tokens, *usual), "sweep over tokens"),
        sweep("combine-tokens", (*tokens, *usual), "sweep over tokens"),
        sweep("dispatch-topk", (*topk, *usual), "sweep over top-k"),
        sweep("combine-topk", (*topk, *usual), "sweep over top-k"),
        sweep("dispatch-skew", (*zipf, *usual), "sweep over skew"),
        sweep("combine-skew", (*zipf, *usual), "sweep over skew"),
        run("dispatch-one-hot", (*one_hot, *usual), "everything to one rank"),
        sweep("dispatch-fp8-sms", (*point, *fp8, *sms, *links), "sweep over SMs"),
        run("alltoall", ("-b", "4096", *shape, *everything), "raw exchange"),
        run("dispatch-symm", symmetric, "beside torch's symmetric memory", alone=True),
        run("combine-symm", symmetric, "beside torch's symmetric memory", alone=True),
    ]


def _shared_experts(experts: int, ranks: int) -> str:
    """The most experts up to `experts` that the ranks can share evenly: 255 of 256 for three."""
    return str(experts // ranks * ranks)


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


def _options(run: Run, target: Path, commit: str | None) -> Options:
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
    target = RESULTS.with_suffix(".md")
    target.write_text(results.renewed(target.read_text() if target.exists() else "", device, part))
    print(f"written: docs/results.md of {len(records)} records in docs/results/")


def _recorded_ranks() -> int:
    """How many ranks the largest runs had whose records are in docs/results/."""
    return max((json.loads(path.read_text())["ranks"] for path in RESULTS.glob("*.json")), default=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_all.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    add("--write", action="store_true", help="write docs/results/ and this device's part of docs/results.md")
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


def main() -> int:
    """Runs the plan, prints the summary, and writes the results if asked."""
    parser = _parser()
    given = parser.parse_args()
    device = find_device(given.device)
    on_gpus = device == "cuda"
    plan = (cuda_plan if on_gpus else cpu_plan)(
        given.ranks or (_recorded_ranks() if given.page else parse("dispatch", ["--device", device]).ranks),
        given.iters or (20 if on_gpus else 15),
        given.warmup if given.warmup is not None else (5 if on_gpus else 3),
    )
    command = shlex.join(["python", "bench/run_all.py", "--device", device, "--write"])
    if given.page:
        _write_page(plan, device, command)
        return 0
    words = given.only.split(",")
    runs = [run for run in plan if any(word in run.name for word in words) and (run.quick or not given.quick)]
    if not runs:
        names = ", ".join(run.name for run in plan)
        parser.exit(2, f"run_all.py: error: --only {given.only!r} matches none of {names}\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.into or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for run in runs:
            (folder / f"{run.name}.json").unlink(missing_ok=True)
        records = execute(runs, folder, given.limit, given.commit)
    print("\n" + results.summary(records), flush=True)
    print("\n".join(results.missing(records)), flush=True)
    if given.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        _write_page(plan, device, command)
    failed = [run.name for run in runs if run.name not in records]
    wrong = [name for name, record in records.items() if record["wrong"]]
    if failed or wrong:
        print(f"run_all.py: not run or failed: {failed}; wrong values: {wrong}", file=sys.stderr, flush=True)
    return int(bool(failed or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
