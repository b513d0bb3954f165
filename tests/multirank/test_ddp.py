"""DistributedDataParallel around layers: gradients that add up, layers that share experts, and what is not
prepared. Gradients are those of `sync_gradients` without a wrapper."""

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, prepare_ddp, sync_gradients
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, unsharded, wrapped
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_data_parallel import CONFIG, TOKENS, build, loss_of, tokens

pool = own_pool()

PLAIN = MoEConfig(**SIZES, dtype=torch.float64)


@on_ranks(4)
def test_ddp_accumulates(rank: int, world_size: int, seed: int) -> None:
    """Gradients under DistributedDataParallel are those of sync_gradients, over three backwards, the first
    without synchronisation and the last added to what is averaged already; loads are counted in all."""
    model, _ = build(rank, world_size, 2, seed)
    plain = copy.deepcopy(model)
    ddp: Any = wrapped(model, "ddp")
    for step in range(3):
        x = tokens(rank, step, seed)
        with ddp.no_sync() if step == 0 else contextlib.nullcontext():
            loss_of(ddp(x)).backward()
        loss_of(plain(x)).backward()
    sync_gradients(plain)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=name)
    assert torch.equal(model.moe.router.load_E, plain.moe.router.load_E)
    assert int(model.moe.router.load_E.sum()) == CONFIG.top_k * 3 * TOKENS[rank]
    model.moe.comm.close()
    plain.moe.comm.close()


@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_unused_parameters_of_replicas_are_refused(rank: int, world_size: int, ep: int, seed: int) -> None:
    """Experts that one rank alone holds may be left out."""
    model, _ = build(rank, world_size, ep, seed)
    with model.moe.comm:
        ddp: Any = wrapped(model, "ddp", find_unused_parameters=True)
        if ep == 4:
            loss_of(ddp(tokens(rank, 0, seed))).backward()
        else:
            refused(
                lambda: ddp(tokens(rank, 0, seed)), begins="find_unused_parameters is True, must be False"
            )


@on_ranks(4)
def test_ddp_of_what_is_not_prepared_is_refused(rank: int, world_size: int, seed: int) -> None:
    model, mesh = build(rank, world_size, 2, seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = mesh.get_group("dp")
    whole = functools.partial(DistributedDataParallel, model)
    with model.moe.comm:
        for options in ({}, {"process_group": half}, {"device_mesh": mesh["ep"]}):
            refused(functools.partial(whole, **options), "prepare_ddp")
        refused(lambda: DistributedDataParallel(nn.ModuleList(model.children())), "prepare_ddp")
        prepare_ddp(model.moe)
        refused(whole, "prepare_ddp")
        prepare_ddp(model)
        refused(lambda: DistributedDataParallel(copy.deepcopy(model)), "prepare_ddp")
        refused(lambda: whole(process_group=half), "was prepared for (0, 1, 2, 3)")
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        refused(lambda: sync_gradients(model), "under DistributedDataParallel")
        model.moe.overlap = OverlapConfig(defer_weights=True)
        loss_of(whole()(torch.ones(2, 16, dtype=torch.float64))).backward()
        refused(model.moe.backward_weights, begins="defer_weights is True")


@on_ranks(2)
def test_ddp_leaves_load_counts_alone(rank: int, world_size: int, seed: int) -> None:
    """Checks that DistributedDataParallel is refused until a rank's load counts are left out: with all
    experts on each rank parameters may be copied, counts may not."""
    model, _ = build(rank, world_size, 1, seed)
    with model.moe.comm:
        refused(lambda: DistributedDataParallel(model), "load_E counts this rank's own tokens")
        DistributedDataParallel(prepare_ddp(model))


class Two(nn.Module):
    """Two layers, perhaps with the same experts."""

    def __init__(self, rank: int, world: int, ep: int, shares: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        group = groups_of(rank, world, ep)[0]
        self.first = MoELayer(PLAIN, group=group, max_tokens=8)
        self.second = MoELayer(PLAIN, self.first.comm)
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


def five_tokens(rank: int) -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients_of(model: Two) -> list[Tensor]:
    return [unsharded(each.grad).clone() for each in model.parameters() if each.grad is not None]


def backward(model: nn.Module, rank: int) -> None:
    model(five_tokens(rank)).square().mean().backward()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("shares", ["", "module", "weights"])
@on_ranks(2)
def test_layers_that_share_experts(rank: int, world: int, shares: str, wrapper: str) -> None:
    plain, model = (Two(rank, world, 2, shares) for _ in range(2))
    backward(plain, rank)
    sync_gradients(plain)
    backward(wrapped(model, wrapper), rank)
    assert_close(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize(("around", "averaged"), [("forward", False), ("backward", True)])
@on_ranks(2)
def test_the_forward_decides_whether_ddp_averages(rank: int, world: int, around: str, averaged: bool) -> None:
    """Then the gradients of the router, and of the experts, are those of all ranks' mean."""
    plain, model = (Two(rank, world, 1) for _ in range(2))
    ddp: Any = wrapped(model, "ddp")
    backward(plain, rank)
    sync_gradients(plain)
    if around == "forward":
        with ddp.no_sync():
            loss = ddp(five_tokens(rank)).square().mean()
        loss.backward()
    else:
        loss = ddp(five_tokens(rank)).square().mean()
        with ddp.no_sync(), torch.no_grad():
            ddp(five_tokens(rank))  # asks for no gradients, and so decides nothing
        with ddp.no_sync():
            loss.backward()
    pairs = zip(gradients_of(plain), gradients_of(model), strict=True)
    assert {torch.allclose(want, found) for want, found in pairs} == {averaged}
