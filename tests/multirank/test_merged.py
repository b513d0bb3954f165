"""Merged microbatches have the same bits as one after the other: outputs, gradients of inputs and of weights;
and an error in a node is one on all ranks, after which everything goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecomm import InvalidArgument
from moecomm.nn import MoEBlock, MoEConfig, MoELayer, TopKRouter, prepare_ddp
from moecomm.overlap import Block, forward_backward, run_microbatches
from tests.multirank.catching import Caught, catch
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import SIZES, TOKENS, poison_tail
from tests.ranks import communicator, device, on_cpu, synchronize

FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}
SHARED = {"num_shared_experts": 1}


class Attention(nn.Module):
    """Stands for attention and its norms: (residual, normed)."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        self.dropout = dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + F.dropout(self.mix(self.norm(x)), self.dropout)
        return residual, F.rms_norm(residual, residual.shape[-1:])


class Dense(nn.Module):
    """A layer without experts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mix(x))


class Nodes(nn.Module):
    """A block of callables for its nodes, differentiated by autograd."""

    def __init__(self, config: MoEConfig, comm: Any) -> None:
        super().__init__()
        self.before = Attention(config.hidden)
        self.router = TopKRouter(config, device=comm.device)
        self.expert = nn.Linear(config.hidden, config.hidden)
        self.comm = comm
        self.block = Block(comm, self.attention, self.dispatch, self.experts, self.combine)

    def attention(self, x: Tensor) -> tuple[Tensor, ...]:
        residual, h = self.before(x)
        routing = self.router(h)
        return residual, h, routing.topk_idx_TK, routing.topk_weights_TK

    def dispatch(self, h: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
        out = self.comm.dispatch(h, ids, weights)
        return out.tokens, out.weights, out.handle

    def experts(self, rows: Tensor, weights: Tensor, handle: Any) -> tuple[Any, ...]:
        return F.gelu(self.expert(rows)), weights, handle

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        return self.comm.combine(rows, handle, weights=weights)


@dataclass(frozen=True)
class Case:
    """Microbatches through blocks: E with experts, D dense, N of nodes as callables."""

    blocks: str = "E"
    microbatches: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    dropout: float = 0.0
    sequences: bool = False
    """Give the tokens as (B, S, H)."""
    frozen: tuple[str, ...] = ()
    """Ends of the names of parameters that are not trained; "x": inputs need no gradient."""
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass
class Step:
    """A model and its microbatches on this rank."""

    blocks: list[Any]
    model: nn.Module
    x: list[Tensor]
    factors: list[Tensor]
    comm: Any

    def loss(self, y: Tensor, number: int) -> Tensor:
        return (y.float() * self.factors[number]).sum()

    def one_after_the_other(self) -> list[Tensor]:
        losses = []
        for number, y in enumerate(self.x):
            for block in self.blocks:
                y = block(y)
            loss = self.loss(y, number)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def merged(self, merge_ends: bool = False) -> list[Tensor]:
        return run_microbatches(self.blocks, self.x, self.loss, merge_ends=merge_ends)

    def seen(self, run: Callable[[], list[Tensor]], seed: int = 0) -> dict[str, Tensor | None]:
        """Runs the step and returns all that it has computed."""
        for each in (*self.model.parameters(), *self.x):
            each.grad = None
        torch.manual_seed(seed)
        losses = run()
        layers = [each for each in self.model.modules() if isinstance(each, MoELayer)]
        for layer in layers:
            layer.backward_weights()
        found: dict[str, Tensor | None] = {f"loss {number}": each for number, each in enumerate(losses)}
        found |= {f"x {number}": each.grad for number, each in enumerate(self.x)}
        found |= {name: each.grad for name, each in self.model.named_parameters()}
        for number, layer in enumerate(layers):
            found |= {f"{name} of layer {number}": each for name, each in layer.last_losses.items()}
            if layer.router.load_E is not None:
                found[f"load of layer {number}"] = layer.router.load_E.clone()
                layer.router.load_E.zero_()
        return {name: None if each is None else each.clone() for name, each in found.items()}


def build(rank: int, world_size: int, case: Case, seed: int) -> Step:
    torch.manual_seed(seed)
    sizes = SIZES if on_cpu() else {**SIZES, "hidden": 256, "ffn_hidden": 192, "init_std": 0.05}
    config = MoEConfig(**{**sizes, "dtype": case.dtype, **case.options})
    tokens = TOKENS[world_size]
    comm = communicator(
        num_experts=config.num_experts,
        hidden=config.hidden,
        top_k=config.top_k,
        max_tokens=max(*tokens, 1) + 2,
        dtype=config.dtype,
    )
    blocks: list[Any] = []
    owners: list[nn.Module] = []
    for kind in case.blocks:
        if kind == "D":
            owner = block = Dense(config.hidden)
        elif kind == "N":
            owner = Nodes(config, comm)
            block = owner.block
        else:
            layer = MoELayer(config, comm, **case.layer)
            for name, value in case.settings.items():
                setattr(layer, name, value)
            before = Attention(config.hidden, case.dropout)
            owner = block = MoEBlock(before, layer, recompute=case.recompute)
        blocks.append(block)
        owners.append(owner.to(device(), case.dtype))
    model = nn.ModuleList(owners)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(case.frozen or ("-",)))
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    shape = (-1, 3, config.hidden) if case.sequences else (tokens[rank], config.hidden)
    pairs = [
        torch.randn(2, tokens[rank], config.hidden, generator=generator) for _ in range(case.microbatches)
    ]
    x = [each[0].to(device(), case.dtype).view(shape).requires_grad_("x" not in case.frozen) for each in pairs]
    factors = [each[1].to(device()).view(shape) for each in pairs]
    return Step(blocks, model, x, factors, comm)


def unequal(want: dict[str, Tensor | None], got: dict[str, Tensor | None], what: str) -> list[str]:
    """Lists what does not have the same bits."""
    assert want.keys() == got.keys()
    problems = []
    for name, value in want.items():
        other = got[name]
        same = value is other if value is None or other is None else torch.equal(value, other)
        if not same:
            problems.append(f"{what}: {name}")
    return problems


def compare(rank: int, world_size: int, case: Case, seed: int, ends: Sequence[bool]) -> list[str]:
    step = build(rank, world_size, case, seed)
    want = step.seen(step.one_after_the_other, seed)
    assert any(each is not None for name, each in want.items() if not name.startswith("l"))
    problems = []
    for merge_ends in ends:
        got = step.seen(partial(step.merged, merge_ends), seed)
        problems += unequal(want, got, f"rank {rank}, merge_ends={merge_ends}")
    problems += unequal(want, step.seen(step.one_after_the_other, seed), f"rank {rank}, again")
    synchronize()
    step.comm.close()
    return problems


LOSSES = {"aux_loss": "batch", "aux_loss_coef": 0.3, "z_loss_coef": 0.1, "bias_update_rate": 0.1}
CASES = {
    **{f"{count} microbatches": Case(microbatches=count) for count in (1, 2, 3, 4)},
    "two layers, shared experts": Case("EE", 3, SHARED),
    "three layers and dense ones": Case("DEDEED", 4, {**SHARED, **LOSSES}),
    "dense layers alone": Case("DD", 3),
    "losses": Case("EE", 3, LOSSES),
    "bfloat16": Case("EE", 3, SHARED, dtype=torch.bfloat16),
    "sequences": Case("EE", 3, {**SHARED, "aux_loss": "sequence", "aux_loss_coef": 0.1}, sequences=True),
    "rows kept": Case("EE", 3, SHARED, layer={"keep": "rows"}),
    "nothing kept": Case("EE", 3, SHARED, layer={"keep": "nothing"}),
    "recomputed": Case("EDE", 3, {**SHARED, **LOSSES, "jitter": 0.1}, recompute=True, dropout=0.2),
    "recomputed, nothing kept": Case("EE", 4, layer={"keep": "nothing"}, recompute=True),
    "capacity": Case("EE", 3, {**SHARED, **FIXED}),
    "capacity, rows kept, recomputed": Case("EE", 3, FIXED, layer={"keep": "rows"}, recompute=True),
    "weights later": Case("EE", 3, SHARED, settings={"defer_weights": True}),
    "recorded": Case("E", 3, SHARED, settings={"record": True}),
    "gelu": Case("E", 3, {"activation": "gelu"}),
    "callables": Case("NN", 4),
    "callables and layers": Case("NEDN", 3, SHARED),
    "no gradients of inputs": Case("EE", 3, frozen=("x",)),
    "experts frozen": Case("EE", 3, SHARED, frozen=("w_in", "w_out")),
    "attention and router frozen": Case("EE", 3, frozen=("x", "router.weight", "mix.weight", "mix.bias")),
}
RANDOM = ("recomputed",)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_after_the_other(pool: Pools, name: str, most_ranks: int, seed: int) -> None:
    ends = (False,) if name in RANDOM else (False, True)
    for size in (1, most_ranks) if name == "two layers, shared experts" else (min(2, most_ranks),):
        assert pool(size)(compare, CASES[name], seed, ends) == [[]] * size


def test_three_ranks_one_without_tokens(pool: Pools, most_ranks: int, seed: int) -> None:
    case = Case("EDE", 4, {**SHARED, **LOSSES})
    assert pool(most_ranks)(compare, case, seed, (False, True)) == [[]] * most_ranks
