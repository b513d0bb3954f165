"""Symmetric memory between processes, over a stand-in for the CUDA driver whose memory is the host's."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import pytest
import torch.distributed as dist

from moecomm.errors import Unsupported
from moecomm.setup.rendezvous import Rendezvous
from moecomm.setup.symmetric_memory import SymmetricMemory
from tests.fake_cuda import GRANULARITY, FakeDriver, Result
from tests.multirank.conftest import Pools
from tests.multirank.harness import run_ranks


def _rendezvous(timeout: float = 20.0) -> Any:
    return Rendezvous(dist.group.WORLD, timeout)


def _barrier() -> None:
    dist.barrier()


def _store(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _load(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _everyone_reads_and_writes(rank: int, world_size: int, gpus: list[int], count: int) -> None:
    """Several memories at once, each its own."""
    before = len(os.listdir("/proc/self/fd"))
    fake = FakeDriver(gpus=gpus)
    memories = [
        SymmetricMemory(_rendezvous(), GRANULARITY - 1, rank % len(gpus), api=fake) for _ in range(count)
    ]
    assert not fake.handles
    assert len(os.listdir("/proc/self/fd")) == before
    for memory in memories:
        assert len(memory.bases) == world_size
        assert all(_load(base + 8 * slot) == 0 for base in memory.bases for slot in range(world_size))
    _barrier()
    for number, memory in enumerate(memories):
        for peer, base in enumerate(memory.bases):
            _store(base + 8 * rank, 1000 * number + 100 * peer + rank + 1)
    _barrier()
    for number, memory in enumerate(memories):
        for source in range(world_size):
            assert _load(memory.bases[rank] + 8 * source) == 1000 * number + 100 * rank + source + 1
    # What a peer still maps stays there for it, whoever lets go first.
    if rank == 0:
        kept = memories[-1].bases[0]
        fake.log.clear()
        for memory in memories:
            memory.close()
        unmapped = [entry[1] for entry in fake.log if entry[0] == "cuMemUnmap"]
        assert unmapped[-1] == kept and len(unmapped) == count * world_size
    _barrier()
    if rank != 0:
        assert _load(memories[0].bases[0] + 8 * rank) == rank + 1
        for memory in memories:
            memory.close()
    assert not fake.alive()


@pytest.mark.parametrize(("world_size", "gpus"), [(2, [0, 1]), (3, [0, 1, 2]), (3, [5])])
def test_every_rank_reads_and_writes_every_memory(pool: Pools, world_size: int, gpus: list[int]) -> None:
    pool(world_size)(_everyone_reads_and_writes, gpus, 2)


def _different_granularity(rank: int, world_size: int) -> int:
    class Coarse(FakeDriver):
        def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
            return Result.CUDA_SUCCESS, GRANULARITY << rank

    memory = SymmetricMemory(_rendezvous(), 1, 0, api=Coarse())
    size = memory.bytes
    memory.close()
    return size


def _in_nodes(rank: int, world_size: int, per_node: int) -> list[int]:
    """Checks that ranks of a node map each other's memory only; returns pairs of (mapped, cuMemMap calls)."""
    first = rank // per_node * per_node
    fake = FakeDriver(gpus=list(range(world_size)))
    neighbours = range(first, first + per_node)
    memory = SymmetricMemory(_rendezvous(), 1, rank, ranks=neighbours, api=fake)
    for slot, base in enumerate(memory.bases):
        _store(base + 8 * (rank - first), 100 * slot + rank + 1)
    _barrier()
    found = [_load(memory.bases[rank - first] + 8 * slot) for slot in range(per_node)]
    assert found == [100 * (rank - first) + mate + 1 for mate in neighbours]
    _barrier()
    memory.close()
    assert not fake.handles
    return [len(neighbours), sum(entry[0] == "cuMemMap" for entry in fake.log)]


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (4, 2)])
def test_only_ranks_of_a_node_map_each_other(pool: Pools, world_size: int, per_node: int) -> None:
    assert pool(world_size)(_in_nodes, per_node) == [[per_node, per_node]] * world_size


def test_the_size_is_the_same_on_all_ranks(pool: Pools) -> None:
    assert pool(3)(_different_granularity) == [GRANULARITY << 2] * 3


def _in_network_namespaces(rank: int, world_size: int) -> str:
    """Makes each rank say that it is in a network namespace of its own."""
    from moecomm.setup import symmetric_memory as symmetric

    symmetric._host = lambda: f"host {rank}"
    fake = FakeDriver(gpus=[rank])
    with pytest.raises(Unsupported) as raised:
        symmetric.SymmetricMemory(_rendezvous(), 1, 0, api=fake)
    assert not fake.alive()
    return str(raised.value)


def test_ranks_that_cannot_pass_each_other_files() -> None:
    for text in run_ranks(2, _in_network_namespaces):
        assert "not a network namespace" in text


def _build(rank: int, world_size: int, drivers: list[dict[str, Any]], sizes: list[int]) -> tuple[Any, ...]:
    """(type, text, needed, available) of what construction raised, and whether anything was left."""
    before = len(os.listdir("/proc/self/fd"))
    fake = FakeDriver(**drivers[rank])
    try:
        SymmetricMemory(_rendezvous(), sizes[rank], 0, api=fake)
    except Exception as error:
        facts = getattr(error, "needed", 0), getattr(error, "available", 0)
        left = {**fake.alive(), "descriptors": len(os.listdir("/proc/self/fd")) - before}
        return type(error).__name__, str(error), facts, left
    raise AssertionError("no error")


CALLS = [
    ("cuInit", 1),
    ("cuMemCreate", 1),
    ("cuMemExportToShareableHandle", 1),
    ("cuMemImportFromShareableHandle", 1),
    ("cuMemImportFromShareableHandle", 2),
    ("cuMemMap", 2),
    ("cuMemMap", 3),
    ("cuMemSetAccess", 3),
]


@pytest.mark.parametrize(("call", "which"), CALLS)
def test_an_error_on_one_rank_is_raised_on_all_and_frees_everything(
    pool: Pools, call: str, which: int
) -> None:
    for guilty in range(3):
        drivers: list[dict[str, Any]] = [{"gpus": [number]} for number in range(3)]
        drivers[guilty]["failing"] = {call: (which, Result.CUDA_ERROR_NOT_SUPPORTED)}
        for rank, (name, text, _, left) in enumerate(pool(3)(_build, drivers, [1, 1, 1])):
            assert name == "Unsupported", f"rank {guilty} failed, rank {rank} raised {name}: {text}"
            assert f"{call}: CUDA_ERROR_NOT_SUPPORTED" in text
            assert rank == guilty or text.startswith(f"rank {guilty}: ")
            assert left == {"descriptors": 0}, f"rank {guilty} failed, rank {rank} kept {left}"


def test_mapping_that_fails_names_both_ranks_and_gpus(pool: Pools) -> None:
    """The way to learn of GPUs that do not reach each other when this process sees only its own."""
    drivers: list[dict[str, Any]] = [{"gpus": [4]}, {"gpus": [9]}]
    drivers[1]["failing"] = {"cuMemSetAccess": (2, Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)}
    for name, text, _, left in pool(2)(_build, drivers, [1, 1]):
        assert name == "Unsupported"
        assert "rank 1 on Fake GPU (0000:09:00.0" in text and "rank 0 on Fake GPU (0000:04:00.0" in text
        assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in text and "NVLink" in text
        assert left == {"descriptors": 0}


def test_gpus_without_peer_access_are_named_before_memory_is_taken(pool: Pools) -> None:
    """Every process sees both GPUs, each in its own order."""
    drivers: list[dict[str, Any]] = [
        {"gpus": [4, 9], "unreachable": {(4, 9)}, "free_bytes": 0},
        {"gpus": [9, 4], "free_bytes": 0},
    ]
    drivers[1]["free_bytes"] = 1 << 30
    for rank, (name, text, _, left) in enumerate(pool(2)(_build, drivers, [1, 1])):
        assert name == "Unsupported", text
        assert "rank 0 on Fake GPU (0000:04:00.0" in text and "rank 1 on Fake GPU (0000:09:00.0" in text
        assert rank == 0 or text.startswith("rank 0: ")
        assert left == {"descriptors": 0}


def test_out_of_memory_on_one_rank(pool: Pools) -> None:
    drivers: list[dict[str, Any]] = [{}, {"free_bytes": GRANULARITY}, {}]
    for name, text, facts, left in pool(3)(_build, drivers, [2 * GRANULARITY] * 3):
        assert name == "OutOfMemory" and "GPU 0" in text
        assert facts == (2 * GRANULARITY, GRANULARITY)
        assert left == {"descriptors": 0}


def _one_leaves(rank: int, world_size: int, phase: str) -> tuple[Any, ...]:
    """Rank 1 ends as it comes to a phase."""
    rendezvous = _rendezvous(1.0)
    exchange = rendezvous.exchange

    def leave(name: str, *others: Any) -> Any:
        if name == phase and rank == 1:
            os._exit(0)
        return exchange(name, *others)

    rendezvous.exchange = leave
    fake = FakeDriver()
    begin = time.monotonic()
    try:
        SymmetricMemory(rendezvous, 1, 0, api=fake)
    except Exception as error:
        return type(error).__name__, getattr(error, "peer", None), fake.alive(), time.monotonic() - begin
    raise AssertionError("no error")


@pytest.mark.parametrize(
    "phase",
    [
        "construction: GPUs",
        "construction: GPU memory",
        "construction: GPU handles",
        "construction: GPU mapping",
    ],
)
def test_a_rank_that_dies_on_the_way(phase: str) -> None:
    results = run_ranks(3, _one_leaves, phase, may_die=[1])
    for rank in (0, 2):
        name, peer, left, seconds = results[rank]
        assert name in ("PeerTimeout", "PeerLost") and peer == 1
        assert not left
        assert seconds < 8.0


def _closes_after_its_peer_died(rank: int, world_size: int) -> bool:
    fake = FakeDriver()
    memory = SymmetricMemory(_rendezvous(), 1, 0, api=fake)
    _store(memory.bases[0] + 8 * rank, 7)
    if rank == 1:
        os._exit(0)
    limit = time.monotonic() + 10.0
    while _load(memory.bases[0] + 8) != 7 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.1)
    memory.close()
    return not fake.alive()


def test_close_after_a_peer_died() -> None:
    assert run_ranks(2, _closes_after_its_peer_died, may_die=[1])[0] is True
