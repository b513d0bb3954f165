"""Parallel folding between ranks: process groups and meshes have the ranks that the arithmetic says, moecomm
takes them, and ranks that do not make the same ones are told so.
"""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm.parallel import ParallelFolding
from tests.multirank.catching import Caught, catch, refused, require
from tests.multirank.conftest import own_pool
from tests.multirank.harness import NO_GPUS, new_store
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_data_parallel import recipe

pool = own_pool()

ALONE = (0,), (1,), (2,), (3,)
NEXT, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))
ALL = ((0, 1, 2, 3),)
# Each folding of 4 ranks, and by hand the groups over sets of dimensions.
FOLDINGS: dict[str, tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], ...]]]] = {
    "one group of experts": (
        {"tp": 2, "ep": 4},
        {"tp": NEXT, "cp": ALONE, "dp": APART, "dp-cp": APART, "ep": ALL, "etp": ALONE, "edp": ALONE},
    ),
    "replicas of experts": (
        {"tp": 2, "ep": 2},
        {"tp": NEXT, "dp": APART, "tp-dp": ALL, "ep": NEXT, "edp": APART, "etp-ep": NEXT, "pp": ALONE},
    ),
    "stages": (
        {"cp": 2, "pp": 2, "etp": 2},
        {"pp": APART, "cp": NEXT, "dp": ALONE, "etp": NEXT, "ep": ALONE, "edp": ALONE, "etp-pp": ALL},
    ),
}


@pytest.mark.parametrize("name", FOLDINGS)
@on_ranks(4)
def test_groups_sum_over_their_ranks(rank: int, world_size: int, name: str) -> None:
    arguments, groups = FOLDINGS[name]
    folding = ParallelFolding(world_size=world_size, **arguments)
    for dims, each in groups.items():
        x = torch.tensor(10**rank)
        dist.all_reduce(x, group=folding.group(dims))
        mine = next(group for group in each if rank in group)
        assert int(x) == sum(10**other for other in mine), (rank, dims)


def check_meshes(rank: int, folding: ParallelFolding) -> None:
    dims = ["pp", "dp", "cp", "tp"], ["pp", "edp", "ep", "etp"]
    for mesh, wanted in zip((folding.dense_mesh("cpu"), folding.expert_mesh("cpu")), dims, strict=True):
        assert list(mesh.mesh_dim_names or ()) == wanted and mesh.device_type == "cpu"
        assert sorted(mesh.mesh.flatten().tolist()) == [0, 1, 2, 3]
        for name in wanted:
            assert mesh[name].get_group() is mesh.get_group(name) is folding.group(name)
            assert tuple(mesh[name].mesh.tolist()) == folding.group_of(name, rank)
            assert mesh.get_local_rank(name) == getattr(folding.coordinates(rank), name)


@pytest.mark.parametrize("name", FOLDINGS)
@on_ranks(4)
def test_meshes_are_laid_out_by_the_order(rank: int, world_size: int, name: str) -> None:
    folding, again = (ParallelFolding(world_size=world_size, **FOLDINGS[name][0]) for _ in range(2))
    with torch.device("meta"):  # where models may be built before they have memory
        check_meshes(rank, folding)
    assert again.dense_mesh("cpu") is folding.dense_mesh("cpu")
    assert again.group("pp") is folding.group("pp")


@on_ranks(4)
def test_the_page_shows_how_groups_are_used(rank: int, world_size: int) -> None:
    names: dict[str, Any] = {"rank": rank, "device_type": "cpu", "torch": torch, "dist": dist}
    exec("\n".join(recipe("Process groups and meshes", "folding.md")), names)
    first = rank // 2 * 2
    assert names["ranks"] == [first, first + 1] and int(names["total"]) == 2 * first + 1


# -- ranks that do not make the same -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("another world", "InvalidArgument", "world_size is 8, but torch.distributed has 4 ranks"),
        ("another world's mesh", "InvalidArgument", "world_size is 8, but torch.distributed has 4 ranks"),
        ("another world on one rank", "MismatchedArguments", "ParallelFolding(world_size=8, "),
        ("another set", "MismatchedArguments", "group 'cp' of ParallelFolding(world_size=4, "),
        ("a mesh and a group", "MismatchedArguments", "mesh 'cpu' over tp, cp, dp, pp of ParallelFolding("),
        ("a device with a number", "InvalidArgument", "device_type is 'cpu:0', expected 'cpu' or 'cuda'"),
        ("a device with a number on one rank", "MismatchedArguments", "mesh 'cpu:0' over "),
    ],
)
@on_ranks(4)
def test_what_does_not_agree_is_refused_on_all_ranks(
    rank: int, world_size: int, case: str, kind: str, says: str
) -> None:
    """What a rank is told where the last one, or all, are wrong; afterwards all make the same group."""
    sizes = {"tp": 2, "etp": 2, "ep": 2}  # of no other test: what is kept already would be handed out
    folding = ParallelFolding(world_size=world_size, **sizes)
    larger = ParallelFolding(world_size=2 * world_size, **sizes)
    last = rank == world_size - 1
    calls: dict[str, Callable[[], Any]] = {
        "another world": lambda: larger.group("ep"),
        "another world's mesh": lambda: larger.expert_mesh("cpu"),
        "another world on one rank": lambda: (larger if last else folding).group("edp"),
        "another set": lambda: folding.group("cp" if last else "etp"),
        "a mesh and a group": lambda: folding.group("cp") if last else folding.dense_mesh("cpu"),
        "a device with a number": lambda: folding.dense_mesh("cpu:0"),
        "a device with a number on one rank": lambda: folding.dense_mesh("cpu:0" if last else "cpu"),
    }
    refused(calls[case], says, name=kind)
    x = torch.ones(1)
    dist.all_reduce(x, group=ParallelFolding(world_size=world_size, ep=world_size).group("ep"))
    assert x.item() == world_size


def late(rank: int, world_size: int) -> Caught | None:
    """Rank 1 comes when the others have given up; afterwards all make the group."""
    folding, store = ParallelFolding(world_size=world_size, ep=world_size), new_store()
    if rank == 1:
        store.wait(["0 gave up", "2 gave up"])
    found = catch(lambda: folding.group("ep"))
    store.set(f"{rank} gave up", "")
    dist.barrier()
    folding.group("ep")
    return found


def test_a_rank_that_does_not_come_is_named(fresh_ranks: Callable[..., list[Any]]) -> None:
    found = fresh_ranks(3, late, environment={**NO_GPUS, "MOECOMM_TIMEOUT": "1"})
    for rank in range(3):
        begins = f"rank {rank}, making group 'ep' of ParallelFolding(world_size=3, "
        says = "waited for 1 s and given up" if rank == 1 else "rank 1 did not come within 1 s"
        require(found[rank], says, begins=begins, name="PeerTimeout")
        assert found[rank].peer == 1 or rank == 1


def lost_store(rank: int, world_size: int) -> Caught | None:
    store = new_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if rank == 0:
        store.wait(["ready"])
        os._exit(0)
    store.set("ready", "")
    return catch(lambda: ParallelFolding(world_size=world_size, ep=world_size).group("ep"))


def test_a_lost_store_is_told(fresh_ranks: Callable[..., list[Any]]) -> None:
    found = fresh_ranks(2, lost_store, may_die=[0])[1]
    require(found, "the store of torch.distributed is gone", name="PeerLost")


def again_after_destroy(rank: int, world_size: int, path: str) -> int:
    folding = ParallelFolding(world_size=world_size, ep=world_size)
    old = [weakref.ref(folding.group("ep")), weakref.ref(folding.expert_mesh("cpu"))]
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [each() for each in old] == [None, None]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    x = torch.ones(1)
    dist.all_reduce(x, group=folding.expert_mesh("cpu")["ep"].get_group())
    return int(x)


def test_groups_go_with_the_default_group_and_are_made_anew(
    fresh_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Groups that were held longer would keep gloo's threads to the interpreter's end (moecomm/types.py)."""
    assert fresh_ranks(2, again_after_destroy, str(tmp_path / "store")) == [2, 2]
