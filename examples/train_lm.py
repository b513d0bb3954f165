"""Train a mixture-of-experts language model on real text, every token routed by moecomm.

    python examples/train_lm.py                                   # starts two ranks; about three minutes
    python examples/train_lm.py --data ~/notes '~/src/**/*.md'    # other text: files, folders, globs
    python examples/train_lm.py --resume --steps 800              # go on; also with another --ranks or --ep
    torchrun --nproc-per-node 4 examples/train_lm.py --ep 2       # 2 data parallel x 2 expert parallel

Reads text files (default: Python's own standard library), holds some of them out, trains a decoder-only
transformer, and leaves in --out: metrics.jsonl, loss.png, expert_load.png, checkpoints/, and sample.txt if
--sample asks for it. The last line is the result. Ctrl-C ends the run after the current step, with a
checkpoint.

The pieces are in `lm/`, each short: options, ranks (processes), data, model, trainer (the loop), metrics,
checkpoint.
"""

from __future__ import annotations

import os
import sys

from lm import options as command_line
from lm.errors import UsageError
from lm.stop import StopRequest


def main() -> int:
    try:
        options = command_line.parse()
        if "LOCAL_RANK" not in os.environ:
            return start_ranks(options)
        stop = StopRequest()  # before torch is imported: from here on Ctrl-C is a request
        run_rank(options, stop)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train_lm.py: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def start_ranks(options: command_line.Options) -> int:
    """Checks all that can be checked before there are ranks, then runs this program again on each of them."""
    from pathlib import Path

    from lm import checkpoint, data, ranks, tokenizer

    count = ranks.default_ranks(options.device) if options.ranks is None else options.ranks
    command_line.check_ranks(options, count)
    data.find_files(options.data)
    tokenizer.make_tokenizer(options.tokenizer)
    if options.resume:
        checkpoint.newest(Path(options.out) / "checkpoints")
    return ranks.launch(sys.argv, count)


def run_rank(options: command_line.Options, stop: StopRequest) -> None:
    import torch.distributed as dist
    from lm import ranks
    from lm.trainer import train

    ranks.follow_parent()
    ep = command_line.check_ranks(options, int(os.environ["WORLD_SIZE"]))
    joined = ranks.join(ep, options.device)
    try:
        train(options, joined, stop)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
