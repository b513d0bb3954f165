"""What a MoELayer keeps between a forward and its backward, and what comes later: bytes of each `keep`, plans
of checkpoints, gradients of weights that are put off, and nothing beyond the step."""

import contextlib
import gc
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moecomm.autograd import deferred as deferring
from moecomm.kernels.products import Products
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    OverlapConfig,
    backward_weights,
    clip_grad_norm,
    fully_shard_experts,
    keep_plans,
    set_loss_scale,
    sharded_state,
    sync_gradients,
    update_expert_bias,
)
from tests.multirank.catching import refused
from tests.multirank.moe_cases import SIZES
from tests.multirank.on_ranks import on_ranks

FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}


@on_ranks(2)
def test_what_is_kept(rank: int, world_size: int, seed: int) -> None:
    """Each `keep` holds as many bytes as docs/layer.md says."""
    hidden, inner = SIZES["hidden"], 2 * SIZES["ffn_hidden"]
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**{**SIZES, "dtype": torch.bfloat16}), max_tokens=64)
    x, bytes_kept = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True), {}
    out = layer.comm.dispatch(x.detach(), layer.router(x).topk_idx_TK)
    for keep in ("all", "rows", "nothing"):
        layer.overlap = OverlapConfig(keep=keep)
        kept: list[torch.Tensor] = []  # alive, so that no two share an address

        def pack(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x)
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        bytes_kept[keep] = sum(storages.values())
        y.sum().backward()
    rows = len(out.tokens)
    assert bytes_kept["all"] - bytes_kept["rows"] == rows * inner * 2
    assert bytes_kept["rows"] - bytes_kept["nothing"] == (rows - 64) * hidden * 2  # and the 64 tokens instead


@on_ranks(2)
def test_saved_tensors_may_lie_on_the_host(rank: int, world_size: int, seed: int) -> None:
    """Steps whose saved tensors are copied away and back, as docs/memory.md shows."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "dtype": torch.bfloat16, "num_shared_experts": 1})
    layer = MoELayer(config, max_tokens=64)
    x = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)

    def step(around: Any) -> list[torch.Tensor]:
        with around:
            y = layer(x)
        y.square().sum().backward()
        found = [x.grad, *(each.grad for each in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        return [each for each in found if each is not None]

    for keep in ("all", "rows", "nothing"):
        layer.overlap = OverlapConfig(keep=keep)
        wanted = step(contextlib.nullcontext())
        clone = torch.Tensor.clone  # copies also where a later torch has the host's tensors stay
        for around in (
            torch.autograd.graph.save_on_cpu(pin_memory=True),
            torch.autograd.graph.saved_tensors_hooks(clone, clone),
        ):
            found = step(around)
            assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted) > 3
    layer.comm.close()


def test_plans_of_no_layer() -> None:
    refused(lambda: keep_plans(torch.nn.Linear(2, 2)), "modules have no MoELayer")
    scale, shard = partial(set_loss_scale, scale=1.0), fully_shard_experts
    for call in (keep_plans, update_expert_bias, sharded_state, scale, backward_weights, shard):
        refused(partial(call, None), "model is NoneType, must be an nn.Module")


@pytest.mark.parametrize("options", [{}, {"num_shared_experts": 1}, FIXED], ids=["", "shared", "fixed"])
@pytest.mark.parametrize("layer", [{}, {"keep": "rows"}, {"keep": "nothing"}], ids=str)
@on_ranks(2)
def test_checkpoints_keep_plans(
    rank: int, world_size: int, options: dict[str, Any], layer: dict[str, Any], seed: int
) -> None:
    """Two layers and more in a block, computed again with the plans of the first time: the same bits as
    without a checkpoint, one plan a layer, and no combine of the last one a second time."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "aux_loss": "batch", "aux_loss_coef": 0.3, "jitter": 0.1, **options})
    first = MoELayer(config, max_tokens=8, overlap=OverlapConfig(**layer))
    second = MoELayer(config, first.comm, overlap=first.overlap)
    norm = torch.nn.RMSNorm(16)
    model = torch.nn.ModuleList([first, second, norm])

    def block(x: torch.Tensor) -> torch.Tensor:
        x = x + first(norm(x))
        return x + second(norm(x))

    found = []
    for way in ("plain", "checkpoint", "plans kept", "plans kept, twice in one graph"):
        x = torch.randn(5 + rank, 16, generator=torch.Generator().manual_seed(seed + rank)).requires_grad_()
        model.zero_grad()
        torch.manual_seed(seed)
        first.comm.reset_stats()
        if way == "plain":
            y = block(x)
        elif way == "checkpoint":
            y = checkpoint(block, x, use_reentrant=False)
        else:
            y = checkpoint(block, x, use_reentrant=False, context_fn=keep_plans(first, second))
        twice = way.endswith("graph")
        y.square().sum().backward(retain_graph=twice)
        stats = first.comm.stats()
        if way.startswith("plans kept"):
            assert stats["plans_made"] + stats["plans_reused"] == 2
            assert stats["combine_calls"] == 2 + 1 + 2  # forward; the first layer again; backward
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        found.append([y.detach(), x.grad.clone(), *grads])
        if twice:
            y.square().sum().backward()
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                assert torch.equal(parameter.grad, 2 * grad)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


class CountedProducts(Products):
    """torch's products, which count the weight gradients that they compute."""

    count = 0

    def grouped_mm_wgrad(self, *args: Any, **options: Any) -> torch.Tensor | None:
        self.count += 1
        return super().grouped_mm_wgrad(*args, **options)


@pytest.mark.parametrize("most_rows", [None, 0])
@pytest.mark.parametrize("options", [{}, FIXED, {"ffn_hidden": 13}], ids=str)
@on_ranks(2)
def test_weights_later_over_several_backwards(
    rank: int, world_size: int, options: dict[str, Any], most_rows: int | None, seed: int
) -> None:
    """Several backwards, one of them without tokens, before their weights' gradients; none is left over. With
    few rows an expert each gradient is one product, and added to what there was before."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "dtype": torch.float64, **options})
    layer = MoELayer(config, max_tokens=8)
    x = [torch.randn(tokens, 16, dtype=torch.float64) for tokens in (5, 0, 3, 8 - rank)]

    def run(layer: MoELayer) -> None:
        for each in x:
            layer(each).square().sum().backward()

    run(layer)
    run(layer)
    want = [parameter.grad for parameter in layer.experts.parameters()]
    layer.zero_grad()
    run(layer)
    layer.experts.products = products = CountedProducts()
    layer.overlap = OverlapConfig(defer_weights=True)
    before = [parameter.grad.clone() for parameter in layer.experts.parameters()]
    run(layer)
    layer.overlap = OverlapConfig()
    for parameter, grad in zip(layer.experts.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
    for use in (sync_gradients, partial(clip_grad_norm, max_norm=1.0)):
        refused(partial(use, layer), "still put off")
    joined = deferring.MOST_JOINED_ROWS if most_rows is None else most_rows
    with mock.patch.object(deferring, "MOST_JOINED_ROWS", joined):
        for _ in range(2):  # the second has nothing to do
            backward_weights(layer)
            for parameter, grad in zip(layer.experts.parameters(), want, strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-13, atol=1e-13)
                assert most_rows is None or torch.equal(parameter.grad, grad)
    assert products.count == (2 if most_rows is None else 2 * len(x))
    layer.comm.close()


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"overlap": False},
        {"record": True},
        {"keep": "nothing", "record": True},
        {"keep": "rows", "record": True},
        {"defer_weights": True, "record": True},
    ],
    ids=str,
)
@on_ranks(1)
def test_nothing_of_a_step_outlives_it(rank: int, world_size: int, way: dict[str, Any], seed: int) -> None:
    """A step's graph is gone with its result: a cycle through autograd's nodes, which Python's collector does
    not see, would keep all of it."""
    torch.manual_seed(seed)
    config = MoEConfig(hidden=32, ffn_hidden=16, num_experts=4, top_k=2, num_shared_experts=1)
    layer = MoELayer(config, max_tokens=16, overlap=OverlapConfig(**way))

    def node() -> Any:
        """The one that accumulates a weight's gradient: there is one as long as a graph holds it."""
        return layer.experts.w_in.expand_as(layer.experts.w_in).grad_fn.next_functions[0][0]

    y_TH = layer(torch.randn(16, 32, requires_grad=True))
    node().metadata["seen"] = True
    assert node().metadata.get("seen")
    y_TH.sum().backward()
    layer.backward_weights()
    del y_TH
    gc.collect()
    found = bool(node().metadata.get("seen"))
    layer.comm.close()
    assert not found
