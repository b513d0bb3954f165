#!/usr/bin/env python3
"""Times moecomm's dispatch, verified first, next to torch permutes around all_to_all_single, and ceilings.

--help lists the flags."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness.launch import main

if __name__ == "__main__":
    raise SystemExit(main("dispatch"))
