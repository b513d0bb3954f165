"""A communicator that cannot be built: a typed error on all ranks, nothing left, and the next one works."""

import contextlib
import gc
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.setup.rendezvous import Rendezvous
from tests import oracle
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import refused
from tests.multirank.harness import no_shared_memory_left, no_threads_left
from tests.multirank.on_ranks import on_ranks
from tests.ranks import variable


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


BAD_CONSTRUCTION: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "experts no multiple": ({"num_experts": 7}, "InvalidArgument", ["num_experts is 7", "multiple", "2"]),
    "timeout": ({"timeout": -1.0}, "InvalidArgument", ["timeout is -1.0"]),
    "num_sms": ({"num_sms": 0}, "InvalidArgument", ["num_sms is 0"]),
    "wire": ({"wire": "fp8"}, "Unsupported", ["wire", "fp8"]),
    "device": ({"device": "meta"}, "Unsupported", ["device", "meta"]),
    "nodes": ({"ranks_per_node": 0}, "InvalidArgument", ["ranks_per_node is 0"]),
    "dtype": ({"dtype": []}, "InvalidArgument", ["dtype is []"]),
    "device number": ({"device": 1 << 70}, "InvalidArgument", [f"device is {1 << 70}"]),
    "no text": ({"hidden": Nameless()}, "InvalidArgument", ["RuntimeError: no name"]),
}
SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 8, "top_k": 2, "max_tokens": 6, "dtype": torch.float32}
GOOD: dict[str, Any] = {**SIZES, "timeout": 30.0}
CASE = Case(tokens=(5, 3), num_experts=8, hidden=8, top_k=2)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with no_shared_memory_left():
        yield


def a_good_one(rank: int) -> list[str]:
    """What is wrong with a communicator of two ranks that is built after a bad one."""
    with moecomm.Communicator(**GOOD) as comm:
        return oracle.play(comm, CASE, rank)


@pytest.mark.parametrize("name", BAD_CONSTRUCTION)
@on_ranks(2)
def test_constructor_arguments(rank: int, world_size: int, name: str) -> list[str]:
    """Given by rank 0 alone, by rank 1 alone, and by both."""
    arguments, type_name, words = BAD_CONSTRUCTION[name]
    for guilty in ({0}, {1}, {0, 1}):
        given = {**GOOD, **(arguments if rank in guilty else {})}
        others = () if rank in guilty else (f"rank {1 - rank}",)
        refused(partial(moecomm.Communicator, **given), *words, *others, name=type_name)
    return a_good_one(rank)


DIFFERENT = {"num_experts": 16, "hidden": 12, "top_k": 3, "max_tokens": 7, "dtype": torch.bfloat16}


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


@on_ranks(2)
def test_too_little_shared_memory_is_said_before_allocating(rank: int, world_size: int) -> list[str]:
    sizes = {**SIZES, "max_tokens": 100_000_000, "hidden": 4096}
    plan = moecomm.Communicator.memory_plan(ranks=world_size, **sizes)
    needed = plan.committed_bytes * world_size
    says = (str(needed), "/dev/shm")
    error = refused(lambda: moecomm.Communicator(**sizes, timeout=30.0), *says, name="OutOfMemory")
    assert "MemoryError" in error.bases and str(error.available) in error.text
    assert error.needed == needed and 0 < error.available < needed
    return a_good_one(rank)


@on_ranks(2)
def test_a_failed_construction_leaves_no_connection_to_the_store(rank: int, world_size: int) -> None:
    """It is gone with the error, not with a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        for guilty, bad, name in (
            ({0}, {"num_experts": 7}, "InvalidArgument"),
            ({0, 1}, {"num_experts": 7}, "InvalidArgument"),
            ({0}, {"hidden": 12}, "MismatchedArguments"),
            ({rank}, {"timeout": 0.3}, "PeerTimeout"),
        ):
            if name == "PeerTimeout" and rank == 1:
                continue
            given = {**GOOD, **(bad if rank in guilty else {})}
            refused(partial(moecomm.Communicator, **given), name=name)
            assert not [each for each in gc.get_objects() if isinstance(each, Rendezvous)]
    finally:
        gc.enable()


@on_ranks(2)
def test_a_bad_environment_variable(rank: int, world_size: int) -> None:
    """Rank 0 alone has it."""
    with variable("MOECOMM_THREADS", "0") if rank == 0 else contextlib.nullcontext():
        refused(lambda: moecomm.Communicator(**SIZES), "MOECOMM_THREADS is '0'")


def check_threads(rank: int, case: Case, *words: str, **arguments: Any) -> list[str]:
    """Rank 1 has no threads for a communicator; the next one works."""
    build = partial(moecomm.Communicator, **{**case.communicator, "max_tokens": 6, **arguments})
    with no_threads_left() if rank == 1 else contextlib.nullcontext():
        error = refused(build, "no thread to be had for", *words, name="OutOfMemory")
    assert rank == 1 or error.text.startswith("rank 1: ")
    with build() as comm:
        return oracle.play(comm, case, rank)


@on_ranks(2)
def test_no_threads_on_one_rank(rank: int, world_size: int) -> list[str]:
    return check_threads(rank, CASE, "no thread to be had for copies and sums", "num_sms", num_sms=4)


@needs_fabric
@pytest.mark.parametrize(
    ("lanes", "words"), [("1", ["the proxy"]), ("2", ["a lane between nodes", "MOECOMM_FABRIC_LANES"])]
)
@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (3, 1), (4, 2)])
@on_ranks("size", MOECOMM_FABRIC_PROVIDER="tcp")
def test_no_threads_between_nodes(
    rank: int, world_size: int, per_node: int, lanes: str, words: list[str]
) -> list[str]:
    """The others hear of it while they wait for connections, long before their deadline."""
    tokens = (5, 3, 0, 4)[:world_size]
    case = Case(tokens=tokens, num_experts=2 * world_size, hidden=8, top_k=2, ranks_per_node=per_node)
    with variable("MOECOMM_FABRIC_LANES", lanes):
        return check_threads(rank, case, *words, num_sms=1, timeout=600.0)


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
    return a_good_one(rank)
