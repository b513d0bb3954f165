"""Gradients of weights that products add to what is there, and both orders of SwiGLU's columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.kernels.products import Products
from moecomm.nn import MoEConfig, MoELayer
from tests.multirank.conftest import Pools

SIZES: dict[str, Any] = {"hidden": 16, "ffn_hidden": 12, "num_experts": 6, "top_k": 2}


class Adding(Products):
    """Products that add, and count how often they did."""

    adds = True
    added = 0

    def grouped_mm_wgrad(self, *arguments: Any, into: torch.Tensor | None = None, **others: Any) -> Any:
        self.added += into is not None
        return super().grouped_mm_wgrad(*arguments, into=into, **others)


def _layers(seed: int) -> tuple[MoELayer, MoELayer, Adding]:
    """Returns two layers with the same weights; the products of the second add."""
    torch.manual_seed(seed)
    plain = MoELayer(MoEConfig(**SIZES, num_shared_experts=1), max_tokens=8)
    adding = MoELayer(plain.config, plain.comm)
    adding.load_state_dict(plain.state_dict())
    adding.experts.products = Adding()
    return plain, adding, adding.experts.products


def accumulated(rank: int, world_size: int, seed: int) -> None:
    """Over several microbatches the sums are autograd's, in the tensors that were there."""
    plain, adding, products = _layers(seed)
    inputs = [torch.randn(3 + rank + i, 16) for i in range(3)]
    for layer in (plain, adding):
        for x in inputs:
            layer(x).square().sum().backward()
    assert products.added == 4
    for one, other in zip(plain.parameters(), adding.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    held = adding.experts.w_in.grad
    adding(inputs[0]).sum().backward()
    assert adding.experts.w_in.grad is held


def left_to_autograd(rank: int, world_size: int, seed: int) -> None:
    """Where something else than `grad` wants the gradient, it gets it."""
    plain, adding, products = _layers(seed)
    x = torch.randn(5, 16)
    weights = {layer: [layer.experts.w_in, layer.experts.w_out] for layer in (plain, adding)}
    for layer in (plain, adding):
        layer(x).sum().backward()
    before = [each.grad.clone() for each in weights[adding]]
    found = [torch.autograd.grad(layer(x).sum(), weights[layer]) for layer in (plain, adding)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(each.grad, old) for each, old in zip(weights[adding], before, strict=True))
    layer = adding
    layer(x).sum().backward(inputs=[layer.router.weight])
    assert all(torch.equal(each.grad, old) for each, old in zip(weights[adding], before, strict=True))
    assert products.added == 0
    seen: list[torch.Tensor] = []
    hook = layer.experts.w_in.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    layer(x).sum().backward()
    assert len(seen) == 1 and products.added == 1  # w_out has no hook
    torch.testing.assert_close(layer.experts.w_in.grad, before[0] + 2 * seen[0])
    hook.remove()
    layer.experts.w_out.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    layer(x).sum().backward()
    assert len(seen) == 2 and products.added == 2  # w_in has none any more


def columns(rank: int, world_size: int, seed: int) -> None:
    """Interleaved columns give what halves do, in every way to run."""
    torch.manual_seed(seed)
    layers = [
        MoELayer(MoEConfig(**SIZES, num_shared_experts=1, activation=activation), max_tokens=8)
        for activation in ("swiglu", "swiglu_interleaved")
    ]
    halves, interleaved = layers
    state = halves.state_dict()
    for name in ("experts.w_in", "shared.w_in"):
        gate, up = state[name].chunk(2, dim=-1)
        state[name] = torch.stack([gate, up], dim=-1).flatten(-2)
    state["experts._extra_state"] = interleaved.experts.get_extra_state()
    interleaved.load_state_dict(state)
    x = torch.randn(4 + rank, 16)
    for overlap in (True, False):
        found = []
        for layer in layers:
            layer.zero_grad()
            layer.overlap = overlap
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.square().sum().backward()
            found.append((y, leaf.grad, layer.experts.w_out.grad, layer.experts.w_in.grad))
        (*same, of_halves), (*others, of_pairs) = found
        for one, other in zip(same, others, strict=True):
            torch.testing.assert_close(one, other)
        pairs = torch.stack(of_halves.chunk(2, dim=-1), dim=-1).flatten(-2)
        torch.testing.assert_close(pairs, of_pairs)


@pytest.mark.parametrize("body", [accumulated, left_to_autograd, columns])
def test_products(body: Any, pool: Pools, seed: int) -> None:
    pool(2)(body, seed)
