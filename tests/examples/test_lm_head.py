"""The loss of the language-model example, computed by slices of tokens, against torch's on all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import head as lm_head  # isort: skip
from lm.head import Head  # isort: skip

BATCH, SEQ, DIM, VOCAB = 2, 11, 12, 37


@pytest.fixture(params=[1, 4 * VOCAB * 5, 1 << 30], ids=["one token", "five tokens", "all tokens"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of so many of the 22 tokens."""
    monkeypatch.setattr(lm_head, "SLICE_BYTES", request.param)


def made(tied: bool, dtype: torch.dtype, seed: int) -> tuple[Head, Tensor, Tensor, Tensor | None]:
    """Returns a head of random weights, its input and targets, and the matrix of a tied one."""
    torch.manual_seed(seed)
    head = Head(DIM, VOCAB, 1e-5, tied).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x_BSH = torch.randn(BATCH, SEQ, DIM, dtype=dtype, requires_grad=True)
    tied_VH = torch.randn(VOCAB, DIM, dtype=dtype, requires_grad=True) if tied else None
    return head, x_BSH, torch.randint(VOCAB, (BATCH, SEQ)), tied_VH


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(3 * loss, [each for each in tensors if each is not None]))


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_cross_entropy_of_all_logits(dtype: torch.dtype, tied: bool, slices: None, seed: int) -> None:
    head, x_BSH, targets_BS, tied_VH = made(tied, dtype, seed)
    want = F.cross_entropy(head(x_BSH, None, tied_VH).flatten(0, 1), targets_BS.flatten())
    found = head(x_BSH, targets_BS, tied_VH)
    assert found.dtype == dtype and found.shape == ()
    assert_close(found, want)
    of = (x_BSH, tied_VH, *head.parameters())
    assert_close(gradients(found, *of), gradients(want, *of))
    with torch.no_grad():
        assert_close(head(x_BSH, targets_BS, tied_VH), want)


def test_bfloat16_is_as_near_as_cross_entropy_of_all_logits(slices: None, seed: int) -> None:
    """Products round to bfloat16 as torch's do within autocast. Weights and their gradients are float32."""
    head, x_BSH, targets_BS, _ = made(False, torch.float32, seed)
    of = (x_BSH, *head.parameters())
    exact = gradients(F.cross_entropy(head(x_BSH).flatten(0, 1), targets_BS.flatten()), *of)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(x_BSH, targets_BS)
        want = F.cross_entropy(head(x_BSH).float().flatten(0, 1), targets_BS.flatten())
    assert found.dtype == torch.float32
    assert_close(found, want, rtol=1e-6, atol=0)
    for name, one, other, right in zip(
        "xnw", gradients(found, *of), gradients(want, *of), exact, strict=True
    ):
        assert one.dtype == torch.float32
        off, usual = (one - right).norm(), (other - right).norm()
        assert off < 2 * usual + 2**-8 * right.norm(), (name, off, usual)


def test_only_what_needs_a_gradient_gets_one(seed: int) -> None:
    head, x_BSH, targets_BS, _ = made(False, torch.float32, seed)
    head.requires_grad_(False)
    (dx_BSH,) = torch.autograd.grad(head(x_BSH, targets_BS), x_BSH)
    want = F.cross_entropy(head(x_BSH).flatten(0, 1), targets_BS.flatten())
    assert_close(dx_BSH, torch.autograd.grad(want, x_BSH)[0])


def test_gradients_are_given_away_once(seed: int) -> None:
    head, x_BSH, targets_BS, _ = made(False, torch.float32, seed)
    loss = head(x_BSH, targets_BS)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="have been given away by a backward before"):
        loss.backward()


class Largest(TorchDispatchMode):
    """Notes the most numbers that a result of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_are_never_logits_of_more_than_a_slice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens in slices of 16, and no second tensor as large as the weight's gradient beside it."""
    tokens, vocab, hidden = 256, 512, 8
    monkeypatch.setattr(lm_head, "SLICE_BYTES", 16 * vocab * 4)
    x_TH = torch.randn(tokens, hidden, requires_grad=True)
    weight_VH = torch.randn(vocab, hidden, requires_grad=True)
    with Largest() as largest:
        loss = lm_head.linear_cross_entropy(x_TH, weight_VH, torch.randint(vocab, (tokens,)), dtype)
        loss.backward()
    assert largest.numbers == 16 * vocab
