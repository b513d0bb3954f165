"""Routing maps, (T, E) bool, and expert ids, (T, K) with -1 for none. Shape letters as in buffer.py."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep.checks import INTEGERS, checked, require_shape
from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument


@checked
def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Returns the (T, E) bool routing map of (T, K) ids, and (T, E) probs of (T, K) weights or None."""
    require_integer("num_of_tokens", num_of_tokens, 0)
    require_shape("topk_idx", topk_idx, f"({num_of_tokens}, K)", num_of_tokens, None, dtypes=INTEGERS)
    require_integer("num_of_experts", num_of_experts, 1)
    if not topk_idx.is_cuda and bool((topk_idx >= num_of_experts).any()):  # on GPUs the host would wait
        raise InvalidArgument(f"topk_idx has {int(topk_idx.max())}, expected ids below {num_of_experts}")
    if topk_weights is not None:
        require_shape("topk_weights", topk_weights, f"{tuple(topk_idx.shape)}", *topk_idx.shape)
    map_TE = spread(torch.ones_like(topk_idx, dtype=torch.bool), topk_idx, num_of_experts)
    return map_TE, None if topk_weights is None else spread(topk_weights, topk_idx, num_of_experts)


def spread(values_NK: Tensor, ids_NK: Tensor, columns: int) -> Tensor:
    """Returns (N, columns): each value in the column of its id, and zeros."""
    found = values_NK.new_zeros(len(values_NK), columns + 1)  # one more column takes those without an id
    found.scatter_(1, ids_NK.long().masked_fill(ids_NK < 0, columns), values_NK)
    return found[:, :columns].contiguous()


def picked(values_NE: Tensor, ids_NK: Tensor) -> Tensor:
    """Returns (N, K): the value in the column of each id; 0 where it is -1."""
    return values_NE.gather(1, ids_NK.long().clamp(min=0)).masked_fill(ids_NK < 0, 0)


def ids_of(map_TE: Tensor, top_k: int) -> Tensor:
    """Returns (T, K) int64 ids: the experts of each token, ascending, then -1. A token with more than K gets
    an id E, which a dispatch refuses: no expert is left out in silence."""
    experts = map_TE.shape[1]
    places_TE = map_TE.cumsum(1) - 1
    ids_TK = places_TE.new_full((len(map_TE), top_k + 1), -1)  # the last column takes all other entries
    each_TE = torch.arange(experts, device=map_TE.device).expand(map_TE.shape)
    ids_TK.scatter_(1, places_TE.masked_fill(~map_TE | (places_TE >= top_k), top_k), each_TE)
    ids_TK[:, 0].masked_fill_(places_TE[:, -1] >= top_k, experts)
    return ids_TK[:, :top_k].contiguous()


def most_experts(map_TE: Tensor) -> int:
    """Returns the largest number of experts of a token; 0 without tokens."""
    return int(map_TE.sum(1).max()) if len(map_TE) else 0
