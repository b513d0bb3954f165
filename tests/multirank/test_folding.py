"""Parallel folding between ranks: process groups and meshes have the ranks that the arithmetic says, moecomm
takes them, and ranks that do not make the same ones are told so.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm.nn import MoELayer, fully_shard_experts
from moecomm.nn.config import MoEConfig
from moecomm.parallel import ParallelFolding
from tests.multirank.catching import catch
from tests.multirank.conftest import Pools, own_pool
from tests.multirank.moe_cases import SIZES
from tests.multirank.on_ranks import on_ranks
from tests.programs import run_program

pool = own_pool()

PAGE = Path(__file__).parents[2] / "docs" / "folding.md"
ALONE = (0,), (1,), (2,), (3,)
NEXT, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))
ALL = ((0, 1, 2, 3),)
# Each folding of 4 ranks, and by hand the groups over sets of dimensions.
FOLDINGS: dict[str, tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], ...]]]] = {
    "the default order": (
        {"tp": 2, "ep": 4},
        {"tp": NEXT, "cp": ALONE, "dp": APART, "dp-cp": APART, "ep": ALL, "etp": ALONE, "edp": ALONE},
    ),
    "replicas of experts": (
        {"tp": 2, "ep": 2, "order": "ep-dp-tp-cp-pp"},
        {"tp": APART, "dp": NEXT, "tp-dp": ALL, "ep": NEXT, "edp": APART, "etp-ep": NEXT, "pp": ALONE},
    ),
    "stages innermost": (
        {"cp": 2, "pp": 2, "etp": 2, "order": "pp-tp-cp-ep-dp"},
        {"pp": NEXT, "cp": APART, "dp": ALONE, "etp": APART, "ep": ALONE, "edp": ALONE, "etp-pp": ALL},
    ),
}


def sums(rank: int, world_size: int, arguments: dict[str, Any], sets: list[str]) -> list[int]:
    folding = ParallelFolding(world_size=world_size, **arguments)
    found = []
    for dims in sets:
        x = torch.tensor(10**rank)
        dist.all_reduce(x, group=folding.group(dims))
        found.append(int(x))
    return found


@pytest.mark.parametrize("name", FOLDINGS)
def test_groups_sum_over_their_ranks(pool: Pools, name: str) -> None:
    arguments, groups = FOLDINGS[name]
    told = pool(4)(sums, arguments, list(groups))
    for rank in range(4):
        mine = [next(group for group in each if rank in group) for each in groups.values()]
        assert told[rank] == [sum(10**other for other in group) for group in mine], (rank, list(groups))


def meshes(rank: int, world_size: int, arguments: dict[str, Any]) -> tuple[Any, ...]:
    folding = ParallelFolding(world_size=world_size, **arguments)
    found = []
    for mesh in (folding.dense_mesh("cpu"), folding.expert_mesh("cpu")):
        names = mesh.mesh_dim_names
        assert names is not None and mesh.device_type == "cpu"
        for name in names:
            assert mesh[name].get_group() is mesh.get_group(name) is folding.group(name)
            assert tuple(mesh[name].mesh.tolist()) == folding.group_of(name, rank)
            assert mesh.get_local_rank(name) == getattr(folding.coordinates(rank), name)
        found.append((names, mesh.mesh.tolist()))
    again = ParallelFolding(world_size=world_size, **arguments)
    assert again.dense_mesh("cpu") is folding.dense_mesh("cpu")
    assert again.group("pp") is folding.group("pp")
    return tuple(found)


MESHES: dict[str, tuple[Any, Any]] = {
    "the default order": (
        (("pp", "dp", "cp", "tp"), [[[[0, 1]], [[2, 3]]]]),
        (("pp", "edp", "ep", "etp"), [[[[0], [1], [2], [3]]]]),
    ),
    "replicas of experts": (
        (("pp", "cp", "tp", "dp"), [[[[0, 1], [2, 3]]]]),
        (("pp", "etp", "edp", "ep"), [[[[0, 1], [2, 3]]]]),
    ),
    "stages innermost": (
        (("dp", "cp", "tp", "pp"), [[[[0, 1]], [[2, 3]]]]),
        (("edp", "ep", "etp", "pp"), [[[[0, 1], [2, 3]]]]),
    ),
}


@pytest.mark.parametrize("name", FOLDINGS)
def test_meshes_are_laid_out_by_the_order(pool: Pools, name: str) -> None:
    assert pool(4)(meshes, FOLDINGS[name][0]) == [MESHES[name]] * 4


def layer_over_a_mesh(rank: int, world_size: int) -> tuple[int, int, tuple[int, ...]]:
    folding = ParallelFolding(world_size=world_size, **FOLDINGS["replicas of experts"][0])
    mesh = folding.expert_mesh("cpu")
    config = MoEConfig(**SIZES, dtype=torch.float64)
    layer = MoELayer(config, mesh=mesh, ep_dim="ep", max_tokens=4)
    model = torch.nn.Sequential(layer)
    fully_shard_experts(model, mesh["edp"])
    y = model(torch.ones(3, config.hidden, dtype=torch.float64))
    y.sum().backward()
    weight: Any = layer.experts.w_in
    return layer.comm.size, layer.comm.rank, tuple(weight.device_mesh.mesh.tolist())


def test_a_layer_and_its_replicas_take_an_expert_mesh(pool: Pools) -> None:
    assert pool(4)(layer_over_a_mesh) == [(2, 0, (0, 2)), (2, 1, (1, 3)), (2, 0, (0, 2)), (2, 1, (1, 3))]


def recipe(rank: int, world_size: int, code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"rank": rank, "device_type": "cpu", "torch": torch, "dist": dist}
    exec(code, names)
    return {"ranks": names["ranks"], "total": int(names["total"])}


def test_the_page_shows_how_groups_are_used(pool: Pools) -> None:
    found = re.search(
        r"^## Process groups and meshes\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, "docs/folding.md has no part on process groups"
    code = "\n".join(
        textwrap.dedent(each) for each in re.findall(r"(?:^    .*\n|^\n(?=    ))+", found[1], re.MULTILINE)
    )
    told = pool(4)(recipe, code)
    assert [each["ranks"] for each in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["total"] for each in told] == [1, 1, 5, 5]


def test_the_program_prints_a_mapping_or_why_there_is_none() -> None:
    program = (Path(__file__).parents[2] / "docs" / "draw_folding.py", "--world", "16", "--tp", "2")
    assert "EP 8: inside a node" in run_program(*program, "--ep", "8").out.splitlines()
    done = run_program(*program, "--ep", "5", code=2)
    assert "ep is 5, expected a divisor of" in done.err
    assert "fit a world_size that is a multiple of 10" in done.err
    assert "Traceback" not in done.err and done.out == ""


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
    found = catch(calls[case])
    x = torch.ones(1)
    dist.all_reduce(x, group=ParallelFolding(world_size=world_size, ep=world_size).group("ep"))
    assert x.item() == world_size
    assert found is not None and found.name == kind and says in found.text


def missed(rank: int, world_size: int) -> tuple[str, int, str]:
    folding = ParallelFolding(world_size=world_size, ep=world_size)
    if rank == 1:
        return "", 0, ""
    try:
        folding.group("ep")
    except Exception as error:
        return type(error).__name__, getattr(error, "peer", -1), str(error)
    return "made", 0, ""


def test_a_rank_that_does_not_come_is_named(fresh_ranks: Callable[..., list[Any]]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "MOECOMM_TIMEOUT": "1"}
    first, _, last = fresh_ranks(3, missed, environment=environment)
    for rank, (kind, peer, text) in ((0, first), (2, last)):
        assert (kind, peer) == ("PeerTimeout", 1)
        assert text.startswith(f"rank {rank}, making group 'ep' of ParallelFolding(world_size=3, ")
        assert "did not come within 1 s" in text


def lost_store(rank: int, world_size: int, port: int) -> tuple[str, str]:
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if rank == 0:
        store.wait(["ready"])
        os._exit(0)
    store.set("ready", "")
    try:
        ParallelFolding(world_size=world_size, ep=world_size).group("ep")
    except Exception as error:
        return type(error).__name__, str(error)
    return "made", ""


def test_a_lost_store_is_told(fresh_ranks: Callable[..., list[Any]]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    kind, text = fresh_ranks(2, lost_store, port, may_die=[0])[1]
    assert kind == "PeerLost" and "the store of torch.distributed is gone" in text, text


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
