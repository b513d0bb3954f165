"""Compares what ranks are about to do together before they do it, so that no rank waits for ever, and no sum
mixes different things."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import InvalidArgument, MismatchedArguments, MoecommError
from moecomm.train.replicas import group_of_hosts, ranks_of, told_by_all
from moecomm.types import Group


def agree(
    group: Group | None,
    device: torch.device,
    about: str,
    check: Callable[[], Sequence[str]],
    same: Callable[[torch.device], tuple[Tensor, bool] | None] = lambda place: None,
) -> bool:
    """Calls `check` on all ranks of `group` together, and compares the texts that it returns. device: that of
    the model. If `group` has a backend for CPU tensors, the hosts exchange what they compare, and need not
    wait for their GPUs.

    If `check` raises a MoecommError on one rank, that rank raises it, and the others InvalidArgument with its
    text. If ranks have different texts, all raise MismatchedArguments, whose text begins with `about`. In a
    CUDA graph capture each rank only checks itself.

    same(place): returns a 0-d int64 tensor on the device of the exchange, and whether its value is an earlier
    one; or None. Returns False if values differ, unless some are earlier ones and others not.
    """
    words: Sequence[str] = ()
    problem: MoecommError | None = None
    try:
        words = check()
    except MoecommError as error:
        problem = error
    if not dist.is_initialized() or dist.get_world_size(group) == 1 or _captures(device):
        if problem is not None:
            raise problem
        return True
    digest, (between, place) = _digest(words), _exchange(group, device)
    value, earlier = same(place) or (torch.zeros((), dtype=torch.int64, device=place), False)
    own = torch.tensor([problem is not None, digest, -digest, earlier, -earlier], device=place)
    seen = torch.cat((own, torch.stack((value, -value))))
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=between)
    failed, most, less, some_earlier, all_earlier, largest, least = seen.tolist()
    if not failed and most == -less:
        return bool(largest == -least or some_earlier != -all_earlier)
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    told = told_by_all((list(words), said), group)
    if problem is not None:
        raise problem
    ranks = ranks_of(group)
    for rank, (_, text) in zip(ranks, told, strict=True):
        if text is not None:
            raise InvalidArgument(f"rank {rank} raises {text}")
    first = told[0][0]
    for rank, (others, _) in zip(ranks, told, strict=True):
        if others != first:
            raise MismatchedArguments(f"{about}: {_difference(ranks[0], first, rank, others)}")
    raise AssertionError("ranks differed, and told the same")


def agree_by_holders(
    group: Group | None,
    device: torch.device,
    about: str,
    holders: Sequence[int],
    words: Sequence[Sequence[str]],
) -> None:
    """Compares texts among ranks that hold the same share of something, such as a layer's experts. This rank
    holds share number holders[i] of layer i, with the texts words[i]. Raises MismatchedArguments, on all
    ranks of `group`, if texts of the same share differ. In a CUDA graph capture nothing is compared."""
    if _captures(device):
        return
    size, own = dist.get_world_size(group), dist.get_rank(group)
    between, place = _exchange(group, device)
    seen = torch.zeros(size, len(holders), 2, dtype=torch.int64, device=place)
    mine = [[number, _digest(each)] for number, each in zip(holders, words, strict=True)]
    seen[own] = seen.new_tensor(mine)
    dist.all_reduce(seen, group=between)
    for of_ranks in zip(*seen.tolist(), strict=True):
        found: dict[int, tuple[int, int]] = {}
        for rank, (number, digest) in zip(ranks_of(group), of_ranks, strict=True):
            other, before = found.setdefault(number, (rank, digest))
            if digest != before:
                raise MismatchedArguments(f"{about}: they are others on ranks {other} and {rank}")


def _exchange(group: Group | None, device: torch.device) -> tuple[Group | None, torch.device]:
    """Returns a group for an exchange, and the device of its tensors."""
    between = group_of_hosts(group)
    return (group, device) if between is None else (between, torch.device("cpu"))


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _digest(words: Sequence[str]) -> int:
    data = hashlib.blake2b("\n".join(words).encode(), digest_size=7).digest()
    return int.from_bytes(data, "big")


def _difference(one: int, first: list[str], other: int, second: list[str]) -> str:
    for name, words, than in ((one, first, second), (other, second, first)):
        alone = [each for each in words if each not in set(than)]
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            return f"rank {name} has {alone[0]}{more}, which rank {other if name == one else one} has not"
    return f"ranks {one} and {other} have them in another order"
