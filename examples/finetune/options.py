"""The command line of finetune_hf.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lm.errors import UsageError
from lm.files import write_whole
from lm.flags import Help, Parser, amount, count, integer

FILE_NAME = "options.json"
NOT_KEPT = ("resume", "ranks", "note")
DEMO = {"seq": 128, "batch": 4, "steps": 80, "lr": 2e-3, "balance": 0.05}
DEMO |= {"eval_every": 40, "save_every": 40}
"""The options with which the small model is trained."""
FIXED = ("model", "text", "lora", "lora_experts", "rank", "seq", "seed")
"""The options that a resumed run must keep."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run; `_parser` says what each one means."""

    model: str | None
    text: list[str]
    out: str
    lora: bool
    lora_experts: bool
    rank: int
    seq: int
    batch: int
    accumulate: int
    steps: int
    lr: float
    warmup: float
    balance: float
    max_skipped: int
    seed: int
    ep: int | None
    implementation: str
    recompute: bool | None
    graph: bool | None
    device: str
    eval_every: int
    save_every: int
    log_every: int
    sample: int
    prompt: str
    ranks: int | None
    resume: bool
    note: str

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def save(self) -> None:
        """Writes the options that `--resume` continues with."""
        kept = {name: value for name, value in asdict(self).items() if name not in NOT_KEPT}
        write_whole(self.folder / FILE_NAME, json.dumps(kept, indent=1) + "\n")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Returns the options; with --resume, those of the earlier run with the changes of the command line.
    Raises UsageError."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    if values["resume"]:
        saved = parser.saved(Path(values["out"]) / FILE_NAME)
        parser.set_defaults(**{**saved, "out": values["out"]})
        values = vars(parser.parse_args(arguments))
        for name in FIXED:
            if values[name] != saved.get(name):
                raise UsageError(
                    f"--resume: {name} is {values[name]}, the run in {values['out']} has {saved.get(name)}"
                )
    elif values["model"] is None:
        parser.set_defaults(**DEMO)
        values = vars(parser.parse_args(arguments))
    values["lora"] |= values["lora_experts"]
    if values["lr"] is None:
        values["lr"] = 1e-4 if values["lora"] else 1e-5
    if values["model"] is not None and not values["text"]:
        raise UsageError(f"{values['model']} has nothing to train on: name files or folders of text after it")
    return Options(**values)


def _seed(text: str) -> int:
    value = integer(text)
    if not 0 <= value < 1 << 32:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 0 to 2**32 - 1")
    return value


def _part(text: str) -> float:
    value = amount(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="finetune_hf.py",
        description="Fine-tune a mixture-of-experts model of Hugging Face, on all GPUs or on the CPU.",
        formatter_class=Help,
        epilog="Without a model, a small one and its text are made.",
    )
    switch, add = argparse.BooleanOptionalAction, parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL_FOLDER",
        help="a model as save_pretrained writes it, with its tokenizer",
    )
    add("text", nargs="*", metavar="TEXT", help="text files, .json and .jsonl files, folders of them")
    add("--out", default="runs/finetune", help="where checkpoints, metrics, report and model go")
    add("--lora", action="store_true", help="train adapters beside the attention, and no other weight")
    add("--lora-experts", action="store_true", help="--lora, with adapters on the experts' weights, too")
    add("--rank", type=count, default=16, metavar="R", help="columns of an adapter")
    add("--seq", type=count, default=1024, metavar="TOKENS", help="tokens of a window")
    add("--batch", type=count, default=1, metavar="WINDOWS", help="windows of a rank in one pass")
    add("--accumulate", type=count, default=1, metavar="PASSES", help="passes of one step")
    add("--steps", type=count, default=100, help="optimizer's steps in all")
    add("--lr", type=amount, help="the highest learning rate (default: 1e-5, with --lora 1e-4)")
    add("--warmup", type=_part, default=0.05, metavar="PART", help="part of the steps in which it rises")
    add(
        "--balance",
        type=amount,
        default=0.0,
        metavar="WEIGHT",
        help="weight of a loss that balances the experts of each layer, beside what the model's config adds",
    )
    add(
        "--max-skipped",
        type=count,
        default=10,
        metavar="N",
        help="steps in a row that are left out, as the norm of the gradient is infinite or no number, before "
        "the run ends with an error",
    )
    add("--seed", type=_seed, default=0, help="of new adapters and of the order of windows")
    add(
        "--ep",
        type=count,
        metavar="RANKS",
        help="ranks that share the experts (default: the most that divide all ranks and the experts)",
    )
    add(
        "--implementation",
        default="moecomm",
        help="what brings the experts their tokens; all_to_all is transformers' own",
    )
    add("--recompute", action=switch, help="compute layers twice to save memory (default: if needed)")
    add(
        "--graph",
        action=switch,
        help="replay each pass as a CUDA graph (default: on one GPU, for models that are tested so)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    add("--eval-every", type=count, default=50, metavar="STEPS", help="from one held-out loss to the next")
    add("--save-every", type=count, default=50, metavar="STEPS", help="from one checkpoint to the next")
    add("--log-every", type=count, default=5, metavar="STEPS", help="from one line to the next")
    add("--sample", type=int, default=60, metavar="TOKENS", help="tokens to write at the end")
    add("--prompt", default="", help="what they go on from (default: the beginning of held-out text)")
    add("--ranks", type=count, help="processes (default: one a GPU; two on the CPU)")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out, with that run's options",
    )
    add("--note", default="", help=argparse.SUPPRESS)
    return parser
