"""The schedules of a mixture-of-experts layer: which of its stages wait for which, and on what stream.

    stream   forward
    comm     publish, dispatch                                 combine
    compute           shared experts   up, activation, down             sum

    stream   backward
    comm     rows again, gradient rows                                     home
    compute  shared backward, up again  down-, activation-, up backward   down weights, up weights, sum

The way to the experts lies under the shared experts, which need no rows from elsewhere; the way back of the
gradients under those of the weights, which nobody waits for.

In parts, by the experts of each rank (moecomm.parts), the products of one part run while the rows of the next
are on their way, and while what the one before has made travels back:

    comm     publish, dispatch 0, dispatch 1                              combine 0             combine 1
    compute           shared experts  up 0, activation 0, down 0  up 1, activation 1, down 1              sum
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


def stage_name(name: str, part: int, parts: int) -> str:
    """Of a stage of one part."""
    return name if parts == 1 else f"{name} {part}"


def _transfer(name: str, part: int, parts: int, *after: str) -> Stage:
    """A part of one. Other programs go on after the last: no other operation may come between parts."""
    last = part + 1 == parts
    return Stage(name=stage_name(name, part, parts), stream=COMM, after=after, communicates=True, yields=last)


@lru_cache
def forward_schedule(*, shared: bool, parts: int = 1) -> Schedule:
    """`shared`: there are shared experts."""

    def compute(name: str, part: int, *after: str) -> Stage:
        names = tuple(stage_name(other, part, parts) for other in after)
        return Stage(name=stage_name(name, part, parts), stream=COMPUTE, after=names)

    stages = [Stage(name="publish", stream=COMM, communicates=True)]
    if shared:
        stages.append(Stage(name="shared experts", stream=COMPUTE))
    for part in range(parts):
        before = stage_name("dispatch", part - 1, parts) if part > 0 else "publish"
        stages.append(_transfer("dispatch", part, parts, before))
    for part in range(parts):
        stages += [
            compute("up", part, "dispatch"),
            compute("activation", part, "up"),
            compute("down", part, "activation"),
            _transfer("combine", part, parts, stage_name("down", part, parts)),
        ]
    if shared:
        last = stage_name("combine", parts - 1, parts)
        stages.append(Stage(name="sum", stream=COMPUTE, after=(last, "shared experts")))
    return Schedule(stages, streams=(COMPUTE, COMM))


@lru_cache
def backward_schedule(*, shared: bool, keep: Keep, home: bool, weights: bool, parts: int = 1) -> Schedule:
    """`home`: tokens or routing weights need gradients; `weights`: those of the experts do, now."""

    def each(name: str) -> list[str]:
        return [stage_name(name, part, parts) for part in range(parts)]

    ways = (["rows again"] if keep == "nothing" else []) + ["gradient rows"]
    stages = [_transfer(way, part, parts) for way in ways for part in range(parts)]
    if shared:
        stages.append(Stage(name="shared backward", stream=COMPUTE))
    for part in range(parts):

        def named(name: str, part: int = part) -> str:
            return stage_name(name, part, parts)

        first: tuple[str, ...] = ()
        if keep != "all":
            first = (named("up again"),)
            rows = (named("rows again"),) if keep == "nothing" else ()
            stages.append(Stage(name=named("up again"), stream=COMPUTE, after=rows))
        stages += [
            Stage(name=named("down backward"), stream=COMPUTE, after=(named("gradient rows"),)),
            Stage(name=named("activation backward"), stream=COMPUTE, after=(named("down backward"), *first)),
        ]
        if home:
            after = (named("activation backward"),)
            stages += [
                Stage(name=named("up backward"), stream=COMPUTE, after=after),
                _transfer("home", part, parts, named("up backward"), *after),
            ]
    if weights:
        done = tuple(each("activation backward"))
        stages += [
            Stage(name="down weights", stream=COMPUTE, after=(*each("gradient rows"), *done)),
            Stage(name="up weights", stream=COMPUTE, after=done),
        ]
    if shared and home:
        last = stage_name("home", parts - 1, parts)
        stages.append(Stage(name="sum", stream=COMPUTE, after=(last, "shared backward")))
    return Schedule(stages, streams=(COMPUTE, COMM))


@lru_cache
def recompute_schedule(*, shared: bool, keep: Keep, parts: int = 1) -> Schedule:
    """What a forward has kept, again, for a checkpoint that has thrown it away."""
    stages = []
    for part in range(parts):
        if keep != "nothing":
            stages.append(_transfer("rows again", part, parts))
    if shared:
        stages.append(Stage(name="shared experts", stream=COMPUTE))
    for part in range(parts):
        if keep == "all":
            after = (stage_name("rows again", part, parts),)
            stages.append(Stage(name=stage_name("up again", part, parts), stream=COMPUTE, after=after))
    return Schedule(stages, streams=(COMPUTE, COMM))
