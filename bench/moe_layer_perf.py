#!/usr/bin/env python3
"""Times whole mixture-of-experts layers, forward and backward, verified first: communication hidden and not,
next to its products alone and to a plain framework's layer. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness.entry import main

if __name__ == "__main__":
    raise SystemExit(main("moe_layer"))
