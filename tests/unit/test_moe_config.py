"""MoEConfig accepts what it documents and names the field, the value and the bound of what it refuses."""

import dataclasses
from typing import Any

import pytest
import torch

from moecomm import InvalidArgument
from moecomm.nn import GroupedExperts, MoEConfig, SharedExperts, TopKRouter

SIZES = {"hidden": 16, "ffn_hidden": 32, "num_experts": 8, "top_k": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "num_experts": 1},
        {"limit_nodes": 2},
        {"activation": "swiglu_clamped", "main_grad": True},
    ],
)
def test_accepts(options: dict[str, Any]) -> None:
    MoEConfig(**{**SIZES, **options})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"hidden": 0}, "hidden"),
        ({"ffn_hidden": -1}, "ffn_hidden"),
        ({"num_experts": 2.0}, "num_experts"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"top_k": 1}, "pre_softmax"),
        ({"top_k": 1, "pre_softmax": True, "normalize_topk": True}, "normalize_topk"),
        ({"activation": "relu"}, "activation"),
        ({"score_function": "tanh"}, "score_function"),
        ({"score_function": "sigmoid", "pre_softmax": True}, "pre_softmax"),
        ({"scaling_factor": 0.0}, "scaling_factor"),
        ({"num_groups": 3, "topk_groups": 1}, "num_groups"),
        ({"num_groups": 4}, "topk_groups"),
        ({"topk_groups": 1}, "topk_groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups"),
        ({"num_groups": 8, "topk_groups": 1}, "top_k"),
        ({"limit_nodes": 0}, "limit_nodes"),
        ({"limit_nodes": True}, "limit_nodes"),
        ({"limit_nodes": 2, "num_groups": 4, "topk_groups": 2}, "limit_nodes"),
        ({"limit_nodes": 2, "topk_groups": 2}, "limit_nodes"),
        ({"aux_loss": "token"}, "aux_loss"),
        ({"aux_loss_coef": 0.01}, "aux_loss_coef"),
        ({"aux_loss": "batch", "aux_loss_coef": -0.1}, "aux_loss_coef"),
        ({"z_loss_coef": float("nan")}, "z_loss_coef"),
        ({"bias_update_rate": -1.0}, "bias_update_rate"),
        ({"jitter": 1.0}, "jitter"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"shared_gate": True}, "shared_gate"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"capacity_factor": 1.0, "drop_policy": "random"}, "drop_policy"),
        ({"pad_to_capacity": True}, "pad_to_capacity"),
        ({"dtype": torch.int32}, "dtype"),
        ({"dtype": torch.float64, "main_grad": True}, "main_grad"),
        ({"scores_per_group": 2}, "scores_per_group"),
        ({"scores_per_group": 4, "num_groups": 4, "topk_groups": 2}, "scores_per_group"),
        ({"scores_per_group": 0, "num_groups": 4, "topk_groups": 2}, "scores_per_group"),
        ({"scores_per_group": True, "limit_nodes": 2}, "scores_per_group"),
        ({"weights_on_input": True}, "weights_on_input"),
        ({"init_std": float("inf")}, "init_std"),
        ({"bias_update_rate": "1e-3"}, "bias_update_rate"),
        ({"capacity_factor": "1.25"}, "capacity_factor"),
        ({"jitter": None}, "jitter"),
        ({"pre_softmax": "false"}, "pre_softmax"),
    ],
)
def test_refuses(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^MoEConfig\.{field} is .*, must be "):
        MoEConfig(**{**SIZES, **options})


def test_nodes_become_groups() -> None:
    """The worked example of `for_nodes`, and a limit that limits nothing."""
    config = MoEConfig(hidden=16, ffn_hidden=32, num_experts=256, top_k=8, limit_nodes=4, aux_loss="batch")
    on_8 = config.for_nodes(8)
    assert (on_8.num_groups, on_8.topk_groups, on_8.limit_nodes) == (8, 4, None)
    assert on_8 == dataclasses.replace(config, limit_nodes=None, num_groups=8, topk_groups=4)
    assert on_8.for_nodes(2) is on_8
    for nodes in (1, 2, 4):
        assert config.for_nodes(nodes) == dataclasses.replace(config, limit_nodes=None)
    plain = MoEConfig(**SIZES)
    assert plain.for_nodes(8) is plain


@pytest.mark.parametrize("nodes", [0, -2, 3, 16, True, 2.0])
@pytest.mark.parametrize("limit", [None, 2])
def test_refuses_nodes_that_cannot_share_the_experts(nodes: Any, limit: int | None) -> None:
    with pytest.raises(InvalidArgument, match=r"^nodes is .*, must be a divisor of num_experts=8$"):
        MoEConfig(**SIZES, limit_nodes=limit).for_nodes(nodes)


def test_refuses_a_limit_below_top_k() -> None:
    config = MoEConfig(**{**SIZES, "top_k": 3}, limit_nodes=1)
    assert config.for_nodes(2).topk_groups == 1
    with pytest.raises(InvalidArgument, match=r"MoEConfig\.limit_nodes is 1, must be .* 2 experts each"):
        config.for_nodes(4)


@pytest.mark.parametrize("kind", [GroupedExperts, SharedExperts, TopKRouter])
def test_a_config_that_is_none(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="config is a int, must be a MoEConfig"):
        kind(3)
