"""What run_all.py --nodes runs: dispatch and combine between nodes that are emulated on this host, and the
two things that hold them, what a provider gives by itself and what the proxy takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Run

PROVIDERS = ("tcp", "shm")
_LARGE_ITERS, _LARGE_WARMUP = 7, 2  # most iterations where one takes seconds
_RAW_SIZES = (64, 4096, 65536, 1 << 19, 1 << 20, 1 << 22)


@dataclass(frozen=True)
class NativeRun:
    """A run of a C++ program that stands by itself."""

    name: str
    program: str
    flags: tuple[str, ...]
    quick: bool = False


def native_plan(providers: Sequence[str]) -> list[NativeRun]:
    """The providers over message sizes, and the proxy."""
    sizes = ("--both", "--sizes", ",".join(map(str, _RAW_SIZES)))
    raw = [NativeRun(f"nodes-raw-{each}", "fabric_raw", ("--provider", each, *sizes)) for each in providers]
    return [*raw, NativeRun("nodes-proxy", "proxy_rate", (), quick=True)]


def nodes_cpu_plan(providers: Sequence[str], iters: int, warmup: int) -> list[Run]:
    """CPU ranks: 1024 tokens of 2048 on two nodes in every form first, then more bytes, then more ranks. What
    is not about the provider is run with the first one.
    """
    usual = ("--baselines", "fabric,fabric-cold,memcpy,gloo,gloo-tuned,gloo-rows")
    alone = ("--baselines", "fabric")
    shape = ("--hidden", "2048", "-d", "bfloat16", "--experts", "64", "--topk", "8")
    point, fewer = ("-b", "1024", *shape), ("-b", "512", *shape)
    large = ("-b", "4096", "--hidden", "7168", "-d", "bfloat16", "--experts", "256", "--topk", "8")
    sweep = ("-b", "16", "-e", "4096", "-f", "4", *shape)
    exchange = ("-b", "2048", "--hidden", "2048", "-d", "bfloat16", "--baselines", "fabric,gloo")
    steady = ("--device", "cpu", "-n", str(iters), "-w", str(warmup))
    few = ("--device", "cpu", "-n", str(min(iters, _LARGE_ITERS)), "-w", str(min(warmup, _LARGE_WARMUP)))
    first = providers[0]
    runs = []
    for each in providers:
        two = f"two nodes of one rank, {each}"
        runs += _both((2, 1), each, (*point, *usual, *steady), two, quick=True)
        limited = (*point, "--limit-nodes", "1", *alone, *steady)
        runs += _both((2, 1), each, limited, f"{two}, a token on one node", name="-limit")
        runs.append(_run("alltoall", (2, 1), each, (*exchange, *steady), f"{two}, raw exchange"))
    runs += _both((2, 1), first, (*sweep, *alone, *steady), "sweep over tokens", name="-tokens")
    large_flags = (*large, "--baselines", "fabric,gloo-rows", *few)
    runs += _both((2, 1), first, large_flags, "more tokens, longer rows", name="-large")
    for each in providers:
        runs += _both((2, 2), each, (*fewer, *usual, *steady), f"two nodes of two ranks, {each}")
        runs += _both((4, 1), each, (*fewer, *usual, *steady), f"four nodes of one rank, {each}")
    limited = (*fewer, "--limit-nodes", "2", *alone, *steady)
    return runs + _both((4, 1), first, limited, "four nodes of one rank, a token on two", name="-limit")


def nodes_cuda_plan(gpus: int, providers: Sequence[str], iters: int, warmup: int) -> list[Run]:
    """GPUs as two nodes: 4096 tokens of 7168, top-8, then what is around it."""
    nodes, first = (2, gpus // 2), providers[0]
    shape = ("--hidden", "7168", "-d", "bfloat16", "--experts", str(256 // gpus * gpus), "--topk", "8")
    point, sweep = ("-b", "4096", *shape), ("-b", "8", "-e", "4096", "-f", "8", *shape)
    beside_nccl = ("--baselines", "fabric,fabric-cold,fabric-one,memcpy,nccl,nccl-tuned,nccl-rows")
    alone = ("--baselines", "fabric")
    steady = ("--device", "cuda", "-n", str(iters), "-w", str(warmup), "--timeout", "60")
    runs = []
    for each in providers:
        flags = (*point, *beside_nccl, *steady)
        runs += _both(nodes, each, flags, f"two nodes, {each}", "cuda-", quick=each == first)
    limited = (*point, "--limit-nodes", "1", *alone, *steady)
    runs += _both(nodes, first, limited, "two nodes, a token on one", "cuda-", "-limit")
    return runs + _both(nodes, first, (*sweep, *alone, *steady), "sweep over tokens", "cuda-", "-tokens")


def _both(
    nodes: tuple[int, int],
    provider: str,
    flags: Sequence[str],
    about: str,
    prefix: str = "",
    name: str = "",
    quick: bool = False,
) -> list[Run]:
    return [
        _run(operation, nodes, provider, flags, about, prefix, name, quick)
        for operation in ("dispatch", "combine")
    ]


def _run(
    operation: str,
    nodes: tuple[int, int],
    provider: str,
    flags: Sequence[str],
    about: str,
    prefix: str = "",
    name: str = "",
    quick: bool = False,
) -> Run:
    """One run on (nodes, ranks of each)."""
    count, local = nodes
    where = ("-g", str(count * local), "--ranks-per-node", str(local), "--fabric-provider", provider)
    whole = f"{prefix}nodes-{operation}-{count}x{local}-{provider}{name}"
    return Run(whole, operation, (*flags, *where), about, quick)
