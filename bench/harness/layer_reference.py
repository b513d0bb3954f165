"""The independent check of a layer: an expert at a time, in a wider type, from data that each rank makes
again from the seed.

It shares nothing with what is timed: no communication, no grouped products, no autograd. For a row x of an
expert, with the routing weight w of its token and the gradient dy of that token's result:
    h = x W_in, a = silu(h_gate) h_up, z = w a, out = z W_out
    dz = dy W_out^T, dw = <dz, a>, dh = w dz a'(h), dx = dh W_in^T
    dW_out = sum of z^T dy, dW_in = sum of x^T dh
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import data
from .layer_case import LayerCase

Named = Mapping[str, Tensor]
Y, DX, DWEIGHTS, DW_IN, DW_OUT = "y", "dx", "dweights", "dw_in", "dw_out"
ROWS_OUT, DROWS, DROW_WEIGHTS = "rows out", "drows", "drow weights"
PLAIN_ROWS_OUT = "rows out without weights"
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
# Products in e4m3 have independent errors of at most a sixteenth of each operand's values: of each product
# 2^-4 sqrt(2/3) = 0.051 in the mean, of the four that a gradient may be behind twice that, and half as much
# again for activations that stretch it. Single values of many lie up to seven times as far off.
FP8 = "fp8"
_FP8_BOUND, _FP8_MEAN = 1.0, 0.2
_BLOCK = 1 << 26  # values compared at a time


class _Pass(NamedTuple):
    """What an expert makes of its rows, forward and backward."""

    out: Tensor
    plain_out: Tensor  # without the weight
    dx: Tensor
    dweight: Tensor
    dw_in: Tensor | None
    dw_out: Tensor | None


def _pass(x: Tensor, weight: Tensor, dy: Tensor, w_in: Tensor, w_out: Tensor, need_weights: bool) -> _Pass:
    gate, up = (x @ w_in).chunk(2, dim=1)
    sigma = torch.sigmoid(gate)
    a = gate * sigma * up
    z = weight[:, None] * a
    dz = dy @ w_out.t()
    da = weight[:, None] * dz
    dh = torch.cat([da * up * sigma * (1 + gate * (1 - sigma)), da * gate * sigma], dim=1)
    return _Pass(
        out=z @ w_out,
        plain_out=a @ w_out,
        dx=dh @ w_in.t(),
        dweight=(dz * a).sum(1),
        dw_in=x.t() @ dh if need_weights else None,
        dw_out=z.t() @ dy if need_weights else None,
    )


@torch.no_grad()
def expected(case: LayerCase) -> dict[str, Tensor]:
    """Everything that a way may return for the case's data, by name."""
    # Single precision is not wide for itself.
    wide = torch.float32 if case.dtype in (torch.bfloat16, torch.float16) else torch.float64
    return {**_at_home(case, wide), **_at_experts(case, wide), **_moved(case, wide)}


def _expert(case: LayerCase, number: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    preset = case.preset
    made = data.expert(case.options.seed, number, preset.hidden, preset.ffn, case.dtype, case.device)
    return made[0].to(wide), made[1].to(wide)


def _rows(case: LayerCase, rank: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, gradients of the result, weights) of a rank's tokens."""
    return (
        data.rows(case.key, rank, case.device).to(wide),
        data.rows(case.gradient_key, rank, case.device).to(wide),
        data.weights(case.key, rank, case.preset.topk, case.device).to(wide),
    )


def _at_home(case: LayerCase, wide: torch.dtype) -> dict[str, Tensor]:
    """Of this rank's tokens, with the experts of all ranks."""
    x_TH, dy_TH, weights_TK = _rows(case, case.rank, wide)
    y_TH, dx_TH = torch.zeros_like(x_TH), torch.zeros_like(x_TH)
    dweights_TK = torch.zeros_like(weights_TK)
    ids_TK = case.ids_R[case.rank]
    for number in range(case.preset.experts):
        token, slot = (torch.from_numpy(each).to(case.device) for each in np.nonzero(ids_TK == number))
        if not token.numel():
            continue
        made = _pass(
            x_TH[token],
            weights_TK[token, slot],
            dy_TH[token],
            *_expert(case, number, wide),
            need_weights=False,
        )
        y_TH.index_add_(0, token, made.out)
        dx_TH.index_add_(0, token, made.dx)
        dweights_TK[token, slot] = made.dweight
    return {Y: y_TH, DX: dx_TH, DWEIGHTS: dweights_TK}


def _at_experts(case: LayerCase, wide: torch.dtype) -> dict[str, Tensor]:
    """Of this rank's experts, with the tokens of all ranks."""
    layout, preset = case.layout, case.preset
    rows = layout.num_rows
    x_PH = torch.empty(rows, preset.hidden, dtype=wide, device=case.device)
    dy_PH, weights_P = torch.empty_like(x_PH), x_PH.new_empty(rows)
    for source in range(case.options.ranks):
        x_TH, dy_TH, weights_TK = _rows(case, source, wide)
        here_N = layout.source_N == source
        row, token, slot = (
            torch.from_numpy(each[here_N]).to(case.device)
            for each in (layout.row_N, layout.token_N, layout.slot_N)
        )
        x_PH[row], dy_PH[row], weights_P[row] = x_TH[token], dy_TH[token], weights_TK[token, slot]
    out_PH, plain_PH, dx_PH = (torch.empty_like(x_PH) for _ in range(3))
    dweights_P = torch.empty_like(weights_P)
    dw_in = x_PH.new_zeros(case.local, preset.hidden, 2 * preset.ffn)
    dw_out = x_PH.new_zeros(case.local, preset.ffn, preset.hidden)
    begin = 0
    for place, end in enumerate(layout.offsets_G.tolist()):
        if end > begin:
            here = slice(begin, end)
            experts = _expert(case, case.rank * case.local + place, wide)
            made = _pass(x_PH[here], weights_P[here], dy_PH[here], *experts, need_weights=True)
            out_PH[here], plain_PH[here], dx_PH[here] = made.out, made.plain_out, made.dx
            dweights_P[here] = made.dweight
            assert made.dw_in is not None and made.dw_out is not None
            dw_in[place], dw_out[place] = made.dw_in, made.dw_out
        begin = end
    return {
        ROWS_OUT: out_PH,
        PLAIN_ROWS_OUT: plain_PH,
        DROWS: dx_PH,
        DROW_WEIGHTS: dweights_P,
        DW_IN: dw_in,
        DW_OUT: dw_out,
    }


def _moved(case: LayerCase, wide: torch.dtype) -> dict[str, Tensor]:
    """Of communication alone, where every expert hands back what it got."""
    x_TH, dy_TH, weights_TK = _rows(case, case.rank, wide)
    return {
        MOVED: case.rows_PH.detach().to(wide),
        MOVED_DY: case.dy_PH.to(wide),
        MOVED_Y: x_TH * case.preset.topk,
        MOVED_DX: dy_TH * case.preset.topk,
        MOVED_DWEIGHTS: weights_TK,
    }


class Verdict(NamedTuple):
    """Values that deviate too much, and the largest deviation, in the terms of BOUNDS."""

    wrong: int
    worst: float


@torch.no_grad()
def compare(got: Named, wanted: Named, dtype: str) -> Verdict:
    """Holds what a way has returned against what it should. A value may be off by BOUNDS[dtype] times its
    magnitude plus the root mean square of its row (of all values for gradients of routing weights; for those
    of an expert plus that of the expert), copied rows by nothing; where all of these are zero it has to be.
    Where dtype is FP8, that of products, all values of a result count as wrong if they are off by too much in
    the mean.
    """
    wrong, worst = 0, 0.0
    for name, value in got.items():
        bound = 0.0 if name in _EXACT else _FP8_BOUND if dtype == FP8 else BOUNDS[dtype]
        if value.shape != wanted[name].shape:
            return Verdict(max(value.numel(), wanted[name].numel()), float("inf"))
        if not value.numel():
            continue
        # As (groups, rows, columns): a mean square is of a row, and where there is one scale all are one row.
        columns = value.numel() if name in _ONE_SCALE else value.shape[-1]
        rows = value.shape[1] if name in _EXPERT_SCALE else 1
        groups, reference = (each.reshape(-1, rows, columns) for each in (value, wanted[name]))
        if dtype == FP8 and not _near_in_the_mean(value, wanted[name]):
            wrong += value.numel()
        block = max(1, _BLOCK // (rows * columns))
        for some, others in zip(groups.split(block), reference.split(block), strict=True):
            squares = others.square().mean(2, keepdim=True)
            scale = others.abs() + squares.sqrt()
            if name in _EXPERT_SCALE:
                scale += squares.mean(1, keepdim=True).sqrt()
            off = (some.to(others.dtype) - others).abs()
            wrong += int((~(off <= bound * scale)).sum())  # so that NaN is wrong
            share = torch.where(off == 0, 0.0, off / scale).max()
            worst = max(worst, float(torch.nan_to_num(share, nan=float("inf"))))
    return Verdict(wrong, worst)


def _near_in_the_mean(value: Tensor, reference: Tensor) -> bool:
    off = size = 0.0
    for some, others in zip(value.flatten().split(_BLOCK), reference.flatten().split(_BLOCK), strict=True):
        off += float((some.to(others.dtype) - others).square().sum(dtype=torch.float64))
        size += float(others.square().sum(dtype=torch.float64))
    return off <= _FP8_MEAN**2 * size
