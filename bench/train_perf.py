#!/usr/bin/env python3
"""Times optimizer steps of examples/train_lm.py, whose flags it takes, beside the same model in torch alone.

    python bench/train_perf.py --preset qwen3-30b-a3b --layers 4
    torchrun --nproc-per-node 8 bench/train_perf.py --preset mixtral-8x22b --layers 2 --tp 2 --ep 8

--help lists the flags of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Ctrl-C reaches all processes of a terminal: a rank ends at once, wherever it is.
if "LOCAL_RANK" in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The pieces of train_lm.py are `lm` there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from bench.harness.training import main

if __name__ == "__main__":
    raise SystemExit(main())
