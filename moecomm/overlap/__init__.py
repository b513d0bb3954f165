"""Communication under computation: what runs beside what, and how to look at it.

`moecomm.nn.MoELayer` runs transfers beside products of its own (moecomm/nn/expert_pass.py, from top to
bottom); with `OverlapConfig(record=True)` its `timelines()` say when each stage ran. `run_microbatches` runs
the transfers of one microbatch beside the computation of another; `merge_stages` does so in a pipeline.
"""

from __future__ import annotations

from moecomm.overlap.beside import Beside, sms_beside_wgrad
from moecomm.overlap.blocks import Block
from moecomm.overlap.merged import Microbatch, forward_backward, run_microbatches
from moecomm.overlap.pipelining import MergedStage, merge_stages
from moecomm.overlap.stages import Stages
from moecomm.overlap.timeline import Span, Timeline

__all__ = [
    "Beside",
    "Block",
    "MergedStage",
    "Microbatch",
    "Span",
    "Stages",
    "Timeline",
    "forward_backward",
    "merge_stages",
    "run_microbatches",
    "sms_beside_wgrad",
]
