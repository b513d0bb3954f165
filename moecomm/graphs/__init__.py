"""Training steps in CUDA graphs. `moecomm.nn` exports GraphedStep as well."""

from __future__ import annotations

from moecomm.graphs.graphed_step import GraphedStep

__all__ = ["GraphedStep"]
