"""Rules of published models beside plain torch: how a group's worth is reckoned, weights on the experts'
input, and balancing biases that stay, or whose mean does."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from moecomm import InvalidArgument
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, TopKRouter, update_expert_bias

SIZES: dict[str, Any] = {"hidden": 16, "num_experts": 12, "top_k": 4, "dtype": torch.float64}


def config_of(**options: Any) -> MoEConfig:
    return MoEConfig(**{**SIZES, "ffn_hidden": 8, "init_std": 0.5, "activation": "gelu", **options})


# -- groups ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("best", "top_k"), [(1, 4), (2, 4), (2, 6), (3, 4), (None, 4)])
def test_worth_of_a_group(best: int | None, top_k: int, seed: int) -> None:
    """best=1 is the code of DeepSeek-V2 (group_scores = scores.max), 2 that of DeepSeek-V3 for any K."""
    torch.manual_seed(seed)
    options = {"score_function": "sigmoid", "num_groups": 4, "topk_groups": 2, "scores_per_group": best}
    router = TopKRouter(config_of(top_k=top_k, **options))
    x_TH = torch.randn(40, 16, dtype=torch.float64)
    scores_TGM = (x_TH @ router.weight.t()).sigmoid().view(40, 4, 3)
    group_scores_TG = scores_TGM.sort(dim=2, descending=True).values[..., : best or 2].sum(dim=2)
    if best == 1:
        assert torch.equal(group_scores_TG, scores_TGM.max(dim=-1).values)
    allowed_TG = torch.zeros(40, 4).scatter(1, group_scores_TG.topk(2, dim=-1).indices, 1).bool()
    masked_TE = torch.where(allowed_TG[..., None], scores_TGM, 0.0).flatten(1)
    wanted_TK = masked_TE.topk(top_k, dim=-1).indices
    assert torch.equal(router(x_TH).topk_idx_TK.long().sort().values, wanted_TK.sort().values)


def test_scores_of_a_node() -> None:
    config = config_of(limit_nodes=2, scores_per_group=3)
    assert config.for_nodes(4).scores_per_group == 3
    assert config.for_nodes(2).scores_per_group is None
    with pytest.raises(InvalidArgument, match=r"scores_per_group is 3, must be at most 2 on 6 nodes"):
        config.for_nodes(6)


# -- weights on the input ----------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {"top_k": 1, "num_experts": 4, "score_function": "sigmoid", "weights_on_input": True}


@pytest.mark.parametrize(
    ("way", "shared"),
    [*product(["", "in order", "nothing kept", "capacity"], [0, 1]), ("compiled", 1)],
)
def test_weights_on_the_input(way: str, shared: int, seed: int) -> None:
    overlap = {"in order": OverlapConfig(overlap=False), "nothing kept": OverlapConfig(keep="nothing")}
    options: dict[str, Any] = {"num_shared_experts": shared}
    if way == "capacity":
        options |= {"capacity_factor": 4.0, "pad_to_capacity": True}
    torch.manual_seed(seed)
    layer = MoELayer(config_of(**LLAMA, **options), max_tokens=12, overlap=overlap.get(way))
    with layer.comm:
        x = torch.randn(2, 6, 16, dtype=torch.float64).requires_grad_()
        factor = torch.randn_like(x)
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager") if way == "compiled" else layer
        y = run(x)
        (y * factor).sum().backward()
        found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        scores, ids = (x @ layer.router.weight.t()).max(dim=-1)
        rows = x * scores.sigmoid().unsqueeze(-1)
        experts = zip(layer.experts.w_in, layer.experts.w_out, strict=True)
        every = torch.stack([nn.functional.gelu(rows @ w_in) @ w_out for w_in, w_out in experts], dim=2)
        wanted = every.gather(2, ids[..., None, None].expand(-1, -1, -1, 16)).squeeze(2)
        if layer.shared is not None:
            wanted = wanted + nn.functional.gelu(x @ layer.shared.w_in) @ layer.shared.w_out
        (wanted * factor).sum().backward()
        assert_close(y, wanted)
        assert_close(found, [x.grad, *(parameter.grad for parameter in layer.parameters())])


# -- balancing biases --------------------------------------------------------------------------------------
def test_biases_that_stay(seed: int) -> None:
    """Fine-tuning with rate 0 has the biases of a checkpoint, and a rate that is given moves them."""
    torch.manual_seed(seed)
    trained = TopKRouter(config_of(score_function="sigmoid", bias_update_rate=0.001))
    trained.expert_bias_E.copy_(torch.randn(12))
    tuned = TopKRouter(config_of(score_function="sigmoid", balancing_bias=True))
    assert not tuned.expert_bias_E.any()
    tuned.load_state_dict(trained.state_dict())
    x_TH = torch.randn(40, 16, dtype=torch.float64)
    assert torch.equal(tuned(x_TH).topk_idx_TK, trained(x_TH).topk_idx_TK)
    before = tuned.expert_bias_E.clone()
    tuned.record_load(torch.arange(12))
    update_expert_bias(tuned)
    assert torch.equal(tuned.expert_bias_E, before)
    tuned.record_load(torch.arange(12))
    update_expert_bias(tuned, rate=0.5)
    assert_close(tuned.expert_bias_E - before, torch.tensor([0.5] * 6 + [-0.5] * 6))


def test_biases_whose_mean_stays(seed: int) -> None:
    """torchtitan: delta = rate * sign(mean - load); delta -= delta.mean(); bias += delta."""
    torch.manual_seed(seed)
    router = TopKRouter(config_of(bias_update_rate=0.25, bias_update="centered"))
    loads = torch.tensor([4] * 9 + [0, 0, 12])
    router.record_load(loads)
    update_expert_bias(router)
    delta = 0.25 * torch.sign(loads.float().mean() - loads)
    assert_close(router.expert_bias_E, delta - delta.mean())
    assert abs(float(router.expert_bias_E.sum())) < 1e-6


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "0.1", True, [0.1]])
def test_refuses_rates(rate: Any, seed: int) -> None:
    with pytest.raises(InvalidArgument, match=r"rate is .*, must be None or a finite number of at least 0"):
        update_expert_bias(TopKRouter(config_of(balancing_bias=True)), rate=rate)
