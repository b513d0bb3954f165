#!/usr/bin/env python3
"""Times the raw exchange, verified first. See --help.

moecomm's dispatch with balanced top-1 routing and one expert a rank is an all-to-all of equal blocks; next to
it gloo's all_to_all_single of the same rows and a memcpy of as many bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness.entry import main

if __name__ == "__main__":
    raise SystemExit(main("alltoall"))
