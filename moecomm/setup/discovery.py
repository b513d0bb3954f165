"""Collects facts about this machine, for `python -m moecomm`. It changes nothing and needs no GPU."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterator

import torch

import moecomm._C as _C
from moecomm.device import cuda_driver
from moecomm.device.cuda_driver import DriverError
from moecomm.env import Env, read_env
from moecomm.errors import InvalidArgument, MoecommError, Unsupported
from moecomm.setup.devices import default_threads, why_no_cuda
from moecomm.setup.handshake import open_rail
from moecomm.setup.memory_plan import window_shape
from moecomm.setup.topology import find_nodes
from moecomm.setup.version import __version__, version_of

_GIB = 1 << 30


def _command(arguments: list[str]) -> list[str]:
    """Returns the lines of a tool's output; none if it is missing or fails."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


def versions() -> Iterator[tuple[str, str]]:
    """Yields (name, version or fact) of all software that matters for a bug report."""
    yield "moecomm", __version__
    yield "torch", torch.__version__
    yield "python", sys.version.split()[0]
    yield "compiler", f"g++ or clang++ {_C.compiler}"
    part = f"built with {_C.cuda_version}" if _C.cuda_version else "not built (no toolkit or no GPU then)"
    yield "CUDA part", part
    missing = "not installed (CUDA tensors need it: pip install cuda-bindings)"
    yield "cuda-bindings", cuda_driver.bindings_version() or missing
    missing = "not installed (faster on Hopper: pip install 'moecomm[cuda]')"
    yield "quack-kernels", version_of("quack-kernels") or missing
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"


def left_out() -> Iterator[str]:
    """Yields a line for each feature that this build or machine lacks, with the way to add the feature."""
    if (missing := _C.fabric_missing()) is not None:
        yield f"links between nodes: left out, {missing}"
    if torch.cuda.is_available():
        reason = why_no_cuda()
        if _C.cuda_version is None:
            reason = (
                "moecomm was built without a CUDA toolkit: put nvcc on PATH, or set CUDACXX, and build again"
            )
    else:
        kernels = "without their kernels (CMAKE_ARGS=-DMOECOMM_CUDA=ON builds them where no GPU is)"
        kernels = "with their kernels" if _C.cuda_version else kernels
        reason = f"torch {torch.__version__} finds none here; moecomm was built {kernels}"
    if reason is not None:
        yield f"GPUs: left out, {reason}"


def processors() -> Iterator[tuple[str, str]]:
    """Yields (name, fact) about the host's cores and memory."""
    cores = len(os.sched_getaffinity(0))
    yield "CPU", f"{_cpu_model()}, {cores} cores for this process"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB"
    try:
        room = f"{_C.shm_available_bytes() / _GIB:.1f} GiB free for windows"
    except Unsupported as error:
        room = f"none: {error}"
    yield "/dev/shm", room
    yield "CPU backend", _C.cpu_heuristics(1)


def gpus() -> Iterator[tuple[str, str]]:
    """Yields (name, fact) about each GPU and the links between GPUs."""
    if not torch.cuda.is_available():
        seen = _command(["nvidia-smi", "-L"])
        listed = f"; nvidia-smi lists {len(seen)}" if seen else ""
        yield "GPUs", f"none that torch {torch.__version__} can use{listed}"
        return
    count = torch.cuda.device_count()
    for index in range(count):
        info = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{info.name}, {info.total_memory / _GIB:.0f} GiB, {info.multi_processor_count} SMs, "
            f"compute capability {info.major}.{info.minor}",
        )
    try:
        driver = cuda_driver.load()
        by_ordinal = [driver.gpu(device) for device in driver.devices()]
    except (Unsupported, DriverError):  # no cuda-bindings, or no driver
        by_ordinal = []
    for index, gpu in enumerate(by_ordinal):
        shares = gpu.virtual_memory and gpu.posix_fd
        how = "file descriptors (ranks of this host)" if shares else "nothing that other processes can map"
        yield f"GPU {index} shares", f"memory as {how}"
    for first in range(count):
        reached = [str(i) for i in range(count) if i != first and torch.cuda.can_device_access_peer(first, i)]
        if count > 1:
            yield f"GPU {first} reaches", ", ".join(reached) or "no other GPU"
    for line in _command(["nvidia-smi", "nvlink", "--status"]):
        if line.strip():
            yield "link", line.strip()


def fabric() -> Iterator[tuple[str, str]]:
    """Yields (name, fact) about libfabric, its providers, and the network that ranks of this host would use
    between nodes."""
    missing = _C.fabric_missing()
    yield "libfabric", missing or _C.fabric_version()
    if missing is not None:
        yield "between nodes", "nothing: the ranks of a communicator have to share a host"
        return
    try:
        yield "fabric providers", _C.fabric_offers()
        network, address = _open_network(read_env())
    except MoecommError as error:
        yield "between nodes", f"nothing: {error}"
        return
    names = [f"MOECOMM_FABRIC_{name}" for name in ("PROVIDER", "INTERFACE", "LANES")]
    asked = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    if asked:
        network += f", as {' and '.join(asked)} {'asks' if len(asked) == 1 else 'ask'}"
    if torch.cuda.is_available() and why_no_cuda() is None:
        network += "; CUDA tensors through pinned host memory, by the NICs nearest to each GPU"
    yield "between nodes", network
    yield "control links", f"TCP on {address}, ports that the system chooses"


def _open_network(env: Env) -> tuple[str, str]:
    """Opens a network endpoint and a control link; returns (the network with which a rank sends, the address
    on which its control links listen). Raises the errors of building a communicator."""
    shape = window_shape(ranks=1, top_k=1, hidden=4, max_tokens=1, dtype=torch.float32)
    native = _C.Communicator(shape=shape, rank=0, num_experts=1, threads=1, timeout=10.0, host_ranks=1)
    try:
        native.connect([""], [os.getpid()])
        rail = open_rail(native, secrets.token_bytes(16), env)
        endpoint = rail.endpoint
        native.connect_rail(rail, [rail.endpoint_addresses], [endpoint])
        return native.network()[0], endpoint.rpartition(":")[0]
    finally:
        native.close()


def transports(
    ranks: int, ranks_per_node: int | None = None, host_ranks: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (peer, transport): how rank 0 of `ranks` ranks would reach each rank, itself included.
    ranks_per_node: None is MOECOMM_RANKS_PER_NODE, or all ranks; host_ranks: those on the host of rank 0, or
    None for all."""
    try:
        nodes = find_nodes([""] * ranks, ranks_per_node or read_env().ranks_per_node)
    except InvalidArgument as error:
        yield "none", str(error)
        return
    threads = default_threads(host_ranks or ranks)
    proxy = ", and a proxy for the network" if nodes.nodes > 1 else ""
    own = f"no copy through the window; {threads} thread{'s' if threads > 1 else ''} a rank{proxy}"
    yield "rank 0 (itself)", own
    network = _network_text() if nodes.nodes > 1 else ""
    on_gpus = torch.cuda.is_available()
    missing = why_no_cuda() if on_gpus else None
    for peer in range(1, ranks):
        node = nodes.node_of(peer)
        if node == 0:
            cpu = "shared memory (POSIX, /dev/shm)"
            gpu = _gpu_transport(peer % torch.cuda.device_count()) if on_gpus else ""
        else:
            rail, where = nodes.rail(0)[node], f"node {node}: "
            works = not network.startswith("none: ")
            cpu = where + network + (f" by way of rank {rail}" if works and peer != rail else "")
            gpu = cpu + " and pinned host memory" * works
        yield f"rank {peer}", f"{cpu}, CPU tensors"
        if on_gpus:
            reason = "" if node == 0 else f"node {node}: "
            yield f"rank {peer}", f"{gpu if missing is None else f'{reason}none: {missing}'}, CUDA tensors"


def _network_text() -> str:
    missing = _C.fabric_missing()
    if missing is not None:
        return f"none: {missing}"
    try:
        return _open_network(read_env())[0]
    except MoecommError as error:
        return f"none: {error}"


def _gpu_transport(peer: int) -> str:
    """Returns the transport from GPU 0, which rank 0 has, to the GPU with ordinal `peer`."""
    if peer == 0:
        return "the same GPU: CUDA symmetric memory"
    if not torch.cuda.can_device_access_peer(0, peer):
        return f"none: GPU 0 and GPU {peer} have no peer access to each other"
    return "NVLink/PCIe peer access: CUDA symmetric memory"
