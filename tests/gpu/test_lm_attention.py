"""Attention of the language-model example: kernels that do not keep all logits against those that do."""

from __future__ import annotations

import pytest
import torch

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm.attention import AttentionCore, attend_by_slices, attend_densely  # isort: skip

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


KINDS = {
    "qwen3": (128, 128, 2, torch.bfloat16),
    "gpt-oss": (64, 64, 2, torch.bfloat16),
    "deepseek-v3": (192, 128, 8, torch.bfloat16),
    "float32": (64, 64, 2, torch.float32),
}


@pytest.mark.parametrize("queries", [8192, 2048], ids=["square", "last queries"])
@pytest.mark.parametrize("kind", KINDS)
def test_long_windows_keep_no_logits(kind: str, queries: int, seed: int) -> None:
    """Forward and gradients of eight heads, of as many queries as keys and of a chunk of context parallelism.
    Logits would take 2.1 GB and 0.5 GB."""
    torch.manual_seed(seed)
    width, value_width, kv_heads, dtype = KINDS[kind]
    shapes = [(1, 8, queries, width), (1, kv_heads, 8192, width), (1, kv_heads, 8192, value_width)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    factor = torch.randn(1, 8, queries, value_width, device="cuda")
    found = []
    for attend, to in ((AttentionCore(), dtype), (attend_by_slices, torch.float32)):
        parts = [each.detach().to(to).requires_grad_() for each in (q, k, v)]
        extra = (None,) if isinstance(attend, AttentionCore) else (0, None, width**-0.5)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = attend(*parts, *extra)
        (y * factor).sum().backward()
        taken = torch.cuda.max_memory_allocated() - before
        if isinstance(attend, AttentionCore):
            assert taken < 8 * queries * 8192 * 4 / 2
        found.append([y.detach(), *(part.grad for part in parts)])
    for one, want in zip(*found, strict=True):
        assert (one.float() - want).abs().max() < BOUNDS[dtype] * want.abs().max()
