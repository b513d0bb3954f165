"""What a host or a container may lack or have otherwise: descriptors, system calls, users, /dev/shm."""

import ctypes
import os
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.setup import rendezvous
from tests import oracle
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import Caught, catch, require
from tests.multirank.harness import NO_GPUS, Died, no_shared_memory_left, run_ranks
from tests.multirank.node_jobs import steps_changed

CASE = Case(tokens=(5, 3), num_experts=4, hidden=8, top_k=2)
EPERM, ENOSYS = 1, 38
FALLOCATE, PIDFD_OPEN = 285, 434  # numbers of system calls on x86-64


def _build(**more: Any) -> Any:
    sizes: dict[str, Any] = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens": 6}
    return moecomm.Communicator(**{**sizes, "dtype": torch.float32, "timeout": 20.0, **more})


def _within(phase: str, what: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """This rank's part of a phase of constructions within the block runs within what()."""

    def change(its_phase: str, action: Callable[[], Any]) -> Any:
        with what() if its_phase == phase else nullcontext():
            return action()

    return steps_changed(change)


@contextmanager
def _limit(of: int, least: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(of)
    resource.setrlimit(of, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(of, (soft, hard))


_no_descriptors = partial(_limit, resource.RLIMIT_NOFILE, 3)
_few_descriptors = partial(_limit, resource.RLIMIT_NOFILE, 64)
_small_files = partial(_limit, resource.RLIMIT_FSIZE, 4096)


@contextmanager
def _nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def _forbid(call: int, error: int) -> None:
    """Lets the system refuse a call from now on, as the seccomp profile of a container does."""
    program = b"".join(
        struct.pack("HBBI", *each)
        for each in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, call),
            (0x06, 0, 0, 0x50000 | error),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    rule = struct.pack("HxxxxxxQ", 4, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(rule)) == 0


def _lacking(rank: int, world_size: int, what: str, more: dict[str, Any]) -> Caught | None:
    kind, _, detail = what.partition("; ")
    around: AbstractContextManager[None] = nullcontext()
    if rank == 1 and kind == "forbidden":
        _forbid(*(int(word) for word in detail.split()))
    elif rank == 1:
        lacks = {"no descriptors": _no_descriptors, "small files": _small_files, "another user": _nobody}
        around = _within(detail, lacks[kind])
    with around:
        return catch(lambda: _build(**more))


NODES = {"ranks_per_node": 1, "timeout": 3.0}


LACKING: dict[str, list[str]] = {
    "no descriptors; construction: communicators": ["ulimit -n"],
    "small files; construction: communicators": ["ulimit -f"],
    "no descriptors; construction: mapping": ["ulimit -n"],
    "no descriptors; construction: arguments": ["ulimit -n"],
    "no descriptors; construction: connections": ["ulimit -n"],
    "no descriptors; construction: network": ["ulimit -n"],
    "another user; construction: mapping": ["user 0", "user 65534", "ranks_per_node"],
    f"forbidden; {PIDFD_OPEN} {EPERM}": ["pidfd_open", "seccomp"],
    f"forbidden; {PIDFD_OPEN} {ENOSYS}": ["pidfd_open", "Linux 5.3"],
    f"forbidden; {FALLOCATE} {ENOSYS}": ["fallocate", "seccomp"],
}
"""The words of the error, by what rank 1 lacks and the place where it notices that."""
BETWEEN_NODES = ("construction: connections", "construction: network")


@pytest.mark.parametrize(
    "what",
    [pytest.param(each, marks=needs_fabric if each.endswith(BETWEEN_NODES) else ()) for each in LACKING],
)
def test_what_one_rank_lacks_is_said_on_both(what: str) -> None:
    words = LACKING[what]
    type_name = "OutOfMemory" if words[0].startswith("ulimit") else "Unsupported"
    more = NODES if what.endswith(BETWEEN_NODES) else {}
    if os.geteuid() != 0 and "user" in what:
        pytest.skip("needs root: acts as another user")
    if os.uname().machine != "x86_64" and "forbidden" in what:
        pytest.skip("knows the numbers of system calls on x86-64 only")
    with no_shared_memory_left():
        results = run_ranks(2, _lacking, what, more)
    for rank, caught in enumerate(results):
        require(caught, *words, name=type_name)
        assert caught.text.startswith("rank 1: ") == (rank == 0), caught


def _no_connection(rank: int, world_size: int) -> Caught | None:
    with _no_descriptors() if rank == 1 else nullcontext():
        return catch(lambda: _build(timeout=3.0))


def test_a_rank_without_descriptors_does_not_wait_for_the_store() -> None:
    waiting, lacking = run_ranks(2, _no_connection)
    require(waiting, "rank 1", name="PeerTimeout")
    require(lacking, "ulimit -n", name="OutOfMemory")


def _one_descriptor(rank: int, world_size: int) -> Caught | None:
    """Builds in the process of the store, where one descriptor is free."""
    store, held = dist.TCPStore("127.0.0.1", 0, is_master=True), list[int]()
    with mock.patch.object(rendezvous, "_get_default_store", return_value=store), _few_descriptors():
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        os.close(held.pop())
        try:
            return catch(_build)
        finally:
            for each in held:
                os.close(each)


def test_a_rank_with_a_descriptor_for_one_end_of_a_connection_to_itself_does_not_wait() -> None:
    require(*run_ranks(1, _one_descriptor), "ulimit -n", name="OutOfMemory")


def _die(rank: int, world_size: int, phase: str) -> None:
    @contextmanager
    def killed() -> Iterator[None]:
        dist.barrier()
        os.kill(os.getpid(), 9)
        yield

    with _within(phase, killed):
        _build()


def _alone(rank: int, world_size: int) -> list[str]:
    with _build() as comm:
        return oracle.play(comm, replace(CASE, tokens=(5,)), rank)


def test_windows_of_ranks_that_were_killed_while_they_had_names_go_with_the_next() -> None:
    with no_shared_memory_left():
        died = run_ranks(2, _die, "construction: mapping", may_die=[0, 1])
        assert all(isinstance(each, Died) for each in died)
        oracle.assert_none(run_ranks(1, _alone))


def _mount_shm(source: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    """Mounts another /dev/shm for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(0x00020000),  # CLONE_NEWNS
        libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None),  # MS_REC | MS_PRIVATE
        libc.mount(source, b"/dev/shm", kind, ctypes.c_ulong(flags), options),
    ):
        assert done == 0, os.strerror(ctypes.get_errno())


def _own_folder(rank: int, world_size: int, folder: str) -> list[str]:
    """Another folder of the host's /dev/shm as one's own, as containers may have it."""
    own = Path(folder, str(rank))
    own.mkdir()
    _mount_shm(str(own).encode(), None, 0x1000, None)  # MS_BIND
    dist.barrier()
    with _build() as comm:
        problems = [] if comm.nodes == 2 else [f"expected 2 nodes, got {comm.nodes}"]
        return problems + oracle.play(comm, CASE, rank)


@needs_fabric
def test_folders_of_one_tmpfs_as_dev_shm_are_told_apart() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes mount namespaces")
    folder = Path(f"/dev/shm/folders-{os.getpid()}")
    folder.mkdir()
    try:
        oracle.assert_none(run_ranks(2, _own_folder, str(folder), environment=NO_GPUS))
    finally:
        for each in folder.iterdir():
            each.rmdir()
        folder.rmdir()


def _no_names(rank: int, world_size: int) -> Caught | None:
    _mount_shm(b"tmpfs", b"tmpfs", 0, b"nr_inodes=1")
    return catch(_build)


def test_a_dev_shm_that_has_no_room_for_a_further_file_is_out_of_memory() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a tmpfs")
    require(*run_ranks(1, _no_names, environment=NO_GPUS), "No space left on device", name="OutOfMemory")


def _no_limit(rank: int, world_size: int) -> list[str]:
    _mount_shm(b"tmpfs", b"tmpfs", 0, b"size=0")
    return _alone(rank, world_size)


def test_a_dev_shm_without_a_limit_has_room() -> None:
    """statvfs gives no blocks there, which does not mean that it is full."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a tmpfs")
    oracle.assert_none(run_ranks(1, _no_limit, environment=NO_GPUS))
