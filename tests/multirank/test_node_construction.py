"""Communicators between nodes that cannot be built: a typed error on all ranks that says what to do, nothing
left, and the next one works.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moecomm
from tests.fabric import needs_fabric
from tests.multirank.harness import Died
from tests.multirank.node_jobs import (
    LONG,
    NEVER_NOTICED,
    SHORT,
    Found,
    caught,
    communicator,
    left_since,
    run,
    small_case,
    steps_changed,
    warm_up,
)
from tests.multirank.on_ranks import on_ranks
from tests.oracle import assert_none, play

pytestmark = needs_fabric

REPOSITORY = Path(__file__).parents[2]


# -- ranks that are missing ----------------------------------------------------------------------------------
def _missing(rank: int, world_size: int, per_node: int, victim: int, phase: str, half: str) -> Found:
    """The victim ends before or after its part of a step of the construction, or never begins one."""
    case = small_case(world_size, per_node)
    before = warm_up(case, rank)
    if rank == victim and not phase:
        time.sleep(SHORT + 0.5)
        return {}

    def change(reached: str, action: Callable[[], Any]) -> Any:
        if reached == phase and half == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        message = action()
        if reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)  # nobody gets the message
        return message

    if rank == victim:
        with steps_changed(change):
            communicator(case, SHORT)
    found = caught(lambda: communicator(case, SHORT))
    found["left"] = left_since(before)
    return found


@pytest.mark.parametrize(
    ("size", "per_node", "victim", "phase", "half"),
    [
        (2, 1, 0, "", ""),
        (4, 2, 3, "construction: network", "before"),
        (4, 2, 0, "construction: connections", "before"),
        (3, 1, 1, "construction: connections", "after"),
    ],
)
def test_a_rank_that_is_missing(size: int, per_node: int, victim: int, phase: str, half: str) -> None:
    may_die = [victim] if phase else []
    results = run(size, _missing, per_node, victim, phase, half, may_die=may_die)
    if phase:
        assert results[victim] == Died(-signal.SIGKILL)
    del results[victim]
    for found in results:
        assert found["type"] in ("PeerTimeout", "PeerLost"), found
        assert found["peer"] == victim and f"rank {victim}" in found["text"], found
        assert found["phase"].startswith("construction") or found["phase"] == "connecting", found
        assert found["seconds"] < NEVER_NOTICED and found["left"] == {}, found


def _interrupted(rank: int, world_size: int) -> Found:
    """Ctrl-C while a peer on another node does not come to the connections."""
    case = small_case(world_size, 1)
    before = warm_up(case, rank)

    def change(phase: str, action: Callable[[], Any]) -> Any:
        if phase == "construction: connections":
            time.sleep(SHORT / 2.0)
        return action()

    if rank == 1:
        with steps_changed(change):
            found = caught(lambda: communicator(case, SHORT / 2.0))
    else:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        found = {"type": "nothing"}
        try:
            communicator(case, LONG)
        except KeyboardInterrupt:
            found["type"] = "KeyboardInterrupt"
    found["left"] = left_since(before)
    return found


def test_an_interrupt_ends_a_construction() -> None:
    interrupted, other = run(2, _interrupted)
    assert interrupted == {"type": "KeyboardInterrupt", "left": {}}
    assert other["type"] == "PeerTimeout" and other["peer"] == 0 and other["left"] == {}, other


# -- settings ------------------------------------------------------------------------------------------------
def _with_settings(
    rank: int, world_size: int, per_node: int, trials: list[tuple[int, dict[str, str], dict[str, Any]]]
) -> tuple[list[Found], list[str]]:
    """Runs trials in each of which one rank, or all for -1, has other environment variables and arguments."""
    case = small_case(world_size, per_node)
    before = warm_up(case, rank)
    found = []
    for guilty, environment, arguments in trials:
        mine = guilty in (rank, -1)
        kept = dict(os.environ)
        os.environ.update(environment if mine else {})
        chosen = {**case.communicator, "timeout": LONG, **(arguments if mine else {})}
        found.append(caught(lambda chosen=chosen: moecomm.Communicator(**chosen)))  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(kept)
        found[-1]["left"] = left_since(before)
    with communicator(case, LONG) as comm:
        return found, play(comm, case, rank, gradients=False)


BAD_SETTINGS: dict[tuple[str, str], list[str]] = {
    ("PROVIDER", "infiniband"): ["fabric provider 'infiniband'", "shm", "(", "MOECOMM_FABRIC_PROVIDER"],
    ("INTERFACE", "nowhere7"): ["'nowhere7'", "name one of these"],
    ("INTERFACE", "203.0.113.9"): ["'203.0.113.9'", "an address of this host"],
}
"""Settings of MOECOMM_FABRIC_ and what is said of them."""


def test_bad_settings() -> None:
    """Bad settings are refused on all ranks, whether all have them or one, which the others name."""
    trials = [
        (guilty, {f"MOECOMM_FABRIC_{name}": value}, dict[str, Any]())
        for i, (name, value) in enumerate(BAD_SETTINGS)
        for guilty in (i, -1)
    ]
    results = run(4, _with_settings, 2, trials)
    assert_none([arrays for _, arrays in results])
    for rank, (found, _) in enumerate(results):
        for i, error in enumerate(found):
            guilty, setting, _ = trials[i]
            assert (error["type"], error["left"]) == ("Unsupported", {}), f"{setting}: rank {rank} {error}"
            words = ["offers", "lo", *[*BAD_SETTINGS.values()][i // 2]]
            assert all(word in error["text"] for word in words), f"{error['text']!r}, needs {words}"
            assert guilty in (rank, -1) or f"rank {guilty}: " in error["text"], f"{setting}: {error}"
            assert error["seconds"] < NEVER_NOTICED, f"{setting}: {error}"


def test_settings_that_differ() -> None:
    """Settings that must be the same on all nodes are refused if one rank has another value."""
    trials: list[tuple[int, dict[str, str], dict[str, Any]]] = [
        (1, {}, {"ranks_per_node": 2}),
        (2, {}, {"ranks_per_node": 4}),
        (3, {"MOECOMM_FABRIC_PROVIDER": "shm"}, {}),
        (0, {"MOECOMM_FABRIC_PROVIDER": "shm"}, {}),
    ]
    results = run(4, _with_settings, 1, trials)
    assert_none([arrays for _, arrays in results])
    for rank, (found, _) in enumerate(results):
        for i, error in enumerate(found):
            assert (error["type"], error["left"]) == ("MismatchedArguments", {}), f"{i}: rank {rank} {error}"
            assert error["seconds"] < NEVER_NOTICED, error
        for error, other in zip(found[:2], (2, 4), strict=True):
            assert f"ranks_per_node: rank 0 has 1, rank {other // 2} has {other}" in error["text"], error
        for error in found[2:]:
            assert "provider shm" in error["text"] and "MOECOMM_FABRIC_PROVIDER" in error["text"], error


@pytest.mark.parametrize("timeout", [86400.0, 9e8])
@on_ranks(2, MOECOMM_FABRIC_PROVIDER="tcp")
def test_a_timeout_that_is_longer_than_keep_alives_can_be(
    rank: int, world_size: int, timeout: float
) -> list[str]:
    case = small_case(world_size, 1)
    with communicator(case, timeout) as comm:
        return play(comm, case, rank, gradients=False)


# -- no libfabric --------------------------------------------------------------------------------------------

_ALONE = """
import datetime, json, sys
import torch.distributed as dist
import moecomm

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
try:
    moecomm.Communicator(
        num_experts=4, hidden=64, top_k=2, max_tokens=8, device="cpu", ranks_per_node=1, timeout=60.0
    )
    found = ["nothing", ""]
except moecomm.MoecommError as error:
    found = [type(error).__name__, str(error)]
dist.barrier()
print(json.dumps(found))
"""


def test_a_host_without_libfabric(tmp_path: Path) -> None:
    """A host whose libfabric.so.1 is no library counts as without libfabric: no other file is looked for."""
    (tmp_path / "libfabric.so.1").write_bytes(b"")
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = f"{REPOSITORY}:{environment.get('PYTHONPATH', '')}"
        if rank == 1:
            environment["LD_LIBRARY_PATH"] = f"{tmp_path}:{environment.get('LD_LIBRARY_PATH', '')}"
        arguments = [sys.executable, "-c", _ALONE, str(rank), "2", str(tmp_path / "store")]
        ranks.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        found = [json.loads(each.communicate(timeout=90.0)[0]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert [each.returncode for each in ranks] == [0, 0]
    for rank, (type_name, text) in enumerate(found):
        assert type_name == "Unsupported", found
        assert "libfabric cannot be opened" in text and "install" in text, found
        assert text.startswith("rank 1: ") == (rank == 0), found
