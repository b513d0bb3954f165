"""A mixture-of-experts layer as plain loops over tokens and experts, to compare moecomm.nn with.

Shares no code with moecomm. Slow and simple; runs in the dtype of its inputs (float64 in the tests)
under autograd. `options` is a dict with the names of MoEConfig's fields. One rank's tokens at a time: ranks
influence each other in no way, because capacity and losses are per rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "activation": "swiglu",
    "num_shared_experts": 0,
    "score_function": "softmax",
    "pre_softmax": False,
    "normalize_topk": False,
    "scaling_factor": 1.0,
    "num_groups": None,
    "topk_groups": None,
    "aux_loss": "none",
    "aux_loss_coef": 0.0,
    "z_loss_coef": 0.0,
    "force_balanced": False,
    "capacity_factor": None,
    "drop_policy": "probs",
}


@dataclass
class Result:
    y: Tensor
    """(T, H)."""
    losses: dict[str, Tensor]
    choices: list[dict[int, Tensor]]
    """For each token: expert -> weight, after drops."""
    load: list[int]
    """Choices of each expert, before drops."""


def reference_moe(
    x: Tensor, weights: dict[str, Tensor], options: dict[str, Any], seq_len: int | None = None
) -> Result:
    """weights: router (E, H), w_in (E, H, F or 2F), w_out (E, F, H), shared_in, shared_out, shared_gate (H,),
    bias (E,) that balances, router_bias (E,), b_in (E, F or 2F), b_out (E, H); the last seven may be absent.
    """
    options = {**DEFAULTS, **options}
    logits = [[dot(x[t], weights["router"][e]) for e in range(options["num_experts"])] for t in range(len(x))]
    if "router_bias" in weights:
        logits = [[logit + weights["router_bias"][e] for e, logit in enumerate(row)] for row in logits]
    chosen = [choose(t, row, weights.get("bias"), options) for t, row in enumerate(logits)]
    choices = [weigh(row, experts, options) for row, experts in zip(logits, chosen, strict=True)]
    load = [sum(e in experts for experts in chosen) for e in range(options["num_experts"])]
    losses = {}
    if options["aux_loss"] != "none":
        length = len(x) if options["aux_loss"] == "batch" or seq_len is None else seq_len
        losses["aux_loss"] = options["aux_loss_coef"] * balance_loss(logits, chosen, length, options)
    if options["z_loss_coef"] > 0:
        squares = [torch.stack(list(row)).exp().sum().log() ** 2 for row in logits]
        losses["z_loss"] = options["z_loss_coef"] * sum(squares, start=x.new_zeros(())) / max(len(x), 1)
    if options["capacity_factor"] is not None:
        choices = drop(choices, options)

    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for expert, weight in choices[t].items():
            own = (weights["w_in"][expert], weights["w_out"][expert])
            biases = [weights[name][expert] for name in ("b_in", "b_out") if name in weights]
            out = feed_forward(x[t], *own, options["activation"], *biases)
            row = row + weight * out
        if options["num_shared_experts"]:
            out = feed_forward(x[t], weights["shared_in"], weights["shared_out"], options["activation"])
            if "shared_gate" in weights:
                out = out / (1 + torch.exp(-dot(x[t], weights["shared_gate"])))
            row = row + out
        rows.append(row)
    return Result(torch.stack(rows) if rows else x.clone(), losses, choices, load)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def feed_forward(
    rows: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: str,
    b_in: Tensor | float = 0.0,
    b_out: Tensor | float = 0.0,
) -> Tensor:
    """Applies an expert to a row (H,) or rows (N, H). w_in is (H, F), or (H, 2F), gate first; w_out (F, H);
    b_in and b_out are added to the products.

    The benchmarks (bench/harness/verify.py) use it and its gradients by autograd.
    """
    inner = rows @ w_in + b_in
    if activation == "swiglu_interleaved":
        inner = torch.cat([inner[..., ::2], inner[..., 1::2]], dim=-1)
    if activation == "swiglu_clamped":
        gate, up = inner[..., ::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
        inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    elif activation != "gelu":
        gate, up = inner.chunk(2, dim=-1)
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    return inner @ w_out + b_out


def scores_of(logits: list[Tensor], function: str) -> list[Tensor]:
    if function == "sigmoid":
        return [1 / (1 + torch.exp(-logit)) for logit in logits]
    total = sum(logit.exp() for logit in logits)
    return [logit.exp() / total for logit in logits]


def choose(t: int, logits: list[Tensor], bias: Tensor | None, options: dict[str, Any]) -> list[int]:
    num_experts, top_k = options["num_experts"], options["top_k"]
    if options["force_balanced"]:
        return [(t + slot * (num_experts // top_k)) % num_experts for slot in range(top_k)]
    chosen_before_softmax = options["score_function"] == "softmax" and not options["pre_softmax"]
    values = logits if chosen_before_softmax else scores_of(logits, options["score_function"])
    value = [v.item() + (0.0 if bias is None else bias[e].item()) for e, v in enumerate(values)]
    allowed = list(range(num_experts))
    if options["num_groups"] is not None:
        size = num_experts // options["num_groups"]
        groups = [allowed[g * size : (g + 1) * size] for g in range(options["num_groups"])]
        best = max(top_k // options["topk_groups"], 1)
        worth = [sum(sorted((value[e] for e in group), reverse=True)[:best]) for group in groups]
        order = sorted(range(len(groups)), key=lambda g: -worth[g])
        allowed = [e for g in order[: options["topk_groups"]] for e in groups[g]]
    return sorted(allowed, key=lambda e: -value[e])[:top_k]


def weigh(logits: list[Tensor], experts: list[int], options: dict[str, Any]) -> dict[int, Tensor]:
    if options["score_function"] == "softmax" and not options["pre_softmax"]:
        values = scores_of([logits[e] for e in experts], "softmax")
    else:
        scores = scores_of(logits, options["score_function"])
        values = [scores[e] for e in experts]
        if options["normalize_topk"]:
            total = sum(values)
            values = [value / total for value in values]
    return {e: value * options["scaling_factor"] for e, value in zip(experts, values, strict=True)}


def balance_loss(
    logits: list[list[Tensor]], chosen: list[list[int]], length: int, options: dict[str, Any]
) -> Tensor:
    losses = []
    for begin in range(0, len(logits), max(length, 1)):
        loss: Any = 0.0
        for e in range(options["num_experts"]):
            times = sum(e in experts for experts in chosen[begin : begin + length])
            mean: Any = 0.0
            for row in logits[begin : begin + length]:
                scores = scores_of(row, options["score_function"])
                mean = mean + scores[e] / sum(scores) / length
            loss = loss + options["num_experts"] * times / (length * options["top_k"]) * mean
        losses.append(loss)
    return sum(losses) / len(losses) if losses else torch.zeros((), dtype=torch.float64)


def drop(choices: list[dict[int, Tensor]], options: dict[str, Any]) -> list[dict[int, Tensor]]:
    limit = math.ceil(len(choices) * options["top_k"] * options["capacity_factor"] / options["num_experts"])
    kept: list[dict[int, Tensor]] = [{} for _ in choices]
    for e in range(options["num_experts"]):
        tokens = [t for t, choice in enumerate(choices) if e in choice]
        if options["drop_policy"] == "probs":
            tokens.sort(key=lambda t: -choices[t][e].item())
        for t in tokens[:limit]:
            kept[t][e] = choices[t][e]
    return kept
