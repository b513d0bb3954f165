"""The schedules of a mixture-of-experts layer: which of its stages wait for which, and on what stream.

    stream   forward
    comm     publish, dispatch                                 combine
    compute           shared experts   up, activation, down             sum

    stream   backward
    comm     rows again, gradient rows                                     home
    compute  shared backward, up again  down-, activation-, up backward   down weights, up weights, sum

The way to the experts lies under the shared experts, which need no rows from elsewhere; the way back of the
gradients under those of the weights, which nobody waits for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from moecomm.overlap.schedule import Schedule, Stage

COMPUTE, COMM = "compute", "comm"

Keep = Literal["all", "rows", "nothing"]
"""What a forward keeps for its backward, of what the experts have per row. "all": the rows and the first
product, P * (H + I) values. "rows": the rows; the first product is made again. "nothing": the rows come once
more along the kept plan, while the gradients are on their way too, and then the first product."""


@lru_cache
def forward_schedule(*, shared: bool) -> Schedule:
    """`shared`: there are shared experts."""
    stages = [Stage(name="publish", stream=COMM, communicates=True)]
    if shared:
        stages.append(Stage(name="shared experts", stream=COMPUTE))
    stages += [
        Stage(name="dispatch", stream=COMM, after=("publish",), communicates=True),
        Stage(name="up", stream=COMPUTE, after=("dispatch",)),
        Stage(name="activation", stream=COMPUTE, after=("up",)),
        Stage(name="down", stream=COMPUTE, after=("activation",)),
        Stage(name="combine", stream=COMM, after=("down",), communicates=True),
    ]
    if shared:
        stages.append(Stage(name="sum", stream=COMPUTE, after=("combine", "shared experts")))
    return Schedule(stages, streams=(COMPUTE, COMM))


@lru_cache
def backward_schedule(*, shared: bool, keep: Keep, home: bool, weights: bool) -> Schedule:
    """`home`: tokens or routing weights need gradients; `weights`: those of the experts do, now."""
    stages = []
    if keep == "nothing":
        stages.append(Stage(name="rows again", stream=COMM, communicates=True))
    stages.append(Stage(name="gradient rows", stream=COMM, communicates=True))
    if shared:
        stages.append(Stage(name="shared backward", stream=COMPUTE))
    if keep != "all":
        rows = ("rows again",) if keep == "nothing" else ()
        stages.append(Stage(name="up again", stream=COMPUTE, after=rows))
    first = ("up again",) if keep != "all" else ()
    stages += [
        Stage(name="down backward", stream=COMPUTE, after=("gradient rows",)),
        Stage(name="activation backward", stream=COMPUTE, after=("down backward", *first)),
    ]
    if home:
        stages += [
            Stage(name="up backward", stream=COMPUTE, after=("activation backward",)),
            Stage(name="home", stream=COMM, after=("up backward",), communicates=True),
        ]
    if weights:
        stages += [
            Stage(name="down weights", stream=COMPUTE, after=("gradient rows", "activation backward")),
            Stage(name="up weights", stream=COMPUTE, after=("activation backward",)),
        ]
    if shared and home:
        stages.append(Stage(name="sum", stream=COMPUTE, after=("home", "shared backward")))
    return Schedule(stages, streams=(COMPUTE, COMM))
