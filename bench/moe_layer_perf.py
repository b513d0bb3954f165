#!/usr/bin/env python3
"""Times whole layers, forward and backward, next to their products alone and a plain framework's layer.

--help lists the flags."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a file: where bench/ is

from bench.harness.launch import main

if __name__ == "__main__":
    raise SystemExit(main("moe_layer"))
