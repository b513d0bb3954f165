"""Ranks of a benchmark: started here on one host, or joined when torchrun has started them.

The starting process waits for all ranks, and ends the others as soon as one fails, or on Ctrl-C, SIGTERM or
SIGHUP. If it is itself killed outright, the kernel ends its ranks. Rank 0 hosts the rendezvous store on a
port that the system picks, so that two benchmarks never collide.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

from .command_line import parse
from .options import Options

RankMain = Callable[[Options, int, int], int]
_GRACE_AFTER_FAILURE = 3.0  # seconds the other ranks get to report what they saw
_GRACE_AFTER_TERM = 3.0
_PR_SET_PDEATHSIG = 1
# All paths are compared without the links' multicast, unless the environment says otherwise.
_WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def run(rank_main: RankMain, options: Options) -> int:
    """Runs `rank_main(options, rank, ranks)` on every rank and returns the exit status of the program.

    0: all ranks returned 0. 1: a rank failed or found wrong values. 130: interrupted.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(rank_main, options)
    return _spawn(rank_main, options)


def _join(rank_main: RankMain, options: Options) -> int:
    import torch.distributed as dist

    backend = _prepare(options, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    return _rank(rank_main, options, dist.get_rank(), dist.get_world_size())


def _rank(rank_main: RankMain, options: Options, rank: int, ranks: int) -> int:
    import torch.distributed as dist

    try:
        return rank_main(options, rank, ranks)
    except Exception as problem:
        if type(problem).__module__.startswith("moecomm"):  # typed: its text says what to do
            text = f"{type(problem).__name__}: {problem}"
        else:
            text = traceback.format_exc().rstrip()
        print(f"{options.program}_perf.py: rank {rank}: {text}", file=sys.stderr, flush=True)
        if options.device == "cuda":
            os._exit(1)  # taking NCCL down would wait for ranks that no longer answer
        return 1
    except KeyboardInterrupt:  # Ctrl-C under torchrun, which ends the other ranks
        return 130
    finally:
        dist.destroy_process_group()


def _prepare(options: Options, local_rank: int) -> str:
    """Sets threads and device of this process; returns the backends of its process group."""
    import torch

    import moecomm  # noqa: F401  # before there are groups, as everybody does

    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        return "gloo"
    for name, value in _WITHOUT_MULTICAST.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(local_rank)
    if "torch-symm" in options.baselines:
        import torch.distributed._symmetric_memory as symmetric

        with contextlib.suppress(Exception):  # without it the baseline says what is missing
            symmetric.set_backend("NVSHMEM")
            torch.empty(1, device="cuda")  # NVSHMEM wants a context
    return "cpu:gloo,cuda:nccl"


def _child(rank_main: RankMain, options: Options, rank: int, parent: int, line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the ranks in order
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request took hold
            raise SystemExit(1)
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__

    backend = _prepare(options, rank)
    timeout = timedelta(seconds=options.timeout)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        line.send(store.port)
    else:
        store = TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks, timeout=timeout)
    raise SystemExit(_rank(rank_main, options, rank, options.ranks))


def _spawn(rank_main: RankMain, options: Options) -> int:
    """Starts the ranks. Does without torch, so that they load it at once instead of after their parent."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = []
    lines: list[Connection] = []
    threads_before = os.environ.get("OMP_NUM_THREADS")
    try:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by the ranks as they start
        for rank in range(options.ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_child, args=(rank_main, options, rank, os.getpid(), there), name=f"rank {rank}"
            )
            process.start()
            there.close()  # so that a rank's death is seen as the end of its line
            ranks.append(process)
            lines.append(here)
        _pass_port_on(lines)
        return _wait(ranks, options)
    except KeyboardInterrupt:
        name = f"{options.program}_perf.py"
        print(f"\n{name}: interrupted, ending {len(ranks)} ranks", file=sys.stderr, flush=True)
        return 130
    finally:
        _end(ranks)
        if threads_before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads_before


def _pass_port_on(lines: Sequence[Connection]) -> None:
    """Rank 0 hosts the rendezvous store on a port that the system picks; the others hear of it here."""
    with contextlib.suppress(EOFError, BrokenPipeError):  # a rank died: what waits for the ranks will say so
        port = lines[0].recv()
        for line in lines[1:]:
            line.send(port)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _wait(ranks: list[BaseProcess], options: Options) -> int:
    """Waits until all ranks are done, or one has failed and the others have had their grace."""
    running: dict[object, tuple[int, BaseProcess]] = {p.sentinel: (rank, p) for rank, p in enumerate(ranks)}
    failed = False
    deadline: float | None = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done = multiprocessing.connection.wait([p.sentinel for _, p in running.values()], timeout=left)
        if not done:
            return 1
        for sentinel in done:
            rank, process = running.pop(sentinel)
            process.join()
            code = process.exitcode
            if code == 0:
                continue
            if code is not None and code < 0 and not failed:
                name = signal.Signals(-code).name
                print(f"{options.program}_perf.py: rank {rank} died of {name}", file=sys.stderr, flush=True)
            failed = True
            deadline = deadline or time.monotonic() + _GRACE_AFTER_FAILURE
    return int(failed)


def _end(ranks: Iterable[BaseProcess]) -> None:
    """Ends what still runs: politely, then not. A second Ctrl-C does not cut this short."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        alive = [process for process in ranks if process.is_alive()]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + _GRACE_AFTER_TERM
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in alive:
            if process.is_alive():
                process.kill()
                process.join()
    finally:
        signal.signal(signal.SIGINT, previous)


def main(program: str) -> int:
    """The exit status of a program. A bad flag is answered before torch is loaded."""
    return run(rank_main, parse(program))


def rank_main(options: Options, rank: int, ranks: int) -> int:
    """Runs one rank of a program and returns its exit code."""
    from .program import benchmark

    return benchmark(options, rank)


def ranks_main(plan: tuple[Options, ...], deadline_s: float, first: Options, rank: int, ranks: int) -> int:
    """Runs one rank of several runs in turn, started once for all; no run begins after the deadline."""
    from .timing import sum_over_ranks

    begun = time.monotonic()
    status = 0
    for options in plan:
        late = rank == 0 and time.monotonic() - begun > deadline_s
        if sum_over_ranks(int(late)):
            break
        if rank == 0:
            print(f"\n$ {options.command}", flush=True)
        status |= rank_main(options, rank, ranks)
    return status
