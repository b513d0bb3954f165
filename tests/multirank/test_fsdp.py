"""MoELayer under FSDP2: weights sharded over the ranks that hold the same experts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moecomm.errors import InvalidArgument
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    OverlapConfig,
    fully_shard_experts,
    is_expert_parameter,
    sync_gradients,
)
from moecomm.parallel import ParallelFolding
from tests.multirank.moe_cases import SIZES, groups_of, tokens_of, unsharded, wrapped
from tests.multirank.on_ranks import on_ranks


@pytest.mark.parametrize(
    ("options", "apart"),
    [({}, False), ({"keep": "nothing"}, True), ({"overlap": False}, True), ({"keep": "rows"}, False)],
    ids=str,
)
@on_ranks(2)
def test_fsdp(rank: int, world_size: int, options: dict[str, Any], apart: bool, seed: int) -> None:
    """The same outputs, and gradients, of two steps together, that are the mean of all ranks'."""
    torch.manual_seed(seed)
    # In float64, as gradients of ranks and steps are added up in another order.
    config, ep_group = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64), groups_of(rank, 2, 1)[0]
    layer = MoELayer(config, group=ep_group, max_tokens=8, overlap=OverlapConfig(**options))
    plain = copy.deepcopy(layer)
    with plain.comm:  # of both; what FSDP holds on to may live on for a while
        if apart:
            fully_shard(layer.experts)
            fully_shard(layer.shared)
        fully_shard(layer)
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
        for step in range(2):
            x, _ = tokens_of(rank, 5 + rank, torch.float64, seed + 10 * step)
            outputs = [each(x) for each in (layer, plain)]
            for y in outputs:
                y.square().sum().backward()
            assert torch.equal(*outputs)
        sync_gradients(plain)
        for (name, ours), theirs in zip(layer.named_parameters(), plain.parameters(), strict=True):
            assert_close(unsharded(ours.grad), theirs.grad, rtol=1e-9, atol=1e-9, msg=name)


EVERYTHING = {
    "num_shared_experts": 1,
    "shared_gate": True,
    "bias": True,
    "router_bias": True,
    "bias_update_rate": 0.01,
    "activation": "swiglu_interleaved",
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _steps_in_float32(layer: MoELayer, plain: MoELayer, rank: int) -> None:
    """Both compute the same, and the gradients of the sharded one's experts are there."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank))
    y = layer(x)
    assert torch.equal(y, plain(x))
    y.square().sum().backward()
    assert all(each.grad is not None and not each.grad.is_meta for each in layer.experts.parameters())
    plain.comm.close()


@pytest.mark.parametrize(
    ("world_size", "ep", "how"),
    [
        (1, 1, "whole"),
        (2, 2, "whole"),
        (2, 2, "sharded"),
        (2, 2, "policy"),
        (2, 1, "sharded"),
        (4, 2, "sharded"),
        (4, 2, "columns"),
        (4, 2, "parts"),
    ],
)
@on_ranks()
def test_a_layer_that_starts_on_meta(rank: int, world_size: int, ep: int, how: str, seed: int) -> None:
    """A layer that is built without values, sharded, and drawn then, is the one that is drawn at once; in the
    same way one that is drawn anew."""
    config = MoEConfig(**SIZES, **EVERYTHING, dtype=torch.float32)
    folding = ParallelFolding(world_size=world_size, etp=2, ep=ep // 2) if how == "parts" else None
    where: dict[str, Any] = {"folding": folding} if folding else {"group": groups_of(rank, world_size, ep)[0]}
    torch.manual_seed(seed)
    plain = MoELayer(config, max_tokens=8, **where)
    with torch.device("meta"):
        layer = MoELayer(config, plain.comm, folding=folding)
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert len(named) >= 10 and all(each.is_meta for each in named.values())
    assert not layer.last_tokens_per_expert.is_meta
    policies: dict[str, Any] = {
        "policy": {"mp_policy": MixedPrecisionPolicy()},
        "columns": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
    }
    if how != "whole":
        fully_shard_experts(layer, **policies.get(how, {}))
        fully_shard(layer)
    layer.to_empty(device="cpu")
    for _ in range(2):
        torch.manual_seed(seed)
        for part in (layer.router, layer.experts, layer.shared):
            for tensor in (*part.parameters(), *part.buffers()):
                _local(tensor).fill_(7)
            part.reset_parameters()
        with torch.no_grad():
            for (name, found), want in zip(layer.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(unsharded(found), want), name
            assert_close([*layer.buffers()], [*plain.buffers()], rtol=0, atol=0)
        for name, each in layer.named_parameters():
            assert is_expert_parameter(each) == name.startswith("experts."), name
        sharded = [isinstance(each, DTensor) for each in layer.experts.parameters()]
        assert (
            all(sharded) if how in ("policy", "columns") or (how == "sharded" and ep < world_size) else True
        )
    _steps_in_float32(layer, plain, rank)


@pytest.mark.parametrize("given", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("ep", [1, 2])
@on_ranks(2)
def test_mixed_precision_rounds_no_router(
    rank: int, world_size: int, ep: int, given: dict[str, Any], seed: int
) -> None:
    """Under an mp_policy of bfloat16 scores are those of float32 weights, and the router's gradient is the
    mean of all ranks' in float32; with weights gathered again for the backward or not."""
    torch.manual_seed(seed)
    options = {"dtype": torch.bfloat16, "z_loss_coef": 0.1, "aux_loss": "batch", "aux_loss_coef": 0.1}
    config = MoEConfig(**{**SIZES, **options})
    layer = MoELayer(config, group=groups_of(rank, world_size, ep)[0], max_tokens=8)
    plain = copy.deepcopy(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrapped(layer, "fsdp", mp_policy=policy, **given)
    x = torch.randn(5 + rank, 16).bfloat16().float()
    seen: list[torch.Tensor] = []
    of_x: list[torch.Tensor] = []
    for each in (layer, plain):
        each.router.register_forward_hook(lambda _module, _inputs, routing: seen.append(routing.scores_TE))
        inside = x.clone().requires_grad_()
        (each(inside) * 0).sum().backward()
        of_x.append(inside.grad)
    assert_close(*of_x, rtol=1e-2, atol=1e-5)  # in bfloat16, by a weight that is gathered once more
    assert seen[0].dtype == torch.float32 and torch.equal(*seen)
    wanted = plain.router.weight.grad
    dist.all_reduce(wanted)
    assert layer.router.weight.grad.dtype == torch.float32
    assert_close(unsharded(layer.router.weight.grad), wanted / world_size, rtol=1e-5, atol=1e-7)
    with torch.no_grad():  # the next step gathers anew
        for each in (layer, plain):
            each.router.weight.mul_(1.5)
            each(x)
    assert torch.equal(*seen[2:])
    plain.comm.close()


@on_ranks(2)
def test_a_router_that_an_outer_unit_rounds(rank: int, world_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    first = MoELayer(MoEConfig(**SIZES), max_tokens=8)
    x = tokens_of(rank, 6, torch.float32, seed)[0]
    with first.comm:
        for dtype in (None, torch.bfloat16):
            layer = copy.deepcopy(first)
            fully_shard_experts(layer, routers=False)
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False))
            if dtype is None:
                assert torch.equal(layer(x), first(x))
                continue
            with pytest.raises(InvalidArgument, match=r"is torch\.bfloat16 in its forward"):
                layer(x)


class _Blocks(torch.nn.Module):
    """Ten layers, which share a communicator; `used` says which of them a forward goes through."""

    def __init__(self, first: MoELayer) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16, dtype=torch.float64) for _ in range(10))
        self.layers = torch.nn.ModuleList(MoELayer(first.config, first.comm) for _ in self.norms)
        self.used = range(10)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.used:
            if self.checkpoints:
                x = checkpoint(self._block, number, x, use_reentrant=False)
            else:
                x = self._block(number, x)
        return x

    def _block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[number](self.norms[number](x))


WAYS = {
    "": {},
    "weights kept": {"reshard_after_forward": False},
    "checkpoints": {},
    "layers left out": {},
    "two microbatches": {},
    "evaluated between": {},
    "blocks in units": {},
    "no outer unit": {"routers": False},
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_routers_that_share_a_unit(rank: int, world_size: int, way: str, seed: int) -> None:
    """Three steps of many layers, whose routers are a few units, are those of the unsharded model."""
    torch.manual_seed(seed)
    first = MoELayer(MoEConfig(**SIZES, dtype=torch.float64), max_tokens=8)
    with first.comm:
        plain = _Blocks(first)
        sharded = copy.deepcopy(plain)
        fully_shard_experts(sharded, **WAYS[way])
        if way == "blocks in units":
            for norm, layer in zip(sharded.norms, sharded.layers, strict=True):
                fully_shard([norm, layer])
        if way != "no outer unit":
            fully_shard(sharded, **WAYS[way])
        models = plain, sharded
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for step in range(3):
            for model in models:
                model.checkpoints = way == "checkpoints"
                model.used = [0, 2, 9] if way == "layers left out" and step == 1 else range(10)
            parts = 2 if way == "two microbatches" else 1
            for part in range(parts):
                x = tokens_of(rank, 5 + rank, torch.float64, seed + 10 * step + part)[0]
                if parts > 1:
                    sharded.set_requires_gradient_sync(part == parts - 1)
                outputs = [model(x) for model in models]
                assert torch.equal(*outputs)
                for y in outputs:
                    (y.square().mean() / parts).backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                sync_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                if way == "evaluated between":
                    with torch.no_grad():
                        model.used = range(4)
                        model(x)
            for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
                assert_close(unsharded(ours), theirs, rtol=1e-9, atol=1e-9, msg=f"{name} in step {step}")
