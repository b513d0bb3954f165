"""What a forward may be told of its tokens besides their rows: which are padding, where sequences begin, and
the experts of tokens, chosen before: in another run (replay), or by the forward that is computed again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm.arguments import require_integer, require_tensor
from moecomm.errors import InvalidArgument

_INTEGERS = (torch.int32, torch.int64)


class Choices(NamedTuple):
    """The choices of a forward, for the same forward once more."""

    chosen_TK: Tensor
    """(T, K) int32 before drops."""
    kept_TK: Tensor
    """The same after drops."""


def flat(x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Returns what was given beside x (B, S, H) as beside its (B * S, H) tokens."""
    dims, shape = {"mask": 2, "topk_idx": 3}, x.shape[:2]
    return {
        name: value.flatten(0, 1)
        if isinstance(value, Tensor) and value.dim() == dims.get(name) and value.shape[:2] == shape
        else value
        for name, value in given.items()
    }


def check_given(
    tokens: int,
    top_k: int,
    device: torch.device,
    *,
    seq_len: int | None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    topk_idx: Tensor | None = None,
) -> None:
    """Raises InvalidArgument for what does not fit so many tokens."""
    if seq_len is not None and tokens % require_integer("seq_len", seq_len, 1):
        raise InvalidArgument(f"seq_len is {seq_len}, must divide the number of tokens {tokens}")
    if seq_len is not None and cu_seqlens is not None:
        raise InvalidArgument(f"seq_len is {seq_len}, must be None with cu_seqlens")
    for name, value, shape, dtypes in (
        ("cu_seqlens", cu_seqlens, None, _INTEGERS),
        ("mask", mask, (tokens,), (torch.bool,)),
        ("topk_idx", topk_idx, (tokens, top_k), _INTEGERS),
    ):
        if value is None:
            continue
        require_tensor(name, value, device)
        if value.dtype not in dtypes:
            raise InvalidArgument(f"{name} is {value.dtype}, must be {' or '.join(map(str, dtypes))}")
        if value.shape != shape and (shape is not None or value.dim() != 1 or not value.shape[0]):
            expected = shape or "(sequences + 1,)"
            raise InvalidArgument(f"{name} has shape {tuple(value.shape)}, must be {expected}")


def replayed(given_TK: Tensor, own_TK: Tensor, experts: int) -> Tensor:
    """Returns (T, K) int64: the given choices, and where all of a token's are -1 the router's own. Ids that
    are none become `experts`, which a dispatch refuses on all ranks without a wait here.

    Example: given = [[2, 0], [-1, -1], [1, -1]], own = [[0, 1], [0, 3], [2, 3]] gives [[2, 0], [0, 3],
    [1, -1]]: the third token has one expert.
    """
    given_TK = given_TK.to(torch.int64)
    given_TK = given_TK.masked_fill((given_TK < -1) | (given_TK >= experts), experts)
    return torch.where((given_TK == -1).all(dim=1, keepdim=True), own_TK, given_TK)
