"""The flags of moe_layer_perf.py, checked against each other. Imports nothing heavy, as options.py."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import options
from .flags import Parser
from .layer_presets import MULTIPLE, PRESETS, Preset, scaled
from .options import (
    at_least,
    exponents_named,
    find_ranks,
    find_threads,
    types_named,
    writable,
)
from .sizes import parse_size

PROGRAM = "moe_layer"
ROUTINGS = ("uniform", "zipf", "balanced")
COMPUTE, PLAIN, COMM = "compute only", "plain compute", "communication only"
SERIAL, OVERLAPPED, INTERLEAVED = "serial", "overlapped", "interleaved"
FIXED, GRAPH, GRAPHED = "fixed", "graph replay", "graphed step"
BASELINE, TUNED = "baseline", "baseline-tuned"
FP8_COMPUTE, FP8_OVERLAPPED, FP8_ANEW = "fp8 compute only", "fp8 overlapped", "fp8 weights anew"
WAYS = (COMPUTE, PLAIN, COMM, SERIAL, OVERLAPPED, INTERLEAVED, BASELINE, TUNED)
FP8_WAYS = (FP8_COMPUTE, FP8_OVERLAPPED, FP8_ANEW)  # not among all: GPUs that have them are few
GRAPH_WAYS = (COMPUTE, OVERLAPPED, FIXED, GRAPH, GRAPHED)  # at --graph-tokens
KEEPS = ("all", "rows", "nothing")
_DENSE = {"cpu": (512, 512, 512), "cuda": (16384, 7168, 4096)}

TEXT = """\
ways (each verified against an independent computation before it is timed):
  compute only        the layer's grouped products and activation on the rows that the routing brings to this
                      rank, as moecomm.nn computes them; no communication, no permutes
  plain compute       the same by torch alone: grouped_mm under autograd, SwiGLU of separate operations
  communication only  dispatch and combine, and for the backward redispatch and dispatch_backward
  serial              MoELayer(overlap=False): one after another
  overlapped          MoELayer; "overlapped, keep rows" and so on for other --keep
  interleaved         overlap.interleave: a forward beside the backward of the one before it, which together
                      are the step
  baseline            what a plain framework does: all_to_all_single (NCCL, on CPUs gloo) between torch sort
                      and index permutes, grouped_mm and SwiGLU under autograd
  baseline-tuned      the same with gathers for the backward of permutes and one fused weighted sum
  fp8 compute only    compute only and overlapped with the experts' products in fp8 (expert_precision of
  fp8 overlapped      MoEConfig); weights are quantised already, as for all microbatches of a step but one
  fp8 weights anew    the same, weights quantised in every call. These three only if --ways has them
  fixed               overlapped, with a fixed number of rows (--headroom)
  graph replay        fixed, forward and backward replayed from CUDA graphs
  graphed step        GraphedStep: dropless, with room for --headroom times a balanced routing's rows, what is
                      kept in a pool, and its check after each replay
All begin with the routing at hand: the router is in none of them.

columns:
  forward    microseconds of a forward: of each iteration the slowest rank, of those the median
  step       the same of a forward and a backward, with gradients of rows, routing weights and experts
  ratio      time / time of compute only, of forward and step
  TFLOP/s    of the step: flops of both products and their backwards, mean over ranks / time
  of dense   TFLOP/s / TFLOP/s of one dense product (--dense) in the same run
  exposed    part of a recorded step in which something communicates and nothing computes, mean over ranks
  memory     GB that a step takes at its peak on top of what was there: activations and gradients (GPUs)
  host       microseconds of CPU time to issue a step, waits for the GPU left out (GPUs)
  error      largest deviation from the independent computation, of a value's magnitude plus the root mean
             square of its row
  #wrong     values that deviate by more than the type's bound, summed over ranks; N/A with -c 0. Of fp8 ways:
             by more than once that scale, or all, where they deviate by a fifth of their size in the mean
"""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Everything the program was asked to do. Plain values only: it travels to the ranks and into the JSON
    file.
    """

    device: str  # cpu | cuda
    ranks: int
    presets: tuple[Preset, ...]
    tokens: int  # a rank
    graph_tokens: int  # 0: no graphs
    dtype: str
    routings: tuple[tuple[str, float | None], ...]  # kind, exponent of zipf
    ways: tuple[str, ...]
    keeps: tuple[str, ...]
    parts: tuple[int, ...]
    headroom: float
    dense: tuple[int, int, int]
    num_sms: int | None  # None: moecomm's own choice
    beside_sms: int | None  # likewise
    iters: int
    warmup: int
    checks: int
    records: int  # recorded passes
    host_calls: int
    json: str | None
    trace: str | None
    seed: int
    threads: int
    flush_bytes: int | None  # None: as large as the last-level cache
    timeout: float
    inject_error: bool
    commit: str | None
    command: str
    operation: str = PROGRAM
    baselines: tuple[str, ...] = ()  # none that the launcher would have to prepare

    @property
    def most_tokens(self) -> int:
        """Of any point of the run."""
        return max(self.tokens, self.graph_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Plain dict for the JSON record."""
        return asdict(self)


def parse(argv: Sequence[str] | None = None) -> LayerOptions:
    """Parses and checks the command line. Ends the program with one line and status 2 if it cannot be
    followed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return _checked(given, arguments)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


def _words(text: str, known: Sequence[str], flag: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if words == ("all",) and "all" not in known:
        return tuple(known)
    for word in words:
        if word not in known:
            raise ValueError(f"{flag} {word!r} is not known: use {', '.join(known)}")
    if not words:
        raise ValueError(f"{flag} is empty: use {', '.join(known)}")
    return words


def _presets(given: argparse.Namespace) -> tuple[Preset, ...]:
    named = [PRESETS[word] for word in _words(given.presets, tuple(PRESETS), "--presets")]
    divisor = at_least(given.scale, 1, "--scale")
    shape: dict[str, Any] = {
        flag: at_least(value, 1, f"--{flag}")
        for flag in ("hidden", "ffn", "experts", "topk")
        if (value := getattr(given, flag)) is not None
    }
    for flag in ("hidden", "ffn"):
        if shape.get(flag, MULTIPLE) % MULTIPLE:
            raise ValueError(f"--{flag} {shape[flag]} has to be a multiple of {MULTIPLE}")
    made = tuple(replace(scaled(preset, divisor), **shape) for preset in named)
    for preset in made:
        if preset.topk > preset.experts:
            raise ValueError(f"--topk {preset.topk} is more than the {preset.experts} experts")
    return made


def _routings(given: argparse.Namespace) -> tuple[tuple[str, float | None], ...]:
    found: list[tuple[str, float | None]] = []
    for kind in _words(given.routing, ROUTINGS, "--routing"):
        found += [(kind, each) for each in exponents_named(given.zipf)] if kind == "zipf" else [(kind, None)]
    return tuple(found)


def _parts(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--parts {text!r} has to be a number above 0, or a list of them: 1,2,4")
    return tuple(dict.fromkeys(map(int, words)))


def _dense(text: str | None, device: str) -> tuple[int, int, int]:
    if text is None:
        return _DENSE[device]
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--dense {text!r} has to be three sizes: 16384x7168x4096")
    rows, inner, columns = map(int, words)
    return rows, inner, columns


def _checked(given: argparse.Namespace, arguments: list[str]) -> LayerOptions:
    device = options.find_device(given.device)
    ranks = at_least(find_ranks(given.ranks, device), 1, "-g")
    dtypes = types_named(given.dtype)
    if len(dtypes) != 1:
        raise ValueError(f"-d {given.dtype} has to be one type")
    if given.timeout <= 0:
        raise ValueError(f"--timeout has to be above 0, got {given.timeout:g}")
    if not 1 <= given.headroom < 1e3:
        raise ValueError(f"--headroom has to be at least 1, got {given.headroom:g}")
    for name in ("num_sms", "beside_sms"):
        if getattr(given, name) is not None and device == "cpu":
            raise ValueError(f"--{name.replace('_', '-')} is for GPUs (--device cuda)")
    flush_bytes = None if given.flush is None else 0 if given.flush == "0" else parse_size(given.flush, 1)
    made = LayerOptions(
        device=device,
        ranks=ranks,
        presets=_presets(given),
        tokens=at_least(given.tokens, 1, "-b"),
        graph_tokens=at_least(given.graph_tokens, 0, "--graph-tokens"),
        dtype=dtypes[0],
        routings=_routings(given),
        ways=WAYS if given.ways == "all" else _words(given.ways, (*WAYS, *FP8_WAYS), "--ways"),
        keeps=_words(given.keep, KEEPS, "--keep"),
        parts=_parts(given.parts),
        headroom=given.headroom,
        dense=_dense(given.dense, device),
        num_sms=None if given.num_sms is None else at_least(given.num_sms, 2, "--num-sms"),
        beside_sms=None if given.beside_sms is None else at_least(given.beside_sms, 0, "--beside-sms"),
        iters=at_least(given.iters, 1, "-n"),
        warmup=at_least(given.warmup, 0, "-w"),
        checks=at_least(given.check, 0, "-c"),
        records=at_least(given.records, 1, "--records"),
        host_calls=at_least(given.host_calls, 0, "--host-calls"),
        json=writable(given.json, "-J"),
        trace=given.trace,
        seed=at_least(given.seed, 0, "--seed"),
        threads=find_threads(given.threads, ranks),
        flush_bytes=flush_bytes,
        timeout=given.timeout,
        inject_error=given.inject_error,
        commit=given.commit or os.environ.get("MOECOMM_BENCH_COMMIT"),
        command=shlex.join(["python", f"bench/{PROGRAM}_perf.py", *arguments]),
    )
    if made.inject_error and made.checks == 0:
        raise ValueError("--inject-error needs a check to catch it, and -c 0 turns checks off")
    return made


def _parser() -> Parser:
    parser = Parser(
        prog=f"{PROGRAM}_perf.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Times whole layers of moecomm, verified first, next to their baselines.",
        epilog=TEXT,
    )
    add = parser.add_argument
    add("-g", "--ranks", type=int, metavar="N", help="ranks to start (2; on GPUs as many as there are)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="GPUs if there are any (auto)")
    add("--presets", default="all", metavar="LIST", help=f"all, or a list of {', '.join(PRESETS)} (all)")
    add("--scale", type=int, default=1, metavar="N", help="divide hidden and ffn by N (1)")
    add("--hidden", type=int, metavar="H", help="instead of the presets' own")
    add("--ffn", type=int, metavar="F", help="instead of the presets' own: inner width of an expert")
    add("--experts", type=int, metavar="E", help="instead of the presets' own")
    add("--topk", type=int, metavar="K", help="instead of the presets' own")
    add("-b", "--tokens", type=int, default=4096, metavar="T", help="tokens a rank (4096)")
    add(
        "--graph-tokens",
        type=int,
        default=512,
        metavar="T",
        help="tokens a rank of graph replay beside eager calls; 0: none (512)",
    )
    add("-d", "--dtype", default="bfloat16", metavar="TYPE", help="of rows and weights (bfloat16)")
    add("--routing", default="uniform", metavar="LIST", help=f"a list of {', '.join(ROUTINGS)} (uniform)")
    add("--zipf", default="1", metavar="S", help="exponent of the zipf routing, or a list S,S (1)")
    add(
        "--ways",
        default="all",
        metavar="LIST",
        help=f"all, or a list of {', '.join((*WAYS, *FP8_WAYS))} (all, without the last three)",
    )
    add(
        "--keep",
        default="all",
        metavar="LIST",
        help="overlapped with each of these kept for the backward: all,rows,nothing (all)",
    )
    add(
        "--parts",
        default="1",
        metavar="LIST",
        help="overlapped with rows in each of these numbers of parts (1)",
    )
    add(
        "--headroom",
        type=float,
        default=1.25,
        metavar="X",
        help="fixed rows / rows needed (1.25)",
    )
    add(
        "--dense",
        metavar="MxKxN",
        help="the dense product that shares are of (16384x7168x4096; on the CPU 512x512x512)",
    )
    add("--num-sms", type=int, metavar="N", help="SMs of one operation of moecomm (its own choice)")
    add(
        "--beside-sms",
        type=int,
        metavar="N",
        help="SMs of what travels beside products, 0: nothing does (its own choice)",
    )
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed iterations (20)")
    add("-w", "--warmup", type=int, default=5, metavar="N", help="untimed iterations before them (5)")
    add(
        "-c",
        "--check",
        type=int,
        default=1,
        metavar="N",
        help="verified steps, new data each; 0: none (1)",
    )
    add("--records", type=int, default=5, metavar="N", help="recorded steps of overlapped (5)")
    add("--host-calls", type=int, default=5, metavar="N", help="steps to time the CPU with (GPUs, 5)")
    add("-J", "--json", metavar="FILE", help="write everything measured as JSON")
    add("--trace", metavar="DIR", help="write the recorded timelines as Chrome traces and pictures")
    add("--seed", type=int, default=20240817, metavar="N", help="seed of data and routing")
    add("--threads", type=int, metavar="N", help="compute threads a rank (cores // ranks, at least 1)")
    add(
        "--flush",
        metavar="BYTES",
        help="bytes rewritten before a call (L3; GPUs: 256M)",
    )
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds a wait for a peer may take (120)")
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    add("--inject-error", action="store_true", help="corrupt one value of each result, to see #wrong move")
    return parser
