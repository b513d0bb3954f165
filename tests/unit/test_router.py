"""TopKRouter against loops over tokens and experts, and the properties of each routing option."""

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from moecomm import Communicator, InvalidArgument
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    Routing,
    TopKRouter,
    attach_loss,
    load_balancing_loss,
    update_expert_bias,
    z_loss,
)
from moecomm.nn.router import tokens_per_expert_limit
from tests import seeds
from tests.moe_reference import Result, reference_moe

SIZES: dict[str, Any] = {"hidden": 16, "ffn_hidden": 8, "num_experts": 12, "top_k": 4, "init_std": 0.5}

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax after top-k": {},
    "softmax before top-k": {"pre_softmax": True, "scaling_factor": 1.5},
    "softmax before top-k, normalised": {"pre_softmax": True, "normalize_topk": True},
    "one expert a token": {"top_k": 1, "pre_softmax": True},
    "all experts": {"top_k": 12},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, normalised": {"score_function": "sigmoid", "normalize_topk": True, "scaling_factor": 2.5},
    "groups of logits": {"num_groups": 4, "topk_groups": 2},
    "groups of probabilities": {"num_groups": 3, "topk_groups": 2, "pre_softmax": True},
    "groups, more of them than k": {"num_groups": 6, "topk_groups": 5},
    "groups of sigmoids": {
        "score_function": "sigmoid",
        "num_groups": 6,
        "topk_groups": 2,
        "normalize_topk": True,
    },
    "capacity by weight": {"capacity_factor": 0.7},
    "capacity by position": {"capacity_factor": 0.7, "drop_policy": "position"},
    "capacity above need": {"capacity_factor": 12.0},
    "balanced by force": {"force_balanced": True},
    "batch loss": {"aux_loss": "batch", "aux_loss_coef": 0.3},
    "batch loss of sigmoids": {"aux_loss": "batch", "aux_loss_coef": 0.3, "score_function": "sigmoid"},
    "sequence loss": {"aux_loss": "sequence", "aux_loss_coef": 0.3, "z_loss_coef": 0.2},
}


def make(options: dict[str, Any], seed: int, dtype: torch.dtype = torch.float64) -> TopKRouter:
    torch.manual_seed(seed)
    return TopKRouter(MoEConfig(**{**SIZES, "dtype": dtype, **options}))


def expected(router: TopKRouter, x_TH: Tensor, options: dict[str, Any], seq_len: int | None = None) -> Result:
    config = router.config
    weights = {
        "router": router.weight,
        "w_in": x_TH.new_ones(config.num_experts, config.hidden, 2),
        "w_out": x_TH.new_ones(config.num_experts, 1, config.hidden),
    }
    if router.expert_bias_E is not None:
        weights["bias"] = router.expert_bias_E
    return reference_moe(x_TH, weights, {**SIZES, **options}, seq_len)


def as_dicts(routing: Routing) -> list[dict[int, float]]:
    rows = zip(routing.topk_idx_TK.tolist(), routing.topk_weights_TK.tolist(), strict=True)
    return [{e: w for e, w in zip(*row, strict=True) if e >= 0} for row in rows]


def check(router: TopKRouter, x_TH: Tensor, options: dict[str, Any], seq_len: int | None = None) -> None:
    x_ref = x_TH.detach().clone().requires_grad_()
    x_TH = x_TH.detach().clone().requires_grad_()
    routing, want = router(x_TH, seq_len), expected(router, x_ref, options, seq_len)

    assert routing.topk_idx_TK.dtype == torch.int32
    assert routing.topk_weights_TK.dtype == torch.float64
    assert routing.tokens_per_expert_E.tolist() == want.load
    want_dicts = [{e: w.item() for e, w in row.items()} for row in want.choices]
    for row, want_row in zip(as_dicts(routing), want_dicts, strict=True):
        assert row.keys() == want_row.keys()
        assert row == pytest.approx(want_row, rel=1e-12)
    assert routing.losses.keys() == want.losses.keys()
    for name, loss in routing.losses.items():
        assert_close(loss, want.losses[name], rtol=1e-12, atol=1e-14)

    # A different factor for every weight, so that no gradient cancels.
    factor_TE = torch.arange(1.0, x_TH.shape[0] * router.config.num_experts + 1).view(
        -1, router.config.num_experts
    )
    got = (routing.topk_weights_TK * factor_TE.gather(1, routing.topk_idx_TK.clamp(min=0).long())).sum()
    ref = sum(
        (factor_TE[t, e] * w for t, row in enumerate(want.choices) for e, w in row.items()), x_ref.sum() * 0
    )
    (got + sum(routing.losses.values())).backward()
    got_grads = [x_TH.grad, router.weight.grad]
    router.weight.grad = None
    (ref + sum(want.losses.values())).backward()
    for grad, ref_grad in zip(got_grads, [x_ref.grad, router.weight.grad], strict=True):
        assert_close(grad, ref_grad, rtol=0, atol=1e-12 * ref_grad.abs().max().item() + 1e-14)
    router.weight.grad = None


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_loops(options: dict[str, Any], seed: int) -> None:
    router = make(options, seed)
    check(router, torch.randn(18, 16, dtype=torch.float64), options, seq_len=6)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_bias_steers_the_choice_but_not_the_weights(score_function: str, seed: int) -> None:
    options = {"score_function": score_function, "bias_update_rate": 0.1, "num_groups": 4, "topk_groups": 2}
    router = make(options, seed)
    router.expert_bias_E = torch.randn(12)
    check(router, torch.randn(18, 16, dtype=torch.float64), options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_no_tokens(options: dict[str, Any], seed: int) -> None:
    router = make(options, seed, torch.float32)
    x_TH = torch.empty(0, 16, requires_grad=True)
    routing = router(x_TH, 6)
    assert routing.topk_idx_TK.shape == routing.topk_weights_TK.shape == (0, router.config.top_k)
    assert routing.tokens_per_expert_E.tolist() == [0] * 12
    assert all(loss.item() == 0 for loss in routing.losses.values())
    (routing.topk_weights_TK.sum() + sum(routing.losses.values())).backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() == 0


def test_float32_whatever_comes_in(seed: int) -> None:
    router = make({"z_loss_coef": 0.1, "aux_loss": "batch", "aux_loss_coef": 0.1}, seed, torch.bfloat16)
    x_TH = torch.randn(9, 16).bfloat16()
    plain = router(x_TH)
    with torch.autocast("cpu", torch.bfloat16):
        inside = router(x_TH)
    upcast = router(x_TH.float())
    assert router.weight.dtype == plain.scores_TE.dtype == plain.topk_weights_TK.dtype == torch.float32
    for other in (inside, upcast):
        assert torch.equal(plain.scores_TE, other.scores_TE)
        assert torch.equal(plain.topk_weights_TK, other.topk_weights_TK)
        assert plain.losses == other.losses


def test_jitter_only_in_training(seed: int) -> None:
    router = make({"jitter": 0.1}, seed, torch.float32)
    x_TH = torch.randn(9, 16)
    torch.manual_seed(seed)
    noisy = router(x_TH)
    torch.manual_seed(seed)
    noise_TH = torch.rand(9, 16) * 0.2 + 0.9
    router.eval()
    assert_close(noisy.scores_TE, router(x_TH * noise_TH).scores_TE)
    assert torch.equal(router(x_TH).scores_TE, router(x_TH).scores_TE)
    assert not torch.equal(noisy.scores_TE, router(x_TH).scores_TE)


SCORES: list[dict[str, Any]] = [
    {},
    {"pre_softmax": True},
    {"score_function": "sigmoid", "normalize_topk": True},
]


@hypothesis_seed(seeds.base())
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nodes_are_chosen_as_in_the_paper(data: st.DataObject) -> None:
    """Section 2.1.2 of arXiv 2412.19437: "at most M nodes, which are selected according to the sum of the
    highest K_r / M affinity scores of the experts distributed on each node"; the reference has that rule for
    groups."""
    nodes = data.draw(st.integers(1, 8), "nodes")
    per_node = data.draw(st.integers(1, 6), "experts of a node")
    m = data.draw(st.integers(1, nodes), "limit")
    k = data.draw(st.integers(1, min(m * per_node, 8)), "top_k")
    scores = data.draw(st.sampled_from(SCORES if k > 1 else [{"score_function": "sigmoid"}]), "scores")
    with_bias = data.draw(st.booleans(), "bias")
    options = {"num_experts": nodes * per_node, "top_k": k, **scores}
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1), "seed"))
    rate = 0.1 if with_bias else 0.0
    more = {"dtype": torch.float64, "limit_nodes": m, "bias_update_rate": rate}
    config = MoEConfig(**{**SIZES, **options, **more})
    router = TopKRouter(config.for_nodes(nodes))
    if with_bias:
        router.expert_bias_E = torch.randn(nodes * per_node)
    x_TH = torch.randn(20, 16, dtype=torch.float64)
    ids_TK = router(x_TH).topk_idx_TK
    wanted = expected(router, x_TH, {**options, "num_groups": nodes, "topk_groups": m})
    assert [set(row) for row in ids_TK.tolist()] == [row.keys() for row in wanted.choices]
    assert max(len(set(row)) for row in (ids_TK // per_node).tolist()) <= m
    if m == nodes:
        unlimited = TopKRouter(config.for_nodes(1))
        unlimited.load_state_dict(router.state_dict())
        assert torch.equal(ids_TK, unlimited(x_TH).topk_idx_TK)


def test_refuses_nodes_that_it_does_not_know(seed: int) -> None:
    with pytest.raises(InvalidArgument, match=r"limit_nodes is 2 .* pass config\.for_nodes"):
        make({"limit_nodes": 2}, seed)


def test_layer_takes_its_nodes_from_the_argument(seed: int) -> None:
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "limit_nodes": 2})
    with Communicator(
        num_experts=12, hidden=16, top_k=4, max_tokens=32, dtype=torch.float32, device="cpu"
    ) as comm:
        layer = MoELayer(config, comm, nodes=6)
        assert layer.config == layer.router.config == config.for_nodes(6)
        x_TH = torch.randn(32, 16)
        layer(x_TH).sum().backward()
        ids = layer.router(x_TH).topk_idx_TK
        assert max(len(set(row)) for row in (ids // 2).tolist()) <= 2
        assert MoELayer(config, comm).config.num_groups is None, "one node: nothing is limited"
        with pytest.raises(InvalidArgument, match="nodes is 2, must be None without limit_nodes"):
            MoELayer(MoEConfig(**SIZES), comm, nodes=2)
        with pytest.raises(InvalidArgument, match="nodes is 5, must be a divisor"):
            MoELayer(config, comm, nodes=5)


def test_capacity_limit() -> None:
    config = MoEConfig(**{**SIZES, "capacity_factor": 1.25})
    assert [tokens_per_expert_limit(config, tokens) for tokens in (0, 1, 2, 12, 100)] == [0, 1, 1, 5, 42]
    generous = MoEConfig(**{**SIZES, "capacity_factor": 100.0})
    assert tokens_per_expert_limit(generous, 7) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bits_count_all_tokens(dtype: torch.dtype) -> None:
    tokens = 70_000
    probs, token_T1 = torch.full((tokens, 4), 0.25, dtype=dtype), torch.arange(tokens).unsqueeze(1)
    ends = torch.tensor([0, tokens])
    loss = load_balancing_loss(probs, (token_T1 + torch.arange(2)) % 4, cu_seqlens=ends)
    assert loss.item() == pytest.approx(1.0, rel=1e-4)
    assert z_loss(24 * probs).item() == pytest.approx((6 + math.log(4)) ** 2, rel=1e-4)


IDS = torch.zeros(6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "mask"),
    [
        (torch.zeros(2, 3, 4), None),
        (torch.zeros(3, 4), torch.ones(3, 1, dtype=torch.bool)),
        (torch.zeros(3, 4), torch.ones(3)),
    ],
)
def test_a_loss_of_tokens_of_another_shape_is_refused(logits: Tensor, mask: Tensor | None) -> None:
    with pytest.raises(InvalidArgument, match=r"(logits_TE|mask_T) is .* of shape"):
        z_loss(logits, mask)
    with pytest.raises(InvalidArgument, match=r"(probs_TE has|mask_T is .*) shape"):
        load_balancing_loss(logits, torch.zeros(3, 2, dtype=torch.int64), mask_T=mask)


def test_a_dropped_choice_counts_as_a_pair_of_no_expert() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])
    idx = torch.tensor([[0, -1], [-1, 1]])
    # Shares 1/4, 1/4, 0 of the four pairs; mean probabilities 3/8, 3/8, 1/4.
    assert load_balancing_loss(probs, idx).item() == pytest.approx(3 * (3 / 32 + 3 / 32))
    with mock.patch("torch.compiler.is_compiling", return_value=True):  # where the host reads no values
        assert load_balancing_loss(probs, idx + 2).isnan()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"topk_idx_TK": IDS[:5]}, "must be .T, E. and .T, K."),
        ({"probs_TE": torch.ones(6)}, "must be .T, E. and .T, K."),
        ({"probs_TE": (torch.ones(6, 3),)}, "probs_TE is tuple, must be a tensor"),
        ({"topk_idx_TK": IDS.to("meta")}, "topk_idx_TK is .* on meta, must be a tensor on cpu"),
        ({"topk_idx_TK": torch.ones(6, 3) > 0}, "topk_idx_TK is torch.bool, must have integers"),
        ({"topk_idx_TK": IDS + 3}, "topk_idx_TK has the id 3, must have -1..2"),
        ({"topk_idx_TK": IDS - 2}, "topk_idx_TK has the id -2, must have -1..2"),
        ({"mask_T": [True] * 6}, "mask_T is list, must be bool"),
        ({"sequence_len": 4}, "sequence_len is 4, must divide the number of tokens 6"),
        ({"sequence_len": 2.0}, "sequence_len is 2.0, expected an integer"),
        ({"sequence_len": 0}, "sequence_len is 0, expected an integer"),
        ({"sequence_len": 3, "cu_seqlens": IDS[:, 0]}, "sequence_len is 3, must be None with cu_seqlens"),
        ({"cu_seqlens": IDS}, r"cu_seqlens has shape \(6, 2\), must be"),
    ],
)
def test_a_loss_of_bad_arguments(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        load_balancing_loss(**{"probs_TE": torch.ones(6, 3), "topk_idx_TK": IDS, **change})


def test_attached_loss_gets_its_gradient_beside_the_output() -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
    calls: list[int] = []
    y = attach_loss(2 * a, b * b, scale=0.5, on_backward=lambda: calls.append(1))
    assert y.tolist() == [2.0, 4.0]
    (10 * y).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [20.0, 20.0]
    assert b.grad.item() == 3.0
    assert calls == [1]


def test_update_expert_bias_moves_against_the_load(seed: int) -> None:
    router = make({"bias_update_rate": 0.25}, seed)
    model = torch.nn.Sequential(router, torch.nn.Linear(2, 2))
    router.record_load(torch.tensor([4] * 10 + [0, 8]))
    update_expert_bias(model)
    assert router.expert_bias_E is not None
    assert router.expert_bias_E.tolist() == [0.0] * 10 + [0.25, -0.25]
    update_expert_bias(model)  # nothing counted since: all loads are equal
    assert router.expert_bias_E.tolist() == [0.0] * 10 + [0.25, -0.25]


def test_bias_stays_float32_and_is_saved(seed: int) -> None:
    router = make({"bias_update_rate": 0.001}, seed)
    router.expert_bias_E = torch.full((12,), 1.001)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias_E.dtype == torch.float32
    assert router.expert_bias_E[0].item() == pytest.approx(1.001, abs=1e-6)
    assert router.state_dict().keys() == {"weight", "expert_bias_E"}
    assert torch.equal(copy.deepcopy(router).expert_bias_E, router.expert_bias_E)


@pytest.mark.parametrize("shape", [(5,), (5, 15), (2, 5, 16)])
def test_refuses_shapes(shape: tuple[int, ...], seed: int) -> None:
    with pytest.raises(InvalidArgument, match="x has shape"):
        make({}, seed)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("seq_len", [0, -3, 3.0, "3", True])
def test_refuses_what_is_no_sequence_length(seq_len: Any, seed: int) -> None:
    with pytest.raises(InvalidArgument, match=r"seq_len is .*, expected an integer"):
        make({"aux_loss": "sequence"}, seed)(torch.zeros(6, 16, dtype=torch.float64), seq_len)
