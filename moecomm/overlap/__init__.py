"""Communication under computation: what runs beside what in a layer, and how to look at it.

`moecomm.nn.MoELayer` runs transfers beside products (moecomm/nn/expert_pass.py, from top to bottom); with
`layer.record = True` its `timelines()` say when each stage ran.
"""

from __future__ import annotations

from moecomm.overlap.beside import Beside, Turns, sms_beside_wgrad
from moecomm.overlap.merged import Block, CutBlock, Microbatch, forward_backward, run_microbatches, run_through
from moecomm.overlap.stages import Stages
from moecomm.overlap.timeline import Span, Timeline

__all__ = [
    "Beside",
    "Block",
    "CutBlock",
    "Microbatch",
    "Span",
    "Stages",
    "Timeline",
    "Turns",
    "forward_backward",
    "run_microbatches",
    "run_through",
    "sms_beside_wgrad",
]
