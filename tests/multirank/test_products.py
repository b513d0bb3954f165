"""Gradients of weights that products add to what is there, and both orders of SwiGLU's columns."""

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm.kernels.products import Products
from moecomm.nn import (
    GraphedStep,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    clip_grad_norm,
    fully_shard_experts,
    is_expert_parameter,
    prepare_ddp,
    sync_gradients,
)
from tests.multirank.catching import refused
from tests.multirank.conftest import Pools
from tests.multirank.test_data_parallel import recipe

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
    assert_close(*found, rtol=0, atol=0)
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


def into_main_grad(rank: int, world_size: int, seed: int) -> None:
    """Gradients add up in `main_grad` in every way to run, with products that add and with those that do not,
    and are synchronised and clipped there."""
    plain, _, products = _layers(seed)
    twins = [MoELayer(dataclasses.replace(plain.config, main_grad=True), plain.comm) for _ in range(2)]
    twins[0].experts.products = products
    inputs = [torch.randn(3 + rank + i, 16) for i in range(3)]
    for layer in (plain, *twins):
        layer.load_state_dict(plain.state_dict())
        for x, overlap, deferred in zip(inputs, (True, False, True), (False, False, True), strict=True):
            layer.overlap = OverlapConfig(overlap=overlap, defer_weights=deferred)
            layer(x).square().sum().backward()
        layer.backward_weights()
    assert products.added == 4  # the first backward, and what the last has put off
    for twin in (*twins, copy.deepcopy(twins[0])):
        weights = twin.experts.w_in, twin.experts.w_out
        if twin in twins:
            for weight, other in zip(weights, (plain.experts.w_in, plain.experts.w_out), strict=True):
                assert weight.grad is None and weight.main_grad.dtype == torch.float32
                assert_close(weight.main_grad, other.grad)
        else:  # a copy begins anew
            twin.overlap = OverlapConfig()
            twin(inputs[0]).sum().backward()
            assert all(weight.grad is None and weight.main_grad.any() for weight in weights)
    held = twins[0].experts.w_in.main_grad
    norms = []
    for layer in (plain, *twins):
        sync_gradients(layer)
        norms.append(clip_grad_norm(layer, 0.01))
    assert twins[0].experts.w_in.main_grad is held
    assert_close(norms[1:], norms[:1] * 2)
    for twin in twins:
        assert_close(twin.experts.w_out.main_grad, plain.experts.w_out.grad)


def main_grad_and_hooks(rank: int, world_size: int, seed: int) -> None:
    """A hook sees the gradient before it is added; torch.autograd.grad adds nothing; a bad tensor, and
    wrappers that would average `grad`, are refused."""
    plain, _, products = _layers(seed)
    layer = MoELayer(dataclasses.replace(plain.config, main_grad=True), plain.comm)
    layer.load_state_dict(plain.state_dict())
    layer.experts.products = products
    x, w_in = torch.randn(5, 16), layer.experts.w_in
    (found,) = torch.autograd.grad(layer(x).sum(), [w_in])
    assert not w_in.main_grad.any()
    hook = w_in.register_hook(lambda grad: 2 * grad)
    layer(x).sum().backward()
    assert_close(w_in.main_grad, 2 * found)
    assert products.added == 1  # w_out has no hook
    hook.remove()
    w_in.main_grad = torch.zeros(3, dtype=torch.bfloat16) if rank == 0 else None
    refused(partial(layer, x), "main_grad is torch.bfloat16 of shape (3,)")
    w_in.main_grad = None
    layer(x).sum().backward()
    assert_close(w_in.main_grad, found)
    for wrap in (prepare_ddp, DistributedDataParallel, fully_shard_experts):
        refused(partial(wrap, layer), "has its gradients in main_grad")
    refused(lambda: GraphedStep(lambda: None, layer), "a MoELayer has main_grad=True")


def recipe_of_main_grad(rank: int, world_size: int, seed: int) -> None:
    """The recipe of docs/training.md trains as an optimizer of `grad` does."""
    plain, _, _ = _layers(seed)
    layer = MoELayer(dataclasses.replace(plain.config, main_grad=True), plain.comm)
    layer.load_state_dict(plain.state_dict())
    batches = [torch.randn(3 + rank + i, 16) for i in range(3)]
    (code,) = recipe("Gradients in float32")
    names: dict[str, Any] = {"torch": torch, "is_expert_parameter": is_expert_parameter, "model": layer}
    names |= {"sync_gradients": sync_gradients, "clip_grad_norm": clip_grad_norm, "batches": batches}
    names |= {"lr": 0.01, "max_norm": 0.5, "loss_of": lambda y: y.square().sum()}
    exec(code, names)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for x in batches:
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        sync_gradients(plain)
        clip_grad_norm(plain, 0.5)
        optimizer.step()
    assert_close([*layer.parameters()], [*plain.parameters()])


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
            layer.overlap = OverlapConfig(overlap=overlap)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.square().sum().backward()
            found.append((y, leaf.grad, layer.experts.w_out.grad, layer.experts.w_in.grad))
        (*same, of_halves), (*others, of_pairs) = found
        assert_close(others, same)
        pairs = torch.stack(of_halves.chunk(2, dim=-1), dim=-1).flatten(-2)
        torch.testing.assert_close(pairs, of_pairs)


@pytest.mark.parametrize(
    "body", [accumulated, left_to_autograd, into_main_grad, main_grad_and_hooks, recipe_of_main_grad, columns]
)
def test_products(body: Any, pool: Pools, seed: int) -> None:
    pool(2)(body, seed)
