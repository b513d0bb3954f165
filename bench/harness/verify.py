"""The independent check: where every row has to be and what every sum has to be.

Shares nothing with the product: it sorts (expert, source rank, token) triples in numpy and regenerates every
rank's rows from the seed, so no rank has to trust what another one sent. Rows are compared where they lie, on
the CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import data
from .data import DataKey
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
    """A dispatch result; what a path does not return is None and is not checked."""

    tokens: torch.Tensor
    scales: torch.Tensor | None = None  # of rows handed on in fp8
    counts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
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


class _Count:
    """Counts values that differ, without waiting for the device before the total is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, wrong: torch.Tensor) -> None:
        self._sum += torch.count_nonzero(wrong)

    def differing(self, got: torch.Tensor, want: npt.NDArray[Any] | torch.Tensor) -> None:
        """Entries that differ, bit for bit; all of `want` when the shapes do."""
        wanted = torch.as_tensor(want, device=got.device)
        if got.shape != wanted.shape:
            self._sum += max(wanted.numel(), 1)
        elif got.dtype == wanted.dtype:
            self.add(_bits(got) != _bits(wanted))
        else:
            self.add(got != wanted)

    @property
    def total(self) -> int:
        return int(self._sum)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Comparing bits, not values: a NaN of a poisoned buffer has to count as wrong, and -0.0 is not 0.0.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(words[tensor.element_size()])


def wrong_dispatch(
    got: Received,
    layout: Layout,
    key: DataKey,
    topk: int,
    capacity: int | None = None,
    wire: str | None = None,
) -> int:
    """Values of a dispatch result that differ, bit for bit, from what `layout` and the sources' data call
    for.

    Rows, padding rows (zero), counts, offsets, weights and local ids are all looked at. Rows past the last
    offset of a result of fixed capacity are unspecified and are not. With `wire` fp8 the rows are those
    that quantising on the way leaves.
    """
    rows = layout.num_rows if capacity is None else capacity
    if got.tokens.shape != (rows, key.hidden):
        return max(layout.num_rows * key.hidden, 1)
    device = got.tokens.device
    wrong = _Count(device)
    if got.counts is not None:
        wrong.differing(got.counts, layout.expert_rows_L)
    if got.offsets is not None:
        wrong.differing(got.offsets, layout.offsets_G)
    if got.topk_idx is not None and layout.ids_NK is not None:
        wrong.differing(got.topk_idx[_on(device, layout.row_N)], layout.ids_NK)
    for source in np.unique(layout.source_N):
        x_TH = data.rows(key, int(source), device)
        w_TK = data.weights(key, int(source), topk, device) if got.weights is not None else None
        for block in _blocks(np.nonzero(layout.source_N == source)[0]):
            row, token = _on(device, layout.row_N[block]), _on(device, layout.token_N[block])
            _compare_rows(wrong, got, row, x_TH[token], wire)
            if got.weights is None or w_TK is None:
                continue
            want = w_TK[token].to(got.weights.dtype)
            if layout.ids_NK is None:
                want = want.gather(1, _on(device, layout.slot_N[block])[:, None])[:, 0]
            else:
                want = torch.where(_on(device, layout.ids_NK[block]) >= 0, want, 0)
            wrong.differing(got.weights[row], want)
    padding = np.ones(layout.num_rows, dtype=bool)
    padding[layout.row_N] = False
    for block in _blocks(np.nonzero(padding)[0]):
        wrong.add(_bits(got.tokens)[_on(device, block)])
    return wrong.total + int(got.overflow != 0)


def wrong_backward(
    grad_PH: torch.Tensor,
    grad_weights_P: torch.Tensor,
    rows_PH: torch.Tensor,
    layout: Layout,
    given: DataKey,
    made: DataKey,
    topk: int,
) -> int:
    """Values of the backward of a weighted combine that are wrong.

    With y = combine(rows, w) and dy, the rows of `given`: the gradient of a row is w dy, bit for bit, and
    that of its weight <row, dy>, within what rounding a sum can explain. The weights are those of `made`.
    """
    if grad_PH.shape != rows_PH.shape or grad_weights_P.shape != rows_PH.shape[:1]:
        return max(layout.num_rows * given.hidden, 1)
    device, wide = grad_PH.device, data.wide(given.torch_dtype)
    allowed = given.hidden * (_ROUNDOFF["float64"] if wide == torch.float64 else _ROUNDOFF["float32"])
    wrong = _Count(device)
    for source in np.unique(layout.source_N):
        dy_TH = data.rows(given, int(source), device)
        w_TK = data.weights(made, int(source), topk, device).to(wide)
        for block in _blocks(np.nonzero(layout.source_N == source)[0]):
            row, token = _on(device, layout.row_N[block]), _on(device, layout.token_N[block])
            weight = w_TK[token, _on(device, layout.slot_N[block])]
            dy_NH = dy_TH[token].to(wide)
            wrong.differing(grad_PH[row], (weight[:, None] * dy_NH).to(grad_PH.dtype))
            terms = rows_PH[row].to(torch.float64) * dy_NH
            error = (grad_weights_P[row].to(torch.float64) - terms.sum(1)).abs_()
            wrong.add(~(error <= terms.abs_().sum(1) * allowed))  # negated, so that NaN counts as wrong
    return wrong.total


def _compare_rows(
    wrong: _Count, got: Received, row: torch.Tensor, x_NH: torch.Tensor, wire: str | None
) -> None:
    if wire is None:
        wrong.differing(got.tokens[row], x_NH)
        return
    values, scales = data.quantised(x_NH)
    if got.scales is None:
        wrong.differing(got.tokens[row], data.dequantised(values, scales, x_NH.dtype))
    else:
        wrong.differing(got.tokens.view(torch.uint8)[row], values.view(torch.uint8))
        wrong.differing(got.scales[row], scales)


def _on(device: torch.device, index: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)


def _blocks(index: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [index[at : at + _BLOCK_ROWS] for at in range(0, index.size, _BLOCK_ROWS)]


def answers(
    layout: Layout, key: DataKey, rows: int, device: torch.device, by_rank: int | None = None
) -> torch.Tensor:
    """The (rows, H) rows that the owner hands to combine: `data.answer` of each row by its expert, or by
    `by_rank`.

    Padding, and rows past the real ones, are NaN: a combine that reads them is caught.
    """
    out = torch.full((rows, key.hidden), float("nan"), dtype=key.torch_dtype, device=device)
    for source in np.unique(layout.source_N):
        x_TH = data.rows(key, int(source), device)
        for block in _blocks(np.nonzero(layout.source_N == source)[0]):
            who = layout.expert_N[block] if by_rank is None else np.full(block.size, by_rank)
            token = _on(device, layout.token_N[block])
            out[_on(device, layout.row_N[block])] = data.answer(x_TH[token], _on(device, who))
    return out


def wrong_combine(
    got_TH: torch.Tensor,
    ids_TK: Ids,
    key: DataKey,
    rank: int,
    *,
    experts: int,
    ranks: int,
    layout: str,
    node_sums: bool = False,
) -> int:
    """Values of a combined (T, H) result that are further from the float64 sum than rounding can explain.

    expert layout: sum over k of weight * answer of expert k. rank layout: sum over owner ranks of the rank's
    answer. Rounding that is allowed, relative to the sum of magnitudes: twice to the row type (partial row,
    result), with `node_sums` (ranks of a node are added up before they travel) once more, and once for each
    product and sum of the accumulation.
    """
    tokens, topk = ids_TK.shape
    if got_TH.shape != (tokens, key.hidden):
        return max(tokens * key.hidden, 1)
    device = got_TH.device
    x_TH, w_TK = data.rows(key, rank, device), data.weights(key, rank, topk, device)
    who_TK, scale_TK = (
        _on(device, part) for part in _terms(ids_TK, w_TK.cpu().numpy(), experts // ranks, layout)
    )
    unit = _ROUNDOFF[key.dtype]
    accumulate = unit if key.dtype == "float64" else _ROUNDOFF["float32"]
    allowed = (3.0 if node_sums else 2.0) * unit + (2 * topk + 4) * accumulate
    wrong = _Count(device)
    for at in range(0, tokens, _BLOCK_ROWS):
        block = slice(at, at + _BLOCK_ROWS)
        want = torch.zeros(x_TH[block].shape, dtype=torch.float64, device=device)
        size = torch.zeros_like(want)
        for k in range(topk):
            used = who_TK[block, k] >= 0
            term = data.answer(x_TH[block], who_TK[block, k].clamp_min(0)).to(torch.float64)
            term *= torch.where(used, scale_TK[block, k], 0.0)[:, None]
            want += term
            size += term.abs_()
        error = (got_TH[block].to(torch.float64) - want).abs_()
        # Negated, so that NaN counts as wrong.
        wrong.add(~(error <= size.mul_(allowed).add_(_SMALLEST[key.dtype])))
    return wrong.total


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
