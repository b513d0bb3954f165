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
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal, NamedTuple

from moecomm.overlap.schedule import SMS, Schedule, Stage

COMPUTE, COMM = "compute", "comm"

Keep = Literal["all", "rows", "nothing"]
"""The tensors per row that a forward keeps for its backward. "all": the rows and the first product, P * (H +
I) values. "rows": the rows; the first product is made again. "nothing": the rows are sent once more along the
kept plan, together with the gradients, and the first product is made again."""


class Split(NamedTuple):
    """The division of the SMs of a GPU where rows travel beside products.

    Attributes:
        sms: all SMs of the GPU.
        comm: the SMs of an operation of the communicator.
    """

    sms: int
    comm: int

    @property
    def products(self) -> dict[str, float]:
        """The resources of a product beside an operation."""
        return {SMS: float(self.sms - self.comm)}


_SMS_TIMES_COLUMNS = 210
"""The share of a GPU's SMs for a dispatch, times the columns of the product beside it."""
_HOME_SUMS = 4
"""The cost on few SMs of sending a token's gradient back and adding it up, in expert rows."""


def sms_beside_products(
    *, sms: int, ranks: int, top_k: int, row_bytes: int, inner: int, ffn: int
) -> dict[str, int]:
    """Returns the SMs for each transfer beside a product, by the transfer's stage, so many that both take
    about the same time. A stage that is not named runs better alone, on the default SMs.

    Both the bytes that a dispatch moves and the products' operations grow with rows times H, so the share of
    the SMs follows from the columns of the product alone; a return of rows also sums them, one more row a
    token. "home" and "combine" lie beside the gradients of the first weights (`inner` columns, I), "dispatch"
    beside the backward of a second product (`ffn`, F; "publish" is its first half), "gradient rows" beside a
    first product (I). A transfer of fewer than eight SMs takes much longer; docs/performance.md has the
    measurements.

    Left out are transfers for which that would be more than a quarter of the GPU, or less than 3 % (leaving
    eight SMs costs such a long product more than the transfer takes alone), and beside products of I columns
    also those of two ranks with rows above 8 KiB: half of their rows stay where they are.

    Example: 132 SMs, 4 ranks, top-8, rows of 14336 bytes, I = 4096, F = 2048: home and combine 10, dispatch
    14, gradient rows 8.
    """

    def share_out(columns: int, work: float = 1.0) -> int | None:
        share = work * _SMS_TIMES_COLUMNS / columns
        return max(8, 2 * round(share * sms / 2)) if 0.03 <= share <= 0.25 else None

    if ranks == 1:
        return {}
    by_stage = {"publish": share_out(ffn), "dispatch": share_out(ffn)}
    if ranks > 2 or row_bytes <= 8192:
        way_home = share_out(inner, 1 + _HOME_SUMS / top_k)
        by_stage |= {"gradient rows": share_out(inner), "combine": way_home, "home": way_home}
    return {stage: count for stage, count in by_stage.items() if count is not None}


def _transfer(
    name: str, *after: str, split: Split | None = None, stream: str = COMM, yields: bool = True
) -> Stage:
    uses = {} if split is None else {SMS: float(split.comm)}
    return Stage(name=name, stream=stream, after=after, uses=uses, communicates=True, yields=yields)


def _compute(
    name: str, *after: str, beside: Split | None = None, yields: bool = False, leaves_sms: bool = False
) -> Stage:
    """Makes a stage that computes. `beside`: the split of the SMs with a transfer that runs meanwhile."""
    uses = {} if beside is None else beside.products
    return Stage(name=name, stream=COMPUTE, after=after, uses=uses, yields=yields, leaves_sms=leaves_sms)


_product = partial(_compute, leaves_sms=True)


def _schedule(stages: list[Stage], split: Split | None) -> Schedule:
    resources = {} if split is None else {SMS: float(split.sms)}
    return Schedule(stages, streams=(COMPUTE, COMM), resources=resources)


@lru_cache
def forward_schedule(
    *, shared: bool, split: Split | None = None, pool: bool = False, in_turns: bool = False
) -> Schedule:
    """Returns the stages of a forward. `shared`: there are shared experts. `split`: products that run beside
    transfers leave them SMs. `pool`: kept tensors go to a pool. `in_turns`: another program computes while
    rows travel, before the host waits for their number. They are then received on the communicator's stream
    (`Communicator.settle`), whenever that comes, and "dispatch" waits for just that."""
    stream = COMPUTE if in_turns else COMM
    stages = [Stage(name="publish", stream=COMM, communicates=True, yields=in_turns)]
    if shared:
        stages.append(_product("shared experts", beside=split))
    stages += [
        _transfer("dispatch", "publish", split=split, stream=stream, yields=not in_turns),
        _product("up", "dispatch"),
        _compute("activation", "up"),
        _product("down", "activation"),
        _transfer("combine", "down", split=split),
    ]
    if pool:
        stages.append(_compute("to pool", "up"))
    if shared:
        stages.append(Stage(name="sum", stream=COMPUTE, after=("combine", "shared experts")))
    return _schedule(stages, split)


@lru_cache
def backward_schedule(
    *,
    shared: bool,
    keep: Keep,
    home: bool,
    weights: bool,
    split: Split | None = None,
    home_split: Split | None = None,
    pool: bool = False,
    in_turns: bool = False,
) -> Schedule:
    """Returns the stages of a backward. `home`: tokens or routing weights need gradients; `weights`: the
    weights of the experts need them, now. `home_split`, without a split of all transfers: the split of "home"
    and "up weights". `pool`: kept tensors are in a pool. `in_turns`: another program computes while rows
    travel. The shared experts come before its turn then, where they run beside its transfers as well."""
    if split is not None or not (home and weights):
        home_split = None
    # Where the weights' gradients cannot run beside "home", one of them comes before it: the rows of
    # "gradient rows" are not needed any more then.
    first_of_two = weights and home and split is None
    ways = (["rows again"] if keep == "nothing" else []) + ["gradient rows"]
    # A second stream costs the host time.
    alone = home_split is not None and not (shared or keep == "nothing" or pool or in_turns)
    stream = COMPUTE if alone else COMM
    shared_first = shared and in_turns
    stages = [
        _transfer(way, split=split, stream=stream, yields=way != ways[-1] or not shared_first) for way in ways
    ]
    if pool:
        stages.append(_compute("from pool"))
    if shared:
        stages.append(_product("shared backward", beside=split, yields=shared_first))
    first: tuple[str, ...] = ()
    if keep != "all":
        first = ("up again",)
        stages.append(_product("up again", *(("rows again",) if keep == "nothing" else ())))
    stages += [
        _product("down backward", "gradient rows"),
        _compute("activation backward", "down backward", *first),
    ]
    if first_of_two:
        stages.append(_product("down weights", "gradient rows", "activation backward"))
    if home:
        stages += [
            _product("up backward", "activation backward"),
            _transfer("home", "up backward", "activation backward", split=split or home_split),
        ]
    if weights:
        if not first_of_two:
            beside_home = split if home else None
            stages.append(
                _product("down weights", "gradient rows", "activation backward", beside=beside_home)
            )
        # A grouped product takes all SMs for as long as it runs, and waits as a whole for SMs that a transfer
        # holds: it runs beside a transfer only where it leaves it SMs.
        later = ("home",) if first_of_two and home_split is None else ()
        stages.append(_product("up weights", "activation backward", *later, beside=home_split))
    if shared and home:
        stages.append(Stage(name="sum", stream=COMPUTE, after=("home", "shared backward")))
    return _schedule(stages, split or home_split)


@lru_cache
def recompute_schedule(*, shared: bool, keep: Keep, pool: bool = False) -> Schedule:
    """Returns the stages that recompute the tensors kept by a forward, for a checkpoint that has thrown them
    away; `pool`: they go to a pool."""
    stages = []
    if keep != "nothing":
        stages.append(_transfer("rows again"))
    if shared:
        stages.append(_product("shared experts"))
    if keep == "all":
        stages.append(_product("up again", "rows again"))
    if pool:
        stages.append(_compute("to pool", "rows again" if keep == "rows" else "up again"))
    return Schedule(stages, streams=(COMPUTE, COMM))
