"""Puts the packages of compat/ on the path, which an installation of moecomm has not."""

import sys
from pathlib import Path

COMPAT = Path(__file__).parents[1] / "compat" / "deep_ep"
sys.path.insert(0, str(COMPAT))
