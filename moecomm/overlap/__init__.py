"""Communication under computation: schedules of stages, how they are run and looked at.

    from moecomm.overlap import Executor, Schedule, Stage

    schedule = Schedule(
        [
            Stage(name="dispatch", stream="comm", communicates=True),
            Stage(name="shared", stream="compute"),
            Stage(name="experts", stream="compute", after=("dispatch",)),
        ],
        streams=("compute", "comm"),
    )
    executor = Executor(comm.device, {"comm": comm.stream})
    results = executor.run(schedule, {"dispatch": ..., "shared": ..., "experts": ...}, record=True)
    results.timeline().chrome_trace("layer.json")

`moecomm.nn.MoELayer` runs by the schedules of `moecomm.overlap.moe`.

Attributes:
    H200: the `Rates` of one H200 with torch 2.11.
    Keep: "all", "rows" or "nothing", what a layer's forward keeps of the experts' rows for its backward.
    Work: what to do in each stage, by its name: a function of the `Results` so far, which puts work on the
        current stream and returns what later stages take.
"""

from __future__ import annotations

from moecomm.overlap.executor import Executor, Recorded, Results, Work
from moecomm.overlap.interleave import in_turns, interleave, pause
from moecomm.overlap.moe import (
    Keep,
    Split,
    backward_schedule,
    forward_schedule,
    recompute_schedule,
    sms_beside_products,
)
from moecomm.overlap.schedule import Schedule, Stage
from moecomm.overlap.timeline import Span, Timeline

__all__ = [
    "Executor",
    "Keep",
    "Recorded",
    "Results",
    "Schedule",
    "Span",
    "Split",
    "Stage",
    "Timeline",
    "Work",
    "backward_schedule",
    "forward_schedule",
    "in_turns",
    "interleave",
    "pause",
    "recompute_schedule",
    "sms_beside_products",
]
