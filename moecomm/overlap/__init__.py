"""Overlap of communication with computation, and how to measure it.

`moecomm.nn.MoELayer` overlaps transfers with its own products (moecomm/nn/expert_pass.py); with
`OverlapConfig(record=True)` its `timelines()` say when each stage ran.
"""

from __future__ import annotations

from moecomm.overlap.side_stream import SideStream
from moecomm.overlap.stages import Span, Stages, Timeline

__all__ = ["SideStream", "Span", "Stages", "Timeline"]
