"""Reference of dispatch and combine, in plain loops over numpy arrays. Shares nothing with moecomm.

The tests compare whole results with it, the benchmarks (bench/harness/verify.py) take from it where every row
has to be.

Every function sees the whole job at once: a list per source rank of tokens `x_TH`, ids `topk_idx_TK` and
weights `topk_weights_TK`. A row's values are held in float32 (float64 for "float64"); `rounded` says which of
them the named dtype can hold. Two ways of writing a row down are used throughout: an assignment is (source
rank, token, k), and an owner row is (source rank, token).

Order: expert-major rows go by expert, then source rank, then token; rank-major rows by source rank, then
token. Combine: the owner sums a token's rows in ascending k in float32 (float64 for "float64"), each times
its weight if there are weights, and rounds the sum; the home rank sums the owners' rows in ascending rank the
same way and rounds once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DTYPES = ("float32", "bfloat16", "float16", "float64")


def wide(dtype: str) -> type:
    """The numpy type sums run in."""
    return np.float64 if dtype == "float64" else np.float32


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x at the precision of `dtype`, to nearest even, kept in the wide type."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
        kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(np.nan), kept).astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return x.astype(wide(dtype))


E4M3 = np.array(
    [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:-1],
    np.float32,
)
"""The 127 finite numbers of float8 e4m3fn that are not negative, by their bits; 448 is the largest."""


def as_e4m3(x: np.ndarray) -> np.ndarray:
    """The e4m3 numbers nearest to float32 x, as float32: ties to the even bit pattern, 448 past the end."""
    size = np.minimum(np.abs(x).astype(np.float64), 448.0)
    above = np.searchsorted(E4M3, np.nan_to_num(size))  # the first that is not below
    below = np.maximum(above - 1, 0)
    up, down = E4M3[above] - size, size - E4M3[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), np.float32(np.nan), np.copysign(E4M3[nearest], x)).astype(np.float32)


SCALE_COLUMNS = {"fp8": 128, "mxfp8": 32}
"""Columns of a row that share a scale, by the wire format."""


def quantised(x: np.ndarray, wire: str = "fp8", block: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows (T,H) as a wire format carries them: e4m3 data (T,H), held in float32, and scales (T, blocks).

    A block is so many columns of a row as share a scale, or `block` ones, the last one what is left. amax is
    its largest magnitude (a NaN does not count). The scale of fp8 is amax / 448, at least 2^-126; that of
    mxfp8 the least power of two that is not below amax / 448, at least 2^-127, and NaN for an infinity. Data
    is x * (1 / scale) in e4m3, x * 0 where the scale is NaN. All of this in float32.
    """
    x = x.astype(np.float32)
    columns = block or SCALE_COLUMNS[wire]
    starts = range(0, x.shape[1], columns)
    data, scales = np.zeros_like(x), np.zeros((len(x), len(starts)), np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for b, start in enumerate(starts):
            part = x[:, start : start + columns]
            amax = np.where(np.isnan(part), np.float32(0), np.abs(part)).max(1, initial=0)
            quotient = amax / np.float32(448)
            scale = (
                powers_of_two(quotient) if wire == "mxfp8" else np.maximum(quotient, np.float32(2.0**-126))
            )
            inverse = np.where(np.isnan(scale), np.float32(0), np.float32(1) / scale)
            data[:, start : start + columns] = as_e4m3(part * inverse[:, None])
            scales[:, b] = scale
    return data, scales


def powers_of_two(x: np.ndarray) -> np.ndarray:
    """The least power of two that is not below each float32, at least 2^-127; NaN for infinity."""
    mantissa, exponent = np.frexp(np.where(np.isinf(x), np.float32(1), x).astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    least = np.ldexp(1.0, np.where(x > 0, np.maximum(exponent, -127), -127))
    return np.where(np.isinf(x), np.nan, least).astype(np.float32)


def dequantised(
    data: np.ndarray, scales: np.ndarray, dtype: str, wire: str = "fp8", block: int | None = None
) -> np.ndarray:
    """data * scale in float32, rounded to the dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.repeat(scales, block or SCALE_COLUMNS[wire], 1)[:, : data.shape[1]]
        return rounded(data.astype(np.float32) * whole, dtype).astype(wide(dtype))


def through_wire(x: np.ndarray, dtype: str, wire: str = "fp8") -> np.ndarray:
    """Rows of `dtype` after they have travelled in a wire format."""
    return dequantised(*quantised(x, wire), dtype, wire)


def wire_error_bound(x: np.ndarray, dtype: str, wire: str = "fp8") -> np.ndarray:
    """Returns how far `through_wire` may move each element of finite float64 x that `dtype` can hold.

    With s the block's scale and v = x / s, |v| <= 448: e4m3 keeps four significant bits, so its numbers near
    v are 2^-3 |v| apart at most, or 2^-9 where v is subnormal; the nearest is within
        |x| * 2^-4  or  s * 2^-10, whichever is more     (with |x| at amax itself: amax * 16/448).
    amax / 448, 1 / s, x * (1/s) and data * s each round in float32, 2^-24 of |x| each, and near a tie the
    first three can turn the choice, which then costs as much again: 2^-21 |x| covers all of it. (With mxfp8 s
    is a power of two, and nothing but e4m3 rounds; s is less than twice amax / 448.) The last rounding, to
    the dtype, adds half an ulp of the result. No element moves by more than amax * (1/28 + 2^-21 + half an
    epsilon of the dtype); with mxfp8, where amax may be anything from 224 to 448 times s, by amax * (1/16 +
    half an epsilon of the dtype).
    """
    size = np.abs(x)
    _, scales = quantised(x, wire)
    s = np.repeat(scales.astype(np.float64), SCALE_COLUMNS[wire], 1)[:, : x.shape[1]]
    nearest = np.maximum(size * 2.0**-4, s * 2.0**-10)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}[dtype]
    tiny = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24, "float64": 2.0**-149}[dtype]
    bound = nearest + size * 2.0**-21
    return bound + unit * (size + bound) + tiny


LARGEST_MOVE = {"fp8": 1 / 28 + 2.0**-21, "mxfp8": 1 / 16}
"""The most that a value moves before it is rounded to the dtype, in parts of its block's largest."""


@dataclass
class Layout:
    """The origins of the rows of one rank's result. `origin` has one entry a row: the assignments (source,
    token, k) that it answers for, none for an alignment row. `offsets` are the ends of the groups.
    """

    origin: list[list[tuple[int, int, int]]]
    tokens_per_expert: list[int]
    offsets: list[int]


def layout_of(
    ids: Sequence[np.ndarray], *, rank: int, num_experts: int, layout: str = "expert", alignment: int = 1
) -> Layout:
    """The rows that `rank` receives: by its experts, or in the rank layout by source rank."""
    local = num_experts // len(ids)
    first = rank * local
    per_expert: list[list[list[tuple[int, int, int]]]] = [[] for _ in range(local)]
    per_source: list[list[list[tuple[int, int, int]]]] = [[] for _ in ids]
    for src, ids_TK in enumerate(ids):
        for t, ids_K in enumerate(ids_TK.tolist()):
            owned = [(src, t, k) for k, e in enumerate(ids_K) if first <= e < first + local]
            for assignment in owned:
                per_expert[ids_K[assignment[2]] - first].append([assignment])
            if owned:
                per_source[src].append(owned)
    origin: list[list[tuple[int, int, int]]] = []
    ends = []
    for group in per_expert if layout == "expert" else per_source:
        origin += group
        while len(origin) % alignment:
            origin.append([])
        ends.append(len(origin))
    return Layout(origin, [len(group) for group in per_expert], ends)


@dataclass
class Dispatched:
    """The rows that one rank receives; `origin` as in Layout. Rows past `offsets[-1]` are not listed."""

    tokens: np.ndarray
    weights: np.ndarray | None
    topk_idx: np.ndarray | None
    tokens_per_expert: np.ndarray
    offsets: np.ndarray
    overflow: int
    origin: list[list[tuple[int, int, int]]]


def dispatch(
    x: Sequence[np.ndarray],
    ids: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None,
    *,
    rank: int,
    num_experts: int,
    layout: str = "expert",
    alignment: int = 1,
    capacity: int | None = None,
) -> Dispatched:
    """The rows that `rank` receives; with a capacity, up to the clamped `offsets[-1]` only."""
    placed = layout_of(ids, rank=rank, num_experts=num_experts, layout=layout, alignment=alignment)
    origin, ends = placed.origin, placed.offsets
    local = num_experts // len(x)
    needed = len(origin)
    overflow = 0
    if capacity is not None and needed > capacity:
        overflow = needed
        origin = origin[:capacity]
        ends = [min(end, capacity) for end in ends]

    hidden, top_k = x[0].shape[1], ids[0].shape[1]
    tokens = np.zeros((len(origin), hidden), x[0].dtype)
    kind = np.float32 if weights is None else weights[0].dtype
    out_weights = np.zeros(len(origin) if layout == "expert" else (len(origin), top_k), kind)
    local_ids = np.full((len(origin), top_k), -1, np.int32)
    for p, row in enumerate(origin):
        for src, t, k in row:
            tokens[p] = x[src][t]
            local_ids[p, k] = ids[src][t, k] - rank * local
            if weights is not None:
                out_weights[p if layout == "expert" else (p, k)] = weights[src][t, k]
    return Dispatched(
        tokens=tokens,
        weights=None if weights is None else out_weights,
        topk_idx=local_ids if layout == "rank" else None,
        tokens_per_expert=np.array(placed.tokens_per_expert, np.int32),
        offsets=np.array(ends, np.int32),
        overflow=overflow,
        origin=origin,
    )


@np.errstate(over="ignore", invalid="ignore")
def combine(
    rows: Sequence[np.ndarray],
    dispatched: Sequence[Dispatched],
    token_counts: Sequence[int],
    *,
    dtype: str,
    weights: Sequence[np.ndarray] | None = None,
    ranks_per_node: int | None = None,
    wire: str | None = None,
) -> list[np.ndarray]:
    """Returns one (T,H) array a rank from the rows (P,H), and weights (P,), of every rank. Infinities and NaN
    are summed like any other value.

    A token's home adds up what ranks of its own node have and what each other node has, by rank;
    another node first adds up and rounds what its ranks have, each rounded. `wire`: the format in which the
    sum of a rank of its own node, or of another node, goes home, quantised as it is, in place of a rounding.
    """
    kind = wide(dtype)
    hidden = rows[0].shape[1]
    ranks_per_node = ranks_per_node or len(rows)
    # Shares of each (home, token): by the node they come from, in the order of ranks.
    shares: dict[tuple[int, int], dict[int, list[np.ndarray]]] = {}
    for owner, sent in enumerate(dispatched):
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for p, row in enumerate(sent.origin):
            if row:
                src, t, k = row[0]
                found.setdefault((src, t), []).append((k, p))
        for (src, t), terms in found.items():
            partial: np.ndarray = np.zeros(hidden, kind)
            for _, p in sorted(terms):
                value = rows[owner][p].astype(kind)
                partial = partial + (value if weights is None else value * kind(weights[owner][p]))
            by_node = shares.setdefault((src, t), {})
            by_node.setdefault(owner // ranks_per_node, []).append(partial)
    totals: list[np.ndarray] = [np.zeros((count, hidden), kind) for count in token_counts]
    for (src, t), by_node in shares.items():
        for node, partials in by_node.items():
            if node != src // ranks_per_node:
                partials = [sum((rounded(partial, dtype) for partial in partials), np.zeros(hidden, kind))]
            for partial in partials:
                if wire is None:
                    totals[src][t] += rounded(partial, dtype)
                else:
                    totals[src][t] += through_wire(partial[None], "float32", wire)[0]
    return [rounded(total, dtype) for total in totals]
