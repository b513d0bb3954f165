"""Training steps in CUDA graphs. The name is importable from `moecomm.nn` as well."""

from __future__ import annotations

from moecomm.graphs.graphed_step import GraphedStep

__all__ = ["GraphedStep"]
