"""Rotary positions (arXiv 2104.09864), also of YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lm.attention import AttentionConfig

YARN_FAST, YARN_SLOW = 32, 1
"""beta_fast and beta_slow of YaRN: turns of a pair within the positions of training."""


def rope_table(config: AttentionConfig, max_seq: int) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of every (position, frequency), both (S, D/2) float32, times YaRN's factor.

    Angles are float64: at position 100 000 float32 would leave an error of 0.004.
    """
    frequencies_D = rope_frequencies(config)
    growth = 1.0 if config.rope_mscale else yarn_growth(config.rope_factor, 1.0)
    angles_SD = torch.outer(torch.arange(max_seq, dtype=torch.float64), frequencies_D)
    return (angles_SD.cos() * growth).float(), (angles_SD.sin() * growth).float()


def rope_frequencies(config: AttentionConfig) -> Tensor:
    """Returns for each pair the angle between consecutive positions, (D/2,) float64.

    A rope_factor above 1 applies YaRN (arXiv 2309.00071, section 3.2): frequencies that turn more than
    YARN_FAST times within rope_positions stay, those that turn less than YARN_SLOW times are divided by the
    factor, with a ramp in between. The ramp's ends are indices of frequencies, as in transformers, whose
    `truncate` rounds them.
    """
    width, base = config.rotated_width, config.rope_base
    places_D = torch.arange(width // 2, dtype=torch.float64)
    frequencies_D = base ** (-2 * places_D / width)
    if config.rope_factor <= 1:
        return frequencies_D

    def place(turns: float) -> float:
        return width / 2 * math.log(config.rope_positions / (turns * 2 * math.pi)) / math.log(base)

    low, high = place(YARN_FAST), place(YARN_SLOW)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp_D = ((places_D - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return frequencies_D * (1 - ramp_D + ramp_D / config.rope_factor)


def yarn_growth(factor: float, coefficient: float) -> float:
    """Returns the m of `AttentionConfig.rope_mscale`."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + D/2]) by its position's angle: dot products depend only on distances.
    Computes in the dtype of the angles, or a wider one of x; the result has x's dtype."""
    turned: Tensor = _Rotate.apply(x_BNSD, cos_SD, sin_SD)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """`rotate` in six operations, and its backward, which turns back, in as many; autograd would take three
    times as many."""

    @staticmethod
    def forward(ctx: Any, x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        return _turn(x_BNSD, cos_SD, sin_SD, 1)

    @staticmethod
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor, None, None]:
        cos_SD, sin_SD = ctx.saved_tensors
        return _turn(grad_BNSD, cos_SD, sin_SD, -1), None, None


def _turn(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: int) -> Tensor:
    turned_BNSD = torch.empty_like(x_BNSD)
    first, second = x_BNSD.chunk(2, dim=-1)
    into_first, into_second = turned_BNSD.chunk(2, dim=-1)
    into_first.copy_((first * cos_SD).addcmul_(second, sin_SD, value=-sign))
    into_second.copy_((second * cos_SD).addcmul_(first, sin_SD, value=sign))
    return turned_BNSD
