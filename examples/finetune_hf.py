"""Fine-tune a mixture-of-experts model of Hugging Face, with moecomm carrying its experts' tokens.

    python examples/finetune_hf.py                                # a small model and text of its own
    python examples/finetune_hf.py ~/models/Qwen3-30B-A3B notes/  # all weights, on all GPUs
    python examples/finetune_hf.py ~/models/gpt-oss-20b chats.jsonl --lora
    python examples/finetune_hf.py --resume --steps 300           # goes on; also with another --ranks
    torchrun --nproc-per-node 8 examples/finetune_hf.py MODEL_FOLDER TEXT...

MODEL_FOLDER is a folder of save_pretrained or a download: config, safetensors, tokenizer. TEXT are files and
folders. A line of a .jsonl file, or an element of a .json file's array, is a record: {"text": ...},
{"messages": [...]}, {"prompt": ..., "completion": ...} and others (finetune/records.py). Sizes are checked
before the weights are read; a run that does not fit is refused, with options that would.

In --out: checkpoints, model/ (for from_pretrained; with --lora the adapters alone), metrics.jsonl,
tensorboard/, report.html. The last line is the result. Ctrl-C ends the run after a step, with a checkpoint.
Steps whose gradient has no finite norm are left out; after --max-skipped of them in a row the run ends.

The parts are in `finetune/`: options, records and text (windows), sizes (what fits), run (model and Trainer),
watch (load, stages), report, demo.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from finetune.options import Options, parse
from lm.errors import UsageError, exit_code
from lm.files import only_run
from lm.stop import StopRequest


def main() -> int:
    return exit_code("finetune_hf.py", start)


def start() -> int:
    """Starts the ranks, or runs this one; returns the exit code."""
    if "LOCAL_RANK" not in os.environ:
        return start_ranks(parse())
    stop = StopRequest()  # before torch is imported: from here on Ctrl-C requests a stop
    stop.watch_output()
    run_rank(parse(), stop)
    return 0


def start_ranks(options: Options) -> int:
    """Checks what needs no ranks, then starts this program on each of them."""
    from finetune.text import find_files
    from lm import ranks

    require_packages()
    if options.model is not None:
        if not (Path(options.model) / "config.json").is_file():
            raise UsageError(
                f"MODEL_FOLDER {options.model} has no config.json: it must be a model's folder; "
                "`hf download NAME --local-dir FOLDER` brings one from the Hub"
            )
        find_files(options.text)
    return ranks.launch(sys.argv, options.ranks or ranks.default_ranks(options.device))


def require_packages() -> None:
    """Raises UsageError for missing packages."""
    from importlib.util import find_spec

    needed = ("transformers", "accelerate", "peft", "tensorboard", "matplotlib")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UsageError(f"not installed: {' '.join(missing)}; pip install 'moecomm[finetune]'")


def run_rank(options: Options, stop: StopRequest) -> None:
    from lm import ranks

    room = only_run(options.folder) if os.environ["RANK"] == "0" else contextlib.nullcontext()
    with room, ranks.process_group(options.device) as device:
        stop.joined = True
        from finetune.run import run

        run(options, device, stop)


if __name__ == "__main__":
    sys.exit(main())
