"""The configuration of a mixture-of-experts layer, and of what it computes during transfers."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moecomm.errors import InvalidArgument
from moecomm.kernels.activation import INPUTS

_CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": tuple(INPUTS),
    "products": (None, "torch", "quack"),
    "score_function": ("softmax", "sigmoid"),
    "aux_loss": ("none", "batch", "sequence", "global"),
    "bias_update": ("sign", "centered"),
    "drop_policy": ("probs", "position"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, routing and balancing of one MoE layer. A bad value raises `InvalidArgument`.

    The routing options follow Megatron-Core's MoE router; docs/routing.md and docs/layer.md explain them.
    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) uses `score_function="sigmoid", normalize_topk=True,
    scaling_factor=2.5, num_groups=8, topk_groups=4, bias_update_rate=0.001`; Switch Transformer (arXiv
    2101.03961) `top_k=1, pre_softmax=True, aux_loss="batch", aux_loss_coef=0.01, capacity_factor=1.25,
    drop_policy="position"`.

    Attributes:
        hidden: width of a token row (H).
        ffn_hidden: inner width of one expert (F).
        num_experts: experts over all ranks (E).
        top_k: experts per token (K).
        activation: "swiglu": silu(x W_gate) * (x W_up), gates in the first half of w_in's columns;
            "swiglu_interleaved": the same product, gates in the even columns; "swiglu_clamped": gates in the
            even columns, gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up within -7..7
            (gpt-oss); "gelu": the exact (erf) GELU of x W_in.
        bias: True: each expert has a bias after both of its products, zero at first; shared experts have
            none.
        num_shared_experts: experts that see every token, computed as one network of inner width
            num_shared_experts * ffn_hidden.
        shared_gate: True: the shared experts' result is multiplied by sigmoid(x w), w of H values
            (Qwen2-MoE).
        router_bias: True: each expert's logit has a trained bias, zero at first (gpt-oss).
        score_function: "softmax" or "sigmoid" of the router's logits.
        pre_softmax: softmax only. True: softmax over all experts, then top-k. False: top-k, then softmax over
            these k; with False, groups and balancing biases work on logits.
        normalize_topk: divide the k weights of a token by their sum.
        scaling_factor: multiplies the weights, after normalisation.
        num_groups: group-limited routing: experts form this many equal groups, in order of their ids
            (Megatron-Core: moe_router_num_groups, DeepSeek: n_group).
        topk_groups: how many groups a token may use; it uses those whose best scores have the highest sums
            (Megatron-Core: moe_router_group_topk, DeepSeek: topk_group). Given together with num_groups.
        scores_per_group: how many of a group's best scores are summed; None: top_k // topk_groups.
            DeepSeek-V2 has 1, DeepSeek-V3 in transformers 2.
        limit_nodes: the most nodes whose experts a token may use, in place of num_groups (`for_nodes`).
        weights_on_input: True: an expert gets weight * x, as in Llama 4; needs top_k=1. Shared experts get x,
            and are computed before the dispatch.
        aux_loss: load-balancing loss over the rank's tokens ("batch"), each sequence ("sequence"), the
            choices of all ranks and microbatches of a step ("global", arXiv 2501.11873), or "none".
        aux_loss_coef: coefficient of the load-balancing loss.
        z_loss_coef: coefficient of the mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906).
        bias_update_rate: above zero: balancing without auxiliary loss. `update_expert_bias` moves each
            expert's balancing bias by this value. The bias affects the choice of experts, not their weights.
        balancing_bias: True: the router has balancing biases even with bias_update_rate=0.
        bias_update: "sign": each bias moves by the rate, up or down (arXiv 2408.15664); "centered": the mean
            of all experts' steps is then subtracted from each step.
        jitter: in training the router's input is multiplied by noise, uniform in [1 - jitter, 1 + jitter].
        force_balanced: for benchmarks: every expert gets the same load, whatever the scores.
        capacity_factor: None: dropless. Else a rank sends each expert at most ceil(T * K / E *
            capacity_factor) of its T tokens.
        drop_policy: a full expert keeps tokens of highest weight ("probs") or its first tokens ("position").
        pad_to_capacity: with capacity_factor: dispatches return a fixed number of rows; no host waits.
        dtype: of the experts' weights and of the rows that travel; bfloat16 for speed on GPUs. The router
            computes in float32.
        products: "torch"; "quack" (quack-kernels, Hopper, bfloat16 and float16); None: quack if it is
            installed and supports the layer, else torch (docs/layer.md).
        main_grad: True: the experts' weights accumulate gradients in `weight.main_grad`, float32
            (docs/training.md). For dtypes narrower than float64.
        init_std: standard deviation of the normal distribution of initial weights.
    """

    hidden: int
    ffn_hidden: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False
    num_shared_experts: int = 0
    shared_gate: bool = False

    router_bias: bool = False
    score_function: str = "softmax"
    pre_softmax: bool = False
    normalize_topk: bool = False
    scaling_factor: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    limit_nodes: int | None = None
    scores_per_group: int | None = None
    weights_on_input: bool = False

    aux_loss: str = "none"
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    balancing_bias: bool = False
    bias_update: str = "sign"
    jitter: float = 0.0
    force_balanced: bool = False

    capacity_factor: float | None = None
    drop_policy: str = "probs"
    pad_to_capacity: bool = False

    dtype: torch.dtype = torch.float32
    products: str | None = None
    main_grad: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn_hidden", "num_experts", "top_k"):
            _require(self, name, _is_count(getattr(self, name)), "an int of at least 1")
        shared = self.num_shared_experts
        _require(self, "num_shared_experts", shared == 0 or _is_count(shared), "an int of at least 0")
        for name, allowed in _CHOICES.items():
            _require(self, name, getattr(self, name) in allowed, f"one of {', '.join(map(str, allowed))}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                _require(self, field.name, isinstance(value, bool), "True or False")
            elif field.type == "float" or (field.type == "float | None" and value is not None):
                number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                _require(self, field.name, number and math.isfinite(value), "a finite number")
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate", "init_std"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        for rules in (self._rules(), self._score_rules(), self._group_rules()):
            for name, holds, bound in rules:
                _require(self, name, holds, bound)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yields for each rule the field, whether its value is allowed, and the allowed values as text."""
        yield "top_k", self.top_k <= self.num_experts, f"at most num_experts={self.num_experts}"
        gates = self.num_shared_experts > 0 or not self.shared_gate
        yield "shared_gate", gates, "False without shared experts"
        yield "jitter", 0 <= self.jitter < 1, "in [0, 1)"
        for name in ("scaling_factor", "capacity_factor"):
            value = getattr(self, name)
            yield name, value is None or value > 0, "above 0"
        fixed = self.capacity_factor is not None or not self.pad_to_capacity
        yield "pad_to_capacity", fixed, "False without a capacity_factor"
        narrow = self.dtype != torch.float64 or not self.main_grad
        yield "main_grad", narrow, "False with dtype=torch.float64, since it is float32"

    def _score_rules(self) -> Iterator[tuple[str, bool, str]]:
        softmax, one = self.score_function == "softmax", self.top_k == 1
        yield "pre_softmax", softmax or not self.pre_softmax, "False with sigmoid scores"
        # A softmax over one value is the constant 1: the router would have no gradient and never learn.
        constant = "when top_k is 1 (else every weight is the constant 1)"
        several = self.num_experts > 1 and one
        yield "pre_softmax", not (several and softmax) or self.pre_softmax, f"True {constant}"
        yield "normalize_topk", not (several and self.normalize_topk), f"False {constant}"
        once = f"False with top_k={self.top_k}: a token's row travels once for all of its experts on a rank"
        yield "weights_on_input", one or not self.weights_on_input, once
        yield "aux_loss_coef", self.aux_loss != "none" or self.aux_loss_coef == 0, "0 with aux_loss='none'"

    def _group_rules(self) -> Iterator[tuple[str, bool, str]]:
        groups, chosen, nodes = self.num_groups, self.topk_groups, self.limit_nodes
        if nodes is not None:
            yield "limit_nodes", _is_count(nodes), "an int of at least 1"
            none = groups is None and chosen is None
            yield "limit_nodes", none, "None when num_groups and topk_groups are given"
        best, per_group = self.scores_per_group, self.num_experts
        if groups is not None and _is_count(groups):
            per_group = self.num_experts // groups
        if best is not None:
            limits = nodes is not None or groups is not None
            yield "scores_per_group", limits, "None without num_groups or limit_nodes"
            fits = _is_count(best) and (groups is None or best <= per_group)
            yield "scores_per_group", fits, "an int from 1 to the number of a group's experts"
        if groups is None and chosen is None:
            return
        yield "topk_groups", groups is not None and chosen is not None, "given together with num_groups"
        assert groups is not None and chosen is not None
        divides = _is_count(groups) and self.num_experts % groups == 0
        yield "num_groups", divides, f"a divisor of num_experts={self.num_experts}"
        yield "topk_groups", _is_count(chosen) and chosen <= groups, f"in 1..num_groups={groups}"
        reachable = chosen * per_group
        yield "top_k", self.top_k <= reachable, f"at most the {reachable} experts of {chosen} groups"

    def for_nodes(self, nodes: int) -> MoEConfig:
        """Returns this config for a job on `nodes` nodes, which hold equal parts of the experts in order of
        their ids. limit_nodes becomes num_groups=nodes and topk_groups=limit_nodes; if limit_nodes is `nodes`
        or more, there are no groups. Raises InvalidArgument if `nodes` does not divide num_experts, if a node
        holds fewer than scores_per_group experts, or if limit_nodes of the nodes hold fewer than top_k.

        Example: 256 experts with limit_nodes=4 on 8 nodes form 8 groups, of which a token uses 4; on 4 nodes
        or fewer there is no limit.
        """
        if not (_is_count(nodes) and self.num_experts % nodes == 0):
            raise InvalidArgument(f"nodes is {nodes!r}, must be a divisor of num_experts={self.num_experts}")
        limit = self.limit_nodes
        if limit is None:
            return self
        if limit >= nodes:
            return dataclasses.replace(self, limit_nodes=None, scores_per_group=None)
        per_node = self.num_experts // nodes
        enough = (
            f"so many that their {per_node} experts each (on {nodes} nodes) suffice for top_k={self.top_k}"
        )
        _require(self, "limit_nodes", self.top_k <= limit * per_node, enough)
        best = self.scores_per_group
        few = best is None or best <= per_node
        _require(self, "scores_per_group", few, f"at most {per_node} on {nodes} nodes")
        return dataclasses.replace(self, limit_nodes=None, num_groups=nodes, topk_groups=limit)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(config: Any, name: str, holds: bool, bound: str) -> None:
    if not holds:
        of = type(config).__name__
        raise InvalidArgument(f"{of}.{name} is {getattr(config, name)!r}, must be {bound}")


def require_config(config: Any) -> None:
    """Raises InvalidArgument if `config` is not a MoEConfig."""
    if not isinstance(config, MoEConfig):
        raise InvalidArgument(f"config is a {type(config).__name__}, must be a MoEConfig")


def values_that_agree(config: MoEConfig) -> dict[str, str]:
    """Returns, as text by field, the values of a config that must be the same on all ranks: all but
    `products`, which decides how a rank computes, but not its result."""
    names = (field.name for field in dataclasses.fields(config) if field.name != "products")
    return {f"MoEConfig.{name}": repr(getattr(config, name)) for name in names}


# -- what is computed during transfers ---------------------------------------------------------------------


Keep = Literal["all", "rows", "nothing"]
"""The choices of OverlapConfig.keep: which of the experts' rows a forward keeps for its backward."""

IN_ORDER = {"keep": "all", "keep_shared": True, "defer_weights": False, "record": False}
"""Fields of OverlapConfig that control the layer's own backward. Where autograd does the backward, they must
have these values."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """How a MoELayer hides its communication. A bad value raises `InvalidArgument`.

        layer = MoELayer(config, comm, overlap=OverlapConfig(keep="rows"))
        layer.overlap = dataclasses.replace(layer.overlap, record=True)    # between forwards

    Attributes:
        overlap: True: transfers overlap with products. False: stages run one after another on one stream, and
            autograd differentiates them; the output and the experts' gradients have the same bits as with
            True. With False the other fields must have their defaults.
        keep: which of the experts' rows a forward keeps for its backward. "all". "rows": the dispatched rows;
            the first product is recomputed. "nothing": rows are also dispatched again, along the kept plan.
        keep_shared: whether a forward keeps the shared experts' first product. False: the backward recomputes
            it, while gradients travel to the experts.
        defer_weights: True: backwards leave the gradients of the experts' weights to
            `MoELayer.backward_weights`.
        record: True: measure when stages run, for `MoELayer.timelines`.
    """

    overlap: bool = True
    keep: Keep = "all"
    keep_shared: bool = True
    defer_weights: bool = False
    record: bool = False

    def __post_init__(self) -> None:
        for name in ("overlap", "keep_shared", "defer_weights", "record"):
            _require(self, name, isinstance(getattr(self, name), bool), "True or False")
        _require(self, "keep", self.keep in ("all", "rows", "nothing"), "'all', 'rows' or 'nothing'")
        for name, only in () if self.overlap else IN_ORDER.items():
            bound = f"{only!r} with overlap=False, where autograd does the backward"
            _require(self, name, getattr(self, name) == only, bound)
