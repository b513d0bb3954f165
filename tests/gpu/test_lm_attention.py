"""Attention of the language-model example with windows and sinks: compiled kernels against all logits."""

from __future__ import annotations

import pytest
import torch

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm.attention import AttentionCore, attend_densely  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

BOUNDS = {torch.float32: 2e-2, torch.bfloat16: 5e-2}
"""Of the largest number of a tensor. Products of float32 may have ten bits on GPUs."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("window", "sinks"), [(0, True), (128, True), (100, False)], ids=["sinks", "both", "window"]
)
def test_equals_all_logits(window: int, sinks: bool, dtype: torch.dtype, seed: int) -> None:
    """Forward and gradients, of the sinks too, with eight heads to one of keys."""
    torch.manual_seed(seed)
    shapes = [(2, 16, 500, 64), (2, 2, 500, 64), (2, 2, 500, 64), (2, 16, 500, 64)]
    q, k, v, factor = (torch.randn(shape).to(dtype) for shape in shapes)
    sink = torch.randn(16) if sinks else None

    def step(device: str, to: torch.dtype) -> list[torch.Tensor]:
        parts = [each.to(device, to).requires_grad_() for each in (q, k, v)]
        sinks_N = None if sink is None else sink.to(device, torch.float32 if device == "cuda" else to)
        if sinks_N is not None:
            parts.append(sinks_N.requires_grad_())
        if device == "cuda":
            y = AttentionCore(window)(*parts[:3], sinks_N)
        else:
            y = attend_densely(*parts[:3], window, sinks_N, 0.125)
        (y * factor.to(device, to)).sum().backward()
        return [y.detach(), *(part.grad for part in parts)]

    for found, want in zip(step("cuda", dtype), step("cpu", torch.float64), strict=True):
        assert (found.cpu().double() - want).abs().max() < BOUNDS[dtype] * want.abs().max()
