"""Ranks of a benchmark: started here on one host, or joined when torchrun has started them.

torch.multiprocessing starts them, ends the others when one fails, and has the kernel end them with their
parent. The parent hosts the rendezvous store, on a port that the system picks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta

from .command_line import parse
from .options import Options

_GRACE_S = 3.0  # that the other ranks get to report what they saw, after one has failed
_UNREAD = 128 + signal.SIGPIPE  # the exit status of what ends with the reader of its output


def _is_unread() -> bool:
    """Returns whether the program that read the output has ended, as `head` does: then there is no news."""
    output = select.poll()
    output.register(1, 0)
    return any(found & select.POLLERR for _, found in output.poll(0))


def quietly(main: Callable[[], int]) -> int:
    """Returns the exit status of `main`. Ends the process without words if nobody reads its output."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os._exit(_UNREAD)  # does not flush once more


def leave_multicast_off() -> None:
    """Sets the variables without which paths would use the links' multicast, unless the environment has
    them."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


def run(plan: Sequence[Options]) -> int:
    """Runs the benchmarks of a plan one after another on one set of ranks, which has to be that of each.

    Returns the exit status: 0 if nothing was wrong, 1 if a rank failed or found wrong values, 130 if
    interrupted, 141 if nobody reads the output any more.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _rank(plan, int(os.environ["RANK"]), None)
    return _start(plan)


def _start(plan: Sequence[Options]) -> int:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in __all__
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    options = plan[0]
    name = f"{options.program}_perf.py"
    if options.device == "cuda" and options.ranks > (gpus := torch.cuda.device_count()):
        print(f"{name}: error: -g {options.ranks}: torch finds {gpus} GPUs here", file=sys.stderr, flush=True)
        return 2
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads_before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by the ranks as they start
    started = None
    try:
        started = start_processes(_child, (plan, store.port), options.ranks, join=False, start_method="spawn")
        while not started.join(grace_period=_GRACE_S):
            pass
        return 0
    except ProcessExitedException as problem:  # what made a rank fail, it has said itself
        if _is_unread():
            return _UNREAD
        if problem.signal_name is not None:
            print(f"{name}: rank {problem.error_index} died of {problem.signal_name}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted, ending {options.ranks} ranks", file=sys.stderr, flush=True)
        for rank in started.processes if started is not None else ():
            rank.kill()
            rank.join()
        return 130
    finally:
        if threads_before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads_before


def _child(rank: int, plan: Sequence[Options], port: int) -> None:
    # Ctrl-C reaches all processes of a terminal, and the kernel sends the same when the parent is gone: the
    # rank ends at once, wherever it waits, and the parent says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(_rank(plan, rank, port))


def _rank(plan: Sequence[Options], rank: int, port: int | None) -> int:
    """Runs one rank, whose store is at `port` of this host, or where torchrun's environment says."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options = plan[0]
    backend = _prepare(options, int(os.environ.get("LOCAL_RANK", rank)))
    timeout = timedelta(seconds=options.timeout)
    if port is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks, timeout=timeout)
    try:
        from .program import benchmark

        return max([benchmark(options, rank) for options in plan])
    except Exception as problem:
        if _is_unread():
            os._exit(_UNREAD)
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
    leave_multicast_off()
    torch.cuda.set_device(local_rank)
    if "torch-symm" in options.baselines:
        import torch.distributed._symmetric_memory as symmetric

        with contextlib.suppress(Exception):  # without it the baseline says what is missing
            symmetric.set_backend("NVSHMEM")
            torch.empty(1, device="cuda")  # NVSHMEM wants a context
    return "cpu:gloo,cuda:nccl"


def main(program: str) -> int:
    """The exit status of a program. A bad flag is answered before torch is loaded."""
    return run([parse(program)])
