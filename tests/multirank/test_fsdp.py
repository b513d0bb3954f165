"""MoELayer under FSDP2 and DDP: weights sharded, or copied, over the ranks that hold the same experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm.nn import MoEConfig, MoELayer, OverlapConfig
from tests.multirank.harness import RankPool
from tests.multirank.moe_cases import SIZES, groups_of


def _layers(group: Any, options: dict[str, Any], seed: int) -> tuple[MoELayer, MoELayer]:
    """Two of the same weights; the first is to be changed."""
    torch.manual_seed(seed)
    # In float64, as gradients of ranks and steps are added up in another order.
    config = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64)
    layer = MoELayer(config, group=group, max_tokens=8, overlap=OverlapConfig(**options)).double()
    return layer, copy.deepcopy(layer)


def _steps(layer: torch.nn.Module, rank: int, seed: int) -> list[torch.Tensor]:
    """Two steps with accumulated gradients; what came out."""
    outputs = []
    for step in range(2):
        generator = torch.Generator().manual_seed(seed + 10 * step + rank)
        x = torch.randn(5 + rank, 16, generator=generator, dtype=torch.float64)
        y = layer(x)
        y.square().sum().backward()
        outputs.append(y.detach())
    return outputs


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _check(ours: torch.nn.Module, plain: MoELayer, rank: int, seed: int) -> None:
    """The same outputs, and gradients that are the mean of all ranks'."""
    for ours_y, plain_y in zip(_steps(ours, rank, seed), _steps(plain, rank, seed), strict=True):
        assert torch.equal(ours_y, plain_y)
    found = {name.removeprefix("module."): _whole(p.grad) for name, p in ours.named_parameters()}
    for name, parameter in plain.named_parameters():
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        assert_close(found[name], mean / dist.get_world_size(), rtol=1e-9, atol=1e-9, msg=name)


def _sharded(rank: int, world_size: int, options: dict[str, Any], apart: bool, seed: int) -> None:
    ep_group, _ = groups_of(rank, world_size, 1)
    layer, plain = _layers(ep_group, options, seed)
    with plain.comm:  # of both; what FSDP and DDP hold on to may live on for a while
        if apart:
            fully_shard(layer.experts)
            fully_shard(layer.shared)
        fully_shard(layer)
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
        _check(layer, plain, rank, seed)


@pytest.mark.parametrize("apart", [False, True], ids=["as one", "experts apart"])
@pytest.mark.parametrize("options", [{}, {"keep": "nothing"}, {"overlap": False}], ids=str)
def test_fsdp(options: dict[str, Any], apart: bool, pool: Callable[[int], RankPool], seed: int) -> None:
    pool(2)(_sharded, options, apart, seed)


def _replicated(rank: int, world_size: int, options: dict[str, Any], seed: int) -> None:
    ep_group, _ = groups_of(rank, world_size, 1)
    layer, plain = _layers(ep_group, options, seed)
    with plain.comm:
        _check(DistributedDataParallel(layer), plain, rank, seed)


@pytest.mark.parametrize("options", [{}, {"keep": "rows"}, {"overlap": False}], ids=str)
def test_ddp(options: dict[str, Any], pool: Callable[[int], RankPool], seed: int) -> None:
    pool(2)(_replicated, options, seed)
