"""Lifetime of windows, communicators and outputs, and who may use them: close, with, GC, threads, fork."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from tests import cases, oracle, ranks
from tests.cases import Case
from tests.multirank.conftest import Pools
from tests.multirank.harness import no_shared_memory_left
from tests.multirank.on_ranks import on_ranks

CASE = Case(tokens=(6, 4), num_experts=4, hidden=1024, top_k=2)


def _mapped_files() -> dict[str, str]:
    """Windows that this process has mapped, its peers' included: inode and path, which says if it is gone."""
    with open("/proc/self/maps") as maps:
        # Semaphores of multiprocessing, which torch.compile makes, lie there too.
        shared = [line for line in maps if "/dev/shm/" in line and "/dev/shm/sem." not in line]
        lines = [line.split(maxsplit=5) for line in shared]
    return {fields[4]: fields[5].strip() for fields in lines}


@on_ranks(2)
def test_windows_have_no_name_once_the_communicator_stands(rank: int, world_size: int) -> None:
    gc.collect()  # a rank that lives on may still have windows of a test before this one
    before = _mapped_files()
    dist.barrier()
    with moecomm.Communicator(**CASE.communicator):
        dist.barrier()
        paths = [path for inode, path in _mapped_files().items() if inode not in before]
        assert len(paths) == 2 and all(path.endswith(" (deleted)") for path in paths), paths


def held() -> dict[str, int]:
    """Counts what a communicator takes: windows, descriptors, threads, and, where nobody else does, bytes of
    a GPU's memory."""
    gc.collect()
    found = {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    if ranks.on_cpu():
        return {**found, "windows": len(_mapped_files())}
    free = free_bytes()
    return found if ranks.shares_its_gpus() else {**found, "bytes": -free}


def free_bytes() -> int:
    """Bytes that are free where windows are, once all ranks have let go of what they mapped."""
    gc.collect()
    ranks.synchronize()
    dist.barrier()
    if ranks.on_cpu():
        info = os.statvfs("/dev/shm")
        free = info.f_bfree * info.f_frsize
    else:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    dist.barrier()
    return free


ALLOWED = {"bytes": 32 << 20, "files": 2, "threads": 2}
"""What drivers may keep on GPUs; one window is larger."""


def _come_and_go(rank: int, world_size: int, case: Case, how: str, turns: int) -> list[str]:
    def use() -> None:
        comm = ranks.communicator(**case.communicator)
        out = cases.dispatch(comm, replace(case, tokens=(6,) * world_size), rank)
        comm.combine(out.tokens, out.handle)
        ranks.synchronize()
        dist.barrier()
        if how == "close":
            comm.close()
        elif how == "error":
            with contextlib.suppress(KeyError), comm:
                raise KeyError("on purpose")
        elif how == "async":
            cases.dispatch(comm, replace(case, tokens=(6,) * world_size), rank, async_op=True).wait()
            comm.close()

    for _ in range(1 if ranks.on_cpu() else 3):
        use()
    time.sleep(0.2)
    first = held()
    for _ in range(turns):
        use()
    # A thread that was joined can be seen for a moment longer.
    for _ in range(100):
        last = held()
        left = {name: count - first[name] for name, count in last.items()}
        if ranks.on_cpu():
            wrong = [name for name in left if left[name]]
        else:
            wrong = [name for name in left if left[name] > ALLOWED[name]]
        if not ranks.on_cpu() or not wrong:
            break
        time.sleep(0.02)
    wrong += ["windows"] if first.get("windows") else []
    return [f"rank {rank}, {how}: {name} were {first}, are {last}" for name in wrong]


@pytest.mark.parametrize("how", ["close", "error", "gc", "async"])
def test_nothing_leaks(pool: Pools, most_ranks: int, how: str) -> None:
    on_cpu = pool(most_ranks).on_cpu
    case = replace(CASE, tokens=(6 if on_cpu else 2048,) * most_ranks, num_experts=12, hidden=2048)
    turns = 5 if on_cpu else 50 if how == "close" else 10
    with no_shared_memory_left():
        oracle.assert_none(pool(most_ranks)(_come_and_go, case, how, turns))


@on_ranks("most_ranks")
def test_memory_comes_and_goes_as_planned(rank: int, world_size: int) -> None:
    on_cpu = ranks.on_cpu()
    hidden = 1024 if on_cpu else 4096
    case = replace(CASE, tokens=(4096,) * world_size, num_experts=12, hidden=hidden)
    with ranks.communicator(**case.communicator):  # the driver's first
        pass
    before = free_bytes()
    comm = ranks.communicator(**case.communicator)
    taken = before - free_bytes()
    shape = {name: getattr(comm, name) for name in ("num_experts", "hidden", "top_k", "max_tokens", "dtype")}
    plan = moecomm.Communicator.memory_plan(ranks=world_size, device=ranks.device().type, **shape)
    assert plan == comm.memory
    comm.close()
    del comm
    left = before - free_bytes()
    planned = plan.committed_bytes * (world_size if on_cpu else 1)  # all windows are in one /dev/shm
    # Other jobs may use /dev/shm meanwhile, in far smaller amounts than this one's.
    slack = planned / 4 if on_cpu else ALLOWED["bytes"]
    assert planned > ALLOWED["bytes"]
    assert abs(taken - planned) < slack, f"took {taken} bytes, planned {planned}"
    assert abs(left) < slack, f"{left} bytes are still taken"


@on_ranks(2)
def test_outputs_outlive_the_communicator(rank: int, world_size: int) -> None:
    """Outputs, handles and inputs in the window stay valid after close and after the communicator is gone."""
    comm = ranks.communicator(**CASE.communicator)
    inside = comm.empty_input(3)
    inside.fill_(7.0)
    out = cases.dispatch(comm, CASE, rank)
    y_TH = comm.combine(out.tokens, out.handle)
    kept = out.tokens.clone(), y_TH.clone()
    ranks.synchronize()
    dist.barrier()
    comm.close()
    watch = weakref.ref(comm)
    del comm
    gc.collect()
    assert watch() is None or not ranks.on_cpu()
    with ranks.communicator(**CASE.communicator) as other:
        assert oracle.play(other, CASE, rank) == []
    inside += 1
    assert torch.equal(out.tokens, kept[0]) and torch.equal(y_TH, kept[1]) and bool((inside == 8).all())


@on_ranks(2)
def test_the_graph_keeps_a_communicator_alive(rank: int, world_size: int) -> None:
    """A communicator that only the graph still refers to serves the backward."""
    own = cases.inputs(CASE, rank, ranks.device())
    x_TH = own.x_TH.requires_grad_()

    def forward() -> torch.Tensor:
        comm = ranks.communicator(**CASE.communicator)
        out = comm.dispatch(x_TH, own.ids_TK)
        return comm.combine(out.tokens * 3, out.handle)

    y_TH = forward()
    gc.collect()
    y_TH.sum().backward()
    del y_TH
    gc.collect()
    assert len(_mapped_files()) == 0 or not ranks.on_cpu()
    assert bool((x_TH.grad == 3 * CASE.top_k).all())


@on_ranks(2)
def test_steps_do_not_leak(rank: int, world_size: int) -> None:
    """Resident kilobytes after some steps and after many more."""

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
    few, many = found
    # One leaked output a step would be 200 x 512 KB.
    assert many - few < 20_000, f"{few} KB after 20 steps, {many} KB after 220"


@on_ranks(2)
def test_an_error_keeps_no_tensors(rank: int, world_size: int) -> None:
    """A call that has failed lets go of its tensors at once, not when Python next looks for cycles, and a
    finished operation of `async_op` of its result. (Each input here is one of two that can be alive.)"""
    case = Case(tokens=(6, 4), num_experts=4, hidden=64, top_k=2)
    gc.disable()
    try:
        with moecomm.Communicator(**case.communicator) as comm:
            ids_TK = torch.from_numpy(case.ids(rank))

            def waited_for_twice(x_TH: torch.Tensor) -> None:
                work = comm.dispatch(x_TH, ids_TK[:1], async_op=True)
                with contextlib.suppress(ValueError):
                    work.wait()
                work.wait()

            calls: list[Callable[[torch.Tensor], Any]] = [
                waited_for_twice,
                lambda x_TH: comm.dispatch(x_TH, ids_TK + 9),
                lambda x_TH: comm.dispatch(x_TH, ids_TK[:1]),
                lambda x_TH: comm.dispatch(x_TH, ids_TK[:1], async_op=True).wait(),
                lambda x_TH: comm.combine(x_TH, None, async_op=True).wait(),
                lambda x_TH: comm.refuse(ValueError(f"a part that had {x_TH.shape}")),
            ]
            for call in calls:
                for _ in range(4):
                    with pytest.raises(ValueError, match=r"rank|topk_idx|handle|part"):
                        call(comm.empty_input(case.tokens[rank]).zero_())
            out = comm.dispatch(torch.from_numpy(case.x(rank)), ids_TK, async_op=True).wait()
            tokens = weakref.ref(out.tokens)
            del out
            assert tokens() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_threads(rank: int, world_size: int) -> None:
    """Two threads, each with a communicator of its own that another thread built."""
    comms = [ranks.communicator(**CASE.communicator) for _ in range(2)]
    problems: list[str] = []

    def work(comm: Any) -> None:
        known = oracle.Oracle(CASE, rank, comm.device)
        for _ in range(20):
            known.check_step(comm)
        problems.extend(known.problems or ["done"])

    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    assert problems == ["done"] * 2


@on_ranks(2)
def test_a_waiting_call_lets_other_threads_run(rank: int, world_size: int) -> None:
    with moecomm.Communicator(**CASE.communicator) as comm:
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
            cases.dispatch(comm, CASE, rank)
            return
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
        assert count > 5


@on_ranks(2)
def test_a_forked_child_does_not_wait_for_an_operation_of_its_parent(rank: int, world_size: int) -> None:
    with moecomm.Communicator(**CASE.communicator) as comm:
        status = 7
        if rank == 0:  # rank 1 begins the operation once the child has ended
            work = cases.dispatch(comm, CASE, rank, async_op=True)
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                with contextlib.suppress(moecomm.CommunicatorClosed):
                    work.wait()
                    os._exit(1)
                os._exit(7)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        dist.barrier()
        if rank == 1:
            work = cases.dispatch(comm, CASE, rank, async_op=True)
        work.wait()
        assert status == 7


@on_ranks(2)
def test_a_forked_child_has_nothing_of_the_windows(rank: int, world_size: int) -> list[str]:
    """A child has nothing of the windows, so that they end with close(), and what it puts at their place in
    memory stays when its copy of the communicator goes."""
    comm = moecomm.Communicator(**CASE.communicator)
    problems = oracle.play(comm, CASE, rank)
    with open("/proc/self/maps") as maps:
        place = next(int(line.split("-")[0], 16) for line in maps if "/dev/shm/" in line)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        files = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        kept = [*_mapped_files(), *(file for file in files if file.startswith("/dev/shm/"))]
        # PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        own = libc.mmap(ctypes.c_void_p(place), ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))
        if kept or own != place:
            os._exit(1)
        ctypes.memset(own, 7, 4096)
        comm.close()
        del comm
        gc.collect()
        os._exit(0 if ctypes.string_at(own, 4096) == bytes([7]) * 4096 else 2)
    _, status = os.waitpid(pid, 0)
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)  # the other rank waits for long enough to look for what became of its peers
    problems += oracle.play(comm, CASE, rank)
    comm.close()
    return problems + ([] if status == 0 else [f"the child ended with {status}"])


def _ends_without_close(rank: int, world_size: int) -> None:
    globals()["_kept"] = moecomm.Communicator(**CASE.communicator)
    oracle.play(globals()["_kept"], CASE, rank)
    assert len(_mapped_files()) == 2


def test_processes_may_end_without_close(fresh_ranks: Callable[..., list[Any]]) -> None:
    with no_shared_memory_left():
        fresh_ranks(2, _ends_without_close)


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
