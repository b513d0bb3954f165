"""Processes: starts them if torchrun did not, and joins them into a group.

A `moecomm.parallel.ParallelFolding` (docs/folding.md) lays ranks out with neighbours in one EP group. With 4
ranks and ep=2, ranks 0 and 1 together hold all experts, and so do 2 and 3; ranks 0 and 2 hold the same
experts and so share their gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# If an optimizer imported this module later, it would keep the process group alive until the process ends,
# and gloo's threads might then crash it (seen with torch 2.13).
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

import moecomm
from lm.errors import UsageError
from moecomm.parallel import Coordinates, ParallelFolding

SHUTDOWN_SECONDS = 120  # time for ranks to write their last checkpoint
PR_SET_PDEATHSIG = 1


def default_ranks(device: str, batch: int | None = None) -> int:
    """Returns the number of ranks: one per GPU, on as many GPUs as can share a batch evenly. Without GPUs it
    is two, so that tokens travel between processes even on the smallest machine.

    Raises UsageError if the requested device does not exist.
    """
    if not uses_cuda(device):
        return 2
    gpus = torch.cuda.device_count()
    return gpus if batch is None else max(count for count in range(1, gpus + 1) if batch % count == 0)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Starts this program on `ranks` ranks, like torchrun; returns the exit code for the shell. A signal ends
    this process."""
    logging.disable(logging.ERROR)  # ranks print their own errors; all else is printed below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"moecomm-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a number, since a bare machine may not know the name localhost
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.11 does not have this setting yet
        config.shutdown_timeout = SHUTDOWN_SECONDS
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except SignalException as stopped:
        _end_now(128 + int(stopped.sigval))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        # 2: the command line was wrong, and a rank has printed why; 141: nobody reads the output.
        if failure.exitcode not in (2, 141):
            program = os.path.basename(arguments[0])
            print(f"{program}: rank {rank} failed with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def _end_now(code: int) -> NoReturn:
    """Ends this process with `code`, without waiting for its threads. After a signal torch leaves a thread
    running that keeps its rendezvous alive. If it is in a call of the store when the interpreter ends, the
    process crashes (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    folding: ParallelFolding

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Coordinates:
        """This rank's position in the grids of the folding."""
        return self.folding.coordinates(self.rank)


TIMEOUT = datetime.timedelta(minutes=10)
"""The deadline of collectives. A rank may compile, or write a checkpoint, for minutes; gloo's default
deadline is half an hour."""


@contextlib.contextmanager
def joined(folding: ParallelFolding, device: str) -> Iterator[Ranks]:
    """Joins the ranks that torchrun (or `launch`) started, as many as the folding has, and leaves them at the
    end."""
    with process_group(device) as place:
        yield Ranks(dist.get_rank(), dist.get_world_size(), place, folding)


@contextlib.contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Joins the process group of all ranks, yields this rank's device, and leaves the group at the end."""
    follow_parent()
    if uses_cuda(device):
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
        torch.set_float32_matmul_precision("high")
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place, timeout=TIMEOUT, **_own_store())
    else:
        place = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo", timeout=TIMEOUT, **_own_store())
    try:
        yield place
    finally:
        dist.destroy_process_group()
        _free_groups()


def _free_groups() -> None:
    """Frees groups that have been destroyed. Caches of DTensor, which FSDP2 fills, hold their meshes: gloo's
    threads would go on to the end of the process, and might then crash it (seen with torch 2.13)."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed"):
            each.cache_clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for place, name in (
        (redistribute, "clear_redistribute_planner_cache"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
    ):
        if (clear := getattr(place, name, None)) is not None:  # other versions of torch may lack it
            clear()
    gc.collect()


def _own_store() -> dict[str, Any]:
    """Returns the arguments of init_process_group for ranks that torchrun has restarted on one host: a store
    without the addresses of the previous ranks, to which torch would otherwise connect."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        return {}  # with several hosts their restart counts may differ
    store, rank, world = next(rendezvous("env://"))
    return {"store": PrefixStore(f"restart {restarts}", store), "rank": rank, "world_size": world}


def describe(folding: ParallelFolding) -> str:
    """Describes the layout of ranks: "8 = tp 2 x cp 2 x dp 2; experts etp 1 x ep 4 x edp 2". With pipeline
    stages both grids end with "x pp 2"."""
    stages = ("pp",) if folding.pp > 1 else ()
    dense, experts = (
        " x ".join(f"{name} {folding.size(name)}" for name in (*names, *stages))
        for names in (("tp", "cp", "dp"), ("etp", "ep", "edp"))
    )
    return f"{folding.world_size} = {dense}; experts {experts}"


def follow_parent() -> None:
    """Asks Linux to end this rank when its launcher dies, even by SIGKILL, so that no rank stays behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def uses_cuda(device: str) -> bool:
    """Returns whether ranks compute on GPUs. Raises UsageError if `device` requires GPUs and there are
    none."""
    available = "cuda" in moecomm.available_devices()
    if device == "cuda" and not available:
        raise UsageError(
            f"--device cuda: moecomm runs here on {', '.join(moecomm.available_devices())} alone"
        )
    return available and device != "cpu"
