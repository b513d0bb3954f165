"""torch.autograd.detect_anomaly has nothing to find in rows past the last group, which nobody writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecomm import Communicator
from moecomm.kernels.activation import weighted_activation
from moecomm.kernels.expert_ffn import expert_ffn
from moecomm.kernels.products import Products, grouped_matmul
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig
from tests.multirank.on_ranks import on_ranks

HIDDEN, TOKENS = 16, 12


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """torch fills empty tensors with NaN in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Scaled(nn.Module):
    """An expert that computes with all rows, those past the last group as well. Ranks have different ones:
    where a token's experts are alike, its weights, whose sum is one, have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5 + 0.25 * dist.get_rank()))

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        written_P1 = (torch.arange(len(rows_PH)) < offsets_L[-1]).unsqueeze(1)
        return torch.where(written_P1, torch.tanh(rows_PH * self.scale), 0)


def layer_of(**options: Any) -> MoELayer:
    own = options.pop("experts", None)
    sizes = {"hidden": HIDDEN, "ffn_hidden": 16, "num_experts": 4, "top_k": 2, "init_std": 0.3}
    config = MoEConfig(**{**sizes, "capacity_factor": 1.5, "pad_to_capacity": True, **options})
    given = {} if own is None else {"experts": own()}
    return MoELayer(config, max_tokens=64, overlap=OverlapConfig(overlap=False), **given)


def in_order(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    layer = layer_of()
    return [*layer.parameters()], layer(x_TH)


def with_biases(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    layer = layer_of(bias=True)
    return [*layer.parameters()], layer(x_TH)


def own_experts(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    layer = layer_of(experts=Scaled)
    return [*layer.parameters()], layer(x_TH)


def routed(x_TH: Tensor, **dispatch: Any) -> tuple[Any, Communicator, Tensor]:
    comm = Communicator(num_experts=4, hidden=HIDDEN, max_tokens=64, top_k=2, dtype=torch.float32)
    ids_TK = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2]] * (TOKENS // 4))
    weights_TK = torch.full(ids_TK.shape, 0.5, requires_grad=True)
    return comm.dispatch(x_TH, ids_TK, weights_TK, **dispatch), comm, weights_TK


def by_hand(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    """Its own arithmetic between the products and the combine, whose weights are trained as well."""
    out, comm, weights_TK = routed(x_TH, capacity=80)
    local = 4 // dist.get_world_size()
    w_in, w_out = (torch.full((local, HIDDEN, n), 0.1, requires_grad=True) for n in (2 * HIDDEN, HIDDEN))
    gate = torch.ones(HIDDEN, requires_grad=True)
    y_PH = expert_ffn(out.tokens, w_in, w_out, out.offsets, None, activation="swiglu", products=Products())
    result = comm.combine(y_PH * gate, out.handle, weights=out.weights)
    return [w_in, w_out, gate, weights_TK], result


def in_parts(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    out, comm, weights_TK = routed(x_TH, capacity=80)
    local = 4 // dist.get_world_size()
    w_in, w_out = (torch.full((local, HIDDEN, n), 0.1, requires_grad=True) for n in (2 * HIDDEN, HIDDEN))
    inner_PI = grouped_matmul(out.tokens, w_in, out.offsets)
    z_PF = weighted_activation(inner_PI.sin(), out.weights, out.offsets, activation="swiglu")
    y_PH = grouped_matmul(z_PF, w_out, out.offsets).sin()
    return [w_in, w_out, weights_TK], comm.combine(y_PH, out.handle)


def by_rank(x_TH: Tensor) -> tuple[list[Tensor], Tensor]:
    out, comm, weights_TK = routed(x_TH, capacity=50, layout="rank")
    gate = torch.ones(HIDDEN, requires_grad=True)
    result = comm.combine(out.tokens * out.weights.sum(1, keepdim=True) * gate, out.handle)
    return [gate, weights_TK], result


Case = Callable[[Tensor], tuple[list[Tensor], Tensor]]


@pytest.mark.parametrize(
    "case", [in_order, with_biases, own_experts, by_hand, in_parts, by_rank], ids=lambda case: case.__name__
)
@on_ranks(2)
def test_rows_past_the_last_group_are_no_anomaly(
    rank: int, world_size: int, case: Case, seed: int
) -> list[str]:
    found = []
    for looked in (nullcontext, torch.autograd.detect_anomaly):
        torch.manual_seed(seed)
        x_TH = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        with unwritten_is_nan(), looked():
            trained, y_TH = case(x_TH)
            y_TH.square().sum().backward()
        found.append([each.grad for each in (x_TH, *trained)])
    plain, watched = found
    # Rows past the last group are the caller's to leave out, without anomaly mode: not all gradients are
    # numbers then, where the caller's arithmetic has them.
    bad = [n for n, each in enumerate(watched) if each is None or not each.isfinite().all() or not each.any()]
    pairs = enumerate(zip(plain, watched, strict=True))
    other = [n for n, (a, b) in pairs if a.isfinite().all() and not torch.equal(a, b)]
    return [f"{name}: {each}" for name, each in (("bad", bad), ("other", other)) if each]
