"""Outputs that are made again for the backward: the bits of a backward that keeps them."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecomm import InvalidArgument
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm.recompute_outputs import recompute_outputs  # isort: skip

WIDTH = 16


class Block(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.norm, self.again = nn.RMSNorm(WIDTH), again
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        with recompute_outputs(self.norm, (x,), h) if self.again else contextlib.nullcontext():
            return x + self.down(self.up(h).sigmoid())


def inputs(number: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(again: bool, way: str = "plain") -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList(Block(again) for _ in range(3))
    x = inputs(0)
    clone = torch.Tensor.clone
    around = torch.autograd.graph.saved_tensors_hooks(clone, clone) if way == "hooks" else None
    for block in model:
        with around or contextlib.nullcontext():
            x = checkpoint(block, x, use_reentrant=False) if way == "checkpoint" else block(x)
    x.square().sum().backward(retain_graph=way == "twice")
    if way == "twice":
        x.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("way", ["plain", "checkpoint", "hooks", "twice"])
def test_gradients_have_the_same_bits(way: str) -> None:
    """Also within hooks that copy all that is saved, and within a part that is computed again itself."""
    wanted = gradients(False, "twice" if way == "twice" else "plain")
    found = gradients(True, way)
    assert len(found) == 15 and all(map(torch.equal, found, wanted))


def test_outputs_must_be_the_same_again() -> None:
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    x, calls = inputs(0).requires_grad_(), []

    def changing(x: Tensor) -> Tensor:
        calls.append(x)
        return norm(x)[: 8 - len(calls)]

    h = changing(x)
    with recompute_outputs(changing, (x,), h):
        y = linear(h)
    with pytest.raises(InvalidArgument, match=r"make returned .* must return what it did before"):
        y.sum().backward()


def test_outputs_are_made_once_for_all_that_need_them() -> None:
    calls = []
    norm, products = nn.RMSNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))

    def counted(x: Tensor) -> Tensor:
        calls.append(torch.is_autocast_enabled("cpu"))
        y: Tensor = norm(x)
        return y

    x = inputs(0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        h = counted(x)
        with recompute_outputs(counted, (x,), h):
            y = sum(each(h).float().sum() for each in products)
    assert isinstance(y, Tensor)
    y.backward(retain_graph=True)
    y.backward()
    assert calls == [True, True, True]  # in the forward, and once in each backward


class _Pair(torch.autograd.Function):
    """Two outputs of one node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2 + grads[1] * 3


def test_an_output_that_is_changed_in_place_is_kept() -> None:
    norm, x = nn.LayerNorm(WIDTH), inputs(0)
    found = []
    for again in (False, True):
        leaf = x.clone().requires_grad_()
        h = norm(leaf)
        with recompute_outputs(norm, (leaf,), h) if again else contextlib.nullcontext():
            y = h.sigmoid_()
        y.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_a_cast_of_the_second_output_is_not_the_first() -> None:
    x, weight = inputs(0), torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for again in (False, True):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        pair = _Pair.apply(leaf)
        with recompute_outputs(_Pair.apply, (leaf,), pair) if again else contextlib.nullcontext():
            y = pair[1].double() @ w.double()
        y.sum().backward()
        found.append(w.grad)
    assert torch.equal(*found)


def test_what_stays_may_not_be_changed_in_place() -> None:
    """torch compares no versions of tensors that go through hooks."""
    x = inputs(0).requires_grad_()
    with recompute_outputs(abs, (), x * 1):
        other = (x * 2).exp()
        y = other * x
    other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
