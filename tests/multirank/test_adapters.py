"""Parameters that torch's parametrizations add to experts: adapters of each expert; one of all is refused.

Weights after some steps are those of ranks that hold all experts."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.testing import assert_close

from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    MoELayer,
    clip_grad_norm,
    fully_shard_experts,
    is_expert_parameter,
    mark_adapter,
    prepare_ddp,
    sharded_state,
    sync_gradients,
)
from moecomm.parallel import ParallelFolding
from moecomm.train.model_parts import ModelParts
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, wrapped
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

CONFIG = MoEConfig(**SIZES, dtype=torch.float64)


class Adapter(nn.Module):
    """weight + 0.2 a b, with a and b for each expert, those from `first` on, or for all."""

    def __init__(self, weight_LAB: Tensor, first: int | None, seed: int) -> None:
        super().__init__()
        local, a, b = weight_LAB.shape
        make = torch.Generator().manual_seed(seed)
        lead = () if first is None else (CONFIG.num_experts,)
        self.a = nn.Parameter(torch.randn(*lead, a, 2, generator=make, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(*lead, 2, b, generator=make, dtype=torch.float64))
        if first is not None:
            self.a, self.b = (nn.Parameter(each[first : first + local].clone()) for each in (self.a, self.b))

    def forward(self, weight_LAB: Tensor) -> Tensor:
        return weight_LAB + 0.2 * (self.a @ self.b)


def build(group: Any, seed: int = 0, **options: Any) -> MoELayer:
    """A layer with an adapter for each expert."""
    torch.manual_seed(seed)
    layer = MoELayer(CONFIG, group=group, max_tokens=8, **options)
    experts = layer.experts
    for number, name in enumerate(("w_in", "w_out")):
        adapter = Adapter(getattr(experts, name), experts.first_expert, seed + number)
        parametrize.register_parametrization(experts, name, adapter)
    return layer


def train(layer: MoELayer, rank: int, ddp: bool) -> torch.optim.Optimizer:
    call = wrapped(layer, "ddp" if ddp else "")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    for step in range(3):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)
        optimizer.zero_grad()
        call(x).square().mean().backward()
        if not ddp:
            sync_gradients(layer)
        clip_grad_norm(layer, 0.1)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("world_size", "ep", "ddp"), [(2, 2, False), (4, 2, True)])
@on_ranks()
def test_adapters_train_as_on_one_rank(rank: int, world: int, ep: int, ddp: bool, tmp_path: Path) -> None:
    spread, whole = (build(groups_of(rank, world, size)[0]) for size in (ep, 1))
    optimizers = [train(layer, rank, ddp) for layer in (spread, whole)]
    first, count = spread.experts.first_expert, spread.experts.num_local_experts
    wanted = dict(whole.named_parameters())
    for name, found in spread.named_parameters():
        want = wanted[name]
        own = found.shape != want.shape
        assert_close(found, want[first : first + count] if own else want, rtol=1e-9, atol=1e-12)
    dcp.save(sharded_state(spread, optimizers[0]), checkpoint_id=tmp_path)
    state = sharded_state(build(groups_of(rank, world, 1)[0], seed=5))
    dcp.load(state, checkpoint_id=tmp_path)
    for name, found in state["model"].items():
        local = found.to_local() if isinstance(found, DTensor) else found
        assert_close(local, wanted[name], rtol=1e-9, atol=1e-12)
    spread.comm.close()
    whole.comm.close()


@on_ranks(2)
def test_adapters_of_experts_in_parts(rank: int, world: int) -> None:
    layer = build(None, folding=ParallelFolding(world_size=world, etp=2))
    with layer.comm:
        sync_gradients(layer)
        says = "experts.parametrizations.w_in.0.a is no weight or bias"
        refused(partial(sharded_state, layer), says)


@on_ranks(2)
def test_marks(rank: int, world: int) -> None:
    """Marks are right on what any walk of a model returns, without a forward between."""

    def check(layer: MoELayer) -> None:
        of_each = {
            name
            for name, parameter in layer.named_parameters()
            if name.startswith("experts.") and parameter.dim() == 3
        }
        assert {name for name, each in layer.named_parameters() if is_expert_parameter(each)} == of_each
        assert len(of_each) in (2, 6, 8)
        assert all(is_expert_parameter(p) == (p in ModelParts(layer).owners) for p in layer.parameters())

    layer = build(None)
    with layer.comm:
        check(layer)
        twin = copy.deepcopy(layer)
        assert is_expert_parameter(twin.experts.parametrizations.w_in[0].a)
        check(twin)
        layer(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
        check(layer)
        parametrize.register_parametrization(
            layer.experts, "w_in", Adapter(layer.experts.w_in, layer.experts.first_expert, 4)
        )
        check(layer)
        for name in ("w_in", "w_out"):
            parametrize.remove_parametrizations(layer.experts, name)
        check(layer)
        layer.experts.w_in = nn.Parameter(layer.experts.w_in.detach().clone())
        assert is_expert_parameter(layer.experts.w_in)
        check(layer.double())


def test_the_walk_that_marks_is_traced() -> None:
    """A compiled step of an optimizer, or of clipping, walks the parameters within its graph."""
    experts = nn.ModuleDict({"experts": GroupedExperts(CONFIG, num_local_experts=4, device="cpu")})

    def total(scale: Tensor) -> Tensor:
        return sum((p.sum() * scale for p in experts.parameters()), start=torch.zeros(()))

    want = total(torch.ones(()))
    torch._dynamo.reset()
    assert_close(torch.compile(total, backend="eager", fullgraph=True)(torch.ones(())), want)


@on_ranks(2)
def test_adapters_of_wrapped_experts(rank: int, world_size: int) -> None:
    """Gradients under checkpoint_wrapper, whose names are others, are those of the experts alone."""
    x = torch.randn(6, CONFIG.hidden, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    found = []
    for wraps in (False, True):
        layer = build(None)
        if wraps:
            layer.experts = checkpoint_wrapper(layer.experts)
        with layer.comm:
            layer(x).square().mean().backward()
            sync_gradients(layer)
            found.append([*(each.grad for each in layer.parameters()), clip_grad_norm(layer, 1e9)])
    assert_close(*found, rtol=1e-9, atol=1e-12)


class Common(nn.Module):
    """One adapter for all experts, whose parameters have, by chance, as many parts as a rank has experts."""

    def __init__(self, weight_LAB: Tensor, how: str, ranks: int) -> None:
        super().__init__()
        _, a, b = weight_LAB.shape
        make = torch.Generator().manual_seed(3)
        shapes = {"low rank": ((ranks, a), (b, ranks)), "three": ((ranks, a, 2), (ranks, 2, b))}[how]
        self.a, self.b = (
            nn.Parameter(torch.randn(*each, generator=make, dtype=torch.float64) * 0.3) for each in shapes
        )
        if how == "low rank":  # as LoRA starts
            nn.init.zeros_(self.b)

    def forward(self, weight_LAB: Tensor) -> Tensor:
        if self.a.dim() == 3:
            return weight_LAB + (self.a @ self.b).sum(0)
        return weight_LAB + (self.b @ self.a).t()


def takers_of_experts() -> tuple[Any, ...]:
    clip = partial(clip_grad_norm, max_norm=1.0)
    return sync_gradients, prepare_ddp, fully_shard_experts, sharded_state, clip


@pytest.mark.parametrize(
    ("how", "parts", "said"), [("low rank", 2, False), ("three", 3, False), ("low rank", 1, True)]
)
@on_ranks(2)
def test_one_adapter_for_all_experts_is_refused(
    rank: int, world: int, how: str, parts: int, said: bool
) -> None:
    """Also where it has, by chance, as many parts as a rank has experts; it trains where ranks have all."""
    config = MoEConfig(**{**SIZES, "num_experts": parts * world, "top_k": 2}, dtype=torch.float64)
    for size in (world, 1):
        torch.manual_seed(0)
        layer = MoELayer(config, group=groups_of(rank, world, size)[0], max_tokens=8)
        adapter = Common(layer.experts.w_in, how, parts)
        parametrize.register_parametrization(layer.experts, "w_in", adapter)
        if said:
            mark_adapter(adapter, per_expert=False)
        assert not is_expert_parameter(adapter.a)
        with layer.comm:
            for taker in takers_of_experts() if size > 1 else ():
                refused(partial(taker, layer), "and counts as one for the experts of all ranks")
            if size == 1:
                train(layer, rank, ddp=True)


@pytest.mark.parametrize("kind", ["one", "numpy", "own"])
@on_ranks(2)
def test_adapters_of_which_nothing_can_be_told_have_to_be_marked(rank: int, world: int, kind: str) -> None:
    """Adapters with a part for each expert where nothing shows it: one expert a rank, one that is not
    computed by torch, a parameter that a module adds on its own."""
    torch.manual_seed(0)
    experts = world if kind == "one" else CONFIG.num_experts
    config = MoEConfig(**{**SIZES, "num_experts": experts, "top_k": 2}, dtype=torch.float64)
    layer = MoELayer(config, max_tokens=8)
    added: nn.Module = Adapter(layer.experts.w_in, layer.experts.first_expert, 1)
    if kind == "own":
        layer.experts.add_module("added", added)
    else:
        if kind == "numpy":
            added.register_forward_pre_hook(lambda module, args: args[0].detach().numpy() and None)
        parametrize.register_parametrization(layer.experts, "w_in", added, unsafe=True)
    with layer.comm:
        for taker in takers_of_experts():
            says = "could be a part for each of them or one for the experts of all ranks"
            refused(partial(taker, layer), says, "moecomm.nn.mark_adapter")
        mark_adapter(added, per_expert=True)
        sync_gradients(layer)
        assert sharded_state(layer)["model"]
        of_each = {name for name, each in layer.named_parameters() if is_expert_parameter(each)}
        assert sum(name.endswith((".a", ".b")) for name in of_each) == 2
