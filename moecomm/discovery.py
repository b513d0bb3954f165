"""What this machine has, for `python -m moecomm`. Looks only; changes nothing and needs no GPU."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from moecomm import _C, cuda_driver
from moecomm.backends.cpu import default_threads
from moecomm.cuda_driver import DriverError, Gpu
from moecomm.errors import Unsupported
from moecomm.version import __version__

_GIB = 1 << 30


def _command(arguments: list[str]) -> list[str]:
    """Lines of a tool's output, or none if it is missing or fails."""
    if shutil.which(arguments[0]) is None:
        return []
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def versions() -> Iterator[tuple[str, str]]:
    """(name, version) of everything that matters in a bug report."""
    yield "moecomm", __version__
    yield "torch", torch.__version__
    yield "python", sys.version.split()[0]
    yield "compiler", f"g++ or clang++ {_C.compiler}"
    yield (
        "CUDA part",
        f"built with {_C.cuda_version}" if _C.cuda_version else "not built (no toolkit at build time)",
    )
    yield (
        "cuda-bindings",
        cuda_driver.bindings_version() or "not installed (CUDA tensors need it: pip install cuda-bindings)",
    )
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"


def processors() -> Iterator[tuple[str, str]]:
    """(name, fact) of the host's cores and memory."""
    cores = len(os.sched_getaffinity(0))
    yield "CPU", f"{_cpu_model()}, {cores} cores for this process"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB"
    yield "/dev/shm", f"{_C.shm_available_bytes() / _GIB:.1f} GiB free for windows"
    yield "CPU backend", _C.cpu_heuristics(1)


def gpus() -> Iterator[tuple[str, str]]:
    """(name, fact) of each GPU and of the links between them."""
    if not torch.cuda.is_available():
        seen = _command(["nvidia-smi", "-L"])
        yield (
            "GPUs",
            f"none that torch {torch.__version__} can use"
            + (f"; nvidia-smi lists {len(seen)}" if seen else ""),
        )
        return
    count = torch.cuda.device_count()
    for index in range(count):
        info = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{info.name}, {info.total_memory / _GIB:.0f} GiB, {info.multi_processor_count} SMs, "
            f"compute capability {info.major}.{info.minor}",
        )
    for index, gpu in enumerate(_driver_gpus()):
        yield f"GPU {index} shares", f"memory as {_handle_types(gpu)}"
    for first in range(count):
        reached = [str(i) for i in range(count) if i != first and torch.cuda.can_device_access_peer(first, i)]
        if count > 1:
            yield f"GPU {first} reaches", ", ".join(reached) or "no other GPU"
    for line in _command(["nvidia-smi", "nvlink", "--status"]):
        if line.strip():
            yield "link", line.strip()


def _driver_gpus() -> list[Gpu]:
    """By ordinal, or none without cuda-bindings or a driver."""
    try:
        driver = cuda_driver.load()
        return [driver.gpu(device) for device in driver.devices()]
    except (Unsupported, DriverError):
        return []


def _handle_types(gpu: Gpu) -> str:
    offered = ["file descriptors (ranks of this host)"] if gpu.posix_fd else []
    if gpu.fabric:
        offered.append("fabric handles (NVLink domain of several hosts, where IMEX is set up)")
    return " and ".join(offered) if gpu.virtual_memory and offered else "nothing that other processes can map"


def fabric() -> Iterator[tuple[str, str]]:
    """(name, fact) of libfabric and its providers."""
    library = ctypes.util.find_library("fabric")
    yield "libfabric", library or "not found"
    providers = sorted(
        {line.split(":", 1)[1].strip() for line in _command(["fi_info"]) if line.startswith("provider:")}
    )
    if providers:
        yield "fabric providers", ", ".join(providers)
    yield "fabric transport", "not in this version: all ranks of a communicator share one host"


def transports(local_ranks: int) -> Iterator[tuple[str, str]]:
    """(peer, transport) as rank 0 of `local_ranks` ranks on this host would use them."""
    threads = default_threads(local_ranks)
    yield (
        "rank 0 (itself)",
        f"no copy through the window; {threads} thread{'s' if threads > 1 else ''} a rank",
    )
    for peer in range(1, local_ranks):
        yield f"rank {peer}", "shared memory (POSIX, /dev/shm), CPU tensors"
        if torch.cuda.is_available():
            yield f"rank {peer}", f"{_gpu_transport(peer % torch.cuda.device_count())}, CUDA tensors"


def _gpu_transport(peer: int) -> str:
    """From GPU 0, which rank 0 has, to the GPU with that ordinal."""
    if _C.cuda_version is None:
        return "none: the CUDA part is not built"
    if cuda_driver.bindings_version() is None:
        return "none: cuda-bindings is missing (pip install cuda-bindings)"
    if peer == 0:
        return "the same GPU: CUDA symmetric memory"
    if not torch.cuda.can_device_access_peer(0, peer):
        return f"none: GPU 0 and GPU {peer} have no peer access to each other"
    return "NVLink/PCIe peer access: CUDA symmetric memory"
