"""MoELayer with its experts in fp8, on several ranks: near the dense reference in float64, the same bits in
whatever way it runs, and never with weights of an earlier step."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moecomm import InvalidArgument
from moecomm.kernels.fp8_products import Fp8Products
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, sync_gradients
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import SIZES, check_ways, groups_of, layer_step, reference_step, whole
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_moe_layer import CASES, IN_EVERY_WAY, in_every_way

FP8: dict[str, Any] = {"ffn_hidden": 32, "expert_precision": "fp8"}
PRODUCT = math.sqrt(2 / 3) / 16
"""Error of a product in the mean, relative to it, at most: e4m3 is off by up to a sixteenth of a value,
evenly spread and independent for both operands."""
DRAWS = 8
WITHOUT_BIASES = [name for name in IN_EVERY_WAY if "bias" not in CASES[name].options]
NEAR = ["softmax", "like deepseek-v3", "like qwen2-moe", "fixed buffers", "recomputed"]


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in NEAR), ("like switch", 1)])
def test_near_the_dense_reference(name: str, ranks: int, pool: Pools, seed: int) -> None:
    """The case is in float32, so that tokens choose the same experts. The output comes from two products in
    e4m3, a gradient from up to four; gradients of others (the router, x) have the experts' error in the mean.

    The router's is that of several draws together: it is made of differences, and in a single draw may be
    small where its error is not."""
    case = CASES[name].with_dtype(torch.float32)
    case = replace(case, options={**case.options, **FP8})

    def near(error: float, size: float, products: int, what: str, least: float = 0.0) -> None:
        # Half as much again: these are few numbers, and activations may stretch errors.
        assert error <= 1.5 * PRODUCT * math.sqrt(products) * size + 1e-6, f"{what}: {error} of {size}"
        assert error >= least * size, f"{what} is too exact for e4m3: {error} of {size}"

    router: list[tuple[float, float]] = []
    for draw in range(seed, seed + DRAWS):
        results = pool(ranks)(layer_step, case, draw)
        want = reference_step(results, case, draw)
        assert [result["load"] for result in results] == want["load"]
        for key, products, least in (("y", 2, 0.005), ("x.grad", 4, 0.002)):
            got, ref = torch.cat([each[key] for each in results]), torch.cat(want[key])
            near(float((got - ref).norm()), float(ref.norm()), products, key, least)
        for grad, value in whole(results, "grads").items():
            ref = want["grads"][grad]
            error, size = float((value - ref).norm()), float(ref.norm())
            if grad.startswith("router."):
                router.append((error, size))
            else:
                near(error, size, 4, f"{grad}.grad", 0.005 if grad.startswith("experts") else 0)
    near(*(math.hypot(*each) for each in zip(*router, strict=True)), 4, "the router's gradients")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in WITHOUT_BIASES),
        ("softmax", torch.float32),
        ("softmax", torch.half),
    ],
)
def test_every_way_gives_the_same(pool: Pools, name: str, dtype: torch.dtype, seed: int) -> None:
    assert pool(3)(check_ways, in_every_way(name, dtype, 3, seed, **FP8)) == [[]] * 3


@pytest.mark.parametrize("way", [{}, {"overlap": False}, {"keep": "rows"}], ids=str)
@on_ranks(2)
def test_steps_of_an_optimizer(rank: int, world_size: int, way: dict[str, Any], seed: int) -> None:
    """Steps of two microbatches each: what a layer makes is what one makes that has never seen other weights,
    and weights are quantised once a step."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, **FP8, "dtype": torch.float32})
    overlap = OverlapConfig(**way)
    layer = MoELayer(config, max_tokens=8, overlap=overlap)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    sizes = []
    for step in range(3):
        fresh = MoELayer(config, layer.comm, overlap=overlap)
        fresh.load_state_dict(layer.state_dict())
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed + 10 * step + rank))
        for each in (layer, fresh):
            each.zero_grad()
            outputs = [each(part) for part in x]
            for y in outputs:
                y.square().sum().backward()
            each.outputs = [y.detach() for y in outputs]  # type: ignore[assignment]
        torch.testing.assert_close(layer.outputs, fresh.outputs, rtol=0, atol=0)
        for ours, theirs in zip(layer.experts.parameters(), fresh.experts.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
        assert isinstance(layer.experts.products, Fp8Products)
        sizes.append(layer.experts.products.kept_bytes())
        sync_gradients(layer)
        optimizer.step()
    assert sizes[0] > 0 and len(set(sizes)) == 1
    layer.comm.close()


@pytest.mark.parametrize("apart", [False, True], ids=["as one", "experts apart"])
@on_ranks(2)
def test_under_fsdp(rank: int, world_size: int, apart: bool, seed: int) -> None:
    """FSDP gathers weights into memory that it uses again, and hides that from the version counter."""
    ep_group, _ = groups_of(rank, world_size, 1)
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, **FP8, "dtype": torch.float32})
    layer = MoELayer(config, group=ep_group, max_tokens=8)
    with layer.comm as comm:
        if apart:
            fully_shard(layer.experts)
        fully_shard(layer)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for step in range(3):
            plain = MoELayer(config, comm)
            state = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in layer.state_dict().items()
            }
            plain.load_state_dict(state)
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed + 10 * step + rank))
            y = layer(x)
            assert torch.equal(y, plain(x)), f"step {step}"
            optimizer.zero_grad()
            y.square().sum().backward()
            sync_gradients(layer)
            optimizer.step()
        dist.barrier()


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    """A layer that cannot be is refused by its description, before any communicator."""
    with pytest.raises(InvalidArgument, match="ffn_hidden is 8, must be a multiple of 16"):
        MoELayer(MoEConfig(**{**SIZES, "expert_precision": "fp8"}), max_tokens=8)
