"""The schedules of a mixture-of-experts layer: which of its stages wait for which, and on what stream.

    stream   forward
    comm     publish, dispatch                                 combine
    compute           shared experts   up, activation, down             sum

    stream   backward
    comm     rows again, gradient rows                                     home
    compute  shared backward, up again  down-, activation-, up backward   down weights, up weights, sum

With an activation pool what the backward needs goes there beside the combine ("to pool"), and comes back
beside the gradients' way to the experts ("from pool").

The way to the experts lies under the shared experts, which need no rows from elsewhere; the way back of the
gradients under those of the weights, which nobody waits for. "down weights" comes before "up backward" where
transfers do not leave products most of the GPU: then "home" lies under "up weights" alone, on few SMs of its
own (`home_split`), or "up weights" comes after it. Where nothing else lies beside anything, "home" alone is
on the stream comm.

In parts, by the experts of each rank (moecomm.parts), the products of one part run while the rows of the next
are on their way, and while what the one before has made travels back:

    comm     publish, dispatch 0, dispatch 1                              combine 0             combine 1
    compute           shared experts  up 0, activation 0, down 0  up 1, activation 1, down 1              sum
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from moecomm.overlap.schedule import SMS, Schedule, Stage

COMPUTE, COMM = "compute", "comm"

Keep = Literal["all", "rows", "nothing"]
"""What a forward keeps for its backward, of what the experts have per row. "all": the rows and the first
product, P * (H + I) values. "rows": the rows; the first product is made again. "nothing": the rows come once
more along the kept plan, while the gradients are on their way too, and then the first product."""


class Split(NamedTuple):
    """How the SMs of a GPU are shared where rows travel beside products.

    Attributes:
        sms: all of them.
        comm: those of an operation of the communicator.
    """

    sms: int
    comm: int

    @property
    def products(self) -> dict[str, float]:
        """What a product uses beside an operation."""
        return {SMS: float(self.sms - self.comm)}


def stage_name(name: str, part: int, parts: int) -> str:
    """Of a stage of one part."""
    return name if parts == 1 else f"{name} {part}"


def _transfer(
    name: str,
    part: int,
    parts: int,
    *after: str,
    split: Split | None = None,
    stream: str = COMM,
    yields: bool = True,
) -> Stage:
    """A part of one. Other programs go on after the last: no other operation may come between parts."""
    last = part + 1 == parts
    uses = {} if split is None else {SMS: float(split.comm)}
    return Stage(
        name=stage_name(name, part, parts),
        stream=stream,
        after=after,
        uses=uses,
        communicates=True,
        yields=last and yields,
    )


def _compute(
    name: str, *after: str, beside: Split | None = None, yields: bool = False, leaves_sms: bool = False
) -> Stage:
    """`beside`: something travels meanwhile."""
    uses = {} if beside is None else beside.products
    return Stage(name=name, stream=COMPUTE, after=after, uses=uses, yields=yields, leaves_sms=leaves_sms)


_product = partial(_compute, leaves_sms=True)


def _schedule(stages: list[Stage], split: Split | None) -> Schedule:
    resources = {} if split is None else {SMS: float(split.sms)}
    return Schedule(stages, streams=(COMPUTE, COMM), resources=resources)


@lru_cache
def forward_schedule(
    *,
    shared: bool,
    parts: int = 1,
    split: Split | None = None,
    pool: bool = False,
    in_turns: bool = False,
) -> Schedule:
    """`shared`: there are shared experts. `split`: what runs while rows travel leaves them SMs. `pool`: what
    is kept goes to one, in one part. `in_turns`: another program goes on where rows travel; in one part that
    is before the host waits for their number. They are received on the communicator's stream by themselves
    then (`Communicator.settle`), whenever that comes, and "dispatch" waits for just that."""
    beside = split if parts > 1 else None

    def of_part(make: Callable[..., Stage], name: str, part: int, *after: str) -> Stage:
        names = (stage_name(other, part, parts) for other in after)
        return make(stage_name(name, part, parts), *names, beside=beside)

    early = in_turns and parts == 1
    stream = COMPUTE if early else COMM
    stages = [Stage(name="publish", stream=COMM, communicates=True, yields=early)]
    if shared:
        stages.append(_product("shared experts", beside=split))
    for part in range(parts):
        before = stage_name("dispatch", part - 1, parts) if part > 0 else "publish"
        stages.append(
            _transfer("dispatch", part, parts, before, split=split, stream=stream, yields=not early)
        )
    for part in range(parts):
        stages += [
            of_part(_product, "up", part, "dispatch"),
            of_part(_compute, "activation", part, "up"),
            of_part(_product, "down", part, "activation"),
            _transfer("combine", part, parts, stage_name("down", part, parts), split=split),
        ]
    if pool:
        stages.append(_compute("to pool", "up"))
    if shared:
        last = stage_name("combine", parts - 1, parts)
        stages.append(Stage(name="sum", stream=COMPUTE, after=(last, "shared experts")))
    return _schedule(stages, split)


@lru_cache
def backward_schedule(
    *,
    shared: bool,
    keep: Keep,
    home: bool,
    weights: bool,
    parts: int = 1,
    split: Split | None = None,
    home_split: Split | None = None,
    pool: bool = False,
    in_turns: bool = False,
) -> Schedule:
    """`home`: tokens or routing weights need gradients; `weights`: those of the experts do, now.
    `home_split`, in one part and without a split of all transfers: that of "home" and "up weights". `pool`:
    what was kept is in one. `in_turns`: another program goes on where rows travel. The shared experts come
    before its turn then, where they lie beside its rows as well."""
    if split is not None or parts > 1 or not (home and weights):
        home_split = None
    beside = split if parts > 1 else None
    # Where the weights' gradients cannot lie beside the way home, one of them comes before it: the gradients'
    # rows are not needed any more then.
    first_of_two = weights and home and split is None and parts == 1

    def each(name: str) -> list[str]:
        return [stage_name(name, part, parts) for part in range(parts)]

    ways = (["rows again"] if keep == "nothing" else []) + ["gradient rows"]
    # A second stream takes the host time.
    alone = home_split is not None and not (shared or keep == "nothing" or pool or in_turns)
    stream = COMPUTE if alone else COMM
    shared_first = shared and in_turns
    stages = [
        _transfer(way, part, parts, split=split, stream=stream, yields=way != ways[-1] or not shared_first)
        for way in ways
        for part in range(parts)
    ]
    if pool:
        stages.append(_compute("from pool"))
    if shared:
        stages.append(_product("shared backward", beside=split, yields=shared_first))
    for part in range(parts):

        def named(name: str, part: int = part) -> str:
            return stage_name(name, part, parts)

        first: tuple[str, ...] = ()
        if keep != "all":
            first = (named("up again"),)
            rows = (named("rows again"),) if keep == "nothing" else ()
            stages.append(_product(named("up again"), *rows, beside=beside))
        stages += [
            _product(named("down backward"), named("gradient rows"), beside=beside),
            _compute(named("activation backward"), named("down backward"), *first, beside=beside),
        ]
        if first_of_two:
            stages.append(_product("down weights", named("gradient rows"), named("activation backward")))
        if home:
            after = (named("activation backward"),)
            stages += [
                _product(named("up backward"), *after, beside=beside),
                _transfer("home", part, parts, named("up backward"), *after, split=split or home_split),
            ]
    if weights:
        done, brought = each("activation backward"), each("gradient rows")
        # A grouped product takes all SMs for as long as it runs, and those that it has to wait for hold up
        # all of it: it runs beside a transfer only where it leaves it SMs.
        apart = home and split is None and home_split is None
        later = (stage_name("home", parts - 1, parts),) if apart else ()
        if not first_of_two:
            beside_home = split if home else None
            stages.append(_product("down weights", *brought, *done, *later, beside=beside_home))
        stages.append(_product("up weights", *done, *later, beside=home_split))
    if shared and home:
        last = stage_name("home", parts - 1, parts)
        stages.append(Stage(name="sum", stream=COMPUTE, after=(last, "shared backward")))
    return _schedule(stages, split or home_split)


@lru_cache
def recompute_schedule(*, shared: bool, keep: Keep, parts: int = 1, pool: bool = False) -> Schedule:
    """What a forward has kept, again, for a checkpoint that has thrown it away; `pool`: it goes to one."""
    stages = []
    for part in range(parts):
        if keep != "nothing":
            stages.append(_transfer("rows again", part, parts))
    if shared:
        stages.append(_product("shared experts"))
    for part in range(parts):
        if keep == "all":
            rows = stage_name("rows again", part, parts)
            stages.append(_product(stage_name("up again", part, parts), rows))
    if pool:
        last = stage_name("rows again" if keep == "rows" else "up again", parts - 1, parts)
        stages.append(_compute("to pool", last))
    return Schedule(stages, streams=(COMPUTE, COMM))
