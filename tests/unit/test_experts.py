"""GroupedExperts against one feed-forward per row, and what happens to empty groups, tails and copies."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.testing import assert_close

from moecomm import InvalidArgument
from moecomm.kernels.products import grouped_matmul
from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    SharedExperts,
    TopKRouter,
    is_expert_parameter,
    mark_expert_parameter,
)
from tests.moe_reference import feed_forward

GROUPS = {
    "plain": [3, 5, 9, 10],
    "empty ones": [0, 4, 4, 10],
    "empty at both ends": [0, 6, 10, 10],
    "all in one": [0, 0, 10, 10],
    "a tail": [2, 3, 3, 7],
    "nothing but tail": [0, 0, 0, 0],
}
# Relative to the largest number of a tensor: a few roundings to dtype (2^-24, 2^-11, 2^-8), and the sums'.
PRECISION = {
    torch.float64: 1e-13,
    torch.float32: 32 * 2**-24,
    torch.float16: 8 * 2**-11,
    torch.bfloat16: 8 * 2**-8,
}


def make(seed: int, **options: Any) -> GroupedExperts:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden": 16, "ffn_hidden": 24, "num_experts": 4, "top_k": 2, "init_std": 0.3}
    return GroupedExperts(MoEConfig(**{**sizes, **options}))


def assert_near(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None
    assert want is not None
    assert got.dtype == dtype
    bound = PRECISION[dtype] * max(want.abs().max().item(), 1e-3)
    assert_close(got.double(), want, rtol=0, atol=bound)


def reference(
    rows: Tensor, w_in: Tensor, w_out: Tensor, ends: list[int], activation: str, *biases: Tensor
) -> Tensor:
    out = [torch.zeros_like(row) for row in rows]
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for row in range(begin, end):
            own = [each[expert] for each in biases]
            out[row] = feed_forward(rows[row], w_in[expert], w_out[expert], activation, *own)
    return torch.stack(out) + 0 * sum(each.sum() for each in (w_in, w_out, rows, *biases))


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", False), ("gelu", True), ("swiglu_clamped", True)]
)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS.keys())
def test_matches_one_row_at_a_time(
    dtype: torch.dtype, activation: str, bias: bool, ends: list[int], seed: int
) -> None:
    experts = make(seed, dtype=dtype, activation=activation, bias=bias)
    own = list(experts.parameters())  # w_in, w_out, and the biases
    for each in own[2:]:
        assert not each.any()
        torch.nn.init.normal_(each)
    rows = torch.randn(10, 16, dtype=dtype, requires_grad=True)
    factor = torch.randn(10, 16, dtype=dtype)
    y = experts(rows, torch.tensor(ends, dtype=torch.int32))
    (y * factor).sum().backward()

    exact = [t.detach().double().requires_grad_() for t in (rows, *own)]
    want = reference(*exact[:3], ends, activation, *exact[3:])
    (want * factor).sum().backward()
    assert_near(y, want, dtype)
    for got, ref in zip((rows, *own), exact, strict=True):
        assert_near(got.grad, ref.grad, dtype)


@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize("dtype", PRECISION)
def test_no_rows(dtype: torch.dtype, has_tail: bool, seed: int) -> None:
    experts = make(seed, dtype=dtype)
    rows = torch.empty(0, 16, dtype=dtype, requires_grad=True)
    y = experts(rows, torch.zeros(4, dtype=torch.int32), has_tail=has_tail)
    assert y.shape == (0, 16)
    y.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_of_any_stride(dtype: torch.dtype, seed: int) -> None:
    """A single row counts as contiguous whatever its strides are."""
    experts = make(seed, dtype=dtype)
    flat, offsets = torch.randn(16, dtype=dtype), torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    want = experts(flat.view(1, 16), offsets)
    for strides in [(0, 1), (3, 1)]:
        y = experts(flat.as_strided((1, 16), strides), offsets, has_tail=False)
        assert torch.equal(y, want)
        y.sum().backward()
        experts(flat.as_strided((1, 16), strides), offsets, has_tail=False).backward(
            flat.as_strided((1, 16), strides)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(16, 24), (16, 10), (6, 16), (5, 7)])
def test_widths_off_the_kernels_alignment(dtype: torch.dtype, inner: int, outer: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(9, inner, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, inner, outer, dtype=dtype, requires_grad=True)
    y = grouped_matmul(rows, weight, torch.tensor([4, 4, 9], dtype=torch.int32))
    y.sum().backward()  # the gradient of a sum is an expanded scalar, which is not contiguous
    exact_rows, exact_weight = rows.detach().double(), weight.detach().double()
    want = torch.cat([exact_rows[:4] @ exact_weight[0], exact_rows[4:] @ exact_weight[2]])
    assert_near(y, want, dtype)
    sums = exact_weight.sum(dim=2)
    assert_near(rows.grad, torch.cat([sums[0].expand(4, inner), sums[2].expand(5, inner)]), dtype)
    totals = torch.stack([exact_rows[:4].sum(0), torch.zeros(inner), exact_rows[4:].sum(0)])
    assert_near(weight.grad, totals.unsqueeze(2).expand(3, inner, outer), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_views(dtype: torch.dtype, seed: int) -> None:
    """torch's grouped_mm refuses their strides."""
    torch.manual_seed(seed)
    rows, offsets = torch.randn(9, 16, dtype=dtype), torch.tensor([4, 4, 9], dtype=torch.int32)
    wide = torch.randn(3, 16, 49, dtype=dtype)
    turned = torch.randn(16, 24, 3, dtype=dtype).permute(2, 0, 1)
    for view in (wide[..., 1:25], wide[..., :48:2], wide[..., :1].expand(3, 16, 24), turned):
        y, want = (grouped_matmul(rows, each, offsets) for each in (view, view.contiguous()))
        assert torch.equal(y, want)


class Added(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2, 1, 48))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.bias


def test_a_look_at_an_adapter_seeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    experts = GroupedExperts(MoEConfig(hidden=16, ffn_hidden=24, num_experts=4, top_k=2), num_local_experts=2)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    state = torch.get_rng_state()
    parametrize.register_parametrization(experts, "w_in", Added())
    assert all(map(is_expert_parameter, experts.parameters()))
    assert torch.equal(torch.get_rng_state(), state) and not seeds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_start_does_not_depend_on_the_number_of_ranks(ranks: int, seed: int) -> None:
    config = MoEConfig(hidden=8, ffn_hidden=4, num_experts=12, top_k=2)
    local = 12 // ranks

    def build(first: int, count: int) -> tuple[GroupedExperts, Tensor]:
        torch.manual_seed(seed)
        return GroupedExperts(config, num_local_experts=count, first_expert=first), torch.rand(1)

    whole, after = build(0, 12)
    shards = [build(rank * local, local) for rank in range(ranks)]
    assert torch.equal(whole.w_in, torch.cat([shard.w_in for shard, _ in shards]))
    assert torch.equal(whole.w_out, torch.cat([shard.w_out for shard, _ in shards]))
    assert all(torch.equal(after, other) for _, other in shards), "layers made later must start alike too"
    # The deviation of n numbers strays by 1 / sqrt(2n) of itself: by six times that once in 5e8 seeds.
    stray = 6 / math.sqrt(2 * whole.w_in.numel())
    assert whole.w_in.std().item() == pytest.approx(0.02, rel=stray)
    assert whole.w_in[0].flatten()[:16].tolist() != whole.w_in[1].flatten()[:16].tolist()
    assert not torch.equal(whole.w_in, GroupedExperts(config).w_in), "layers differ"


def test_parameters_stay_marked(seed: int) -> None:
    experts = make(seed)
    copies = [copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), experts.to(torch.bfloat16)]
    for module in [experts, *copies]:
        assert all(is_expert_parameter(parameter) for parameter in module.parameters())
    assert not any(
        is_expert_parameter(p)
        for p in SharedExperts(
            MoEConfig(hidden=8, ffn_hidden=4, num_experts=2, top_k=2, num_shared_experts=1)
        ).parameters()
    )


def test_the_default_device_has_no_say_in_where_weights_start(seed: int) -> None:
    config = MoEConfig(hidden=16, ffn_hidden=8, num_experts=4, top_k=2, num_shared_experts=1)
    made = []
    for default in ("cpu", "meta"):  # a draw on "meta" would give no numbers
        with torch.device(default):
            torch.manual_seed(seed)
            layers = [kind(config, device="cpu") for kind in (TopKRouter, GroupedExperts, SharedExperts)]
        made.append([parameter for layer in layers for parameter in layer.parameters()])
    assert_close(*made, rtol=0, atol=0)


def test_refuses(seed: int) -> None:
    experts, offsets = make(seed), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"rows have shape \(3, 8\)"):
        experts(torch.zeros(3, 8), offsets)
    with pytest.raises(InvalidArgument, match=r"dtype torch.float64, must be .* torch.float32"):
        experts(torch.zeros(3, 16, dtype=torch.float64), offsets)
    with pytest.raises(InvalidArgument, match=r"offsets have shape \(3,\), must be \(4,\)"):
        experts(torch.zeros(3, 16), offsets[:3])
    for ends in ([1, 2, 0, 3], [1, 2, 4, 4]):
        with pytest.raises(InvalidArgument, match=rf"offsets\[2\] is {ends[2]}, must be from 2 to 3"):
            experts(torch.zeros(3, 16), torch.tensor(ends))
    with pytest.raises(InvalidArgument, match=r"offsets are list, must be a tensor"):
        experts(torch.zeros(3, 16), [3, 3, 3, 3])
    with pytest.raises(InvalidArgument, match=r"first_expert is 3, expected an integer from 0 to 2"):
        GroupedExperts(experts.config, num_local_experts=2, first_expert=3)
    with pytest.raises(InvalidArgument, match=r"num_local_experts is 2.0, expected an integer from 1 to 4"):
        GroupedExperts(experts.config, num_local_experts=2.0)  # type: ignore[arg-type]
    shared = SharedExperts(dataclasses.replace(experts.config, num_shared_experts=1))
    for rows in (torch.zeros(3, 8), torch.zeros(3, 16, dtype=torch.bfloat16)):
        with pytest.raises(InvalidArgument, match=r"rows have shape .* \(rows, hidden=16\) of the weights'"):
            shared(rows)
    with pytest.raises(InvalidArgument, match=r"parameter is SharedExperts, must be an nn.Parameter"):
        mark_expert_parameter(shared)  # type: ignore[arg-type]
