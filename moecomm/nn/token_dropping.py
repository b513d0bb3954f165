"""Expert capacity: how many tokens a rank may send to one expert, and which tokens lose their place."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import InvalidArgument
from moecomm.nn.balance_sums import exchanging
from moecomm.nn.config import MoEConfig
from moecomm.types import Group, GroupReference


def tokens_per_expert_limit(config: MoEConfig, num_tokens: int) -> int:
    """Returns how many of T tokens may go to one expert: ceil(T * K / E * capacity_factor), at most T.

    Megatron-Core's get_capacity. With drop_over="rank" the tokens are those of a sending rank, so that
    dropping needs no communication.
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


def kept_choices(
    topk_idx_TK: Tensor, weights_TK: Tensor | None, num_experts: int, limit: int | Tensor
) -> Tensor:
    """Returns (T, K) bool: the choices that fit when each expert takes at most `limit` tokens, one number or
    (E,) int64.

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
    kept_N[order_N] = place_N < (limit[ordered_N] if isinstance(limit, Tensor) else limit)
    return kept_N.view(topk_idx_TK.shape)


class SequenceRanks:
    """The ranks that hold parts of the same sequences, and drop their choices together
    (drop_over="sequence"). All call `kept` for each forward, or `bring_nothing` in its place.

    By position they exchange how often each chose each expert; by weight all choices with their weights,
    from which each ranks the same as one process would. Shapes depend on `max_tokens` alone, and the host
    waits for nothing but its group, which has torch's deadline.
    """

    def __init__(self, config: MoEConfig, group: Group, order: list[int], max_tokens: int) -> None:
        """order: the group's ranks in the order of their parts of a sequence, as numbers within the group."""
        self._config, self._order, self._max_tokens = config, order, max_tokens
        self._group = GroupReference(group)
        self._own = order.index(dist.get_rank(group))
        self.exchanges = 0
        """Exchanges so far, also those that failed."""

    def require_tokens(self, num_tokens: int) -> None:
        """Raises InvalidArgument for more tokens than the exchange has room for."""
        if num_tokens > self._max_tokens:
            raise InvalidArgument(
                f"x has {num_tokens} tokens, must have at most max_tokens={self._max_tokens}"
            )

    def kept(self, topk_idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns (T, K) bool: this rank's choices that fit, counted over all these ranks; for -1 either."""
        config = self._config
        num_tokens, absent = topk_idx_TK.shape[0], config.num_experts
        topk_idx_TK = topk_idx_TK.masked_fill(topk_idx_TK < 0, absent)  # they count in the number of tokens
        if config.drop_policy == "position":
            expert_N = topk_idx_TK.reshape(-1)
            counts_E = torch.zeros(absent + 1, dtype=torch.int64, device=expert_N.device)
            counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
            counts_RE = self._gather(counts_E)
            before_E = counts_RE[: self._own].sum(0)
            limit_E = self._limit(counts_RE.sum()) - before_E
            return kept_choices(topk_idx_TK, None, absent + 1, limit_E)
        # In float64, which holds ids and weights of any dtype; places without a token choose E + 1.
        choices_MK2 = weights_TK.new_zeros(self._max_tokens, config.top_k, 2, dtype=torch.float64)
        choices_MK2[..., 0] = absent + 1
        choices_MK2[:num_tokens, :, 0] = topk_idx_TK
        choices_MK2[:num_tokens, :, 1] = weights_TK.detach()
        all_idx, all_weights = self._gather(choices_MK2).flatten(0, 1).unbind(-1)
        all_idx = all_idx.to(torch.int64)
        limit = self._limit((all_idx <= absent).sum())
        kept = kept_choices(all_idx, all_weights, absent + 2, limit.expand(absent + 2))
        first = self._own * self._max_tokens
        return kept[first : first + num_tokens]

    def bring_nothing(self, experts: int, device: torch.device) -> None:
        """Takes part in the exchange of a forward that this rank refuses."""
        idx_TK = torch.zeros(0, self._config.top_k, dtype=torch.int64, device=device)
        self.kept(idx_TK, idx_TK)

    def _limit(self, choices: Tensor) -> Tensor:
        """Returns tokens_per_expert_limit for the tokens of so many choices, in the same arithmetic."""
        config = self._config
        assert config.capacity_factor is not None
        limit = (choices.double() * config.capacity_factor / config.num_experts).ceil().long()
        return limit.minimum(choices // config.top_k)

    def _gather(self, own: Tensor) -> Tensor:
        """Returns the tensors of all ranks, in the order of their parts."""
        self.exchanges += 1
        gathered = [torch.empty_like(own) for _ in self._order]
        group = self._group()
        with exchanging(group, "dropping over a sequence"):
            dist.all_gather(gathered, own, group=group)
        return torch.stack([gathered[number] for number in self._order])
