"""Checks which options of `train_lm.py` fit together, and fit the number of ranks."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from lm.errors import UsageError

if TYPE_CHECKING:
    from lm.options import Options
    from moecomm.parallel import ParallelFolding

# The classes of torch.distributed.pipelining. The last two take two stages per rank, in a V shape.
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
V_SCHEDULES = ("zbv", "dualpipev")
COMPILED = {"norms", "mla-up", "attention", "all"}
"""The parts of --recompute that --compile compiles."""


def check(options: Options) -> None:
    """Checks what does not depend on the number of ranks, and makes the folder of the run. Raises
    UsageError."""
    _check_attention(options)
    _check_experts(options)
    _check_split(options)
    _check_pipeline(options)
    _check_step(options)
    _check_folder(Path(options.out))


def compiles(options: Options, device: str) -> bool:
    """Returns whether blocks are compiled on devices of this type: as --compile says; without it on GPUs,
    unless compiled parts are recomputed, or a pipeline may split their backward, or Triton lacks what it
    builds launchers with."""
    if options.compile is not None:
        return options.compile
    if device != "cuda" or COMPILED & set(options.recompute) or options.pp > 1:
        return False
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return importlib.util.find_spec("triton") is not None and compiler is not None and headers.exists()


def captures(options: Options, device: str) -> bool:
    """Returns whether steps on devices of this type may become CUDA graphs: as --graph says; without it on
    GPUs, unless a window or the weights are split, something is recomputed, or products are not in bfloat16.
    """
    if options.graph is not None:
        return options.graph
    whole = options.tp == options.cp == options.pp == 1 and not options.fsdp
    plain = options.dtype == "bfloat16" and not options.recompute
    return device == "cuda" and whole and plain


def check_ranks(options: Options, world: int) -> ParallelFolding:
    """Lays out `world` ranks. Raises UsageError where batch, windows, heads or experts do not divide over
    them, or torch lacks the pipeline's schedule."""
    from moecomm import InvalidArgument  # imported late: torch takes seconds to import
    from moecomm.parallel import ParallelFolding

    of_experts = max(1, world // (options.etp * options.pp))
    ep = math.gcd(of_experts, options.experts) if options.ep is None else options.ep
    _refuse(world % ep, f"--ep {ep} does not divide the number of ranks, {world}")
    _refuse(options.experts % ep, f"--ep {ep} does not divide --experts {options.experts}")
    try:
        folding = ParallelFolding(
            world_size=world, tp=options.tp, cp=options.cp, pp=options.pp, ep=ep, etp=options.etp
        )
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    _refuse(options.ffn % options.etp, f"--ffn {options.ffn} must be a multiple of --etp {options.etp}")
    ranks = "the number of ranks" if folding.dp == folding.world_size else "the data-parallel size"
    _refuse(options.batch % folding.dp, f"--batch {options.batch} is not divisible by {ranks}, {folding.dp}")
    windows = options.batch // folding.dp
    _refuse(
        windows % options.microbatches,
        f"--batch {options.batch} is {windows} windows a rank, which do not divide into --microbatches "
        f"{options.microbatches}",
    )
    ranks = "there is 1 rank" if options.pp == 1 else f"a stage of --pp {options.pp} has 1 rank"
    _refuse(options.fsdp and folding.size("tp-cp-dp") == 1, f"--fsdp: {ranks}, and shards need 2 or more")
    if options.pp > 1:
        from lm.pipeline import schedule_class

        schedule_class(options)
    return folding


def flag(name: str) -> str:
    """Returns the flag of a field of `Options`."""
    return "--" + name.replace("_", "-")


def _refuse(wrong: object, text: str) -> None:
    if wrong:
        raise UsageError(text)


def _check_attention(options: Options) -> None:
    base, factor = options.rope_base, options.rope_factor
    _refuse(factor < 1, f"--rope-factor {factor} must be at least 1; 1: no YaRN")
    _refuse(factor > 1 and base == 1, "--rope-base 1 has one frequency, which --rope-factor cannot scale")
    of_latent = ("q_rank", "kv_rank", "rope_dim", "value_dim")
    of_grouped = ("kv_heads", "qk_norm", "qkv_bias", "out_bias", "window", "sinks")
    if options.attention == "latent":
        for name in ("head_dim", *of_latent):
            _refuse(not getattr(options, name), f"--attention latent needs {flag(name)}, above 0")
        for name in of_grouped:
            _refuse(getattr(options, name), f"{flag(name)} is of --attention grouped, not of latent")
        _refuse(options.rope_dim % 2, f"--rope-dim {options.rope_dim} must be even")
        return
    for name in of_latent:
        _refuse(getattr(options, name), f"{flag(name)} is of --attention latent, not of grouped")
    dim, heads, kv_heads = options.dim, options.heads, options.kv_heads
    _refuse(options.head_dim % 2, f"--head-dim {options.head_dim} must be even")
    _refuse(
        not options.head_dim and dim % (2 * heads),
        f"--dim {dim} must be an even multiple of --heads {heads}, without --head-dim",
    )
    _refuse(kv_heads and heads % kv_heads, f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")


def _check_experts(options: Options) -> None:
    unit = 16 // {"float32": 4, "bfloat16": 2}[options.dtype]
    _refuse(
        options.dim % unit,
        f"--dim {options.dim} must be a multiple of {unit} with --dtype {options.dtype}",
    )
    dense = f"--dense-layers {options.dense_layers}"
    _refuse(
        options.dense_layers >= options.layers,
        f"{dense} must be less than --layers {options.layers}: the others have the experts",
    )
    _refuse(options.dense_layers and not options.dense_ffn, f"{dense} needs --dense-ffn, above 0")
    _refuse(
        options.top_k > options.experts,
        f"--top-k {options.top_k} is more than --experts {options.experts}",
    )


def _check_split(options: Options) -> None:
    """Checks that windows and heads can be split over ranks as --tp and --cp say."""
    tp, cp = options.tp, options.cp
    if tp == cp == 1:
        return
    given = f"--tp {tp}" if cp == 1 else f"--cp {cp}" if tp == 1 else f"--tp {tp} --cp {cp}"
    parts = tp * cp * (1 if cp == 1 else 2)
    _refuse(options.seq % parts, f"--seq {options.seq} must be a multiple of {parts} with {given}")
    for name in ("heads", "kv_heads"):
        value = getattr(options, name)
        _refuse(value % tp, f"{flag(name)} {value} must be a multiple of --tp {tp}")
    _refuse(options.sample, f"--sample: text is written by ranks that see whole windows: not with {given}")
    _refuse(options.graph, f"--graph: a graph is of whole windows: not with {given}")


def _check_pipeline(options: Options) -> None:
    """Checks that layers and microbatches can be shared out as --pp and the schedule say."""
    pp, schedule, count = options.pp, options.schedule or "1f1b", options.microbatches
    if pp == 1:
        for name in ("schedule", "stages_per_rank"):
            value = getattr(options, name)
            _refuse(value is not None, f"{flag(name)} {value} is of pipelines: give --pp 2 or more")
        return
    per_rank = options.stages // pp
    needed = 1 if schedule == "1f1b" else 2 if schedule in V_SCHEDULES else per_rank
    _refuse(per_rank != needed, f"--stages-per-rank {per_rank} must be {needed} with --schedule {schedule}")
    _refuse(
        options.layers < options.stages,
        f"--layers {options.layers} is less than the {options.stages} stages of --pp {pp}, {per_rank} on a "
        "rank",
    )
    _refuse(options.tied, f"--tied: embedding and output are of different stages with --pp {pp}: --no-tied")
    _refuse(options.sample, f"--sample: text is written by ranks that hold all layers: not with --pp {pp}")
    _refuse(options.graph, f"--graph: a graph is of a step on all layers: not with --pp {pp}")
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    given = f"with --pp {pp} --schedule {schedule}"
    _refuse(count < least, f"--microbatches {count} must be at least {least} {given}")
    _refuse(
        schedule in ("interleaved", "zero-bubble") and count % pp,
        f"--microbatches {count} must be a multiple of {pp} {given}",
    )


def _check_step(options: Options) -> None:
    """Checks that a step can be captured, kept in bfloat16 or recomputed as the options say."""
    _refuse(
        options.fsdp and options.graph,
        "--graph: a graph is of weights that stay where they are: not with --fsdp",
    )
    _refuse(
        options.weights == "bfloat16" and options.dtype != "bfloat16",
        f"--weights bfloat16 needs --dtype bfloat16, not {options.dtype}",
    )
    again = set(options.recompute)
    _refuse(
        "mla-up" in again and options.attention != "latent",
        f"--recompute mla-up is of --attention latent, not of {options.attention}",
    )
    _refuse(
        "shared" in again and not options.shared_experts,
        "--recompute shared needs --shared-experts, above 0",
    )
    _refuse(options.compile and again & COMPILED, "--compile: not with --recompute of what it compiles")
    delayed = "--delay-wgrad: the gradients of the experts' weights are"
    _refuse(
        options.delay_wgrad and options.fsdp,
        f"{delayed} computed past the hooks by which FSDP shards gradients: not with --fsdp",
    )
    _refuse(
        options.delay_wgrad and options.microbatches == 1,
        f"{delayed} one product of several microbatches: give --microbatches 2 or more",
    )


def _check_folder(out: Path) -> None:
    _refuse(out.exists() and not out.is_dir(), f"--out: {out} is a file, not a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {error}") from None
    _refuse(not os.access(out, os.W_OK), f"--out: {out} cannot be written to")
