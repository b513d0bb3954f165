"""The command line of `train_lm.py`: its options, and which of them a resumed run keeps.

`Options` declares every option once: its fields have the arguments for `argparse` and say what `--resume`
does with a value. `fitting.py` checks which values fit together; `presets.py` has the defaults for a machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm import fitting, presets
from lm.errors import UsageError
from lm.files import write_whole
from lm.fitting import SCHEDULES, flag
from lm.flags import Help, Parser, above_zero, amount, count, integer, whole

FILE_NAME = "options.json"

RECOMPUTED = ("norms", "mla-up", "shared", "fc1", "dispatch", "moe", "attention", "all")

# What `--resume` does with the earlier run's value of an option.
FIXED = "fixed"  # refuses another value: that would be another model or other batches
KEPT = "kept"  # keeps it, unless the command line has another
PER_CALL = "per call"  # nothing: the option belongs to one call, not to the run

DTYPES = ("float32", "bfloat16")
SWITCH = argparse.BooleanOptionalAction


def _seed(text: str) -> int:
    value = integer(text)
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


def _flag(
    help: str,
    type: Callable[[str], Any] = str,
    resumed: str = KEPT,
    *,
    group: str | None = None,
    also: tuple[str, ...] = (),
    **argument: Any,
) -> Any:
    """Returns a field of `Options`. `help`, `type` and `argument` go to `add_argument`; `resumed` is FIXED,
    KEPT or PER_CALL; `group` begins a group of `--help`; `also` has further names of the flag. If `argument`
    has no default, the preset's is used."""
    if "action" not in argument:
        argument["type"] = type
    argument["help"] = help
    return dataclasses.field(
        metadata={"argument": argument, "resumed": resumed, "group": group, "also": also}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the program, in the order of `--help`."""

    data: Sequence[str] | None = _flag(
        "files, folders or globs (default: Python's own standard library)",
        resumed=FIXED,
        group="text",
        nargs="+",
        metavar="PATH",
    )
    tokenizer: str | None = _flag(
        "a tokenizer.json of the tokenizers library (default: bytes)", resumed=FIXED, metavar="FILE"
    )
    seq: int = _flag("tokens of one training window", count, FIXED)

    preset: str = _flag(
        "defaults of all flags that say no other; auto: large on GPUs, else small, which is shown here",
        resumed=PER_CALL,
        group="model",
        choices=("auto", *presets.PRESETS),
        default="auto",
    )
    vocab: int = _flag("entries of the vocabulary, at least the tokenizer's; 0: as many", whole, FIXED)
    dim: int = _flag("width of a token", count, FIXED)
    layers: int = _flag("transformer blocks", count, FIXED)
    tied: bool = _flag("one matrix for the embedding and the output", resumed=FIXED, action=SWITCH)
    norm_eps: float = _flag("what norms add to the mean square", above_zero, FIXED)
    dense_layers: int = _flag("first layers, which have a dense network in place of experts", whole, FIXED)
    dense_ffn: int = _flag("inner width of that network", whole, FIXED)
    experts: int = _flag("experts of a layer, over all ranks", count, FIXED)
    top_k: int = _flag("experts a token is sent to", count, FIXED)
    ffn: int = _flag("inner width of one expert", count, FIXED)
    shared_experts: int = _flag("experts that every token is sent to", whole, FIXED)
    shared_gate: bool = _flag(
        "a gate that multiplies what the shared experts compute", resumed=FIXED, action=SWITCH
    )
    expert_bias: bool = _flag("biases after both products of an expert", resumed=FIXED, action=SWITCH)
    activation: str = _flag(
        "of the experts: gates in the first half of the columns, or in the even ones, or these clamped",
        resumed=FIXED,
        choices=("swiglu", "swiglu_interleaved", "swiglu_clamped"),
    )
    dtype: str = _flag("of the arithmetic, and of rows between ranks", choices=DTYPES)
    weights: str = _flag(
        "of matrices; of a bfloat16 one the optimizer has the other 16 bits of a float32 one",
        resumed=FIXED,
        choices=DTYPES,
        default="float32",
    )
    moments: str = _flag(
        "both of the optimizer, which computes in float32", resumed=FIXED, choices=DTYPES, default="float32"
    )
    wire: str = _flag(
        "in which a dispatch's rows travel; gradients in dtype; others than dtype on GPUs",
        choices=("dtype", "fp8", "mxfp8"),
        default="dtype",
    )
    combine_wire: str = _flag(
        "in which a combine's sums travel; fp8 on GPUs", choices=("dtype", "fp8"), default="dtype"
    )
    gradient_wire: str = _flag(
        "in which gradients travel to the experts; others than dtype on GPUs",
        choices=("dtype", "fp8", "mxfp8"),
        default="dtype",
    )

    attention: str = _flag(
        "grouped-query or multi-head latent attention",
        resumed=FIXED,
        group="attention",
        choices=("grouped", "latent"),
    )
    heads: int = _flag("attention heads", count, FIXED)
    kv_heads: int = _flag("heads of keys and values, which others share; 0: as many as heads", whole, FIXED)
    head_dim: int = _flag("width of a head; latent: without its position; 0: dim / heads", whole, FIXED)
    qk_norm: bool = _flag("a norm of each head's queries and keys", resumed=FIXED, action=SWITCH)
    qkv_bias: bool = _flag("biases of queries, keys and values", resumed=FIXED, action=SWITCH)
    out_bias: bool = _flag("a bias of the attention's output", resumed=FIXED, action=SWITCH)
    window: int = _flag("positions that every second layer sees, from the first on; 0: all", whole, FIXED)
    sinks: bool = _flag("a trained logit of each head that has no value", resumed=FIXED, action=SWITCH)
    rope_base: float = _flag("base of the rotary frequencies", above_zero, FIXED)
    rope_factor: float = _flag(
        "above 1: YaRN, for windows so many times as long as before", above_zero, FIXED
    )
    rope_positions: int = _flag("of YaRN: positions of a window before", count, FIXED)
    rope_truncate: bool = _flag(
        "of YaRN: its ramp begins and ends at whole frequencies", resumed=FIXED, action=SWITCH
    )
    rope_mscale: float = _flag(
        "of YaRN: what grows all logits; 0: the rotated part alone grows", amount, FIXED
    )
    q_rank: int = _flag("latent: width of the queries' latent", whole, FIXED)
    kv_rank: int = _flag("latent: width of the latent of keys and values", whole, FIXED)
    rope_dim: int = _flag("latent: width of the part of a head that has a position", whole, FIXED)
    value_dim: int = _flag("latent: width of a head's values", whole, FIXED)

    score_function: str = _flag(
        "of the router's logits", resumed=FIXED, group="routing", choices=("softmax", "sigmoid")
    )
    pre_softmax: bool = _flag(
        "softmax over all experts, and not over the chosen ones", resumed=FIXED, action=SWITCH
    )
    normalize_topk: bool = _flag(
        "a token's weights sum to one, if it has several", resumed=FIXED, action=SWITCH
    )
    scaling_factor: float = _flag("what the weights are multiplied by", above_zero, FIXED)
    router_bias: bool = _flag("a trained bias of each expert's logit", resumed=FIXED, action=SWITCH)
    num_groups: int = _flag("groups of experts, of which a token may use some; 0: none", whole, FIXED)
    topk_groups: int = _flag("groups that a token may use", whole, FIXED)
    bias_rate: float = _flag("step of the balancing biases of the router", amount)
    aux_loss: str = _flag("tokens over which the balancing loss is taken", choices=("batch", "sequence"))
    aux_coef: float = _flag("weight of the balancing loss; 0: none", amount)

    steps: int = _flag("optimizer steps, from the first one on", count, group="training")
    batch: int = _flag("windows of one step, over all ranks", count, FIXED)
    lr: float = _flag("highest learning rate", amount)
    warmup: int = _flag("steps in which the learning rate rises", count)
    weight_decay: float = _flag("of matrices, not of norms", amount, default=0.1)
    clip: float = _flag("largest norm of the gradient; 0: any", amount, default=1.0)
    max_skipped: int = _flag(
        "steps in a row that are left out, as the norm of the gradient is infinite or no number, before "
        "the run ends with an error",
        count,
        default=10,
        metavar="N",
    )
    seed: int = _flag("of the weights and the batches", _seed, FIXED, default=0)

    ranks: int | None = _flag(
        "ranks to start when torchrun did not (default: one per GPU, else 2)", count, PER_CALL, group="ranks"
    )
    tp: int = _flag("ranks over which the heads of attention are split", count, PER_CALL, default=1)
    cp: int = _flag("ranks over which each window is split", count, PER_CALL, default=1)
    pp: int = _flag("ranks over which the layers are shared out", count, PER_CALL, default=1)
    ep: int | None = _flag(
        "ranks that share out the experts (default: as many as divide both)", count, PER_CALL
    )
    etp: int = _flag("ranks over which each expert is split", count, PER_CALL, default=1)
    schedule: str | None = _flag(
        "of --pp: the order of microbatches, by torch.distributed.pipelining (default: 1f1b)",
        resumed=PER_CALL,
        choices=SCHEDULES,
    )
    stages_per_rank: int | None = _flag(
        "of --pp: stages on a rank (default: 1 with 1f1b, 2 with the others)", count, PER_CALL, metavar="N"
    )
    fsdp: bool = _flag(
        "shard weights, gradients and optimizer: matrices over the ranks of a stage, experts over those "
        "that hold the same",
        resumed=PER_CALL,
        action="store_true",
    )
    device: str = _flag(
        "where the ranks compute", resumed=PER_CALL, choices=("auto", "cpu", "cuda"), default="auto"
    )
    compile: bool | None = _flag(
        "torch.compile what comes before a block's feed-forward layer, which takes seconds at the start "
        "(default: on GPUs, where that is possible)",
        resumed=PER_CALL,
        action=SWITCH,
        default=None,
    )
    graph: bool | None = _flag(
        "on GPUs: forward and backward as a CUDA graph, apart from steps whose transfers are timed; steps "
        "whose rows do not fit run again without (default: where that is possible, and memory has room "
        "for three times what a step takes)",
        resumed=PER_CALL,
        action=SWITCH,
        default=None,
    )
    microbatches: int = _flag(
        "parts of a step, forward and backward each, whose gradients are accumulated",
        count,
        also=("--accumulate",),
        default=1,
    )
    delay_wgrad: bool = _flag(
        "compute the gradients of the experts' weights at the end of a step, of all microbatches at "
        "once: faster where each brings few rows to an expert; rows are kept until then",
        resumed=PER_CALL,
        action=SWITCH,
        default=False,
    )
    recompute: Sequence[str] = _flag(
        f"what is computed again in the backward instead of kept, of {', '.join(RECOMPUTED)} (default: "
        "nothing)",
        _recomputed,
        default=[],
        metavar="PART,...",
    )

    out: str = _flag(
        "metrics, pictures and checkpoints go here",
        resumed=PER_CALL,
        group="output",
        default="runs/train_lm",
        metavar="DIR",
    )
    resume: bool = _flag(
        "go on from the newest checkpoint in --out, with that run's options",
        resumed=PER_CALL,
        action="store_true",
    )
    sample: int = _flag(
        "write N tokens at the end; not with --tp, --cp or --pp",
        count,
        PER_CALL,
        nargs="?",
        const=400,
        default=0,
        metavar="N",
    )
    prompt: str = _flag("what the sample starts from", resumed=PER_CALL, default="def ")
    eval_every: int = _flag("steps between validations", count)
    eval_windows: int = _flag("windows of held-out text in one validation", count)
    save_every: int = _flag("steps between checkpoints", count)
    log_every: int = _flag("steps between lines, and between expert loads in the metrics", count)
    note: str = _flag(
        "text to show at the beginning, and again before the result", resumed=PER_CALL, default=""
    )

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks of a pipeline."""
        usual = 1 if self.schedule in (None, "1f1b") else 2
        return self.pp * (usual if self.stages_per_rank is None else self.stages_per_rank)

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the options for a later `--resume`; returns those that differ from the resumed run's."""
        kept = {name: getattr(self, name) for name in _names(FIXED, KEPT)}
        before = _load_saved(folder) if self.resume else kept
        write_whole(folder / FILE_NAME, json.dumps(kept, indent=1) + "\n")
        return {name: value for name, value in kept.items() if value != before.get(name)}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Returns the options, checked as far as possible without the number of ranks. Raises UsageError."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    parser.set_defaults(**presets.choose(values["preset"], values["device"]))
    if values["resume"]:
        # The options of the earlier run replace the defaults, so that `--resume` alone continues it.
        saved = _load_saved(Path(values["out"]))
        parser.set_defaults(**saved)
    values = vars(parser.parse_args(arguments))
    _absolute_paths(values)
    if values["resume"]:
        for name in _names(FIXED):
            if name in saved and values[name] != saved[name]:
                raise UsageError(
                    f"--resume: this run has {flag(name)} {saved[name]}, which cannot become {values[name]}"
                )
    options = Options(**values)
    fitting.check(options)
    return options


def _names(*resumed: str) -> list[str]:
    """Returns the fields for which `--resume` does one of these."""
    return [field.name for field in dataclasses.fields(Options) if field.metadata["resumed"] in resumed]


def _absolute_paths(values: dict[str, Any]) -> None:
    """Makes paths absolute, since a run may be resumed from another folder."""
    if values["data"] is not None:
        values["data"] = [os.path.abspath(os.path.expanduser(place)) for place in values["data"]]
    if values["tokenizer"] is not None:
        values["tokenizer"] = os.path.abspath(os.path.expanduser(values["tokenizer"]))


def _load_saved(out: Path) -> dict[str, Any]:
    return {**presets.PLAIN, **_parser().saved(out / FILE_NAME)}


def _parser() -> Parser:
    parser = Parser(
        prog="train_lm.py",
        description="Train a mixture-of-experts language model on text; every token is routed by moecomm.",
        formatter_class=Help,
        epilog=f"--preset large, the default on GPUs, stands for {presets.describe('large')}",
    )
    parser.set_defaults(**presets.SMALL)
    for field in dataclasses.fields(Options):
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        group.add_argument(flag(field.name), *field.metadata["also"], **field.metadata["argument"])
    return parser
