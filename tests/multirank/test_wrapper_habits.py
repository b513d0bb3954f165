"""What programs do with DistributedDataParallel, FSDP2 and checkpoints around layers: experts that two layers
share, experts that are trained later, gradients that are not synchronised, outputs that are changed in place.
Gradients are those of `sync_gradients` without a wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm.nn import MoEConfig, MoELayer, fully_shard_experts, prepare_ddp, sharded_state, sync_gradients
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

CONFIG = MoEConfig(**SIZES, dtype=torch.float64)


class Two(nn.Module):
    """Two layers, perhaps with the same experts."""

    def __init__(self, rank: int, world: int, ep: int, shares: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        group = groups_of(rank, world, ep)[0]
        self.first = MoELayer(CONFIG, group=group, max_tokens=8)
        self.second = MoELayer(CONFIG, self.first.comm)
        if shares == "module":
            self.second.experts = self.first.experts
        elif shares == "weights":
            self.second.experts.w_in = self.first.experts.w_in
            self.second.experts.w_out = self.first.experts.w_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(h)
        y += h
        return y


def tokens(rank: int) -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients(model: Two) -> list[Tensor]:
    wanted = [
        *model.first.experts.parameters(),
        *model.second.experts.parameters(),
        model.first.router.weight,
    ]
    found = []
    for parameter in wanted:
        assert parameter.grad is not None
        grad = parameter.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone())
    return found


def backward(model: nn.Module, rank: int) -> None:
    model(tokens(rank)).square().mean().backward()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("shares", ["", "module", "weights"])
@on_ranks(2)
def test_layers_that_share_experts(rank: int, world: int, shares: str, wrapper: str) -> None:
    ep = 2
    plain, model = (Two(rank, world, ep, shares) for _ in range(2))
    backward(plain, rank)
    sync_gradients(plain)
    if wrapper == "ddp":
        backward(DistributedDataParallel(prepare_ddp(model)), rank)
    else:
        fully_shard_experts(model)
        backward(fully_shard(model), rank)
    for want, found in zip(gradients(plain), gradients(model), strict=True):
        assert_close(found, want)


@pytest.mark.parametrize("shares", ["module", "weights"])
@on_ranks(2)
def test_a_checkpoint_of_layers_that_share_experts(
    rank: int, world: int, shares: str, tmp_path: Path
) -> None:
    model = Two(rank, world, 2, shares)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, rank)
    sync_gradients(model)
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = sharded_state(model, optimizer)
    experts = {name: type(value).__name__ for name, value in saved["model"].items() if ".experts." in name}
    assert experts == dict.fromkeys(experts, "DTensor") and len(experts) == 4, experts
    dcp.save(saved, checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(sharded_state(model, optimizer), checkpoint_id=tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("ep", [2, 1])
@on_ranks(2)
def test_experts_that_fsdp_has_found_frozen_are_trained_later(rank: int, world: int, ep: int) -> None:
    plain, model = (Two(rank, world, ep) for _ in range(2))
    backward(plain, rank)
    sync_gradients(plain)
    for layer in (model.first, model.second):
        layer.experts.requires_grad_(False)
    fully_shard_experts(model)
    fully_shard(model)
    for layer in (model.first, model.second):
        layer.experts.requires_grad_(True)
    backward(model, rank)
    for want, found in zip(gradients(plain), gradients(model), strict=True):
        assert_close(found, want)


@pytest.mark.parametrize(("around", "averaged"), [("forward", False), ("backward", True)])
@on_ranks(2)
def test_the_forward_decides_whether_ddp_averages(rank: int, world: int, around: str, averaged: bool) -> None:
    """Then the gradients of the router, and of the experts, are those of all ranks' mean."""
    plain, model = (Two(rank, world, 1) for _ in range(2))
    wrapped = DistributedDataParallel(prepare_ddp(model))
    backward(plain, rank)
    sync_gradients(plain)
    if around == "forward":
        with wrapped.no_sync():
            loss = wrapped(tokens(rank)).square().mean()
        loss.backward()
    else:
        loss = wrapped(tokens(rank)).square().mean()
        with wrapped.no_sync(), torch.no_grad():
            wrapped(tokens(rank))  # asks for no gradients, and so decides nothing
        with wrapped.no_sync():
            loss.backward()
    *experts, router = [
        torch.allclose(want, found) for want, found in zip(gradients(plain), gradients(model), strict=True)
    ]
    assert len(set(experts)) == 1
    assert [router, experts[0]] == [averaged, averaged]
