"""Symmetric memory between processes, over a stand-in for the CUDA driver whose memory is the host's."""

import ctypes
import os
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moecomm.setup import symmetric_memory
from moecomm.setup.rendezvous import Rendezvous
from moecomm.setup.symmetric_memory import SymmetricMemory
from tests.fake_cuda import GRANULARITY, FakeDriver, Result
from tests.multirank.catching import Caught, refused
from tests.multirank.harness import run_ranks
from tests.multirank.on_ranks import on_ranks


def _rendezvous(timeout: float = 20.0) -> Any:
    return Rendezvous(dist.group.WORLD, timeout)


def _store(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _load(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@pytest.mark.parametrize(("world_size", "gpus"), [(2, [0, 1]), (3, [0, 1, 2]), (3, [5])])
@on_ranks()
def test_every_rank_reads_and_writes_every_memory(rank: int, world_size: int, gpus: list[int]) -> None:
    """Several memories at once, each its own."""
    before = len(os.listdir("/proc/self/fd"))
    fake = FakeDriver(gpus=gpus)
    memories = [SymmetricMemory(_rendezvous(), GRANULARITY - 1, rank % len(gpus), api=fake) for _ in range(2)]
    assert not fake.handles
    assert len(os.listdir("/proc/self/fd")) == before
    for memory in memories:
        assert len(memory.bases) == world_size
        assert all(_load(base + 8 * slot) == 0 for base in memory.bases for slot in range(world_size))
    dist.barrier()
    for number, memory in enumerate(memories):
        for peer, base in enumerate(memory.bases):
            _store(base + 8 * rank, 1000 * number + 100 * peer + rank + 1)
    dist.barrier()
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
        assert unmapped[-1] == kept and len(unmapped) == 2 * world_size
    dist.barrier()
    if rank != 0:
        assert _load(memories[0].bases[0] + 8 * rank) == rank + 1
        for memory in memories:
            memory.close()
    assert not fake.alive()


@on_ranks(3)
def test_the_size_is_the_same_on_all_ranks(rank: int, world_size: int) -> None:
    class Coarse(FakeDriver):
        def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
            return Result.CUDA_SUCCESS, GRANULARITY << rank

    memory = SymmetricMemory(_rendezvous(), 1, 0, api=Coarse())
    assert memory.bytes == GRANULARITY << 2
    memory.close()


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (4, 2)])
@on_ranks()
def test_only_ranks_of_a_node_map_each_other(rank: int, world_size: int, per_node: int) -> None:
    first = rank // per_node * per_node
    fake = FakeDriver(gpus=list(range(world_size)))
    neighbours = range(first, first + per_node)
    memory = SymmetricMemory(_rendezvous(), 1, rank, ranks=neighbours, api=fake)
    for slot, base in enumerate(memory.bases):
        _store(base + 8 * (rank - first), 100 * slot + rank + 1)
    dist.barrier()
    found = [_load(memory.bases[rank - first] + 8 * slot) for slot in range(per_node)]
    assert found == [100 * (rank - first) + mate + 1 for mate in neighbours]
    dist.barrier()
    memory.close()
    assert not fake.handles
    assert sum(entry[0] == "cuMemMap" for entry in fake.log) == per_node


@on_ranks(2)
def test_ranks_that_cannot_pass_each_other_files(rank: int, world_size: int) -> None:
    """Each rank says that it is in a network namespace of its own."""
    fake = FakeDriver(gpus=[rank])
    with mock.patch.object(symmetric_memory, "identity", return_value={"network": str(rank)}):
        call = partial(SymmetricMemory, _rendezvous(), 1, 0, api=fake)
        refused(call, "not a network namespace", name="Unsupported")
    assert not fake.alive()


def _refused(driver: dict[str, Any], *says: str, size: int = 1, name: str = "Unsupported") -> Caught:
    """Asserts that a construction over such a driver is refused so, and leaves nothing."""
    before, fake = len(os.listdir("/proc/self/fd")), FakeDriver(**driver)
    found = refused(lambda: SymmetricMemory(_rendezvous(), size, 0, api=fake), *says, name=name)
    assert not fake.alive() and len(os.listdir("/proc/self/fd")) == before
    return found


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
@on_ranks(3)
def test_an_error_on_one_rank_is_raised_on_all_and_frees_everything(
    rank: int, world_size: int, call: str, which: int
) -> None:
    for guilty in range(3):
        failing = {call: (which, Result.CUDA_ERROR_NOT_SUPPORTED)} if rank == guilty else {}
        found = _refused({"gpus": [rank], "failing": failing}, f"{call}: CUDA_ERROR_NOT_SUPPORTED")
        assert rank == guilty or found.text.startswith(f"rank {guilty}: ")


@on_ranks(2)
def test_mapping_that_fails_names_both_ranks_and_gpus(rank: int, world_size: int) -> None:
    """The way to learn of GPUs that do not reach each other when this process sees only its own."""
    failing = {"cuMemSetAccess": (2, Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)}
    driver = [{"gpus": [4]}, {"gpus": [9], "failing": failing}][rank]
    says = ("rank 1 on Fake GPU (0000:09:00.0", "rank 0 on Fake GPU (0000:04:00.0")
    _refused(driver, *says, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "NVLink")


@on_ranks(2)
def test_gpus_without_peer_access_are_named_before_memory_is_taken(rank: int, world_size: int) -> None:
    """Every process sees both GPUs, each in its own order."""
    driver: dict[str, Any] = [
        {"gpus": [4, 9], "unreachable": {(4, 9)}, "free_bytes": 0},
        {"gpus": [9, 4], "free_bytes": 1 << 30},
    ][rank]
    found = _refused(driver, "rank 0 on Fake GPU (0000:04:00.0", "rank 1 on Fake GPU (0000:09:00.0")
    assert rank == 0 or found.text.startswith("rank 0: ")


@on_ranks(3)
def test_out_of_memory_on_one_rank(rank: int, world_size: int) -> None:
    driver = {"free_bytes": GRANULARITY} if rank == 1 else {}
    found = _refused(driver, "GPU 0", size=2 * GRANULARITY, name="OutOfMemory")
    assert (found.needed, found.available) == (2 * GRANULARITY, GRANULARITY)


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
