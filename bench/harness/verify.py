"""The independent check: where every row has to be and what every sum has to be, in plain numpy.

Shares nothing with the product: it sorts (expert, source rank, token) triples and regenerates every rank's
rows from the seed, so no rank has to trust what another one sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import data
from .data import DataKey, Storage
from .routing import Ids

_BLOCK_ROWS = 2048  # rows compared at a time, to bound the memory a check takes
_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the rows of one rank's result come from. N counts real rows, in result order; padding is not
    among them.

    For the expert layout `slot_N` is the position in the token's top-k ids and `expert_N` the global expert;
    for the rank layout both are -1, `ids_NK` holds local expert ids or -1, and `group_G` counts rows per
    source rank.
    """

    source_N: IntArray
    token_N: IntArray
    slot_N: IntArray
    expert_N: IntArray
    row_N: IntArray  # row of the result
    ids_NK: IntArray | None
    group_G: IntArray  # real rows per local expert (or per source rank)
    expert_rows_L: IntArray  # (token, expert) pairs per local expert, in either layout
    offsets_G: IntArray  # inclusive ends of the groups in the result

    @property
    def num_rows(self) -> int:
        """Rows of an exactly sized result, padding counted."""
        return int(self.offsets_G[-1]) if self.offsets_G.size else 0


@dataclass(frozen=True, kw_only=True)
class Received:
    """A dispatch result as numpy arrays; what a path does not return is None and is not checked."""

    tokens: Storage
    counts: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[Any] | None = None
    weights: npt.NDArray[Any] | None = None
    topk_idx: npt.NDArray[Any] | None = None
    overflow: int = 0


def expert_layout(ids_R: Sequence[Ids], rank: int, experts: int, alignment: int = 1) -> Layout:
    """Rows ordered by local expert, then source rank, then token; every expert's group padded to `alignment`
    rows.

    Example: 2 ranks, experts 0, 1 | 2, 3, ids_R = [[[0, 2], [1, 0]], [[0, 3]]]. Rank 0 gets, for expert 0,
    tokens 0 and 1 of rank 0 and token 0 of rank 1, then for expert 1 token 1 of rank 0; with alignment 2 at
    rows 0, 1, 2 | 4.
    """
    local = experts // len(ids_R)
    parts = []
    for source, ids_TK in enumerate(ids_R):
        token, slot = np.nonzero(ids_TK // local == rank)  # -1 // local is -1: no rank
        parts.append(np.stack([ids_TK[token, slot], np.full_like(token, source), token, slot]))
    expert, source_N, token_N, slot_N = np.concatenate(parts, axis=1).astype(np.int64)
    order = np.lexsort((token_N, source_N, expert))
    expert, source_N, token_N, slot_N = expert[order], source_N[order], token_N[order], slot_N[order]
    group = np.bincount(expert - rank * local, minlength=local)
    padded = -(-group // alignment) * alignment
    ends = np.cumsum(padded)
    within = np.arange(expert.size) - np.repeat(np.cumsum(group) - group, group)
    return Layout(
        source_N=source_N,
        token_N=token_N,
        slot_N=slot_N,
        expert_N=expert,
        row_N=np.repeat(ends - padded, group) + within,
        ids_NK=None,
        group_G=group,
        expert_rows_L=group,
        offsets_G=ends,
    )


def rank_layout(ids_R: Sequence[Ids], rank: int, experts: int) -> Layout:
    """One row per (token, this rank) for tokens that want any of its experts, ordered by source rank, then
    token.
    """
    local = experts // len(ids_R)
    owned_R = [ids_TK // local == rank for ids_TK in ids_R]
    token_R = [np.nonzero(owned.any(axis=1))[0] for owned in owned_R]
    group = np.array([token.size for token in token_R], dtype=np.int64)
    ids = [
        np.where(owned, ids_TK - rank * local, -1)[token]
        for owned, ids_TK, token in zip(owned_R, ids_R, token_R, strict=True)
    ]
    local_ids = np.concatenate(ids).astype(np.int64)
    none = np.full(int(group.sum()), -1, dtype=np.int64)
    return Layout(
        source_N=np.repeat(np.arange(len(ids_R)), group),
        token_N=np.concatenate(token_R),
        slot_N=none,
        expert_N=none,
        row_N=np.arange(none.size),
        ids_NK=local_ids,
        group_G=group,
        expert_rows_L=np.bincount(local_ids[local_ids >= 0], minlength=local),
        offsets_G=np.cumsum(group),
    )


def _differing(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> int:
    """Entries that differ; all of `want` when the shapes do."""
    if got.shape != want.shape:
        return max(int(want.size), 1)
    return int(np.count_nonzero(got != want))


def _bits(array: Storage) -> npt.NDArray[Any]:
    # Comparing bits, not values: a NaN of a poisoned buffer has to count as wrong, and -0.0 is not 0.0.
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def wrong_dispatch(
    got: Received, layout: Layout, key: DataKey, topk: int, capacity: int | None = None
) -> int:
    """Values of a dispatch result that differ, bit for bit, from what `layout` and the sources' data call
    for.

    Rows, padding rows (zero), counts, offsets, weights and local ids are all looked at. Rows past the last
    offset of a result of fixed capacity are unspecified and are not.
    """
    rows = layout.num_rows if capacity is None else capacity
    want_elements = layout.num_rows * key.hidden
    if got.tokens.shape != (rows, key.hidden):
        return max(want_elements, 1)
    wrong = int(got.overflow != 0)
    if got.counts is not None:
        wrong += _differing(got.counts, layout.expert_rows_L)
    if got.offsets is not None:
        wrong += _differing(got.offsets, layout.offsets_G)
    if got.topk_idx is not None and layout.ids_NK is not None:
        wrong += _differing(got.topk_idx[layout.row_N], layout.ids_NK)
    for source in np.unique(layout.source_N):
        x_TH = data.rows(key, int(source))
        w_TK = data.weights(key, int(source), topk) if got.weights is not None else None
        for block in _blocks(np.nonzero(layout.source_N == source)[0]):
            row, token = layout.row_N[block], layout.token_N[block]
            wrong += _differing(_bits(got.tokens[row]), _bits(x_TH[token]))
            if got.weights is None or w_TK is None:
                continue
            if layout.ids_NK is None:
                wrong += _differing(got.weights[row], w_TK[token, layout.slot_N[block]])
            else:
                want = np.where(layout.ids_NK[block] >= 0, w_TK[token], np.float32(0))
                wrong += _differing(got.weights[row], want)
    padding = np.ones(layout.num_rows, dtype=bool)
    padding[layout.row_N] = False
    for block in _blocks(np.nonzero(padding)[0]):
        wrong += int(np.count_nonzero(_bits(got.tokens[block])))
    return wrong


def _blocks(index: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [index[at : at + _BLOCK_ROWS] for at in range(0, index.size, _BLOCK_ROWS)]


def answers(layout: Layout, key: DataKey, rows: int, by_rank: int | None = None) -> Storage:
    """The (rows, H) rows that the owner hands to combine: `data.answer` of each row by its expert, or by
    `by_rank`.

    Padding, and rows past the real ones, are NaN: a combine that reads them is caught.
    """
    nan = data.round_to(np.zeros(1, dtype=np.float32), key.dtype).dtype
    out = np.full((rows, key.hidden), 0x7FFF if nan == np.uint16 else np.nan, dtype=nan)
    for source in np.unique(layout.source_N):
        x_TH = data.rows(key, int(source))
        for block in _blocks(np.nonzero(layout.source_N == source)[0]):
            who = layout.expert_N[block] if by_rank is None else np.full(block.size, by_rank)
            out[layout.row_N[block]] = data.answer(x_TH[layout.token_N[block]], who, key.dtype)
    return out


def wrong_combine(
    got_TH: Storage, ids_TK: Ids, key: DataKey, rank: int, *, experts: int, ranks: int, layout: str
) -> int:
    """Values of a combined (T, H) result that are further from the float64 sum than rounding can explain.

    expert layout: sum over k of weight * answer of expert k. rank layout: sum over owner ranks of the rank's
    answer. Rounding that is allowed, relative to the sum of magnitudes: twice to the row type (partial row,
    result) and once for each product and sum of the accumulation.
    """
    tokens, topk = ids_TK.shape
    if got_TH.shape != (tokens, key.hidden):
        return max(tokens * key.hidden, 1)
    x_TH, w_TK = data.rows(key, rank), data.weights(key, rank, topk)
    who_TK, scale_TK = _terms(ids_TK, w_TK, experts // ranks, layout)
    unit = _ROUNDOFF[key.dtype]
    accumulate = unit if key.dtype == "float64" else _ROUNDOFF["float32"]
    allowed = 2.0 * unit + (2 * topk + 4) * accumulate
    wrong = 0
    for block in _blocks(np.arange(tokens)):
        want = np.zeros((block.size, key.hidden))
        size = np.zeros_like(want)
        for k in range(topk):
            used = who_TK[block, k] >= 0
            term = data.widen(data.answer(x_TH[block], np.maximum(who_TK[block, k], 0), key.dtype), key.dtype)
            term = term * np.where(used, scale_TK[block, k], 0.0)[:, None]
            want += term
            size += np.abs(term)
        with np.errstate(invalid="ignore", over="ignore"):  # a wrong result may hold anything
            error = np.abs(data.widen(got_TH[block], key.dtype) - want)
        # Negated, so that NaN counts as wrong.
        wrong += int(np.count_nonzero(~(error <= allowed * size + _SMALLEST[key.dtype])))
    return wrong


def _terms(
    ids_TK: Ids, w_TK: npt.NDArray[np.float32], local: int, layout: str
) -> tuple[IntArray, npt.NDArray[Any]]:
    """Who answers in each slot (-1: nobody) and with what factor: experts with weights, or each owner rank
    once.
    """
    if layout == "expert":
        return ids_TK.astype(np.int64), w_TK.astype(np.float64)
    owner = np.sort(ids_TK.astype(np.int64) // local, axis=1)
    owner[:, 1:][owner[:, 1:] == owner[:, :-1]] = -1
    return owner, np.ones(owner.shape)
