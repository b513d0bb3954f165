"""The independent check: where every row has to be, what every sum and every product has to be.

The tests' reference (tests/reference.py) says where rows have to be, tests/moe_reference.py what an expert
makes of them, differentiated by autograd; both share nothing with moecomm. Every rank makes all
ranks' inputs again from the seed, so no rank has to trust what another one sent. Values are compared where
they lie, on the CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests import moe_reference

from . import inputs
from .case import Case, LayerCase
from .inputs import DataKey
from .path import Verdict
from .placing import Rows, on

_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}


@dataclass(frozen=True, kw_only=True)
class Received:
    """A dispatch result; what a path does not return is None and is not checked."""

    tokens: Tensor
    scales: Tensor | None = None  # of rows passed on in fp8
    counts: Tensor | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None
    topk_idx: Tensor | None = None
    overflow: int = 0


def _differing(got: Tensor, want: npt.NDArray[Any] | Tensor) -> int:
    """Counts entries that differ, bit for bit; all of `want` when the shapes do."""
    wanted = torch.as_tensor(want, device=got.device)
    if got.shape != wanted.shape:
        return max(wanted.numel(), 1)
    same_type = got.dtype == wanted.dtype
    return _count(_bits(got) != _bits(wanted) if same_type else got != wanted)


def _count(wrong: Tensor) -> int:
    return int(torch.count_nonzero(wrong))


def _bits(tensor: Tensor) -> Tensor:
    # Comparing bits, not values: a NaN of a poisoned buffer has to count as wrong, and -0.0 is not 0.0.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(words[tensor.element_size()])


def wrong_dispatch(
    got: Received, rows: Rows, key: DataKey, topk: int, capacity: int | None = None, wire: str | None = None
) -> int:
    """Values of a dispatch result that differ, bit for bit, from what `rows` and the sources' data call for.

    Rows, padding rows (zero), counts, offsets, weights and local ids are all looked at. Rows past the last
    offset of a result of fixed capacity are unspecified and are not. With a `wire` format the rows are those
    that quantising on the way leaves.
    """
    if got.tokens.shape != (rows.num_rows if capacity is None else capacity, key.hidden):
        return max(rows.num_rows * key.hidden, 1)
    device, wrong = got.tokens.device, int(got.overflow != 0)
    if got.counts is not None:
        wrong += _differing(got.counts, rows.expert_rows_L)
    if got.offsets is not None:
        wrong += _differing(got.offsets, rows.offsets_G)
    if got.topk_idx is not None and rows.ids_NK is not None:
        wrong += _differing(got.topk_idx[on(device, rows.row_N)], rows.ids_NK)
    for source in rows.sources:
        row, token, slot = rows.from_source(source, device)
        wrong += _wrong_rows(got, row, inputs.rows(key, source, device)[token], wire)
        if got.weights is None:
            continue
        want = inputs.weights(key, source, topk, device)[token].to(got.weights.dtype)
        if rows.ids_NK is None:
            want = want.gather(1, slot[:, None])[:, 0]
        else:
            want = torch.where(on(device, rows.ids_NK[rows.source_N == source]) >= 0, want, 0)
        wrong += _differing(got.weights[row], want)
    padding = np.setdiff1d(np.arange(rows.num_rows), rows.row_N)
    return wrong + _count(_bits(got.tokens[on(device, padding)]))


def _wrong_rows(got: Received, row: Tensor, x_NH: Tensor, wire: str | None) -> int:
    if wire is None:
        return _differing(got.tokens[row], x_NH)
    values, scales = inputs.quantised(x_NH, wire)
    if got.scales is None:
        return _differing(got.tokens[row], inputs.dequantised(values, scales, x_NH.dtype, wire))
    sent = _differing(got.tokens.view(torch.uint8)[row], values.view(torch.uint8))
    return sent + _differing(inputs.factors(got.scales)[row], inputs.factors(scales))


def wrong_backward(
    grad_PH: Tensor,
    grad_weights_P: Tensor,
    rows_PH: Tensor,
    rows: Rows,
    given: DataKey,
    made: DataKey,
    topk: int,
) -> int:
    """Values of the backward of a weighted combine that are wrong.

    With y = combine(rows, w) and dy, the rows of `given`: the gradient of a row is w dy, bit for bit, and
    that of its weight <row, dy>, within what rounding a sum can explain. The weights are those of `made`.
    """
    if grad_PH.shape != rows_PH.shape or grad_weights_P.shape != rows_PH.shape[:1]:
        return max(rows.num_rows * given.hidden, 1)
    device, wide = grad_PH.device, inputs.wide(given.torch_dtype)
    allowed = given.hidden * (_ROUNDOFF["float64"] if wide == torch.float64 else _ROUNDOFF["float32"])
    wrong = 0
    for source in rows.sources:
        row, token, slot = rows.from_source(source, device)
        weight_N = inputs.weights(made, source, topk, device).to(wide)[token, slot]
        dy_NH = inputs.rows(given, source, device)[token].to(wide)
        wrong += _differing(grad_PH[row], (weight_N[:, None] * dy_NH).to(grad_PH.dtype))
        terms = rows_PH[row].to(torch.float64) * dy_NH
        error = (grad_weights_P[row].to(torch.float64) - terms.sum(1)).abs_()
        wrong += _count(~(error <= terms.abs_().sum(1) * allowed))  # negated, so that NaN counts as wrong
    return wrong


def answers(rows: Rows, key: DataKey, count: int, device: torch.device, by_rank: int | None = None) -> Tensor:
    """The (count, H) rows that the owner hands to combine: `inputs.answer` of each row by its expert, or by
    `by_rank`.

    Padding, and rows past the real ones, are NaN: a combine that reads them is caught.
    """
    out = torch.full((count, key.hidden), float("nan"), dtype=key.torch_dtype, device=device)
    for source in rows.sources:
        row, token, _ = rows.from_source(source, device)
        who = on(device, rows.expert_N[rows.source_N == source])
        if by_rank is not None:
            who.fill_(by_rank)
        out[row] = inputs.answer(inputs.rows(key, source, device)[token], who)
    return out


def wrong_combine(got_TH: Tensor, case: Case) -> int:
    """Values of a combined (T, H) result that are further from the float64 sum than rounding can explain.

    expert layout: sum over k of weight * answer of expert k. rank layout: sum over owner ranks of the rank's
    answer. Rounding that is allowed, relative to the sum of magnitudes: twice to the row type (partial row,
    result), once more where ranks of a node are added up before they travel, and once for each product and
    sum of the accumulation. Where sums travel in fp8, that of e4m3 instead of the partial row's: a sixteenth
    of each, and below the normal numbers of e4m3 a 1024th of the scale, that of the largest of 128 columns.
    """
    key, (tokens, topk) = case.key, case.ids_TK.shape
    if got_TH.shape != (tokens, key.hidden):
        return max(tokens * key.hidden, 1)
    options, device = case.options, got_TH.device
    nodes, ranks = options.nodes, options.ranks
    x_TH, w_TK = inputs.rows(key, case.rank, device), inputs.weights(key, case.rank, topk, device)
    who = case.ids_TK.astype(np.int64)
    if options.layout == "rank":  # each owner answers once, without a weight
        who = np.sort(who // (case.point.experts // ranks), axis=1)
        who[:, 1:][who[:, 1:] == who[:, :-1]] = -1
        w_TK = torch.ones_like(w_TK)
    who_TK = on(device, who)
    unit = _ROUNDOFF[key.dtype]
    accumulate = unit if key.dtype == "float64" else _ROUNDOFF["float32"]
    allowed = (3.0 if 1 < nodes < ranks else 2.0) * unit + (2 * topk + 4) * accumulate
    want = torch.zeros(x_TH.shape, dtype=torch.float64, device=device)
    size = torch.zeros_like(want)
    for k in range(topk):
        term = inputs.answer(x_TH, who_TK[:, k].clamp_min(0)).to(torch.float64)
        term *= torch.where(who_TK[:, k] >= 0, w_TK[:, k].to(torch.float64), 0.0)[:, None]
        want += term
        size += term.abs_()
    error = (got_TH.to(torch.float64) - want).abs_()
    if options.combine_wire is not None:
        allowed += 2.0**-4 + 2.0**-21
        scales = inputs.quantised(size.float(), options.combine_wire)[1]
        error -= min(topk, ranks) / 1024 * inputs.spread(scales, key.hidden, options.combine_wire)
    return _count(~(error <= size.mul_(allowed).add_(_SMALLEST[key.dtype])))  # negated: NaN is wrong


# -- layers --------------------------------------------------------------------------------------------------

Y, DX, DWEIGHTS, DW_IN, DW_OUT = "y", "dx", "dweights", "dw_in", "dw_out"
SHARED_IN, SHARED_OUT = "shared dw_in", "shared dw_out"
OF_WEIGHTS = (DW_IN, DW_OUT, SHARED_IN, SHARED_OUT)
ROWS_OUT, DROWS, DROW_WEIGHTS = "rows out", "drows", "drow weights"
MOVED, MOVED_DY = "rows moved", "gradients moved"
MOVED_Y, MOVED_DX, MOVED_DWEIGHTS = "sum of rows", "sum of gradients", "weights moved"
_EXACT = (MOVED, MOVED_DY)
# A row of a few values may be small by chance throughout: all have one scale. So may a row of an expert with
# a single token: in its gradients the expert counts, too.
_ONE_SCALE = (DWEIGHTS, DROW_WEIGHTS, MOVED_DWEIGHTS)
_EXPERT_SCALE = (DW_IN, DW_OUT)
# Largest deviation of a value, as a part of its magnitude plus the root mean square of its row (for gradients
# of experts: plus that of the expert). A value is behind up to five roundings; float32 is held against
# float64, and sums thousands of products.
BOUNDS = {"bfloat16": 2.0**-4, "float16": 2.0**-7, "float32": 2.0**-14, "float64": 2.0**-40}
_BLOCK = 1 << 26  # values compared at a time


class _Expert(NamedTuple):
    """Results of an expert for its rows, and gradients."""

    out: Tensor
    grads: tuple[Tensor, ...]  # of rows and weights, and if wanted of w_in and w_out


def _expert(
    x: Tensor, weight: Tensor, dy: Tensor, matrices: Sequence[Tensor], activation: str, *, with_grads: bool
) -> _Expert:
    """Runs one expert forward and, if gradients are wanted, backward."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (x, weight, *matrices)]
        out = leaves[1][:, None] * moe_reference.feed_forward(leaves[0], leaves[2], leaves[3], activation)
        grads = torch.autograd.grad(out, leaves if with_grads else leaves[:2], dy)
    return _Expert(out.detach(), grads)


def by_name(weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the given tensors, one of each weight, under the names of OF_WEIGHTS; without shared experts
    there are none of theirs."""
    return dict(zip(OF_WEIGHTS, weights, strict=False))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of a layer's reference: float32, or float64 for layers in float32 or float64."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def wanted(case: LayerCase, round: int) -> list[dict[str, Tensor]]:
    """Loads the data of `round` into all microbatches, and returns what a variant is expected to return for
    each; the gradients of the experts are those of all microbatches together. Kept until the next round."""
    for each in case.microbatches:
        each.load(round)
    if case.wanted is None or case.wanted[0] != round:
        case.wanted = None  # its memory first
        case.wanted = (round, expected_of_layer(case.microbatches))
    return case.wanted[1]


@torch.no_grad()
def expected_of_layer(cases: Sequence[LayerCase]) -> list[dict[str, Tensor]]:
    """Computes everything that a variant may return for the data of each case, by name: one expert at a time,
    in the wide type. The gradients of the experts are sums over all cases, in tensors that they share.
    """
    first, point = cases[0], cases[0].point
    wide, device = wide_type(first.dtype), first.device
    assert point.ffn is not None
    sums = {
        DW_IN: torch.zeros(first.local, point.hidden, 2 * point.ffn, dtype=wide, device=device),
        DW_OUT: torch.zeros(first.local, point.ffn, point.hidden, dtype=wide, device=device),
    }
    found = [sums | _nothing_yet(case, wide) for case in cases]
    for number in range(point.experts):
        made = inputs.expert(first.experts.seed, number, point.hidden, point.ffn, first.dtype, device)
        matrices = [each.to(wide) for each in made]
        for case, want in zip(cases, found, strict=True):
            _add_expert(case, want, number, matrices)
    if shared_experts := inputs.shared_experts(first.experts.seed, point, first.dtype, device):
        for case, want in zip(cases, found, strict=True):
            x, dy, *matrices = (each.detach().to(wide) for each in (case.x_TH, case.dy_TH, *shared_experts))
            once = torch.ones(len(x), dtype=wide, device=device)
            shared = _expert(x, once, dy, matrices, case.options.activation, with_grads=True)
            for name, value in zip((Y, DX), (shared.out, shared.grads[0]), strict=True):
                want[name] += value
            for name, value in zip((SHARED_IN, SHARED_OUT), shared.grads[2:], strict=True):
                sums[name] = sums.get(name, 0) + value
        found = [want | sums for want in found]
    return found


def _nothing_yet(case: LayerCase, wide: torch.dtype) -> dict[str, Tensor]:
    x_TH, dy_TH, rows_PH = (each.detach() for each in (case.x_TH, case.dy_TH, case.rows_PH))
    want = {name: torch.zeros_like(x_TH, dtype=wide) for name in (Y, DX)}
    want |= {name: torch.zeros_like(rows_PH, dtype=wide) for name in (ROWS_OUT, DROWS)}
    want[DWEIGHTS] = torch.zeros_like(case.weights_TK, dtype=wide)
    want[DROW_WEIGHTS] = torch.zeros_like(case.weights_P, dtype=wide)
    if case.point.microbatches:
        return want
    # Of communication alone every expert hands back what it got.
    want |= {MOVED: rows_PH.to(wide), MOVED_DY: case.dy_PH.to(wide)}
    want[MOVED_DWEIGHTS] = case.weights_TK.detach().to(wide)
    topk = case.point.topk
    return want | {MOVED_Y: x_TH.to(wide) * topk, MOVED_DX: dy_TH.to(wide) * topk}


def _add_expert(case: LayerCase, want: dict[str, Tensor], number: int, matrices: Sequence[Tensor]) -> None:
    """Adds what expert `number` makes of a case's own tokens, and of all ranks' if it is this rank's."""
    wide, activation = matrices[0].dtype, case.options.activation
    token, slot = (on(case.device, each) for each in np.nonzero(case.ids_TK == number))
    if token.numel():
        x, dy = (each.detach()[token].to(wide) for each in (case.x_TH, case.dy_TH))
        weight = case.weights_TK.detach()[token, slot].to(wide)
        home = _expert(x, weight, dy, matrices, activation, with_grads=False)
        want[Y].index_add_(0, token, home.out)
        want[DX].index_add_(0, token, home.grads[0])
        want[DWEIGHTS][token, slot] = home.grads[1]
    place = number - case.rank * case.local
    ends = [0, *case.rows.offsets_G.tolist()]
    here = slice(ends[place], ends[place + 1]) if 0 <= place < case.local else slice(0, 0)
    if here.start < here.stop:
        rows, weight, dy = (
            each.detach()[here].to(wide) for each in (case.rows_PH, case.weights_P, case.dy_PH)
        )
        at_home = _expert(rows, weight, dy, matrices, activation, with_grads=True)
        want[ROWS_OUT][here] = at_home.out
        want[DROWS][here], want[DROW_WEIGHTS][here] = at_home.grads[:2]
        for name, grad in zip((DW_IN, DW_OUT), at_home.grads[2:], strict=True):
            want[name][place] += grad


@torch.no_grad()
def compare(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: str, depth: int = 1) -> Verdict:
    """Holds what a variant has returned against what it should; `depth`: so many layers behind one another.

    A value may be off by BOUNDS[dtype] a layer times its magnitude plus the root mean square of its row (of
    all values for gradients of routing weights; for those of an expert plus that of the expert), copied rows
    by nothing; where all of these are zero it has to be.
    """
    wrong, worst = 0, 0.0
    for name, value in got.items():
        bound = 0.0 if name in _EXACT else depth * BOUNDS[dtype]
        if value.shape != wanted[name].shape:
            return Verdict(max(value.numel(), wanted[name].numel()), float("inf"))
        if not value.numel():
            continue
        # As (groups, rows, columns): a mean square is of a row, and where there is one scale all are one row.
        columns = value.numel() if name in _ONE_SCALE else value.shape[-1]
        rows = value.shape[1] if name in _EXPERT_SCALE else 1
        groups, others = (each.reshape(-1, rows, columns) for each in (value, wanted[name]))
        block = max(1, _BLOCK // (rows * columns))
        for some, want in zip(groups.split(block), others.split(block), strict=True):
            row_squares = want.square().mean(2, keepdim=True)
            scale = want.abs() + row_squares.sqrt()
            if name in _EXPERT_SCALE:
                scale += row_squares.mean(1, keepdim=True).sqrt()
            off = (some.to(want.dtype) - want).abs()
            wrong += int((~(off <= bound * scale)).sum())  # so that NaN is wrong
            share = torch.where(off == 0, 0.0, off / scale).max()
            worst = max(worst, float(torch.nan_to_num(share, nan=float("inf"))))
    return Verdict(wrong, worst)
