"""Experts that change places between ranks: training goes on as if they had not, with rows more alike."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, sync_gradients, update_expert_bias
from moecomm.train import rebalance_experts
from moecomm.train.rebalance import exchanged
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import groups_of, unsharded, wrapped
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

EXPERTS, HIDDEN, TOP_K, TOKENS = 8, 12, 2, 40
CONFIG = MoEConfig(
    hidden=HIDDEN,
    ffn_hidden=6,
    num_experts=EXPERTS,
    top_k=TOP_K,
    bias=True,
    router_bias=True,
    bias_update_rate=0.01,
    dtype=torch.float64,
)


class Model(nn.Module):
    """Two layers whose first tokens go to low numbers of experts above all."""

    def __init__(self, group: Any, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        made = [MoELayer(CONFIG, group=group, max_tokens=TOKENS, **options) for _ in range(2)]
        self.layers = nn.ModuleList(made)
        for layer in made:
            assert layer.router.bias is not None
            layer.router.bias.data.copy_(torch.linspace(0.5, -0.5, EXPERTS))

    def forward(self, x_TH: Tensor) -> Tensor:
        x_TH = self.dense(x_TH)
        for layer in self.layers:
            x_TH = x_TH + layer(x_TH)
        return x_TH


class Square(nn.Module):
    """Adds a product that has the experts in both dimensions of a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(EXPERTS, EXPERTS, dtype=torch.float64))

    def forward(self, weight_EH: Tensor) -> Tensor:
        return weight_EH + self.a @ weight_EH


class Shift(nn.Module):
    """Adds the same numbers on all ranks, as many as a rank has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift_L11", torch.arange(4.0, dtype=torch.float64).view(4, 1, 1))

    def forward(self, weight_LAB: Tensor) -> Tensor:
        return weight_LAB + self.shift_L11


def _tokens(rank: int, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randn(TOKENS - rank, HIDDEN, generator=generator, dtype=torch.float64)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _step(model: Any, optimizer: torch.optim.Optimizer, x_TH: Tensor) -> Tensor:
    y_TH = model(x_TH)
    y_TH.square().mean().backward()
    sync_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    update_expert_bias(model)
    return y_TH.detach()


def _busiest(model: Model) -> list[float]:
    """The rows of each layer's busiest rank in the last forward, over the mean."""
    found = []
    for layer in model.layers:
        total_E = layer.last_tokens_per_expert.clone()
        dist.all_reduce(total_E)
        rows_R = total_E.view(layer.comm.size, -1).sum(1).double()
        found.append(float(rows_R.max() / rows_R.mean()))
    return found


@pytest.mark.parametrize(("ep", "how", "optimizer"), [(4, "", "adamw"), (2, "", "sgd"), (4, "fsdp", "adamw")])
@on_ranks(4)
def test_training_goes_on(rank: int, size: int, ep: int, how: str, optimizer: str, seed: int) -> None:
    """With exchanges after each step a model computes what it would have computed, its experts are those of
    the other model with new numbers, and the rows of the next forward are spread as was foretold."""
    group, _ = groups_of(rank, size, ep)
    plain, moved = (wrapped(Model(group, seed), how) if how else Model(group, seed) for _ in range(2))
    of_plain, of_moved = (OPTIMIZERS[optimizer](each.parameters()) for each in (plain, moved))
    orders = [torch.arange(EXPERTS)] * 2
    changed = 0
    for step in range(4):
        x_TH = _tokens(rank, seed, step)
        torch.testing.assert_close(
            _step(moved, of_moved, x_TH), _step(plain, of_plain, x_TH), rtol=1e-9, atol=1e-11
        )
        with torch.no_grad():
            moved(x_TH)
            before = _busiest(moved)
            done = rebalance_experts(moved, of_moved, tolerance=0.0)
            moved(x_TH)
        for number, after in enumerate(_busiest(moved)):
            if found := done.get(f"layers.{number}"):
                changed += 1
                assert (found.before, found.after) == pytest.approx((before[number], after))
                assert after < before[number]
                orders[number] = orders[number][found.order]
            else:
                assert after == before[number]
    assert changed >= 2, "experts did move"
    for number, (a, b) in enumerate(zip(plain.layers, moved.layers, strict=True)):
        order = orders[number].tolist()
        one, other = unsharded(a.router.weight), unsharded(b.router.weight)
        torch.testing.assert_close(other, one[order], rtol=1e-9, atol=1e-11)
        assert torch.equal(b.router.expert_bias_E, a.router.expert_bias_E[order])
        for name, own in a.experts.named_parameters():
            every = [torch.empty_like(own) for _ in range(ep)]
            dist.all_gather(every, own.detach(), group=group)
            first, count = b.comm.rank * len(own), len(own)
            wanted = torch.cat(every)[order][first : first + count]
            torch.testing.assert_close(
                dict(b.experts.named_parameters())[name], wanted, rtol=1e-9, atol=1e-11
            )


@on_ranks(2)
def test_gradients_and_given_loads(rank: int, size: int, seed: int) -> None:
    """Gradients, also in main_grad, go with their experts; ranks add up the loads that they give."""
    model = Model(None, seed)
    model(_tokens(rank, seed, 0)).square().mean().backward()
    for layer in model.layers:
        layer.experts.w_in.main_grad = layer.experts.w_in.grad.float() * 2
    before = copy.deepcopy({name: each.grad for name, each in model.named_parameters()})
    loads = [torch.tensor([9, 1, 1, 1, 1, 1, 1, 1]) * (rank + 1), torch.ones(EXPERTS)]
    assert rebalance_experts(model, loads=loads) == {}, "no exchange brings ranks nearer"
    loads[0] = torch.tensor([5, 4, 4, 3, 1, 1, 1, 1]) / 20 if rank else torch.zeros(EXPERTS)
    done = rebalance_experts(model, loads=loads)
    order = exchanged(torch.tensor([5, 4, 4, 3, 1, 1, 1, 1]), 2, 0.02)
    assert list(done) == ["layers.0"] and done["layers.0"].order == order
    assert done["layers.0"].before == pytest.approx(1.6) and done["layers.0"].after < 1.3
    layer = model.layers[0]
    for name, own in layer.experts.named_parameters():
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, before[f"layers.0.experts.{name}"])
        wanted = torch.cat(both)[order][4 * rank : 4 * rank + 4]
        assert torch.equal(own.grad, wanted), name
        if name == "w_in":
            assert torch.equal(own.main_grad, wanted.float() * 2)
    assert torch.equal(layer.router.weight.grad, before["layers.0.router.weight"][order])
    assert torch.equal(model.layers[1].experts.w_in.grad, before["layers.1.experts.w_in"])


@on_ranks(2)
def test_states_that_one_rank_has_of_a_router(rank: int, size: int, seed: int) -> None:
    """A ZeroRedundancyOptimizer keeps them in an optimizer of its own."""
    model = Model(None, seed)
    routers = ZeroRedundancyOptimizer(
        [each.router.weight for each in model.layers], torch.optim.AdamW, lr=0.1
    )
    experts = torch.optim.AdamW([each.experts.w_in for each in model.layers], lr=0.1)
    model(_tokens(rank, seed, 0)).square().mean().backward()
    sync_gradients(model)
    for each in (routers, experts):
        each.step()
    states = routers.optim.state
    before = {weight: own["exp_avg"].clone() for weight, own in states.items()}
    assert len(before) == 1
    done = rebalance_experts(model, [routers, experts])
    for number, layer in enumerate(model.layers):
        if layer.router.weight in before:
            wanted = before[layer.router.weight][done[f"layers.{number}"].order]
            assert torch.equal(states[layer.router.weight]["exp_avg"], wanted)


@on_ranks(2)
def test_what_cannot_be_moved_is_refused(rank: int, size: int, seed: int) -> None:
    """On all ranks, and nothing has moved."""
    model = Model(None, seed)
    kept = copy.deepcopy(model.state_dict())
    model(_tokens(rank, seed, 0)).square().mean().backward()
    sync_gradients(model)
    loads = [torch.arange(EXPERTS), torch.ones(EXPERTS)]
    wrong = [*loads[:1], torch.ones(EXPERTS + rank)]
    refused(lambda: rebalance_experts(model, loads=wrong), "loads have shapes" if rank else "rank 1 raises")
    refused(lambda: rebalance_experts(model, tolerance=-1), "tolerance is -1")
    for number, bad in enumerate(
        ([["a"] * EXPERTS], 5, [[-1.0] * EXPERTS] * 2, [[float("nan")] * EXPERTS] * 2)
    ):
        given: Any = bad if rank else loads
        text = "loads has no tensors of numbers" if number < 2 else "negative or not finite"
        refused(lambda given=given: rebalance_experts(model, loads=given), text)  # type: ignore[misc]
    refused(lambda: rebalance_experts(model, loads=loads, tolerance=-rank), "tolerance is -1")
    refused(lambda: rebalance_experts(model, loads=loads, tolerance=rank), name="MismatchedArguments")
    copies = torch.optim.SGD([each.detach().float() for each in model.parameters()], lr=0.1)
    refused(lambda: rebalance_experts(model, copies, loads), "parameters that are not in the model")
    refused(lambda: rebalance_experts(model, [None], loads), "optimizers has a NoneType")  # type: ignore[list-item]
    model.layers[0].experts.w_in.requires_grad_(rank == 0)
    refused(lambda: rebalance_experts(model, loads=loads), "trained w_in", name="MismatchedArguments")
    model.layers[0].experts.w_in.requires_grad_()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    refused(lambda: rebalance_experts(model, loads=loads, group=alone), "the EP groups of a layer")
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    own.state[model.layers[0].experts.w_in]["flat"] = torch.zeros(7)
    refused(lambda: rebalance_experts(model, own, loads), "w_in's flat has shape (7,)", name="Unsupported")
    own.state[model.layers[0].experts.w_in] = {"several": [torch.zeros(EXPERTS // size)]}
    refused(lambda: rebalance_experts(model, own, loads), "w_in's several is a list", name="Unsupported")
    own.state[model.layers[0].experts.w_in] = {"pair": TwoTensor(torch.zeros(4, 3), torch.zeros(4, 3))}
    refused(lambda: rebalance_experts(model, own, loads), "w_in's pair is a TwoTensor", name="Unsupported")
    own.state.clear()
    if not rank:
        own.state[model.layers[0].experts.w_in]["flat"] = torch.zeros(EXPERTS // size, 3)
    refused(lambda: rebalance_experts(model, own, loads), name="MismatchedArguments")
    assert all(
        torch.equal(each, kept[name]) for name, each in model.state_dict().items() if "_extra" not in name
    )
    tied = Model(None, seed)
    tied.layers[1].router = tied.layers[0].router
    refused(lambda: rebalance_experts(tied), "share experts or routers", name="Unsupported")
    adapted = Model(None, seed)
    parametrize.register_parametrization(adapted.layers[0].router, "weight", Square())
    refused(
        lambda: rebalance_experts(adapted, loads=loads), "parametrizations.weight.0.a", name="Unsupported"
    )
    buffered, forced = Model(None, seed), Model(None, seed)
    parametrize.register_parametrization(buffered.layers[0].experts, "w_in", Shift())
    refused(
        lambda: rebalance_experts(buffered, loads=loads), "w_in.0.shift_L11 is a buffer", name="Unsupported"
    )
    forced.layers[0].config = dataclasses.replace(CONFIG, force_balanced=True)
    refused(lambda: rebalance_experts(forced, loads=loads), "force_balanced=True", name="Unsupported")
    deferred = Model(None, seed, overlap=OverlapConfig(defer_weights=True))
    deferred(_tokens(rank, seed, 0)).sum().backward()
    refused(lambda: rebalance_experts(deferred), "backward_weights(model)")


@on_ranks(4)
def test_sharded_experts_are_refused(rank: int, size: int, seed: int) -> None:
    group, _ = groups_of(rank, size, 2)
    model = wrapped(Model(group, seed), "fsdp")
    loads = [torch.arange(EXPERTS), torch.ones(EXPERTS)]
    refused(lambda: rebalance_experts(model, loads=loads), "FSDP2 has sharded", name="Unsupported")


@on_ranks(2)
def test_gradients_that_fsdp_has_not_averaged_are_refused(rank: int, size: int, seed: int) -> None:
    """Those of routers are whole then, in a tensor of FSDP2."""
    model = wrapped(Model(None, seed), "fsdp")
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(_tokens(rank, seed, 0)).square().mean().backward()
        if not last:
            refused(
                lambda: rebalance_experts(model), "FSDP2 has gradients of routers that it has not averaged"
            )
    assert rebalance_experts(model)


def test_exchanges(seed: int) -> None:
    """The busiest rank has never more than before, each rank keeps its number of experts, and the busiest and
    the least busy have no two experts whose exchange would bring them nearer by much."""
    assert exchanged(torch.tensor([5, 4, 1, 2]), 2, 0.0) == [3, 1, 2, 0]
    generator = torch.Generator().manual_seed(seed)
    for ranks, local in [(2, 1), (2, 64), (4, 3), (8, 16), (3, 5)]:
        for tolerance in (0.0, 0.02, 0.2):
            load_E = torch.randint(0, 1000, (ranks * local,), generator=generator) ** 2
            order = exchanged(load_E, ranks, tolerance)
            assert sorted(order) == list(range(ranks * local))
            before_R = load_E.view(ranks, local).sum(1).double()
            load_RL = load_E[order].view(ranks, local).double()
            after_R = load_RL.sum(1)
            assert after_R.max() <= before_R.max() and after_R.sum() == before_R.sum()
            busy, idle = after_R.argmax(), after_R.argmin()
            apart = after_R[busy] - after_R[idle]
            moved = (load_RL[busy].unsqueeze(1) - load_RL[idle]).clamp(0, float(apart))
            gain = torch.minimum(moved, apart - moved).max()
            mean = after_R.mean()
            assert after_R.max() <= (1 + tolerance) * mean or gain <= tolerance * mean / 4
    for tolerance in (0.0, math.inf):
        assert exchanged(torch.zeros(6), 3, tolerance) == list(range(6))
