"""Formulas with which torch.utils.flop_counter.FlopCounterMode counts the experts' products.

Each row is multiplied by its group's weight. Rows past the last group count as well, as formulas see only
shapes. quack's kernels are no torch operators, and not counted. P, Q: rows in L groups; others: widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def _by_group(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of (P, A) times (L, A, B), a matrix for each group; of (A, P), or (P, A) to be transposed, times
    (P, B), summed over each group; of (L, M, A) times (L, A, B); or of (L, M, A) times (A, P), whose columns
    are grouped."""
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]


_operator = torch.ops.aten._grouped_mm
if _operator not in flop_registry:  # a later torch may have its own formula
    register_flop_formula(_operator)(_by_group)
