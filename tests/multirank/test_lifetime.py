"""Lifetime of windows, communicators and outputs, and who may use them: close, with, GC, threads, fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multirank import cases
from tests.multirank.cases import Case
from tests.multirank.conftest import Pools
from tests.multirank.harness import RankPool, no_shared_memory_left, shared_memory_names

CASE = Case(tokens=(6, 4), num_experts=4, hidden=1024, top_k=2)


def _mapped_windows() -> int:
    """Windows that this process has mapped, its peers' included."""
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "/dev/shm/" in line})


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _names(rank: int, world_size: int) -> tuple[set[str], int]:
    """Returns the names that are new beside an open communicator, and how many windows it has mapped."""
    import moecomm

    gc.collect()  # a rank that lives on may still have windows of a test before this one
    before, mapped = shared_memory_names(), _mapped_windows()
    dist.barrier()
    with moecomm.Communicator(**CASE.communicator):
        dist.barrier()
        return shared_memory_names() - before, _mapped_windows() - mapped


def test_windows_have_no_name_once_the_communicator_stands(pool: Pools) -> None:
    with no_shared_memory_left():
        for names, mapped in pool(2)(_names):
            # Another job on this machine may be building one at this moment; ours are two.
            assert len(names) < 2 and mapped == 2


def _released(rank: int, world_size: int, how: str) -> list[Any]:
    import moecomm

    def use() -> None:
        comm = moecomm.Communicator(**CASE.communicator)
        out = cases.dispatch(comm, CASE, rank)
        comm.combine(out.tokens, out.handle)
        dist.barrier()
        if how == "close":
            comm.close()
        elif how == "with":
            with comm:
                pass
        elif how == "error":
            try:
                with comm:
                    raise KeyError("on purpose")
            except KeyError:
                pass
        elif how == "async":
            cases.dispatch(comm, CASE, rank, async_op=True).wait()
            comm.close()

    def held() -> list[int]:
        gc.collect()
        return [_mapped_windows(), _open_files(), _threads()]

    use()
    time.sleep(0.2)
    first = held()
    for _ in range(10):
        use()
    # A thread that was joined can be seen for a moment longer.
    limit = time.monotonic() + 5.0
    while (last := held()) != first and time.monotonic() < limit:
        time.sleep(0.02)
    return [first, last]


@pytest.mark.parametrize("how", ["close", "with", "error", "gc", "async"])
def test_everything_is_released(pool: Pools, how: str) -> None:
    for first, last in pool(2)(_released, how):
        assert first[0] == 0, f"{how}: {first[0]} windows still mapped"
        assert last == first, f"{how}: windows, files, threads were {first}, are {last}"


def _shared_bytes_free() -> int:
    info = os.statvfs("/dev/shm")
    return info.f_bfree * info.f_frsize


def _memory(rank: int, world_size: int) -> tuple[int, int, int]:
    import moecomm

    arguments = {**CASE.communicator, "max_tokens": 4096}
    dist.barrier()
    free = [_shared_bytes_free()]
    dist.barrier()
    comm = moecomm.Communicator(**arguments)
    dist.barrier()
    free.append(_shared_bytes_free())
    dist.barrier()
    taken = comm.memory.committed_bytes * world_size
    comm.close()
    del comm
    gc.collect()
    dist.barrier()
    free.append(_shared_bytes_free())
    return free[0] - free[1], free[0] - free[2], taken


def test_memory_comes_and_goes_as_planned(pool: Pools) -> None:
    taken, left, planned = pool(2)(_memory)[0]
    # Other jobs may use /dev/shm meanwhile, in far smaller amounts than this one's.
    assert planned > 100 << 20
    assert abs(taken - planned) < planned / 4, f"took {taken} bytes, planned {planned}"
    assert abs(left) < planned / 4, f"{left} bytes are still taken"


def _outputs_outlive(rank: int, world_size: int) -> bool:
    """Outputs, handles and inputs in the window stay valid after close and after the communicator is gone."""
    import moecomm

    comm = moecomm.Communicator(**CASE.communicator)
    inside = comm.empty_input(3)
    inside.fill_(7.0)
    out = cases.dispatch(comm, CASE, rank)
    y_TH = comm.combine(out.tokens, out.handle)
    kept = out.tokens.clone(), y_TH.clone()
    dist.barrier()
    comm.close()
    watch = weakref.ref(comm)
    del comm
    gc.collect()
    gone = watch() is None
    with moecomm.Communicator(**CASE.communicator) as other:
        cases.play(other, CASE, rank)
    inside += 1
    return (
        gone and torch.equal(out.tokens, kept[0]) and torch.equal(y_TH, kept[1]) and bool((inside == 8).all())
    )


def test_outputs_outlive_the_communicator(pool: Pools) -> None:
    assert all(pool(2)(_outputs_outlive))


def _graph_keeps_it(rank: int, world_size: int) -> torch.Tensor:
    """A communicator that only the graph still refers to serves the backward."""
    import moecomm

    x_TH = torch.from_numpy(CASE.x(rank)).requires_grad_()

    def forward() -> torch.Tensor:
        comm = moecomm.Communicator(**CASE.communicator)
        out = comm.dispatch(x_TH, torch.from_numpy(CASE.ids(rank)))
        return comm.combine(out.tokens * 3, out.handle)

    y_TH = forward()
    gc.collect()
    y_TH.sum().backward()
    del y_TH
    gc.collect()
    assert _mapped_windows() == 0
    return x_TH.grad


def test_the_graph_keeps_a_communicator_alive(pool: Pools) -> None:
    for rank, grad_TH in enumerate(pool(2)(_graph_keeps_it)):
        assert torch.equal(grad_TH, torch.full((CASE.tokens[rank], CASE.hidden), 6.0))


def _memory_of_steps(rank: int, world_size: int) -> list[int]:
    """Resident kilobytes after some steps and after many more."""
    import moecomm

    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    case = Case(tokens=(64, 64), num_experts=4, hidden=1024, top_k=2)
    found = []
    with moecomm.Communicator(**case.communicator) as comm:
        x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
        ids_TK = torch.from_numpy(case.ids(rank))
        for steps in (20, 200):
            for step in range(steps):
                out = comm.dispatch(x_TH, (ids_TK + step) % 4)
                comm.combine(out.tokens, out.handle).sum().backward()
                x_TH.grad = None
            gc.collect()
            found.append(resident())
    return found


def test_steps_do_not_leak(pool: Pools) -> None:
    for few, many in pool(2)(_memory_of_steps):
        # One leaked output a step would be 200 x 512 KB.
        assert many - few < 20_000, f"{few} KB after 20 steps, {many} KB after 220"


def _from_a_thread(rank: int, world_size: int) -> list[cases.Arrays]:
    """Two threads, each with a communicator of its own that another thread built."""
    import moecomm

    comms = [moecomm.Communicator(**CASE.communicator) for _ in range(2)]
    results: list[Any] = [None, None]

    def work(i: int) -> None:
        for _ in range(20):
            results[i] = cases.play(comms[i], CASE, rank)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    return results


def test_threads(pool: Pools) -> None:
    for results in zip(*pool(2)(_from_a_thread), strict=True):
        cases.verify(CASE, results)


def _gil(rank: int, world_size: int) -> int:
    """Other Python threads run while a call waits for a peer."""
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
            cases.dispatch(comm, CASE, rank)
            return 1
        count, running = 0, True

        def spin() -> None:
            nonlocal count
            while running:
                count += 1
                time.sleep(0.001)

        thread = threading.Thread(target=spin)
        thread.start()
        cases.dispatch(comm, CASE, rank)
        running = False
        thread.join()
        return count


def test_a_waiting_call_lets_other_threads_run(pool: Pools) -> None:
    count, _ = pool(2)(_gil)
    assert count > 5


def _forked(rank: int, world_size: int) -> tuple[int, cases.Arrays]:
    """A forked child (a data loader's worker, say) that ends does the parent's communicator no harm."""
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        cases.play(comm, CASE, rank)
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), cases.play(comm, CASE, rank)


def test_a_forked_child_does_no_harm(pool: Pools) -> None:
    results = pool(2)(_forked)
    assert [code for code, _ in results] == [7, 7]
    cases.verify(CASE, [result for _, result in results])


def _forked_and_dropped(rank: int, world_size: int) -> tuple[int, cases.Arrays]:
    """The child closes its copy, as an interpreter that ends would: the rank itself has not closed."""
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        dist.barrier()
        pid = os.fork()
        if pid == 0:
            comm.close()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)  # the other rank waits for long enough to look for what became of its peers
        return os.waitstatus_to_exitcode(status), cases.play(comm, CASE, rank)


def test_a_forked_child_that_closes_its_copy_does_no_harm(pool: Pools) -> None:
    results = pool(2)(_forked_and_dropped)
    assert [code for code, _ in results] == [0, 0]
    cases.verify(CASE, [result for _, result in results])


def _ends_without_close(rank: int, world_size: int) -> int:
    import moecomm

    globals()["_kept"] = moecomm.Communicator(**CASE.communicator)
    cases.play(globals()["_kept"], CASE, rank)
    return _mapped_windows()


def test_processes_may_end_without_close() -> None:
    with no_shared_memory_left(), RankPool(2) as own:
        assert own(_ends_without_close) == [2, 2]


WHOLE_PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist

import moecomm
from moecomm.nn import MoEConfig, MoELayer

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
shape = {"num_experts": 2, "hidden": 16, "top_k": 2, "dtype": torch.float32}
comm = moecomm.Communicator(**shape, max_tokens=4, device="cpu")
layer = MoELayer(MoEConfig(**shape, ffn_hidden=8), comm)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.randn(4, 16)).sum().backward()
optimizer.step()
comm.close()
dist.destroy_process_group()
assert "torch._dynamo" in sys.modules
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print([name for name in names if "gloo" in name])
"""


def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    """A thread that outlived its group would now and then abort the process at the end of the interpreter."""
    command = [sys.executable, "-c", WHOLE_PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stdout + done.stderr
