"""The process groups and meshes of a folding: all ranks make them together on first use, and keep them."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world

from moecomm.errors import (
    InvalidArgument,
    MismatchedArguments,
    MoecommError,
    PeerLost,
    PeerTimeout,
    of_peer,
)
from moecomm.parallel.grid import Grid, Ranks
from moecomm.setup.checks import timeout_seconds
from moecomm.types import Group

if TYPE_CHECKING:
    from moecomm.parallel.folding import ParallelFolding

# For each default group, the groups and meshes made while it exists. They are dropped when the default group
# is destroyed, since groups must not be held longer (moecomm/types.py, GroupReference).
_kept: weakref.WeakKeyDictionary[Group, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_calls = itertools.count(1)


def group(folding: ParallelFolding, dims: str) -> Group:
    """Returns this rank's process group over `dims`, named in the grid's order; the first call makes all."""
    kept, key = _kept_in(folding.world_size), (folding, dims)
    if key not in kept:
        _agree(f"group {dims!r} of {folding}", folding.world_size)
        # All ranks make all groups. If each rank made its own alone (use_local_synchronization), torch would
        # name a group by a rank's number of groups, and ranks with different numbers would never meet.
        ranks = [list(each) for each in folding.groups(dims)]
        kept[key], _ = dist.new_subgroups_by_enumeration(ranks, group_desc=dims)
    return kept[key]


def mesh(folding: ParallelFolding, grid: Grid, device_type: str) -> DeviceMesh:
    """Returns one of the grids of a folding as a DeviceMesh, with the folding's process groups."""
    kept, key = _kept_in(folding.world_size), (folding, grid, device_type)
    if key not in kept:
        _agree(f"mesh {device_type!r} over {', '.join(grid.names)} of {folding}", folding.world_size)
        if device_type not in ("cpu", "cuda"):
            raise InvalidArgument(f"device_type is {device_type!r}, expected 'cpu' or 'cuda'")
        names, sizes = grid.names[::-1], grid.sizes[::-1]
        kept[key] = DeviceMesh.from_group(
            [folding.group(name) for name in names],
            device_type,
            torch.arange(folding.world_size, dtype=torch.int, device="cpu").view(sizes),
            mesh_dim_names=names,
        )
    return kept[key]


def _kept_in(world_size: int) -> dict[Hashable, Any]:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise InvalidArgument(
            f"world_size is {world_size}, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group on that many ranks first"
        )
    return _kept.setdefault(world, {})


def _agree(what: str, world_size: int) -> None:
    """Raises on all ranks unless all of them now make the same groups (`what`) and have `world_size` ranks.
    Else ranks that disagree would wait in new_group for ranks that do not call it, without an explanation."""
    size, phase = dist.get_world_size(), f"making {what}"
    store = PrefixStore(f"moecomm.parallel/{next(_calls)}", _get_default_store())
    with _lost_store_told(phase):
        first = store.compare_set("first", "", what).decode()
        if first != what:
            store.set("other", f"rank {dist.get_rank()} makes {what}")
        _meet(store, range(size), phase)
        other = store.get("other").decode() if store.check(["other"]) else None
    if other is not None:
        raise MismatchedArguments(
            f"{other}, and another rank makes {first}: all ranks have to make the same groups and meshes of "
            "equal foldings, in the same order"
        )
    if world_size != size:
        raise InvalidArgument(
            f"world_size is {world_size}, but torch.distributed has {size} ranks: start {world_size}, or "
            f"make a folding with world_size={size}"
        )


def _meet(store: Store, ranks: Sequence[int], phase: str, timeout: timedelta | None = None) -> None:
    """Waits until all of `ranks` have called this; `store` is for this call alone. Raises PeerTimeout if a
    rank has not come within `timeout`, or MOECOMM_TIMEOUT. The late rank raises it too when it comes."""
    rank, seconds = dist.get_rank(), timeout_seconds(timeout)
    store.set(f"came/{rank}", "")
    # The first rank to write the outcome decides it for all ranks.
    if store.add("count", 1) == len(ranks):
        store.compare_set("outcome", "", "all came")
    deadline = time.monotonic() + seconds
    try:
        store.wait(["outcome"], timedelta(seconds=seconds))
    except RuntimeError:
        if time.monotonic() < deadline:
            raise
        store.compare_set("outcome", "", str(rank))
    outcome = store.get("outcome").decode()
    if outcome == "all came":
        return
    late = [each for each in ranks if not store.check([f"came/{each}"])]
    if late:
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        says = f"rank {late[0]}{more} did not come within {seconds:g} s"
    else:
        says = f"this rank, or another, came when rank {outcome} had waited for {seconds:g} s and given up"
    text = f"{says}; all ranks have to make it, at the same place in the program"
    raise of_peer(PeerTimeout, text, rank, phase, late[0] if late else int(outcome))


@contextlib.contextmanager
def _lost_store_told(phase: str) -> Iterator[None]:
    try:
        yield
    except MoecommError:
        raise
    except RuntimeError as error:
        gone = f"the store of torch.distributed is gone ({error})"
        raise of_peer(PeerLost, gone, dist.get_rank(), phase) from error


# -- a process group that its own ranks make by themselves -------------------------------------------------


_calls_of: defaultdict[Ranks, Iterator[int]] = defaultdict(itertools.count)
_NAMED_BY_COUNT = torch.__version__ >= "2.14"


def new_group(ranks: Ranks, timeout: timedelta | None = None, backend: str | None = None) -> Group:
    """Makes a process group of some ranks of the job, which call it together; no other rank takes part.
    Raises PeerTimeout (after `timeout`, or `MOECOMM_TIMEOUT`) for a rank that does not call.

    torch names such a group by its ranks and by a number, and ranks with different numbers would wait for
    each other for ever. The number is a count of this process's groups, which differs between ranks and falls
    when a group is destroyed. So during the call a count of the calls for these ranks replaces it.
    """
    phase, call = f"making a group of ranks {ranks}", next(_calls_of[ranks])
    with _lost_store_told(phase):
        _meet(PrefixStore(f"moecomm.subgroup/{ranks}/{call}", _get_default_store()), ranks, phase, timeout)
    with _numbered(call):
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def _numbered(call: int) -> Iterator[None]:
    """A context in which torch gives a new group a number of this `call`, above any that it counts to."""
    names, before = _world.pg_names, _world.group_count
    added: dict[Any, Any] = {}
    if _NAMED_BY_COUNT:
        _world.group_count = (1 << 40) + call
    else:  # the number is how many groups there are
        added = {object(): "" for _ in range((1 << 12) + call - len(names))}
    names.update(added)
    try:
        yield
    finally:
        _world.group_count = before
        for each in added:
            del names[each]
