#!/usr/bin/env python3
"""Times moecomm's combine, verified first, next to torch permutes around all_to_all_single, and ceilings.

--help lists the flags."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a file: where bench/ is

from bench.harness.launch import main

if __name__ == "__main__":
    raise SystemExit(main("combine"))
