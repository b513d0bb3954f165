"""Optimizer steps of examples/train_lm.py: variants of a model are trained one after another, timed, compared
and recorded. The pieces of that program, `lm`, have to be on the path."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm import fitting
from lm import options as command_line
from lm.errors import UsageError, exit_code
from lm.flags import Parser, count

from .command_line import file_to_write

if TYPE_CHECKING:
    from .record import Row

MOECOMM, TORCH = "moecomm", "torch"
Plan = argparse.Namespace
"""Own flags: `variants` in the order in which they are measured, of which one may come twice,
`warmup_steps` and `timed_steps`, `no_profile` (of one more step, on GPUs), `trace` (a folder), `json` (a
file) and `commit`."""
FLOAT32_DIFFERENCE, BFLOAT16_DIFFERENCE = 1e-4, 1e-2
"""The most by which the first loss of a variant, and its second gradient norm, may differ from those of the
first one, of them. The loss alone would not do: a model with an output matrix of its own begins with that of
guessing, whatever its layers compute."""


def parse(arguments: Sequence[str]) -> tuple[Plan, command_line.Options]:
    """Returns the plan, and the options of train_lm.py. Raises UsageError."""
    parser = Parser(
        prog="train_perf.py",
        description="Times optimizer steps of examples/train_lm.py beside the same model in torch alone.",
        epilog="All other flags are those of examples/train_lm.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--variants", default=f"{MOECOMM},{TORCH}", metavar="LIST", help="in this order (%(default)s)")
    add("--warmup-steps", type=count, default=3, metavar="N", help="untimed steps (%(default)s)")
    add("--timed-steps", type=count, default=8, metavar="N", help="timed steps (%(default)s)")
    add("--no-profile", action="store_true", help="GPUs: without a profile of one more step")
    add("--trace", metavar="FOLDER", help="GPUs: write the trace of the profiled step there")
    add("-J", "--json", type=file_to_write, metavar="FILE", help="write a record of the run")
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    plan, others = parser.parse_known_args(arguments)
    plan.variants = plan.variants.split(",")
    if wrong := [each for each in plan.variants if each not in (MOECOMM, TORCH)]:
        raise UsageError(f"--variants has {wrong[0]!r}, must be of {MOECOMM}, {TORCH}")
    flags = {each.partition("=")[0] for each in others}
    if taken := sorted(flags & {"--out", "--steps", "--resume", "--sample", "--prompt"}):
        raise UsageError(f"{taken[0]} is not for train_perf.py, which keeps nothing of the training")
    steps = str(_steps(plan))
    fixed = ["--out", tempfile.gettempdir(), "--steps", steps, "--log-every", steps]
    options = command_line.parse(["--no-graph", *others, *fixed])  # else one variant alone had a graph
    not_for_torch = {
        "--etp": options.etp > 1,
        "--pp": options.pp > 1,
        "--graph": options.graph,
        "--delay-wgrad": options.delay_wgrad,
        "--recompute": bool({"fc1", "dispatch", "shared"} & set(options.recompute)),
        "--wire": options.wire != "dtype",
        "--combine-wire": options.combine_wire != "dtype",
        "--gradient-wire": options.gradient_wire != "dtype",
    }
    for name, is_given in not_for_torch.items():
        if is_given and TORCH in plan.variants:
            raise UsageError(f"{name} is not for the variant {TORCH}: --variants {MOECOMM}")
    return plan, options


def _steps(plan: Plan) -> int:
    """Steps of a variant without the profiled one; in the last of them the layers measure transfers."""
    return int(plan.warmup_steps + plan.timed_steps + 1)


def main() -> int:
    return exit_code("train_perf.py", _main)


def _main() -> int:
    plan, options = parse(sys.argv[1:])
    return _run_rank(plan, options) if "LOCAL_RANK" in os.environ else _start(options)


def _start(options: command_line.Options) -> int:
    from lm import ranks

    from .launch import leave_multicast_off

    count = ranks.default_ranks(options.device, options.batch) if options.ranks is None else options.ranks
    fitting.check_ranks(options, count)
    leave_multicast_off()
    return ranks.launch(sys.argv, count)


def _run_rank(plan: Plan, options: command_line.Options) -> int:
    from lm import ranks

    from ..results.tables import profile_table, train_table
    from . import record, report

    folding = fitting.check_ranks(options, int(os.environ["WORLD_SIZE"]))
    with ranks.joined(folding, options.device) as joined:
        rows = measure(plan, options, joined)
    wrong = sum(row["wrong"] for row in rows)
    if joined.first:
        command = shlex.join(["python", "bench/train_perf.py", *sys.argv[1:]])
        content = {
            **record.heading("train_perf", command, plan.commit, joined.device.type),
            "ranks": joined.world,
            "folding": ranks.describe(folding),
            "options": dataclasses.asdict(options),
            "wrong": wrong,
            "rows": rows,
        }
        if plan.json is not None:
            record.write(plan.json, content)
        print(f"# {report.machine_words(content['hardware'], content['gpus'])}")
        run = {str(rows[0]["model"]): content}
        for table in (train_table(run), profile_table(run)):
            if table:
                print(f"\n{table}", flush=True)
    return int(wrong > 0)


def measure(plan: Plan, options: command_line.Options, joined: Any) -> list[Row]:
    """Returns a row of each variant. `wrong` is 1 in one whose first loss or second gradient norm is not that
    of the first variant, 0 in the others. joined: this rank's `lm.ranks.Ranks`."""
    rows = [_variant(plan, options, joined, number, name) for number, name in enumerate(plan.variants)]
    allowed = FLOAT32_DIFFERENCE if options.dtype == "float32" else BFLOAT16_DIFFERENCE
    loss, norm = rows[0]["losses"][0], rows[0]["grad_norms"][1]
    for row in rows:
        same = abs(row["losses"][0] - loss) <= allowed * loss
        row["wrong"] = int(not (same and abs(row["grad_norms"][1] - norm) <= allowed * norm))
    return rows


def _variant(plan: Plan, options: command_line.Options, joined: Any, number: int, variant: str) -> Row:
    """Trains from the first weights on, and returns the variant's row."""
    import gc
    import statistics

    import torch
    from lm import presets
    from lm.trainer import Trainer

    from moecomm.nn import MoELayer

    from ..paths.plain_layer import PlainFfn
    from .profile import profiled

    on_gpu = joined.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(options, joined, stop=False)
    if variant == TORCH:
        for block in trainer.model.own_blocks():
            if isinstance(block.ffn, MoELayer):
                block.ffn = PlainFfn(block.ffn)
    records = [trainer.step(step)[0] for step in range(1, _steps(plan) + 1)]
    seconds = [each["seconds"] for each in records[plan.warmup_steps : -1]]
    total, active = trainer.parameters
    tokens = options.batch * options.seq
    row: Row = {
        "path": variant,
        "model": presets.name_of(options.preset, options.device),
        "layers": options.layers,
        "parameters": total,
        "active_parameters": active,
        "tokens": tokens,
        "seq": options.seq,
        "microbatches": options.microbatches,
        "time_s": statistics.median(seconds),
        "samples_s": seconds,
        "tokens_per_s": tokens / statistics.median(seconds),
        "losses": [each["loss"] for each in records],
        "grad_norms": [each["grad_norm"] for each in records],
        "busiest_rank": _busiest(records[-1]["load"], joined.folding.ep),
    }
    if trainer.speed is not None:
        row |= trainer.speed.of(row["tokens_per_s"])
    if variant == MOECOMM and "exposed_share" in records[-1]:
        row["exposed_share"] = records[-1]["exposed_share"]
    if joined.first:  # a run of all variants takes minutes
        speed = f", MFU {100 * row['mfu']:.1f} %" if "mfu" in row else ""
        print(f"{variant}: {row['time_s']:.4f} s a step{speed}", flush=True)
    if on_gpu:
        row["memory_bytes"] = torch.cuda.max_memory_allocated()
        if not plan.no_profile and joined.first:
            trace = Path(plan.trace, f"{variant}-{number}.json") if plan.trace else None
            row |= profiled(lambda: trainer.step(_steps(plan) + 1), trace)
        elif not plan.no_profile:
            trainer.step(_steps(plan) + 1)
    trainer.comm.close()
    return row


def _busiest(load_AE: list[list[int]], ep: int) -> float:
    """Returns the rows of the rank of `ep` that gets most, over those of the average one: the mean over
    layers. While its experts compute, the others wait."""
    import torch

    load_AR = torch.tensor(load_AE, dtype=torch.float64).unflatten(1, (ep, -1)).sum(-1)
    return float((load_AR.amax(1) / load_AR.mean(1)).mean())
