"""A MoELayer with experts of the user's own equals all experts applied to all tokens, with gradients."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from moecomm import InvalidArgument
from moecomm.nn import (
    GraphedStep,
    GroupedExperts,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    is_expert_parameter,
    sync_gradients,
)
from tests.multirank.catching import refused
from tests.multirank.moe_cases import poison_tail
from tests.multirank.on_ranks import on_ranks
from tests.played import Played, step_of

HIDDEN, TOKENS = 16, (6, 0, 9)
FIXED = {"capacity_factor": 3.0, "pad_to_capacity": True}


class Affine(nn.Module):
    """tanh of a matrix and a bias for each expert: of rows that are zero it makes other ones."""

    def __init__(self, weight_LHH: Tensor, bias_LH: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight_LHH.clone()), nn.Parameter(bias_LH.clone())

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        places_P = torch.arange(rows_PH.shape[0], dtype=torch.int32)
        expert_P = torch.searchsorted(offsets_L, places_P, right=True).clamp(max=len(self.bias) - 1)
        product_PH = torch.bmm(rows_PH.unsqueeze(1), self.weight[expert_P]).squeeze(1)
        return torch.tanh(product_PH + self.bias[expert_P])


def weights_of(experts: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight_EHH = torch.randn(experts, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) * 0.3
    return weight_EHH.to(dtype), torch.randn(experts, HIDDEN, generator=generator).to(dtype)


def build(rank: int, world_size: int, options: dict[str, Any], seed: int, **layer: Any) -> MoELayer:
    torch.manual_seed(seed)
    sizes = {"hidden": HIDDEN, "ffn_hidden": 8, "num_experts": 2 * world_size, "top_k": 2, "init_std": 0.4}
    config = MoEConfig(**{**sizes, "dtype": torch.float64, **options})
    mine = slice(2 * rank, 2 * rank + 2)
    weight_EHH, bias_EH = weights_of(config.num_experts, seed, config.dtype)
    layer.setdefault("experts", Affine(weight_EHH[mine], bias_EH[mine]))
    return MoELayer(config, max_tokens=max(TOKENS), **layer)


def tokens_of(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + rank + 1)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", [{}, {"overlap": False}], ids=["overlapped", "in order"])
@pytest.mark.parametrize("options", [{}, FIXED], ids=["dropless", "capacity"])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_equals_every_expert_on_every_token(
    rank: int, world_size: int, options: dict[str, Any], way: dict[str, Any], seed: int
) -> None:
    options = {**options, "num_shared_experts": 1}
    layer = build(rank, world_size, options, seed, overlap=OverlapConfig(**way))
    if layer.capacity is not None:
        poison_tail(layer.comm)
    experts = layer.config.num_experts
    x_TH, parameters = tokens_of(rank, seed).requires_grad_(), dict(layer.named_parameters())
    assert [name for name, each in parameters.items() if is_expert_parameter(each)] == [
        "experts.weight",
        "experts.bias",
    ]
    y_TH = layer(x_TH)
    y_TH.square().sum().backward()
    assert x_TH.grad is not None
    found = {"x": x_TH.grad} | {name: each.grad for name, each in parameters.items()}

    weight_EHH, bias_EH = (each.requires_grad_() for each in weights_of(experts, seed))
    layer.zero_grad()
    x2_TH = x_TH.detach().requires_grad_()
    routing = layer.router(x2_TH)
    every_TEH = torch.tanh(torch.einsum("th,ehg->teg", x2_TH, weight_EHH) + bias_EH)
    chosen_TKH = every_TEH.gather(1, routing.topk_idx_TK.long().unsqueeze(-1).expand(-1, -1, HIDDEN))
    want_TH = (routing.topk_weights_TK.unsqueeze(-1) * chosen_TKH).sum(dim=1)
    if layer.shared is not None:
        want_TH = want_TH + layer.shared(x2_TH)
    assert_close(y_TH, want_TH, rtol=1e-10, atol=1e-12)
    want_TH.square().sum().backward()
    want = {"x": x2_TH.grad} | {n: p.grad for n, p in parameters.items() if not n.startswith("experts.")}
    for name, whole in (("experts.weight", weight_EHH), ("experts.bias", bias_EH)):
        gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
        if world_size > 1:
            dist.all_reduce(gradient)
        want[name] = gradient[2 * rank : 2 * rank + 2]
    assert_close(found, want, rtol=1e-9, atol=1e-12)
    layer.comm.close()


class Scales(nn.Module):
    """Rows times a trained number, and a constant where there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        return rows_PH * self.scale if int(offsets_L[-1]) else torch.zeros_like(rows_PH)


@pytest.mark.parametrize("trained", ["tokens", "experts"])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 9.0, "pad_to_capacity": True}], ids=str)
@on_ranks(2)
def test_a_rank_without_rows_takes_part_in_the_backward(
    rank: int, world_size: int, options: dict[str, Any], trained: str
) -> None:
    """Sends every token to rank 0; nothing but the tokens, or the experts, wants a gradient."""
    layer = build(rank, world_size, options, 0, experts=Scales().requires_grad_(trained == "experts"))
    layer.router.weight.requires_grad_(False).fill_(-1.0)[:2] = 1.0
    x_TH = torch.ones(4, HIDDEN, dtype=torch.float64).requires_grad_(trained == "tokens")
    layer(x_TH).sum().backward()
    gradient = layer.experts.scale.grad
    assert (gradient is None) == (rank == 1 or trained == "tokens")
    assert (x_TH.grad is None) == (trained == "experts")
    if x_TH.grad is not None:  # the weights of two equal scores sum to 1
        assert_close(x_TH.grad, torch.full_like(x_TH, 2.0))
    if gradient is not None:
        assert_close(gradient, torch.tensor(4.0 * HIDDEN * world_size, dtype=torch.float64))
    layer.comm.close()


class Returns(nn.Module):
    """Rows as another module would have made them."""

    def __init__(self, change: str | None) -> None:
        super().__init__()
        self.change = change

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Any:
        changes = {"dtype": rows_PH.float(), "shape": rows_PH[:, 1:], "none": None}
        return rows_PH if self.change is None else changes[self.change]


@pytest.mark.parametrize(
    ("change", "says"),
    [("dtype", "torch.float32"), ("shape", "15)"), ("none", "experts returned NoneType, must return")],
)
@pytest.mark.parametrize("options", [{}, FIXED], ids=["dropless", "capacity"])
@on_ranks(2)
def test_a_wrong_result_on_one_rank_is_refused_on_all(
    rank: int, world_size: int, options: dict[str, Any], change: str, says: str
) -> None:
    layer = build(rank, world_size, options, 0, experts=Returns(change if rank == 1 else None))
    x_TH = torch.ones(4, HIDDEN, dtype=torch.float64)
    refused(lambda: layer(x_TH), "rows", says, begins="" if rank == 1 else "rank 1: ")
    layer.experts.change = None
    assert layer(x_TH).isfinite().all(), "the communicator can be used again"
    layer.comm.close()


def test_settings_without_effect_are_refused() -> None:
    for way in ({"keep": "nothing"}, {"keep_shared": False}):
        with pytest.raises(InvalidArgument, match=f"{next(iter(way))} is .* with experts of one's own"):
            build(0, 1, {}, 0, overlap=OverlapConfig(**way))
    layer = build(0, 1, FIXED, 0)
    x_TH = tokens_of(0, 0)
    for name in ("defer_weights", "record"):
        layer.overlap = OverlapConfig(**{name: True})
        refused(partial(layer, x_TH), f"{name} is True, must be False with experts of one's own")
    layer.overlap = OverlapConfig()
    assert layer(x_TH).isfinite().all()
    layer.backward_weights()  # of which there are none
    layer.comm.close()


def test_modules_that_cannot_be_experts_are_refused() -> None:
    refused(lambda: build(0, 1, {}, 0, experts=weights_of), "experts is function, must be an nn.Module")
    counting = Returns(None)
    counting.register_buffer("calls", torch.zeros(()))
    refused(lambda: build(0, 1, {}, 0, experts=counting), "experts has the buffer 'calls' in its state")
    around = nn.Sequential(GroupedExperts(MoEConfig(hidden=HIDDEN, ffn_hidden=8, num_experts=2, top_k=2)))
    with pytest.raises(InvalidArgument, match=r"'0\._extra_state'.*parametrize"):
        build(0, 1, {}, 0, experts=around)


@on_ranks(2)
def test_a_graphed_step(rank: int, world_size: int, seed: int) -> None:
    """Steps whose graph is the step itself, with too little room, equal plain ones."""
    plain = build(rank, world_size, {"num_shared_experts": 1}, seed)
    model = copy.deepcopy(plain)
    assert all(map(is_expert_parameter, model.experts.parameters()))

    graph = GraphedStep(step_of(model), model, headroom=0.2, recorder=Played())
    for number in range(3):
        x_TH = tokens_of(rank, seed + 10 * number)
        assert torch.equal(graph(x_TH), step_of(plain)(x_TH).detach())
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.grad is not None and want.grad is not None
            assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12)
    sync_gradients(model)
    plain.comm.close()
    assert graph.overflows > 0
