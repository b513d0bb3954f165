"""A communicator that cannot be built: a typed error on all ranks, nothing left, and the next one works."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.backends import cpu
from tests import oracle
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import Caught, catch, refused
from tests.multirank.conftest import Pools
from tests.multirank.harness import NO_GPUS, RankPool, no_shared_memory_left, no_threads_left
from tests.multirank.on_ranks import on_ranks
from tests.ranks import variable

BAD_CONSTRUCTION: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "experts no multiple": ({"num_experts": 7}, "InvalidArgument", ["num_experts is 7", "multiple", "2"]),
    "no experts": ({"num_experts": 0}, "InvalidArgument", ["num_experts is 0", "1"]),
    "hidden of 12 bytes": ({"hidden": 3}, "InvalidArgument", ["hidden is 3", "16"]),
    "hidden 0": ({"hidden": 0}, "InvalidArgument", ["hidden is 0"]),
    "hidden no integer": ({"hidden": 8.0}, "InvalidArgument", ["hidden is 8.0"]),
    "top_k 0": ({"top_k": 0}, "InvalidArgument", ["top_k is 0"]),
    "top_k above experts": ({"top_k": 9}, "InvalidArgument", ["top_k is 9", "8"]),
    "max_tokens 0": ({"max_tokens": 0}, "InvalidArgument", ["max_tokens is 0"]),
    "max_tokens no integer": ({"max_tokens": "4"}, "InvalidArgument", ["max_tokens is '4'"]),
    "dtype": ({"dtype": torch.int8}, "InvalidArgument", ["dtype is torch.int8", "torch.bfloat16"]),
    "timeout": ({"timeout": -1.0}, "InvalidArgument", ["timeout is -1.0"]),
    "num_sms": ({"num_sms": 0}, "InvalidArgument", ["num_sms is 0"]),
    "wire": ({"wire": "fp8"}, "Unsupported", ["wire", "fp8"]),
    "device": ({"device": "meta"}, "Unsupported", ["device", "meta"]),
    "nodes": ({"ranks_per_node": 0}, "InvalidArgument", ["ranks_per_node is 0"]),
}
GOOD: dict[str, Any] = {
    "num_experts": 8,
    "hidden": 8,
    "top_k": 2,
    "max_tokens": 6,
    "dtype": torch.float32,
    "timeout": 30.0,
}


def _bad_constructions(rank: int, world_size: int, names: list[str]) -> tuple[list[Caught | None], list[str]]:
    caught = []
    for i, name in enumerate(names):
        arguments = {**GOOD, **BAD_CONSTRUCTION[name][0]} if i % 3 in (rank, 2) else GOOD
        caught.append(catch(lambda kept=arguments: moecomm.Communicator(**kept)))
    case = Case(tokens=(5, 3), num_experts=8, hidden=8, top_k=2)
    with moecomm.Communicator(**GOOD) as comm:
        return caught, oracle.play(comm, case, rank)


def test_constructor_arguments(pool: Pools) -> None:
    """Given by rank 0 alone, by rank 1 alone, and by both."""
    names = [name for name in BAD_CONSTRUCTION for _ in range(3)]
    with no_shared_memory_left():
        results = pool(2)(_bad_constructions, names)
    oracle.assert_none([problems for _, problems in results])
    for i, name in enumerate(names):
        _, type_name, words = BAD_CONSTRUCTION[name]
        for rank in range(2):
            error = results[rank][0][i]
            assert error is not None and error.name == type_name, f"{name}: rank {rank} raised {error}"
            assert all(word in error.text for word in words), f"{name}: {error.text!r} lacks one of {words}"
            if i % 3 == 1 - rank:
                assert f"rank {1 - rank}" in error.text, f"{name}: {error.text!r} does not say which rank"


DIFFERENT = {
    "num_experts": 16,
    "hidden": 12,
    "top_k": 3,
    "max_tokens": 7,
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize("guilty", [0, 3])
@on_ranks(4)
def test_constructor_arguments_that_differ_between_ranks(rank: int, world_size: int, guilty: int) -> None:
    for name, value in DIFFERENT.items():
        arguments = {**GOOD, name: value} if rank == guilty else GOOD
        says = (name, str(value), str(GOOD[name]))
        error = refused(partial(moecomm.Communicator, **arguments), *says, name="MismatchedArguments")
        assert "InvalidArgument" in error.bases and "ValueError" in error.bases
    with moecomm.Communicator(**GOOD) as comm:
        assert comm.size == world_size


@on_ranks(4)
def test_another_version_on_one_rank(rank: int, world_size: int) -> None:
    says = ("rank 2", "9.9.9", "rank 0", moecomm.__version__)
    with mock.patch("moecomm.setup.handshake.__version__", "9.9.9" if rank == 2 else moecomm.__version__):
        refused(lambda: moecomm.Communicator(**GOOD), *says, name="MismatchedArguments")
    with moecomm.Communicator(**GOOD) as comm:
        assert comm.size == world_size


def _too_large(rank: int, world_size: int, max_tokens: int) -> tuple[Caught | None, int]:
    arguments = {**GOOD, "max_tokens": max_tokens, "hidden": 4096}
    caught = catch(lambda: moecomm.Communicator(**arguments))
    needed = moecomm.Communicator.memory_plan(
        ranks=world_size,
        **{name: arguments[name] for name in ("num_experts", "hidden", "top_k", "max_tokens", "dtype")},
    )
    with moecomm.Communicator(**GOOD) as comm:
        assert oracle.play(comm, Case(tokens=(5, 3), num_experts=8, hidden=8, top_k=2), rank) == []
    return caught, needed.committed_bytes * world_size


def test_too_little_shared_memory_is_said_before_allocating(pool: Pools) -> None:
    with no_shared_memory_left():
        results = pool(2)(_too_large, 100_000_000)
    for caught, needed in results:
        assert caught is not None and caught.name == "OutOfMemory" and "MemoryError" in caught.bases
        assert caught.needed == needed and 0 < caught.available < needed
        assert (
            str(needed) in caught.text and str(caught.available) in caught.text and "/dev/shm" in caught.text
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("MOECOMM_TIMEOUT", "soon"), ("MOECOMM_THREADS", "0"), ("MOECOMM_RANKS_PER_NODE", "1.5")],
)
@on_ranks(2)
def test_bad_environment_variables(rank: int, world_size: int, name: str, value: str) -> None:
    """Rank 0 alone has it."""
    arguments = {key: given for key, given in GOOD.items() if key != "timeout"}
    with variable(name, value) if rank == 0 else contextlib.nullcontext():
        refused(lambda: moecomm.Communicator(**arguments), name, repr(value))


def _no_memory_on_one_rank(rank: int, world_size: int) -> tuple[Caught | None, list[str]]:
    def refuse(**_: Any) -> None:
        raise moecomm.OutOfMemory("no room for a window", needed=4096, available=17)

    runtime = cpu._C
    if rank == 1:
        cpu._C = SimpleNamespace(**{**vars(runtime), "Communicator": refuse})
    caught = catch(lambda: moecomm.Communicator(**GOOD))
    cpu._C = runtime
    with moecomm.Communicator(**GOOD) as comm:
        return caught, oracle.play(comm, Case(tokens=(5, 3), num_experts=8, hidden=8, top_k=2), rank)


def test_no_memory_on_one_rank_is_no_memory_on_all(pool: Pools) -> None:
    with no_shared_memory_left():
        results = pool(2)(_no_memory_on_one_rank)
    oracle.assert_none([problems for _, problems in results])
    for (caught, _), text in zip(
        results, ("rank 1: no room for a window", "no room for a window"), strict=True
    ):
        assert caught is not None
        assert (caught.name, caught.text) == ("OutOfMemory", text)
        assert (caught.needed, caught.available) == (4096, 17)


def _no_threads_on_one_rank(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> tuple[Caught | None, list[str]]:
    with no_threads_left() if rank == 1 else contextlib.nullcontext():
        caught = catch(lambda: moecomm.Communicator(**{**GOOD, **arguments}))
    with moecomm.Communicator(**{**GOOD, **arguments}) as comm:
        case = Case(
            tokens=(5, 3, 0, 4)[:world_size],
            num_experts=arguments["num_experts"],
            hidden=8,
            top_k=2,
            ranks_per_node=arguments.get("ranks_per_node"),
        )
        return caught, oracle.play(comm, case, rank)


def test_no_threads_on_one_rank(pool: Pools) -> None:
    with no_shared_memory_left():
        results = pool(2)(_no_threads_on_one_rank, {"num_experts": 8, "num_sms": 4})
    oracle.assert_none([problems for _, problems in results])
    for caught, _ in results:
        assert caught is not None and caught.name == "OutOfMemory"
        assert "rank 1" in caught.text or caught is results[1][0]
        assert "no thread to be had for copies and sums" in caught.text and "num_sms" in caught.text


@needs_fabric
@pytest.mark.parametrize(
    ("lanes", "words"), [("1", ["the proxy"]), ("2", ["a lane between nodes", "MOECOMM_FABRIC_LANES"])]
)
@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_no_threads_between_nodes(size: int, per_node: int, lanes: str, words: list[str]) -> None:
    """The others hear of it while they wait for connections, long before their deadline."""
    environment = NO_GPUS | {"MOECOMM_FABRIC_PROVIDER": "tcp", "MOECOMM_FABRIC_LANES": lanes}
    arguments = {"num_experts": 2 * size, "num_sms": 1, "ranks_per_node": per_node, "timeout": 600.0}
    with no_shared_memory_left(), RankPool(size, timeout=90.0, environment=environment) as ranks:
        results = ranks(_no_threads_on_one_rank, arguments)
    oracle.assert_none([problems for _, problems in results])
    for rank, (caught, _) in enumerate(results):
        assert caught is not None and caught.name == "OutOfMemory", caught
        assert "no thread to be had for" in caught.text and all(word in caught.text for word in words)
        assert rank == 1 or caught.text.startswith("rank 1: ")


@on_ranks(2)
def test_what_a_run_before_has_left_in_the_store(rank: int, world_size: int) -> list[str]:
    """torchrun keeps its store when it starts ranks again: messages of the ranks before them, with the same
    names, are not taken for answers."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    assert dist.group.WORLD is not None
    store = PrefixStore(f"moecomm/{dist.group.WORLD.group_name}", _get_default_store())
    if rank == 1:
        for what in ("number", "name", *(f"construction: {each}" for each in ("arguments", "names"))):
            for peer in range(world_size):
                store.set(f"{what}/{peer}", "0123456789abcdef 5,6")
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)
    with moecomm.Communicator(**GOOD) as comm:
        return oracle.play(comm, Case(tokens=(5, 3), num_experts=8, hidden=8, top_k=2), rank)
