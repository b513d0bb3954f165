"""Communication under computation: what runs beside what, and how to look at it.

`moecomm.nn.MoELayer` runs transfers beside products of its own (moecomm/nn/expert_pass.py, from top to
bottom); with `OverlapConfig(record=True)` its `timelines()` say when each stage ran.
"""

from __future__ import annotations

from moecomm.overlap.side_stream import SideStream
from moecomm.overlap.stages import Span, Stages, Timeline

__all__ = ["SideStream", "Span", "Stages", "Timeline"]
