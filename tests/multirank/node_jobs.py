"""Helpers of the tests of faults between nodes: small jobs on emulated nodes, errors in a form that is sent
back to the test, and counts of the resources that a process holds.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moecomm
from moecomm.setup.rendezvous import Rendezvous
from tests import cases, ranks
from tests.cases import Case
from tests.multirank.harness import NO_GPUS, Died, RankPool, no_shared_memory_left

Found = dict[str, Any]

NEVER_NOTICED = 20.0
"""Seconds; a generous bound, a loss is noticed within some tens of milliseconds. Timeouts of communicators
are three times as long where it is used."""
LONG, SHORT = 60.0, 1.0
"""Timeouts of communicators: one that no test waits for, and one that it does."""


def small_case(size: int, per_node: int) -> Case:
    return Case(tokens=(6,) * size, num_experts=2 * size, hidden=64, top_k=2, seed=5, ranks_per_node=per_node)


def communicator(case: Case, timeout: float) -> Any:
    return moecomm.Communicator(**{**case.communicator, "timeout": timeout})


def step(comm: Any, case: Case, rank: int) -> None:
    out = cases.dispatch(comm, case, rank)
    comm.combine(out.tokens, out.handle, weights=out.weights)


def steps(comm: Any, case: Case, rank: int, count: int) -> None:
    for _ in range(count):
        step(comm, case, rank)


def caught(call: Callable[[], Any]) -> Found:
    """The error of ours that `call` raises, and after how long."""
    before = time.monotonic()
    try:
        call()
    except moecomm.MoecommError as error:
        facts = {name: getattr(error, name, None) for name in ("rank", "peer", "phase", "expected", "seen")}
        found = {"type": type(error).__name__, "text": str(error), **facts}
        return {**found, "seconds": time.monotonic() - before}
    return {"type": "nothing", "seconds": time.monotonic() - before}


def refusals(comm: Any, dispatch: Callable[..., Any]) -> set[str]:
    """Types of the errors that a broken communicator gives to whatever is asked of it."""
    calls: list[Callable[[], Any]] = [dispatch, lambda: dispatch(async_op=True).wait(), comm.check]
    if ranks.on_cpu():
        calls.append(lambda: comm.dispatch(torch.zeros(1), torch.zeros(1)))
    return {caught(call)["type"] for call in calls}


@contextmanager
def steps_changed(change: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Makes every step of a construction in this process send `change(phase, action)` as its message."""
    real = Rendezvous.step

    def step(self: Any, phase: str, action: Callable[[], Any], *more: Any, **named: Any) -> Any:
        return real(self, phase, lambda: change(phase, action), *more, **named)

    with mock.patch.object(Rendezvous, "step", step):
        yield


def resources() -> dict[str, int]:
    """Counts the resources of this process that a communicator could leave behind."""
    with open("/proc/self/maps") as maps:
        windows = {line.split()[5] for line in maps if "/dev/shm/" in line}
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "windows": len(windows),
    }


def left_since(before: dict[str, int], patience: float = 5.0) -> dict[str, int]:
    """Returns the resources beyond `before`; a thread that was joined can be seen for a moment longer."""
    limit = time.monotonic() + patience
    while True:
        gc.collect()
        left = {name: count - before[name] for name, count in resources().items() if count > before[name]}
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.02)


def warm_up(case: Case, rank: int) -> dict[str, int]:
    """Makes a first communicator, which loads libraries and their threads for good, and returns the resources
    after it."""
    with communicator(case, LONG) as comm:
        step(comm, case, rank)
    dist.barrier()
    return resources()


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    provider: str = "tcp",
    may_die: Sequence[int] = (),
    timeout: float = 90.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """body(rank, size, *args) on fresh ranks; asserts that nothing of theirs is left in /dev/shm, and that
    they end by themselves."""
    chosen = {"MOECOMM_FABRIC_PROVIDER": provider, **(environment or {})}
    # Processes that were killed before this test can have left files of the shm provider, whose numbers the
    # system gives to later processes.
    earlier = set(os.listdir("/dev/shm"))
    with no_shared_memory_left():
        with RankPool(size, timeout=timeout, environment=NO_GPUS | chosen) as pool:
            owners = {str(pid) for pid in pool(_pid)}
            processes = list(pool._processes)
            results = pool(body, *args, may_die=may_die)
        # Where one has died the pool ends the others at once.
        if not any(isinstance(result, Died) for result in results):
            codes = [process.exitcode for process in processes]
            assert codes == [0] * size, f"ranks ended with {codes}"
        # Files of the shm provider are called "<process>:<endpoint>".
        limit = time.monotonic() + 5.0
        while left := [n for n in set(os.listdir("/dev/shm")) - earlier if n.split(":")[0] in owners]:
            assert time.monotonic() < limit, f"left in /dev/shm: {left}"
            time.sleep(0.02)
    return results
