"""The command line of `train_lm.py`: what can be set, what fits together, what a resumed run takes over."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lm import presets
from lm.errors import UsageError
from lm.files import write_whole

if TYPE_CHECKING:
    from moecomm.parallel import ParallelFolding

FILE_NAME = "options.json"

# The classes of torch.distributed.pipelining. The last two take two stages a rank, in a V.
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
V_SCHEDULES = ("zbv", "dualpipev")

RECOMPUTED = ("norms", "mla-up", "shared", "fc1", "dispatch", "moe", "attention", "all")

# A checkpoint is bound to these: another value would be another model or another stream of batches.
FIXED = (
    "data",
    "tokenizer",
    "seed",
    "batch",
    "seq",
    "dim",
    "layers",
    "heads",
    "ffn",
    "experts",
    "top_k",
    "activation",
    "tied",
    "vocab",
    "attention",
    "kv_heads",
    "head_dim",
    "q_rank",
    "kv_rank",
    "rope_dim",
    "value_dim",
    "qk_norm",
    "qkv_bias",
    "out_bias",
    "window",
    "sinks",
    "rope_base",
    "rope_factor",
    "rope_positions",
    "rope_truncate",
    "rope_mscale",
    "norm_eps",
    "dense_layers",
    "dense_ffn",
    "shared_experts",
    "shared_gate",
    "expert_bias",
    "router_bias",
    "score_function",
    "pre_softmax",
    "normalize_topk",
    "scaling_factor",
    "num_groups",
    "topk_groups",
    "weights",
    "moments",
)
# These belong to one call and not to the run.
PER_CALL = (
    "out",
    "resume",
    "sample",
    "prompt",
    "ranks",
    "tp",
    "cp",
    "pp",
    "ep",
    "etp",
    "schedule",
    "stages_per_rank",
    "fsdp",
    "device",
    "preset",
    "compile",
    "graph",
    "delay_wgrad",
    "note",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the program, one field each; the `help` texts are in `_parser`."""

    data: list[str] | None
    tokenizer: str | None
    out: str
    resume: bool
    sample: int
    prompt: str
    ranks: int | None
    tp: int
    cp: int
    pp: int
    ep: int | None
    etp: int
    schedule: str | None
    stages_per_rank: int | None
    fsdp: bool
    device: str
    compile: bool
    graph: bool
    microbatches: int
    delay_wgrad: bool
    recompute: list[str]
    preset: str
    dtype: str
    expert_precision: str
    wire: str
    combine_wire: str
    gradient_wire: str
    weights: str
    moments: str
    seed: int
    steps: int
    batch: int
    seq: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    max_skipped: int
    vocab: int
    dim: int
    layers: int
    tied: bool
    norm_eps: float
    attention: str
    heads: int
    kv_heads: int
    head_dim: int
    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    window: int
    sinks: bool
    rope_base: float
    rope_factor: float
    rope_positions: int
    rope_truncate: bool
    rope_mscale: float
    dense_layers: int
    dense_ffn: int
    ffn: int
    activation: str
    experts: int
    top_k: int
    shared_experts: int
    shared_gate: bool
    expert_bias: bool
    router_bias: bool
    score_function: str
    pre_softmax: bool
    normalize_topk: bool
    scaling_factor: float
    num_groups: int
    topk_groups: int
    bias_rate: float
    aux_loss: str
    aux_coef: float
    eval_every: int
    eval_windows: int
    save_every: int
    log_every: int
    note: str

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks of a pipeline."""
        usual = 1 if self.schedule in (None, "1f1b") else 2
        return self.pp * (usual if self.stages_per_rank is None else self.stages_per_rank)

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes what a later `--resume` takes over; returns what differs from the run that is resumed."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name not in PER_CALL}
        before = _load_saved(folder) if self.resume else kept
        write_whole(folder / FILE_NAME, json.dumps(kept, indent=1) + "\n")
        return {name: value for name, value in kept.items() if value != before.get(name)}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options, checked as far as they can be without knowing the number of ranks. Raises UsageError."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    parser.set_defaults(**presets.choose(values["preset"], values["device"]))
    if values["resume"]:
        # What the run was started with takes the place of the defaults, so that `--resume` alone goes on
        # with it.
        saved = _load_saved(Path(values["out"]))
        parser.set_defaults(**saved)
    values = vars(parser.parse_args(arguments))
    _absolute_paths(values)
    if values["resume"]:
        for name in FIXED:
            if name in saved and values[name] != saved[name]:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"--resume: this run has {flag} {saved[name]}, which cannot become {values[name]}"
                )
    options = Options(**values)
    _check(options)
    return options


def check_ranks(options: Options, world: int) -> ParallelFolding:
    """Lays out `world` ranks. Raises UsageError where batch, windows, heads or experts do not divide over
    them, or torch has not the schedule of the pipeline."""
    from moecomm import InvalidArgument  # late: torch takes seconds to import
    from moecomm.parallel import ParallelFolding

    of_experts = max(1, world // (options.etp * options.pp))
    ep = math.gcd(of_experts, options.experts) if options.ep is None else options.ep
    if world % ep:
        raise UsageError(f"--ep {ep} does not divide the number of ranks, {world}")
    if options.experts % ep:
        raise UsageError(f"--ep {ep} does not divide --experts {options.experts}")
    try:
        folding = ParallelFolding(
            world_size=world, tp=options.tp, cp=options.cp, pp=options.pp, ep=ep, etp=options.etp
        )
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    _check_experts(options)
    _check_batch(options, folding)
    if options.fsdp and folding.size("tp-cp-dp") == 1:
        ranks = "there is 1 rank" if options.pp == 1 else f"a stage of --pp {options.pp} has 1 rank"
        raise UsageError(f"--fsdp: {ranks}, and shards need 2 or more")
    if options.pp > 1:
        from lm.pipeline import schedule_class

        schedule_class(options)
    return folding


def _check_experts(options: Options) -> None:
    """Has each part of an expert whole columns, in fp8 as many as a scale is for?"""
    unit = options.etp * (16 if options.expert_precision == "fp8" else 1)
    if options.ffn % unit:
        raise UsageError(f"--ffn {options.ffn} must be a multiple of {unit} with --etp {options.etp}")


def _check_batch(options: Options, folding: ParallelFolding) -> None:
    if options.batch % folding.dp:
        ranks = "the number of ranks" if folding.dp == folding.world_size else "the data-parallel size"
        raise UsageError(f"--batch {options.batch} is not divisible by {ranks}, {folding.dp}")
    if options.batch // folding.dp % options.microbatches:
        raise UsageError(
            f"--batch {options.batch} is {options.batch // folding.dp} windows a rank, which do not divide "
            f"into --microbatches {options.microbatches}"
        )


def _check(options: Options) -> None:
    _check_attention(options)
    unit = 16 // {"float32": 4, "bfloat16": 2}[options.dtype]
    if options.dim % unit:
        raise UsageError(f"--dim {options.dim} must be a multiple of {unit} with --dtype {options.dtype}")
    if options.dense_layers >= options.layers:
        raise UsageError(
            f"--dense-layers {options.dense_layers} must be less than --layers {options.layers}: the others "
            "have the experts"
        )
    if options.dense_layers and not options.dense_ffn:
        raise UsageError(f"--dense-layers {options.dense_layers} needs --dense-ffn, above 0")
    for name in ("dim", "ffn"):
        if options.expert_precision == "fp8" and getattr(options, name) % 16:
            raise UsageError(
                f"--{name} {getattr(options, name)} must be a multiple of 16 for --expert-precision fp8"
            )
    _check_split(options)
    _check_pipeline(options)
    if options.fsdp and options.graph:
        raise UsageError("--graph: a graph is of weights that stay where they are: not with --fsdp")
    if options.weights == "bfloat16" and options.dtype != "bfloat16":
        raise UsageError(f"--weights bfloat16 needs --dtype bfloat16, not {options.dtype}")
    _check_memory(options)
    if options.graph and options.microbatches > 1:
        raise UsageError("--graph captures a step as a whole: not with --microbatches")
    if options.delay_wgrad and (options.microbatches == 1 or options.fsdp):
        reason = "one product of several microbatches: give --microbatches 2 or more"
        if options.fsdp:
            reason = "computed past the hooks by which FSDP shards gradients: not with --fsdp"
        raise UsageError(f"--delay-wgrad: the gradients of the experts' weights are {reason}")
    if options.top_k > options.experts:
        raise UsageError(f"--top-k {options.top_k} is more than --experts {options.experts}")
    if options.expert_bias and options.expert_precision == "fp8":
        raise UsageError("--expert-bias: experts in fp8 have none: not with --expert-precision fp8")
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is a file, not a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {error}") from None
    if not os.access(out, os.W_OK):
        raise UsageError(f"--out: {out} cannot be written to")


def _check_split(options: Options) -> None:
    """Can windows and heads be split over ranks as --tp and --cp say?"""
    tp, cp = options.tp, options.cp
    if tp == cp == 1:
        return
    given = f"--tp {tp}" if cp == 1 else f"--cp {cp}" if tp == 1 else f"--tp {tp} --cp {cp}"
    parts = tp * cp * (1 if cp == 1 else 2)
    if options.seq % parts:
        raise UsageError(f"--seq {options.seq} must be a multiple of {parts} with {given}")
    for name in ("heads", "kv_heads"):
        if getattr(options, name) % tp:
            flag = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise UsageError(f"{flag} must be a multiple of --tp {tp}")
    if options.sample:
        raise UsageError(f"--sample: text is written by ranks that see whole windows: not with {given}")
    if options.graph:
        raise UsageError(f"--graph: a graph is of whole windows: not with {given}")


def _check_memory(options: Options) -> None:
    """Is there what is to be computed again?"""
    if "mla-up" in options.recompute and options.attention != "latent":
        raise UsageError(f"--recompute mla-up is of --attention latent, not of {options.attention}")
    if "shared" in options.recompute and not options.shared_experts:
        raise UsageError("--recompute shared needs --shared-experts, above 0")
    if options.compile and {"norms", "mla-up", "attention", "all"} & set(options.recompute):
        raise UsageError("--compile: not with --recompute of what it compiles")


def _check_pipeline(options: Options) -> None:
    """Can layers and microbatches be shared out as --pp and the schedule say?"""
    pp, schedule = options.pp, options.schedule or "1f1b"
    if pp == 1:
        for name in ("schedule", "stages_per_rank"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')} {getattr(options, name)}"
                raise UsageError(f"{flag} is of pipelines: give --pp 2 or more")
        return
    per_rank = options.stages // pp
    if schedule == "1f1b" and per_rank != 1:
        raise UsageError(f"--stages-per-rank {per_rank} must be 1 with --schedule 1f1b")
    if schedule in V_SCHEDULES and per_rank != 2:
        raise UsageError(f"--stages-per-rank {per_rank} must be 2 with --schedule {schedule}")
    if options.layers < options.stages:
        raise UsageError(
            f"--layers {options.layers} is less than the {options.stages} stages of --pp {pp}, {per_rank} on "
            "a rank"
        )
    if options.tied:
        raise UsageError(f"--tied: embedding and output are of different stages with --pp {pp}: --no-tied")
    if options.sample:
        raise UsageError(f"--sample: text is written by ranks that hold all layers: not with --pp {pp}")
    if options.graph:
        raise UsageError(f"--graph: a graph is of a step on all layers: not with --pp {pp}")
    _check_microbatches(options, schedule)


def _check_microbatches(options: Options, schedule: str) -> None:
    count, pp = options.microbatches, options.pp
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if count < least:
        raise UsageError(
            f"--microbatches {count} must be at least {least} with --pp {pp} --schedule {schedule}"
        )
    if schedule in ("interleaved", "zero-bubble") and count % pp:
        raise UsageError(
            f"--microbatches {count} must be a multiple of {pp} with --pp {pp} --schedule {schedule}"
        )


def _check_attention(options: Options) -> None:
    if options.rope_factor < 1:
        raise UsageError(f"--rope-factor {options.rope_factor} must be at least 1; 1: no YaRN")
    if options.rope_factor > 1 and options.rope_base == 1:
        raise UsageError("--rope-base 1 has one frequency, which --rope-factor cannot scale")

    def flags(*names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]

    latent = ("q_rank", "kv_rank", "rope_dim", "value_dim")
    if options.attention == "latent":
        if missing := [name for name in ("head_dim", *latent) if not getattr(options, name)]:
            raise UsageError(f"--attention latent needs --{missing[0].replace('_', '-')}, above 0")
        if grouped := flags("kv_heads", "qk_norm", "qkv_bias", "out_bias", "window", "sinks"):
            raise UsageError(f"{grouped[0]} is of --attention grouped, not of latent")
        if options.rope_dim % 2:
            raise UsageError(f"--rope-dim {options.rope_dim} must be even")
        return
    if given := flags(*latent):
        raise UsageError(f"{given[0]} is of --attention latent, not of grouped")
    if options.head_dim % 2:
        raise UsageError(f"--head-dim {options.head_dim} must be even")
    if not options.head_dim and (options.dim % options.heads or (options.dim // options.heads) % 2):
        raise UsageError(
            f"--dim {options.dim} must be an even multiple of --heads {options.heads}, without --head-dim"
        )
    if options.kv_heads and options.heads % options.kv_heads:
        raise UsageError(f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}")


def _absolute_paths(values: dict[str, Any]) -> None:
    """A run may be resumed from another folder."""
    if values["data"] is not None:
        values["data"] = [os.path.abspath(os.path.expanduser(place)) for place in values["data"]]
    if values["tokenizer"] is not None:
        values["tokenizer"] = os.path.abspath(os.path.expanduser(values["tokenizer"]))


def _load_saved(out: Path) -> dict[str, Any]:
    try:
        saved = json.loads((out / FILE_NAME).read_text())
    except FileNotFoundError:
        raise UsageError(f"--resume: no run in {out} (no {FILE_NAME})") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--resume: {out / FILE_NAME}: {error}") from None
    if not isinstance(saved, dict):
        raise UsageError(f"--resume: {out / FILE_NAME} does not hold a run's options")
    known = {field.name for field in dataclasses.fields(Options)}
    return {**presets.PLAIN, **{name: value for name, value in saved.items() if name in known}}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option unless its help says in words what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help is not None and "(default:" in action.help
        return action.help if said or action.default in (None, "") else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 0 to 2**63 - 1")
    return value


def _recomputed(text: str) -> list[str]:
    names = text.split(",") if text else []
    for name in names:
        if name not in RECOMPUTED:
            raise argparse.ArgumentTypeError(
                f"invalid choice: {name!r} (choose from {', '.join(RECOMPUTED)})"
            )
    return names


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not a number of at least 0")
    return value


def _above_zero(text: str) -> float:
    value = _amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not a number above 0")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{value} is not a finite number of at least 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a mixture-of-experts language model on text; every token is routed by moecomm.",
        formatter_class=_HelpFormatter,
        epilog=f"--preset large, the default on GPUs, stands for {presets.describe('large')}",
    )
    parser.set_defaults(**presets.SMALL)
    add = parser.add_argument_group("text").add_argument
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, folders or globs (default: Python's own standard library)",
    )
    add("--tokenizer", metavar="FILE", help="a tokenizer.json of the tokenizers library (default: bytes)")
    add("--seq", type=_count, help="tokens of one training window")

    add = parser.add_argument_group("model").add_argument
    add(
        "--preset",
        choices=("auto", *presets.PRESETS),
        default="auto",
        help="defaults of all flags that say no other; auto: large on GPUs, else small, which is shown here",
    )
    switch = argparse.BooleanOptionalAction
    add("--vocab", type=_whole, help="entries of the vocabulary, at least the tokenizer's; 0: as many")
    add("--dim", type=_count, help="width of a token")
    add("--layers", type=_count, help="transformer blocks")
    add("--tied", action=switch, help="one matrix for the embedding and the output")
    add("--norm-eps", type=_above_zero, help="what norms add to the mean square")
    add("--dense-layers", type=_whole, help="first layers, which have a dense network in place of experts")
    add("--dense-ffn", type=_whole, help="inner width of that network")
    add("--experts", type=_count, help="experts of a layer, over all ranks")
    add("--top-k", type=_count, help="experts a token is sent to")
    add("--ffn", type=_count, help="inner width of one expert")
    add("--shared-experts", type=_whole, help="experts that every token is sent to")
    add("--shared-gate", action=switch, help="a gate that multiplies what the shared experts compute")
    add("--expert-bias", action=switch, help="biases after both products of an expert")
    add(
        "--activation",
        choices=("swiglu", "swiglu_interleaved", "swiglu_clamped"),
        help="of the experts: gates in the first half of the columns, or in the even ones, or these clamped",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the arithmetic, and of rows between ranks",
    )
    add(
        "--weights",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of matrices; of a bfloat16 one the optimizer has the other 16 bits of a float32 one",
    )
    add(
        "--moments",
        choices=("float32", "bfloat16"),
        default="float32",
        help="both of the optimizer, which computes in float32",
    )
    add(
        "--expert-precision",
        choices=("dtype", "fp8"),
        default="dtype",
        help="of the experts' products, forward and backward; fp8 takes H100 or H200, where it is GPUs",
    )
    add(
        "--wire",
        choices=("dtype", "fp8", "mxfp8", "nvfp4"),
        default="dtype",
        help="in which a dispatch's rows travel; gradients in dtype; others than dtype on GPUs",
    )
    add(
        "--combine-wire",
        choices=("dtype", "fp8"),
        default="dtype",
        help="in which a combine's sums travel; fp8 on GPUs",
    )
    add(
        "--gradient-wire",
        choices=("dtype", "fp8", "mxfp8"),
        default="dtype",
        help="in which gradients travel to the experts; others than dtype on GPUs",
    )

    add = parser.add_argument_group("attention").add_argument
    add("--attention", choices=("grouped", "latent"), help="grouped-query or multi-head latent attention")
    add("--heads", type=_count, help="attention heads")
    add("--kv-heads", type=_whole, help="heads of keys and values, which others share; 0: as many as heads")
    add("--head-dim", type=_whole, help="width of a head; latent: without its position; 0: dim / heads")
    add("--qk-norm", action=switch, help="a norm of each head's queries and keys")
    add("--qkv-bias", action=switch, help="biases of queries, keys and values")
    add("--out-bias", action=switch, help="a bias of the attention's output")
    add("--window", type=_whole, help="positions that every second layer sees, from the first on; 0: all")
    add("--sinks", action=switch, help="a trained logit of each head that has no value")
    add("--rope-base", type=_above_zero, help="base of the rotary frequencies")
    add("--rope-factor", type=_above_zero, help="above 1: YaRN, for windows so many times as long as before")
    add("--rope-positions", type=_count, help="of YaRN: positions of a window before")
    add("--rope-truncate", action=switch, help="of YaRN: its ramp begins and ends at whole frequencies")
    add("--rope-mscale", type=_amount, help="of YaRN: what grows all logits; 0: the rotated part alone grows")
    add("--q-rank", type=_whole, help="latent: width of the queries' latent")
    add("--kv-rank", type=_whole, help="latent: width of the latent of keys and values")
    add("--rope-dim", type=_whole, help="latent: width of the part of a head that has a position")
    add("--value-dim", type=_whole, help="latent: width of a head's values")

    add = parser.add_argument_group("routing").add_argument
    add("--score-function", choices=("softmax", "sigmoid"), help="of the router's logits")
    add("--pre-softmax", action=switch, help="softmax over all experts, and not over the chosen ones")
    add("--normalize-topk", action=switch, help="a token's weights sum to one, if it has several")
    add("--scaling-factor", type=_above_zero, help="what the weights are multiplied by")
    add("--router-bias", action=switch, help="a trained bias of each expert's logit")
    add("--num-groups", type=_whole, help="groups of experts, of which a token may use some; 0: none")
    add("--topk-groups", type=_whole, help="groups that a token may use")
    add("--bias-rate", type=_amount, help="step of the balancing biases of the router")
    add("--aux-loss", choices=("batch", "sequence"), help="tokens over which the balancing loss is taken")
    add("--aux-coef", type=_amount, help="weight of the balancing loss; 0: none")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_count, help="optimizer steps, from the first one on")
    add("--batch", type=_count, help="windows of one step, over all ranks")
    add("--lr", type=_amount, help="highest learning rate")
    add("--warmup", type=_count, help="steps in which the learning rate rises")
    add("--weight-decay", type=_amount, default=0.1, help="of matrices, not of norms")
    add("--clip", type=_amount, default=1.0, help="largest norm of the gradient; 0: any")
    add(
        "--max-skipped",
        type=_count,
        default=10,
        metavar="N",
        help="steps in a row that are left out, as the norm of the gradient is infinite or no number, before "
        "the run ends with an error",
    )
    add("--seed", type=_seed, default=0, help="of the weights and the batches")

    add = parser.add_argument_group("ranks").add_argument
    add("--ranks", type=_count, help="ranks to start when torchrun did not (default: one per GPU, else 2)")
    add("--tp", type=_count, default=1, help="ranks over which the heads of attention are split")
    add("--cp", type=_count, default=1, help="ranks over which each window is split")
    add("--pp", type=_count, default=1, help="ranks over which the layers are shared out")
    add("--ep", type=_count, help="ranks that share out the experts (default: as many as divide both)")
    add("--etp", type=_count, default=1, help="ranks over which each expert is split")
    add(
        "--schedule",
        choices=SCHEDULES,
        help="of --pp: the order of microbatches, by torch.distributed.pipelining (default: 1f1b)",
    )
    add(
        "--stages-per-rank",
        type=_count,
        metavar="N",
        help="of --pp: stages on a rank (default: 1 with 1f1b, 2 with the others)",
    )
    add(
        "--fsdp",
        action="store_true",
        help="shard weights, gradients and optimizer: matrices over the ranks of a stage, experts over those "
        "that hold the same",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the ranks compute")
    add(
        "--compile",
        action="store_true",
        help="torch.compile attention with its norm; takes half a minute at the start",
    )
    add(
        "--graph",
        action="store_true",
        help="on GPUs: forward and backward as a CUDA graph; steps whose rows do not fit run again without",
    )

    add(
        "--microbatches",
        "--accumulate",
        type=_count,
        default=1,
        help="parts of a step, forward and backward each, whose gradients are accumulated",
    )
    add(
        "--delay-wgrad",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute the gradients of the experts' weights at the end of a step, of all microbatches at "
        "once: faster where each brings few rows to an expert; rows are kept until then",
    )
    add(
        "--recompute",
        type=_recomputed,
        default=[],
        metavar="PART,...",
        help=f"what is computed again in the backward instead of kept, of {', '.join(RECOMPUTED)} (default: "
        "nothing)",
    )

    add = parser.add_argument_group("output").add_argument
    add("--out", default="runs/train_lm", metavar="DIR", help="metrics, pictures and checkpoints go here")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out, with that run's options",
    )
    add(
        "--sample",
        type=_count,
        nargs="?",
        const=400,
        default=0,
        metavar="N",
        help="write N tokens at the end; not with --tp, --cp or --pp",
    )
    add("--prompt", default="def ", help="what the sample starts from")
    add("--eval-every", type=_count, help="steps between validations")
    add("--eval-windows", type=_count, help="windows of held-out text in one validation")
    add("--save-every", type=_count, help="steps between checkpoints")
    add("--log-every", type=_count, help="steps between lines, and between expert loads in the metrics")
    add("--note", default="", help="text to show at the beginning, and again before the result")
    return parser
