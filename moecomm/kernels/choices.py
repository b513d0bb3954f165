"""Choices of experts by operations of torch: their scores, weights and counts, a limit to groups of experts,
balanced choices without a router, and the choices that fit a limit on each expert.

Shape letters: T tokens, E experts, K choices of a token, G groups of M experts, N = T K choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """The rule by which the weights of a token's choices are made."""

    top_k: int
    scores: str
    """"softmax" of all experts, "chosen_softmax" of the chosen experts alone, or "sigmoid"."""
    normalize: bool
    """True: the weights of a token are divided by their sum, except with chosen_softmax."""
    scale: float


def scores_of(logits_TE: Tensor, rule: Rule) -> Tensor:
    """Returns (T, E): the softmax over all experts, also for chosen_softmax, or the sigmoid."""
    return logits_TE.sigmoid() if rule.scores == "sigmoid" else logits_TE.softmax(dim=-1)


def weights_of(logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, rule: Rule, gaps: bool) -> Tensor:
    """Returns (T, K): the weights of the chosen experts. `gaps`: ids (int64) may be -1, and get weight 0."""
    at_TK = ids_TK.clamp(min=0) if gaps else ids_TK
    if rule.scores == "chosen_softmax":
        logits_TK = logits_TE.gather(1, at_TK)
        if gaps:  # a token without any choice keeps its logits: else its softmax would be NaN
            gone_TK = ids_TK < 0
            all_T1 = gone_TK.all(dim=1, keepdim=True)
            logits_TK = logits_TK.masked_fill(gone_TK & ~all_T1, float("-inf"))
        weights_TK = logits_TK.softmax(dim=-1)
    else:
        weights_TK = scores_TE.gather(1, at_TK)
    if gaps:
        weights_TK = weights_TK.masked_fill(ids_TK < 0, 0.0)
    if rule.normalize and rule.scores != "chosen_softmax":
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * rule.scale


def counts_of(ids_TK: Tensor, num_experts: int, gaps: bool = False) -> Tensor:
    """Returns (E,) int64: how often each expert is among the ids (int64). `gaps`: ids of -1 are left out."""
    ids_N = ids_TK.reshape(-1)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_N.device)
    if gaps:
        return counts_E.scatter_add_(0, ids_N.clamp(min=0), (ids_N >= 0).to(torch.int64))
    return counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))


def limit_to_groups(
    rank_by_TE: Tensor, num_groups: int, topk_groups: int, top_k: int, best: int | None = None
) -> Tensor:
    """Returns (T, E) with -inf outside each token's best groups (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2).

    A group's value is the sum of its `best` highest entries (None: top_k // topk_groups, at least one). A
    token keeps the topk_groups groups of highest value. If groups are nodes, a row travels to at most
    topk_groups of them.

    Example: one token, rank_by = [5, 0, 3, 3], 2 groups of 2, one group kept, top_k = 2: the groups' values
    are 5 and 6, so the result is [-inf, -inf, 3, 3], although expert 0 has the highest entry.
    """
    num_tokens, num_experts = rank_by_TE.shape
    grouped_TGM = rank_by_TE.view(num_tokens, num_groups, num_experts // num_groups)
    worth_TG = grouped_TGM.topk(best or max(top_k // topk_groups, 1), dim=-1).values.sum(dim=-1)
    kept_TG = torch.zeros_like(worth_TG, dtype=torch.bool)
    kept_TG.scatter_(1, worth_TG.topk(topk_groups, dim=-1).indices, True)
    return grouped_TGM.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)


def balanced_choice(num_tokens: int, num_experts: int, top_k: int, device: Any) -> Tensor:
    """Returns (T, K) int64: K different experts per token, E // K apart, each equally often in any E
    consecutive tokens. Example: 3 tokens, E = 4, K = 2 gives [[0, 2], [1, 3], [2, 0]]."""
    token_T1 = torch.arange(num_tokens, device=device).unsqueeze(1)
    slot_K = torch.arange(top_k, device=device) * (num_experts // top_k)
    return (token_T1 + slot_K) % num_experts


def kept_choices(topk_idx_TK: Tensor, weights_TK: Tensor | None, num_experts: int, limit: int) -> Tensor:
    """Returns (T, K) bool: the choices that fit when each expert takes at most `limit` tokens.

    With weights an expert keeps the tokens of highest weight, the earlier token among equals; without weights
    it keeps the first tokens. Shapes do not depend on the data, and the host does not wait. Every entry of
    topk_idx_TK is an expert id.

    Example: topk_idx = [[0, 1], [0, 2], [0, 1]], weights = [[.6, .4], [.9, .1], [.7, .3]], limit = 2. Tokens
    0, 1, 2 choose expert 0 with .6, .9, .7: by weight token 0 is dropped, by position token 2.
    """
    expert_N = topk_idx_TK.reshape(-1).to(torch.int64)
    order_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if weights_TK is not None:
        order_N = torch.argsort(weights_TK.detach().reshape(-1), descending=True, stable=True)
    # Sorting by expert keeps the order of preference within each expert, as both sorts are stable.
    order_N = order_N[torch.argsort(expert_N[order_N], stable=True)]
    counts_E = counts_of(expert_N, num_experts)
    first_E = counts_E.cumsum(0) - counts_E
    ordered_N = expert_N[order_N]
    place_N = torch.arange(expert_N.numel(), device=expert_N.device) - first_E[ordered_N]
    kept_N = torch.empty_like(expert_N, dtype=torch.bool)
    kept_N[order_N] = place_N < limit
    return kept_N.view(topk_idx_TK.shape)
