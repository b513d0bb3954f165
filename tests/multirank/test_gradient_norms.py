"""Norms of gradients over ranks that hold different experts, beside those of all gradients in one place."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from moecomm.nn import (
    MoEConfig,
    MoELayer,
    clip_grad_norm,
    is_expert_parameter,
    prepare_ddp,
    sharded_state,
    sync_gradients,
    update_expert_bias,
)
from moecomm.parallel import ParallelFolding
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, wrapped
from tests.multirank.on_ranks import on_ranks
from tests.ranks import gathered

pool = own_pool()

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, bias=True, dtype=torch.float64)


def layer_with_gradients(rank: int, world: int, ep: int, how: str, seed: int) -> MoELayer:
    torch.manual_seed(seed)
    folding = ParallelFolding(world_size=world, etp=2, ep=ep // 2) if how == "parts" else None
    where: dict[str, Any] = {"folding": folding} if folding else {"group": groups_of(rank, world, ep)[0]}
    layer = MoELayer(CONFIG, max_tokens=8, **where)
    wrapped(layer, how)
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + rank))
    layer(x).square().sum().backward()
    if how == "plain":  # as one assigned by hand may be: without memory of its own for each element
        layer.shared.w_in.grad = layer.shared.w_in.grad[:, :1].expand_as(layer.shared.w_in)
    sync_gradients(layer)
    return layer


def gradients_of_all(layer: MoELayer, ep: int) -> dict[str, Tensor]:
    """Returns the elements of all gradients of the model, of experts those of the ranks of one EP group."""
    own: dict[str, tuple[bool, Tensor]] = {}
    for name, parameter in layer.named_parameters():
        of_experts, gradient = name.startswith("experts."), parameter.grad
        assert of_experts or not is_expert_parameter(parameter)
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        own[name] = of_experts, gradient.flatten()
    told = gathered(own)
    found: dict[str, list[Tensor]] = {}
    for rank, each in enumerate(told[:ep]):
        for name, (of_experts, gradient) in each.items():
            if of_experts or rank == 0:
                found.setdefault(name, []).append(gradient)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize(
    ("world_size", "ep", "how"),
    [(1, 1, "plain"), (2, 2, "plain"), (4, 2, "plain"), (4, 2, "fsdp"), (2, 1, "fsdp"), (2, 2, "parts")],
)
@on_ranks()
def test_norms(rank: int, world: int, ep: int, how: str, seed: int) -> None:
    layer = layer_with_gradients(rank, world, ep, how, seed)
    with layer.comm:
        want = gradients_of_all(layer, ep)
        with torch.no_grad():  # an evaluation, after which FSDP2's outermost unit stays unsharded
            layer(torch.ones(1, 16, dtype=torch.float64))
        total = torch.linalg.vector_norm(torch.cat(list(want.values())))
        assert_close(clip_grad_norm(layer, float(total) / 4), total, rtol=1e-12, atol=0)
        quarters = {name: gradient / 4 for name, gradient in want.items()}
        assert_close(gradients_of_all(layer, ep), quarters, rtol=1e-5, atol=1e-12)
        for value in (None, "1", -1.0, math.nan):
            begins = f"max_norm is {value!r}, must be at least 0"
            refused(partial(clip_grad_norm, layer, value), begins=begins)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_ranks(2)
def test_a_norm_that_is_not_finite(rank: int, world: int, value: float, seed: int) -> None:
    """A value of one rank's experts is no number."""
    layer = layer_with_gradients(rank, world, 2, "plain", seed)
    with layer.comm:
        if rank == 1:
            layer.experts.w_in.grad[0, 0, 0] = value
        norm = clip_grad_norm(layer, 1e-3)
    assert str(norm.item()) == str(value)


@on_ranks(2)
def test_experts_outside_of_layers_are_refused(rank: int, world: int, seed: int) -> None:
    layer = layer_with_gradients(rank, world, 2, "plain", seed)
    with layer.comm:
        for call in (sync_gradients, partial(clip_grad_norm, max_norm=1.0), prepare_ddp, sharded_state):
            refused(partial(call, layer.experts), begins="w_in is marked as an expert's, and in no MoELayer")


class _Operations(TorchDispatchMode):
    """Notes torch's operations, without views, and in which dtypes GPUs multiply in place: there a number on
    the device is cast to the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.products: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        if func is torch.ops.aten.mul_.Tensor:
            self.products.append(torch.result_type(*args))
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_a_scale_that_is_small_for_float16(rank: int, world: int) -> None:
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.float16)
    model.weight.grad = torch.full_like(model.weight, 60000)
    with _Operations() as seen:
        clip_grad_norm(model, 1e-3)
    assert seen.products == [torch.float32]
    assert_close(model.weight.grad, torch.full_like(model.weight, 5e-4))


class _Model(torch.nn.ModuleList):
    walks = 0

    def named_modules(self, *args: Any, **options: Any) -> Any:
        self.walks += 1
        return super().named_modules(*args, **options)


@on_ranks(2)
def test_what_a_step_costs_the_host(rank: int, world: int, seed: int) -> None:
    """The functions of a step walk over the model once, and have no operations for each parameter."""
    torch.manual_seed(seed)
    config = MoEConfig(**SIZES, bias=True, bias_update_rate=0.1)
    first = MoELayer(config, max_tokens=8)
    with first.comm:
        found = []
        for layers in (2, 7):
            model = _Model(MoELayer(config, first.comm) for _ in range(layers))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            sync_gradients(model)  # the first call also exchanges who holds which experts
            for function in (sync_gradients, partial(clip_grad_norm, max_norm=1.0), update_expert_bias):
                model.walks = 0
                with _Operations() as seen:
                    function(model)
                assert model.walks == 1
                found.append(seen.names)
    assert found[:3] == found[3:]
    assert all(found)


@on_ranks(1)
def test_a_gradient_of_two_parameters(rank: int, world: int) -> None:
    """One tensor that is set as the gradient of two parameters counts for both."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    for each in model.parameters():
        each.grad = model[0].weight.grad if each is model[1].weight else torch.tensor([[3.0, 4.0]])
    assert_close(clip_grad_norm(model, math.inf), torch.tensor(5 * 2**0.5))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has gradients of one dtype")
@on_ranks(2)
def test_gradients_of_another_dtype(rank: int, world: int) -> None:
    """A rank without a gradient has zeros in the dtype that the gradient has elsewhere."""
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    if rank == 0:
        model.weight.grad = torch.full((2, 2), 3.0)
    sync_gradients(model)
    assert_close(model.weight.grad, torch.full((2, 2), 1.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded_state(model, optimizer)
    assert not optimizer.state[model.weight]["momentum_buffer"].any()
    assert_close(model.weight.grad, torch.full((2, 2), 1.5))
