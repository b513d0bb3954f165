"""Runs a function on several ranks, each a process of its own on this host, and brings the results back.

    def body(rank: int, world_size: int, scale: float) -> float:      # module level: ranks import it by name
        x = torch.full((1,), rank * scale)
        torch.distributed.all_reduce(x)                               # the default gloo group is ready
        return x.item()

    assert run_ranks(3, body, 2.0) == [6.0, 6.0, 6.0]

Ranks are forked from a server process that has torch loaded already, so three of them start in about a tenth
of a second. What the harness promises:

- An exception in a rank is raised in the caller as `RankFailure`, with the rank, the full traceback of the
  child and what it printed. The other ranks get `GRACE_S` to fail or finish by themselves and are then
  killed.
- At the deadline all ranks dump the stacks of all their threads, are killed, and `RankTimeout` carries the
  dumps.
- No rank outlives the call, nor the process that made it.
- Results and arguments travel by plain pickle; tensors are copied and never put in shared memory.

`RankPool` keeps one set of ranks for many calls (a hypothesis test, say).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import on_cpu

GRACE_S = 4.0
"""How long the other ranks may go on after the first failure, so that their own errors can be shown too."""

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.utils.checkpoint",
    "torch._inductor.pattern_matcher",  # with all that torch.compile imports at first: three seconds a rank
    "torch.distributed.checkpoint",
    "numpy",
    "matplotlib.pyplot",  # of examples/train_lm.py
    "pytest",
    "moecomm",
    "moecomm.nn",
    "tests.multirank.fabric_library",
    "tests.multirank.moe_cases",
    "tests.oracle",
]
"""Imported once by the fork server. What cannot be imported there fails in the rank, with its reason."""

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}

_PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def preload(*modules: str) -> None:
    """Has the fork server import these, too: for files of tests that need them, as they are collected."""
    PRELOAD.extend(modules)
    _context.set_forkserver_preload(PRELOAD)


class RankFailure(RuntimeError):
    """A rank raised or died. `ranks`: which, first failure first; `types`: the names of the exceptions."""

    def __init__(self, message: str, ranks: Sequence[int] = (), types: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.types = tuple(types)


class RankTimeout(RankFailure):
    """The deadline passed. The message holds the stacks of every rank that had not answered."""


@dataclass(frozen=True)
class Died:
    """Stands in the results for a rank that died and was allowed to. `exitcode` is negative for a signal."""

    exitcode: int


@dataclass(frozen=True)
class _Raised:
    type_name: str
    text: str


class RankPool:
    """A set of ranks that runs one function after another.

    After a failure the set is killed; the next call starts a fresh one, so tests that share a pool do not
    infect each other. Use as a context manager, or `close()` it. `environment` is added to that of the
    caller; by default it hides the GPUs, so that a communicator's default device is the CPU everywhere.
    """

    def __init__(
        self, world_size: int, *, timeout: float = 60.0, environment: Mapping[str, str] = NO_GPUS
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, at least 1 is needed")
        self.world_size = world_size
        self.timeout = timeout
        self.environment = dict(environment)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: Path | None = None
        self._shown: list[int] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranks_per_node(self) -> int | None:
        """The ranks per node that the environment sets; None: each communicator chooses."""
        given = self.environment.get("MOECOMM_RANKS_PER_NODE")
        return None if given is None else int(given)

    @property
    def on_cpu(self) -> bool:
        """Do its communicators work on the CPU backend unless told otherwise?"""
        return on_cpu({**os.environ, **self.environment})

    def __call__(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, may_die: Sequence[int] = ()
    ) -> list[Any]:
        """fn(rank, world_size, *args) on every rank; the results by rank, `Died` from one in `may_die`."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        if not self._processes:
            self._start()
        try:
            work = pickle.dumps((fn, args))
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send_bytes(work)
                except OSError:
                    self._fail(
                        [rank], {rank: _Raised("Died", f"died before the call, exit code {self._reap(rank)}")}
                    )
            results = self._collect(deadline, frozenset(may_die))
        except BaseException:
            self._kill()
            raise
        if any(isinstance(result, Died) for result in results):
            self._kill()
        else:
            self._show_output()
        return results

    def close(self) -> None:
        """Lets the ranks end by themselves, and kills what has not done so within a few seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        limit = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="moecomm-ranks-"))
        self._shown = [0] * self.world_size
        # Gloo otherwise looks the host name up, which machines without a network answer slowly or not at all.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment = {**os.environ, **self.environment}
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank_main,
                args=(theirs, rank, self.world_size, str(self._folder), environment, self.timeout),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, may_die: frozenset[int]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Raised] = {}
        order: list[int] = []
        limit = deadline
        while len(results) + len(failures) < self.world_size:
            open_ranks = [
                rank for rank in range(self.world_size) if rank not in results and rank not in failures
            ]
            waitables = {self._pipes[rank]: rank for rank in open_ranks}
            ready = multiprocessing.connection.wait(waitables, timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for waitable in ready:
                rank = waitables[waitable]
                try:
                    answer = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    code = self._reap(rank)
                    if rank in may_die:
                        results[rank] = Died(code)
                        continue
                    answer = _Raised("Died", f"the process died, {_describe_exit(code)}")
                if isinstance(answer, _Raised):
                    failures[rank] = answer
                    order.append(rank)
                    limit = min(limit, time.monotonic() + GRACE_S)
                else:
                    results[rank] = answer[0]
        if failures:
            self._fail(order, failures)
        if len(results) < self.world_size:
            self._time_out(sorted(set(range(self.world_size)) - set(results)))
        return [results[rank] for rank in range(self.world_size)]

    def _reap(self, rank: int) -> int:
        self._processes[rank].join(5.0)
        code = self._processes[rank].exitcode
        return -signal.SIGKILL if code is None else int(code)

    def _fail(self, order: list[int], failures: dict[int, _Raised]) -> None:
        silent = [r for r in range(self.world_size) if r not in failures and self._processes[r].is_alive()]
        stacks = self._dump_stacks(silent)
        self._kill(keep_folder=True)
        parts = [
            f"rank {rank} of {self.world_size}: {failures[rank].text}{self._output(rank)}" for rank in order
        ]
        if stacks:
            parts.append("stacks of the ranks that had not failed:\n" + stacks)
        self._remove_folder()
        raise RankFailure("\n\n".join(parts), order, [failures[rank].type_name for rank in order])

    def _time_out(self, late: list[int]) -> None:
        stacks = self._dump_stacks(late)
        self._kill(keep_folder=True)
        output = "".join(self._output(rank) for rank in late)
        self._remove_folder()
        raise RankTimeout(
            f"ranks {late} of {self.world_size} had not answered at the deadline\n{stacks}{output}", late
        )

    def _dump_stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            self._signal(rank, signal.SIGUSR1)
        text = ""
        for rank in ranks:
            path = self._file(rank, "stacks")
            limit = time.monotonic() + 1.0
            while time.monotonic() < limit and not (path.exists() and path.stat().st_size):
                time.sleep(0.02)
            time.sleep(0.05)
            body = path.read_text() if path.exists() else ""
            pid = self._processes[rank].pid
            text += f"--- rank {rank} (pid {pid})\n{body or 'no stack: stopped or not started'}\n"
        return text

    def _signal(self, rank: int, number: int) -> None:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self, keep_folder: bool = False) -> None:
        for rank in range(len(self._processes)):
            self._signal(rank, signal.SIGKILL)
        for process in self._processes:
            process.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None and not keep_folder:
            self._show_output()
            self._remove_folder()
        self._processes, self._pipes = [], []

    def _file(self, rank: int, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{rank}.{kind}"

    def _output(self, rank: int) -> str:
        path = self._file(rank, "output")
        text = path.read_text(errors="replace")[self._shown[rank] :] if path.exists() else ""
        return f"\n--- output of rank {rank}\n{text}" if text.strip() else ""

    def _show_output(self) -> None:
        for rank in range(self.world_size):
            text = self._output(rank)
            if text:
                print(text)
                self._shown[rank] = len(self._file(rank, "output").read_text(errors="replace"))

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    may_die: Sequence[int] = (),
    environment: Mapping[str, str] = NO_GPUS,
) -> list[Any]:
    """fn(rank, world_size, *args) on `world_size` fresh processes; the results by rank.

    `fn` is a module-level function; its arguments and results must pickle. Raises `RankFailure` when a rank
    raises or dies (a rank named in `may_die` gives `Died` instead), `RankTimeout` after `timeout` seconds.
    """
    with RankPool(world_size, timeout=timeout, environment=environment) as pool:
        return pool(fn, *args, may_die=may_die)


def shared_memory_names(marker: str = "moecomm") -> set[str]:
    """Names in /dev/shm that contain `marker`."""
    return {name for name in os.listdir("/dev/shm") if marker in name}


@contextlib.contextmanager
def no_shared_memory_left(patience: float = 15.0) -> Iterator[None]:
    """Asserts that the block leaves no name of ours in /dev/shm.

    Another test run on this machine may hold a name between creating and unlinking it, or until what it has
    killed is cleaned up, so a new name counts only if it stays for `patience` seconds.
    """
    before = shared_memory_names()
    yield
    limit = time.monotonic() + patience
    left = shared_memory_names() - before
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left &= shared_memory_names()
    assert not left, f"left in /dev/shm: {sorted(left)}"


@contextlib.contextmanager
def no_threads_left() -> Iterator[None]:
    """Makes starting a thread with a stack of the default size fail in this process, within the block."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a pthread_attr_t is smaller
    usual = ctypes.c_size_t()

    def set_stack(size: int) -> None:
        assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size)) == 0
        assert libc.pthread_setattr_default_np(attributes) == 0

    assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(usual)) == 0
    set_stack(1 << 47)  # more than there are addresses
    try:
        yield
    finally:
        set_stack(usual.value)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def new_store() -> Any:
    """Returns a TCPStore that rank 0 keeps for all ranks of the default group. The system chooses its port as
    it is taken: one that was looked up before may be another process's by then."""
    import torch.distributed as dist

    port = [0]
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    return store if dist.get_rank() == 0 else dist.TCPStore("127.0.0.1", port[0])


def _rank_main(
    pipe: Any, rank: int, world_size: int, folder: str, environment: dict[str, str], timeout: float
) -> None:
    gc.freeze()  # collections need not look at what the fork server has imported, and so copy its pages
    # The fork server ends when the test process does; this makes the ranks end with the fork server.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(f"{folder}/{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(f"{folder}/{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr, all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    joined = False
    while True:
        try:
            work = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if not work:
            break
        try:
            if not joined:
                store = dist.FileStore(f"{folder}/store", world_size)
                limit = datetime.timedelta(seconds=max(timeout, 1.0))
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
                joined = True
                # A rank that dies in its first lines would otherwise break the start of a slower one.
                store.set(f"joined/{rank}", "")
                store.wait([f"joined/{peer}" for peer in range(world_size)], limit)
            fn, args = pickle.loads(work)
            answer = pickle.dumps((fn(rank, world_size, *args),))
        except BaseException as error:
            answer = pickle.dumps(_Raised(type(error).__name__, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(answer)
        except OSError:
            os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
