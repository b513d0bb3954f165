"""Compares the configs of a layer's ranks: when it is built, and by its number in each dispatch."""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from moecomm.arguments import weight_dtype
from moecomm.communicator import Communicator
from moecomm.errors import MismatchedArguments
from moecomm.nn.config import MoEConfig

_MAY_DIFFER = ("products",)
"""Fields that say how a rank computes, and not what."""

MOST_CALLERS = 0xFFFE
"""Numbers of layers are from 1 to this."""


def caller_of(number: int, config: MoEConfig) -> int:
    """Returns the number by which dispatches of a layer are told from those of layers at another place among
    the communicator's (`number`, from 1), and of those with another config but for one in 65,534."""
    digest = hashlib.blake2b("\n".join(_words(config)).encode(), digest_size=4).digest()
    return (number - 1 + int.from_bytes(digest, "big")) % MOST_CALLERS + 1


def _words(config: MoEConfig) -> list[str]:
    return [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if field.name not in _MAY_DIFFER
    ]


def require_same_config(config: MoEConfig, comm: Communicator) -> None:
    """Raises MismatchedArguments, on all ranks, for configs that differ. All ranks call together.

    Each rank sends a token for each field to the first rank, with 24 bits of the field's digest as its
    routing weight, which travels as it is; what comes back says which fields differ. Where a rank may not
    bring so many tokens, several fields share one.
    """
    if comm.size == 1:
        return
    words = _words(config)
    count = min(len(words), comm.max_tokens)
    parts = [words[first::count] for first in range(count)]
    digests = [hashlib.blake2b("\n".join(part).encode(), digest_size=3).digest() for part in parts]
    device = comm.device
    idx_TK = torch.full((count, comm.top_k), -1, dtype=torch.int32, device=device)
    idx_TK[:, 0] = 0
    weights_TK = torch.zeros(count, comm.top_k, dtype=weight_dtype(comm.dtype), device=device)
    weights_TK[:, 0] = torch.tensor([int.from_bytes(each, "big") for each in digests], device=device)
    with torch.no_grad():
        x_TH = torch.zeros(count, comm.hidden, dtype=comm.dtype, device=device)
        # The class's own, whatever stands in their places on this communicator.
        out = Communicator.dispatch(comm, x_TH, idx_TK, weights_TK)
        rows_PH = out.tokens.clone()
        if comm.rank == 0:
            assert out.weights is not None
            of_ranks = out.weights.view(comm.size, -1)
            rows_PH.copy_((of_ranks != of_ranks[0]).any(dim=0).repeat(comm.size).unsqueeze(1))
        differs_T = Communicator.combine(comm, rows_PH, out.handle)[:, 0].tolist()
    for part, differs in zip(parts, differs_T, strict=True):
        if differs:
            raise MismatchedArguments(
                "MoEConfig differs between the ranks of the layer, and must be the same: rank "
                f"{comm.rank} has {' and '.join(part)}" + ", of which one differs" * (len(part) > 1)
            )
