"""Finds the ranks that hold the same experts, from the layers of a model.

The experts of a layer are spread over the ranks of its communicator (its EP group). If the job has several EP
groups, rank number p of each holds the same experts; these ranks are replicas. Example: 4 ranks, EP groups
(0, 1) and (2, 3). Ranks 0 and 2 hold the first half of the experts, 1 and 3 the second: blocks ((0, 1), (2,
3)), replicas of rank 0 are (0, 2).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.nn.layer import MoELayer
from moecomm.parallel import ParallelFolding
from moecomm.parallel.expert_ranks import STAGE
from moecomm.parallel.grid import Ranks
from moecomm.parallel.meshes import new_group
from moecomm.parallel.records import grouped_in
from moecomm.types import AnyGroup, Group, as_group


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same experts of a communicator as this rank."""

    blocks: tuple[Ranks, ...]
    """The EP groups, ordered by first rank."""
    ranks: Ranks
    """This rank's replicas, including itself."""

    @property
    def group(self) -> Group:
        """The process group of `ranks`. The first access makes it; all of these ranks access it together."""
        if self.ranks == ranks_of(None):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        group = _groups.get(self.ranks)
        if group is None or group not in _world.pg_map:  # a destroyed group, which something still holds
            group = _groups[self.ranks] = new_group(self.ranks)
        return group

    def mesh(self, comm: Communicator, device_type: str) -> DeviceMesh:
        """Returns a mesh (R, replicas): the R ranks of `comm`, each with its own experts, and for each
        of them the replicas over which FSDP shards these experts."""
        assert comm.group is not None
        ranks = torch.tensor(self.blocks, dtype=torch.int, device="cpu").t().contiguous()
        names = ("experts", "replicas")
        return DeviceMesh.from_group([comm.group, self.group], device_type, ranks, mesh_dim_names=names)


def model_group(
    layers: Sequence[MoELayer], group: AnyGroup | None, folding: ParallelFolding | None = None
) -> Group | None:
    """Returns the ranks that hold the model of these layers (None: all): the given group, or those of the
    pipeline stage under a ParallelFolding. Raises InvalidArgument for a group that is not the stage, and for
    different foldings."""
    group = as_group(group)
    foldings = {layer.folding for layer in layers if layer.folding is not None}
    if folding is not None:
        foldings.add(folding)
    if len(foldings) > 1:
        raise InvalidArgument(
            f"the model's layers, or they and `folding`, have different foldings, must have one: {foldings}"
        )
    for folding in foldings:
        stage = folding.group_of(STAGE, dist.get_rank())
        if group is None:
            return folding.group(STAGE) if folding.pp > 1 else None
        if sorted(ranks_of(group)) != list(stage):
            raise InvalidArgument(
                f"group has ranks {ranks_of(group)}, must have {stage}, those of this pipeline stage "
                f"(folding.group({STAGE!r})); leave it out, the layers know"
            )
    return group


def ranks_of(group: Group | None) -> Ranks:
    """Returns the ranks of a group; None is the default group."""
    return tuple(dist.get_process_group_ranks(group))


_of_hosts: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()
"""Maps a group to another one of the same ranks, for CPU tensors, in which moecomm.train alone exchanges."""


def group_of_hosts(group: Group | None) -> Group | None:
    """Returns a group of the same ranks with the backend that `group` has for CPU tensors, None if it has
    none. In the caller's own group another thread may exchange, as that of an async_save of
    torch.distributed.checkpoint does."""
    over = group or dist.group.WORLD
    assert over is not None
    if over not in _of_hosts:
        backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
        if "cpu" not in backends:
            return None
        options: Any = over._get_backend(torch.device("cpu")).options
        _of_hosts[over] = new_group(ranks_of(over), getattr(options, "_timeout", None), backends["cpu"])
    return _of_hosts[over]


def told_by_all(own: Any, group: Group | None) -> list[Any]:
    """Returns the `own` of each rank of `group`, in their order. The hosts exchange, if they can."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group_of_hosts(group) or group)
    return told


def match_blocks(own: Sequence[Ranks], ranks: Ranks) -> tuple[Ranks, ...]:
    """Returns the EP groups of `ranks`, where own[i] is the group of ranks[i]. Raises InvalidArgument unless
    they divide the ranks equally."""
    blocks = tuple(sorted(set(own)))
    whole = sorted(rank for block in blocks for rank in block) == sorted(ranks)
    if not whole or len({len(block) for block in blocks}) != 1:
        raise InvalidArgument(
            f"the EP groups of a layer are {blocks} on the ranks {ranks} of the group, must part these ranks "
            "into equally large groups: each expert is to be held once in each. Pass the group of all ranks "
            "that hold this model"
        )
    return blocks


def find_replicas(layers: Sequence[MoELayer], group: Group | None) -> dict[Communicator, Replicas]:
    """Finds, for each communicator of a model's layers, the ranks that hold this rank's experts. All ranks
    of `group`, which hold the model, call it together; they exchange EP groups once for each communicator.
    Raises InvalidArgument, on all ranks, unless the EP groups divide the group equally."""
    comms = dict.fromkeys(layer.comm for layer in layers)
    ranks = ranks_of(group)
    missing = [comm for comm in comms if ranks not in _known.get(comm, {})]
    if missing:
        own = [ranks_of(comm.group) if comm.size > 1 else (dist.get_rank(),) for comm in missing]
        told = told_by_all(own, group)
        if len({len(each) for each in told}) != 1:
            raise InvalidArgument(
                f"model has {[len(each) for each in told]} communicators on ranks {ranks}: all ranks of the "
                "group must hold the same model"
            )
        found = [match_blocks(each, ranks) for each in zip(*told, strict=True)]
        for comm, blocks in zip(missing, found, strict=True):
            replicas = Replicas(blocks, tuple(block[comm.rank] for block in blocks))
            _known.setdefault(comm, {})[ranks] = replicas
    return {comm: _known[comm][ranks] for comm in comms}


def shard_over(experts: nn.Module, replicas: Replicas) -> None:
    """Stores, as attributes of a layer's `experts` and of a GroupedExperts within, the replicas over which
    `fully_shard_experts` is about to shard them. The layer may get a new communicator afterwards."""
    experts.moecomm_replicas = replicas  # type: ignore[assignment]
    grouped, _ = grouped_in(experts)
    for each in {experts, grouped or experts}:
        each.sharded_over = frozenset(replicas.ranks)


_known: weakref.WeakKeyDictionary[Communicator, dict[Ranks, Replicas]] = weakref.WeakKeyDictionary()
_groups: weakref.WeakValueDictionary[Ranks, Group] = weakref.WeakValueDictionary()
