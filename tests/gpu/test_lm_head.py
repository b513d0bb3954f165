"""The loss by slices of tokens on GPUs: its numbers, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import head as lm_head  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

BOUNDS = {torch.float32: 2e-2, torch.bfloat16: 5e-2}
"""Of the largest number of a tensor. Products of float32 may have ten bits on GPUs."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equals_cross_entropy_in_a_part_of_its_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """8192 tokens of a vocabulary of 50 000, of which logits take 1.6 GB and a slice 64 MiB."""
    torch.manual_seed(seed)
    monkeypatch.setattr(lm_head, "SLICE_BYTES", 1 << 26)
    tokens, vocab, hidden = 8192, 50_000, 512
    x_TH = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    weight_VH = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).requires_grad_()
    targets_T = torch.randint(vocab, (tokens,), device="cuda")
    want = F.cross_entropy(x_TH.double() @ weight_VH.double().T, targets_T)
    grads = torch.autograd.grad(want, (x_TH, weight_VH))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = lm_head.linear_cross_entropy(x_TH, weight_VH, targets_T, dtype)
    found = torch.autograd.grad(loss, (x_TH, weight_VH))
    assert torch.cuda.max_memory_allocated() - before < 0.5e9
    assert loss.dtype == torch.float32 and abs(loss.item() - want.item()) < 1e-3 * want.item()
    for one, other in zip(found, grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() < BOUNDS[dtype] * other.abs().max()
