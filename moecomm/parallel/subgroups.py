"""A process group that its own ranks make by themselves."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _world

from moecomm.errors import PeerTimeout
from moecomm.parallel.grid import Ranks
from moecomm.setup.checks import timeout_seconds
from moecomm.types import Group

_calls: defaultdict[Ranks, Iterator[int]] = defaultdict(itertools.count)


def new_group(ranks: Ranks) -> Group:
    """Makes a process group of some ranks of the job, which call together; no other rank takes part.

    torch names such a group by its ranks and by how many groups the calling rank is in, and ranks that
    differ in that number would wait for each other in vain. So they tell each other theirs, and a rank with
    fewer makes groups of its own until it has as many as all.

    Raises PeerTimeout (after `MOECOMM_TIMEOUT`) for a rank that does not call.
    """
    rank, seconds = dist.get_rank(), timeout_seconds(None)
    store = PrefixStore(f"moecomm.subgroup/{ranks}/{next(_calls[ranks])}", _get_default_store())
    store.set(str(rank), str(len(_world.pg_names)))
    most = 0
    for other in ranks:
        try:
            store.wait([str(other)], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise PeerTimeout(
                f"rank {rank}, making a group of ranks {ranks}: rank {other} did not come within "
                f"{seconds:g} s ({error}); all of them have to call, at the same place in the program",
                rank=rank,
                peer=other,
                phase="making a group",
            ) from error
        most = max(most, int(store.get(str(other))))
    while len(_world.pg_names) < most:
        dist.new_group([rank], use_local_synchronization=True)
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
