"""Joins the rows of several passes (microbatches) of a layer: group by group, and in a group pass by pass.

A product that sums over the rows of a group, such as a weight's gradient, then sums over all passes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_PIECE = torch.complex128
"""A dtype of 16 bytes for copying rows: the largest pieces that a GPU thread moves."""


class Joined(NamedTuple):
    """The positions of some passes' rows after joining."""

    ends_L: Tensor
    """int32, cumulative ends of the joined groups."""
    places: list[Tensor]
    """For each pass a tensor (P,) int64: element p is the position of the pass's row p among the joined rows.
    Rows past the groups come after all groups."""


def join_groups(ends: Sequence[Tensor], rows: Sequence[int]) -> Joined:
    """Computes the positions of rows when passes are joined, without a host wait. ends: for each pass the
    cumulative ends of its groups, (L,) int32, ascending; rows: for each pass its P, at least its ends[-1].

    Example, two passes of two groups, ends [2, 3] and [1, 4], 3 and 5 rows: the joined ends are [3, 7], and
    the positions [0, 1, 3] and [2, 4, 5, 6, 7].
    """
    device = ends[0].device
    # M passes, G = L + 1: the rows past the groups form one more group.
    ends_MG = torch.stack(
        [torch.cat((each, each.new_full((1,), count))) for each, count in zip(ends, rows, strict=True)]
    )
    starts_MG = torch.nn.functional.pad(ends_MG[:, :-1], (1, 0))
    sizes_MG = ends_MG - starts_MG
    joined_G = sizes_MG.sum(0).cumsum(0)
    before_MG = sizes_MG.cumsum(0) - sizes_MG  # rows of this group in earlier passes
    shifts_MG = joined_G - sizes_MG.sum(0) + before_MG - starts_MG
    places = []
    for number, count in enumerate(rows):
        row_P = torch.arange(count, device=device, dtype=torch.int32)
        group_P = torch.searchsorted(ends_MG[number], row_P, right=True)
        places.append(row_P + shifts_MG[number][group_P])
    return Joined(joined_G[:-1].to(torch.int32), places)


def join_rows(rows: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all passes, (sum of P, A), each at its position; inputs are (P, A) of one dtype."""
    first = rows[0]
    joined = first.new_empty(sum(each.shape[0] for each in rows), first.shape[1])
    target = _in_pieces(joined)
    for each_PA, place_P in zip(rows, places, strict=True):
        each_PA = each_PA.contiguous()
        if target is None or (pieces := _in_pieces(each_PA)) is None:
            joined.index_copy_(0, place_P, each_PA)
        else:
            target.index_copy_(0, place_P, pieces)
    return joined


def _in_pieces(rows_PA: Tensor) -> Tensor | None:
    """Returns the rows in elements of _PIECE; None if row size or address is no multiple of 16 bytes."""
    size = _PIECE.itemsize
    if (rows_PA.shape[1] * rows_PA.element_size()) % size or rows_PA.data_ptr() % size:
        return None
    return rows_PA.view(_PIECE)
