"""Train a mixture-of-experts language model on real text, every token routed by moecomm.

    python examples/train_lm.py                                   # a rank on each GPU, else two on the CPU
    python examples/train_lm.py --data ~/notes '~/src/**/*.md'    # other text: files, folders, globs
    python examples/train_lm.py --resume --steps 800              # go on; also with another --ranks or --ep
    torchrun --nproc-per-node 4 examples/train_lm.py --ep 2       # 2 data parallel x 2 expert parallel
    torchrun --nproc-per-node 8 examples/train_lm.py --heads 8 --tp 2 --cp 2 --ep 4 --etp 2 --aux-coef 0
    torchrun --nproc-per-node 8 examples/train_lm.py --no-tied --pp 2 --schedule dualpipev --microbatches 4

The last two split attention, windows and experts over ranks, or distribute the layers (docs/folding.md).

On GPUs the model is larger than on the CPU, and computes in bfloat16; `--preset` chooses, and every size has
a flag.

It reads text files (default: Python's own standard library), holds some of them out, trains a decoder-only
transformer, and writes to --out: metrics.jsonl, loss.png, expert_load.png, checkpoints/, and sample.txt if
--sample asks for it. The last line is the result. Ctrl-C ends the run after the current step, with a
checkpoint. All ranks skip a step whose gradient has no finite norm. After --max-skipped of them in a row, or
if it is the last step, the run ends with an error and keeps the earlier checkpoints.

The pieces are in `lm/`, each short: options and the types of flags, presets (sizes), ranks (processes), data,
model, attention, head (the loss), parallel (windows and attention over ranks), pipeline (layers over ranks),
sharding (FSDP2), precision, optimizer, trainer (the loop), metrics, speed (TFLOP/s and MFU, on GPUs),
checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from lm import fitting
from lm import options as command_line
from lm.errors import UsageError, exit_code
from lm.files import only_run
from lm.stop import StopRequest


def main() -> int:
    return exit_code("train_lm.py", start)


def start() -> int:
    """Starts the ranks, or runs this one; returns the exit code."""
    if "LOCAL_RANK" not in os.environ:
        return start_ranks(command_line.parse())
    stop = StopRequest()  # before torch is imported: from here on Ctrl-C requests a stop
    stop.watch_output()
    run_rank(after_restart(command_line.parse()), stop)
    return 0


def after_restart(options: command_line.Options) -> command_line.Options:
    """Returns the options for ranks that torchrun has restarted after it lost one: they continue from the
    newest checkpoint, if there is one."""
    if options.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return options
    from lm import checkpoint

    there = checkpoint.finished(Path(options.out) / "checkpoints")
    return command_line.parse([*sys.argv[1:], "--resume"]) if there else options


def start_ranks(options: command_line.Options) -> int:
    """Checks all that can be checked without ranks, then starts this program on each of them."""
    from lm import data, ranks, tokenizer

    count = ranks.default_ranks(options.device, options.batch) if options.ranks is None else options.ranks
    fitting.check_ranks(options, count)
    data.split_files(data.find_files(options.data, Path(options.out)))
    tokenizer.make_tokenizer(options.tokenizer)
    if options.resume:
        from lm import checkpoint  # imported late: it takes a second

        checkpoint.newest(Path(options.out) / "checkpoints")
    return ranks.launch(sys.argv, count)


@contextlib.contextmanager
def room_for(options: command_line.Options) -> Iterator[None]:
    """Keeps other runs out of this run's folder. A new run first sets an earlier run's checkpoints aside:
    after a restart by torchrun they would be taken for its own. If it does not begin, because its options are
    wrong, they are put back."""
    from lm import checkpoint

    out = Path(options.out)
    checkpoints, aside = out / "checkpoints", None
    with only_run(out):
        if not options.resume:
            aside = checkpoint.set_aside(checkpoints)
        if aside is not None:
            print(f"a new run: the checkpoints of the earlier one are now in {aside}", flush=True)
        try:
            yield
        except UsageError:
            if aside is not None and not checkpoints.exists():
                checkpoint.put_back(checkpoints)
            raise


def run_rank(options: command_line.Options, stop: StopRequest) -> None:
    from lm import ranks
    from lm.trainer import train

    folding = fitting.check_ranks(options, int(os.environ["WORLD_SIZE"]))
    room = room_for(options) if os.environ["RANK"] == "0" else contextlib.nullcontext()
    with room, ranks.joined(folding, options.device) as joined:
        stop.joined = True
        train(options, joined, stop)


if __name__ == "__main__":
    sys.exit(main())
