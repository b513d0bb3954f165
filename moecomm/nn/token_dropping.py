"""Expert capacity: how many tokens a rank may send to one expert, and which tokens lose their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moecomm.nn.config import MoEConfig


def tokens_per_expert_limit(config: MoEConfig, num_tokens: int) -> int:
    """Returns how many of T tokens may go to one expert: ceil(T * K / E * capacity_factor), at most T.

    Megatron-Core's get_capacity. The tokens are those of a sending rank, so that dropping needs no
    communication.
    """
    assert config.capacity_factor is not None
    limit = math.ceil(num_tokens * config.top_k * config.capacity_factor / config.num_experts)
    return min(limit, num_tokens)


def rows_at_worst(*, ranks: int, max_tokens: int, top_k: int, num_local_experts: int) -> int:
    """Returns the rows that no routing can exceed on one rank: each token with as many of its choices as
    there are experts."""
    return ranks * max_tokens * min(top_k, num_local_experts)


def rows_for_headroom(
    headroom: float, *, ranks: int, max_tokens: int, top_k: int, num_local_experts: int
) -> int:
    """Returns the rows that a rank gets where the tokens of all ranks spread evenly over the experts, times
    `headroom`; never more than any routing can bring.

    Example: 4 ranks with 1000 tokens each, top-2, 8 experts a rank: 2000 rows by balance, 8000 at worst; with
    a headroom of 1.25 it is 2500.
    """
    worst = rows_at_worst(
        ranks=ranks, max_tokens=max_tokens, top_k=top_k, num_local_experts=num_local_experts
    )
    return min(worst, math.ceil(headroom * max_tokens * top_k))


def kept_choices(topk_idx_TK: Tensor, weights_TK: Tensor | None, num_experts: int, limit: int) -> Tensor:
    """Returns (T, K) bool: the choices that fit when each expert takes at most `limit` tokens.

    With weights an expert keeps the tokens of highest weight, the earlier token among equals; without, the
    first ones. Shapes do not depend on the data, and the host waits for nothing. Every entry of topk_idx_TK
    is an expert id.

    Example: topk_idx = [[0, 1], [0, 2], [0, 1]], weights = [[.6, .4], [.9, .1], [.7, .3]], limit = 2. Expert
    0 is wanted by tokens 0, 1, 2 with .6, .9, .7: by weight token 0 is dropped, by position token 2.
    """
    expert_N = topk_idx_TK.reshape(-1).to(torch.int64)
    order_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if weights_TK is not None:
        order_N = torch.argsort(weights_TK.detach().reshape(-1), descending=True, stable=True)
    # Sorting by expert keeps the order of preference inside each expert, because both sorts are stable.
    order_N = order_N[torch.argsort(expert_N[order_N], stable=True)]
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
    first_E = counts_E.cumsum(0) - counts_E
    ordered_N = expert_N[order_N]
    place_N = torch.arange(expert_N.numel(), device=expert_N.device) - first_E[ordered_N]
    kept_N = torch.empty_like(expert_N, dtype=torch.bool)
    kept_N[order_N] = place_N < limit
    return kept_N.view(topk_idx_TK.shape)
