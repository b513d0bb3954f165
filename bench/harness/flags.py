"""The flags of the programs and the text of --help."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

_CEILINGS = ("fabric", "fabric-cold", "fabric-one", "sm-push", "copy-engine", "memcpy")
BASELINES = {
    "cpu": {
        "dispatch": ("fabric", "fabric-cold", "fabric-one", "memcpy", "gloo", "gloo-tuned", "gloo-rows"),
        "combine": ("fabric", "fabric-cold", "fabric-one", "memcpy", "gloo", "gloo-tuned", "gloo-rows"),
        # Nothing around the bare exchange to tune.
        "alltoall": ("fabric", "fabric-cold", "fabric-one", "memcpy", "gloo"),
    },
    "cuda": {
        "dispatch": (*_CEILINGS, "nccl", "nccl-tuned", "nccl-rows", "torch-symm"),
        "combine": (*_CEILINGS, "nccl", "nccl-tuned", "nccl-rows", "torch-symm"),
        "alltoall": (*_CEILINGS, "nccl"),
    },
}
# What "all" leaves out: torch-symm takes all symmetric memory of its process to NVSHMEM, which is another
# environment for the rest; gloo-rows is there to try on a CPU what nccl-rows does on GPUs.
# fabric-one says nothing that fabric does not, where moecomm has one lane.
ON_REQUEST = ("torch-symm", "gloo-rows", "fabric-one")
# What "all" leaves out on one node.
BETWEEN_NODES = ("fabric", "fabric-cold", "fabric-one")

KEPT_HANDLE = ("plain", "weighted")

BANDWIDTH_TEXT = """\
sizes:
  A bare number counts tokens per rank: -b 2048. A number with a suffix B, K, M or G (powers of 1024) is bytes
  of input rows per rank, as in nccl-tests: -b 32M. Bytes are rounded down to whole tokens, at least one.

columns:
  size     bytes of input rows a rank holds: tokens x hidden x bytes of the type
  count    tokens a rank holds
  path     moecomm, or a baseline
  time     microseconds of one call: of each iteration the slowest rank, of those the median
  min      the smallest of the same
  algbw    useful bytes / time, mean over ranks, GB/s (1e9). {useful}
  busbw    remote bytes / time, mean over ranks, GB/s. Remote is one row per (token, other rank that owns one
           of its experts): the least that has to leave a rank, and the same number for every path,
           whatever the path really sends.
  wire     (several nodes) bytes of the rows that went to other nodes / time, mean over ranks, GB/s
  sent     (several nodes) all bytes that went to other nodes / the least that the routing needs: one row per
           (token, other node that has one of its experts)
  puts     (several nodes) messages to other nodes, mean over ranks
  ceiling  time of the ceiling / time. GPUs: sm-push, the same remote rows moved by bulk copies and nothing
           else; several nodes: fabric, the least bytes at what the provider gives by itself; else memcpy
  SMs      (GPUs) multiprocessors at work, where that is known; 0: copy engines
  host     (GPUs) microseconds of CPU time to issue a call, waits for the GPU left out
  #wrong   values that differ from an independent computation, summed over ranks; N/A with -c 0
"""

USEFUL_TEXT = {
    "dispatch": "Useful are the bytes of the real\n           rows in the result (padding not counted).",
    "combine": "Useful are the bytes of the real\n           rows summed (those that dispatch wrote).",
    "alltoall": "Useful are the bytes of the rows\n           that a rank ends up with.",
}


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and nothing else."""

    def error(self, message: str) -> NoReturn:
        # Under torchrun every rank parses the same line; one of them speaks.
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def build_parser(operation: str, prog: str) -> argparse.ArgumentParser:
    """The parser of one program; `alltoall` has no routing flags (its routing is what makes it an
    all-to-all).
    """
    parser = Parser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description=f"Times {operation} of moecomm, verified first, next to its baselines.",
        epilog=BANDWIDTH_TEXT.format(useful=USEFUL_TEXT[operation]),
    )
    add = parser.add_argument
    add(
        "-g",
        "--ranks",
        type=int,
        metavar="N",
        help="ranks to start on this host (2; on GPUs as many as there are); under torchrun its own count",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the tensors are; auto: on GPUs if there are any and moecomm serves them (auto)",
    )
    add(
        "-b",
        "--min",
        default="2048",
        metavar="SIZE",
        help="first size per rank: tokens, or bytes with K/M/G (2048)",
    )
    add("-e", "--max", metavar="SIZE", help="last size per rank (the first)")
    add("-i", "--increment", metavar="SIZE", help="add this between sizes")
    add("-f", "--factor", type=float, metavar="X", help="multiply by this between sizes (2)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed iterations (20)")
    add("-w", "--warmup", type=int, default=5, metavar="N", help="untimed iterations before them (5)")
    add(
        "-c",
        "--check",
        type=int,
        default=1,
        metavar="N",
        help="verified calls before timing, new data each; 0: none (1)",
    )
    add(
        "-d",
        "--dtype",
        default="float32",
        metavar="TYPE",
        help="float32, bfloat16, float16, float64, a list a,b or all",
    )
    add("-J", "--json", metavar="FILE", help="write everything measured as JSON")
    add("--plot", metavar="FILE.png", help="draw algbw over size")
    add("--hidden", type=int, default=4096, metavar="H", help="values per row (4096)")
    if operation != "alltoall":
        add("--experts", default="32", metavar="E", help="experts over all ranks, or a list E,E (32)")
        add("--topk", metavar="K", help="experts per token, or a list K,K (4; of a trace: its own)")
        add("--layout", choices=("expert", "rank"), default="expert", help="result layout (expert)")
        add("--alignment", type=int, default=1, metavar="A", help="rows an expert's group is padded to (1)")
        add(
            "--capacity",
            metavar="ROWS",
            help="fixed result rows, or auto: what the fullest rank needs (exact sizes)",
        )
        add(
            "--routing",
            nargs="+",
            default=["uniform"],
            metavar="HOW",
            help="uniform | zipf | one-hot | balanced | trace FILE (.npy or .npz with top-k ids)",
        )
        add("--zipf", default="1", metavar="S", help="exponent of the zipf routing, or a list S,S (1.0)")
        add(
            "--limit-nodes",
            type=int,
            metavar="M",
            help="a token's experts are on at most M nodes, those that score highest (uniform, zipf)",
        )
        add("--wire", choices=("fp8",), help="rows travel as e4m3 with scales (GPUs); default: in their type")
        add(
            "--no-dequantize",
            action="store_true",
            help="with --wire fp8: dispatch hands on (data, scales) as they arrived",
        )
    if operation == "dispatch":
        add(
            "--kept-handle",
            nargs="?",
            const="plain",
            choices=KEPT_HANDLE,
            help="the dispatch along the handle of an earlier one: combine's backward; weighted: of a "
            "combine with weights, which multiplies rows and makes the weights' gradients (plain)",
        )
    add(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks that share memory; fewer than there are: nodes emulated on this host, over libfabric "
        "(found by the hosts)",
    )
    add(
        "--fabric-provider",
        metavar="NAME",
        help="libfabric provider between nodes: tcp, shm, verbs, ... (the best one found)",
    )
    add(
        "--fabric-lanes",
        type=int,
        metavar="N",
        help="endpoints of a rank towards other nodes (moecomm's own choice)",
    )
    add("--num-sms", metavar="N", help="SMs of one operation (GPUs), or a list N,N (moecomm's own choice)")
    add("--graph", action="store_true", help="replay the call from a CUDA graph; needs --capacity (GPUs)")
    add("--host-calls", type=int, default=20, metavar="N", help="calls to time the CPU with (GPUs, 20)")
    add(
        "--input",
        choices=("tensor", "window"),
        default="tensor",
        help="rows come from an ordinary tensor, or already lie in the window (Communicator.empty_input)",
    )
    add(
        "--ids",
        choices=("fresh", "same"),
        default="fresh",
        help="timed dispatches get new ids each, as in training, or the same again, as when recomputing",
    )
    add(
        "--baselines",
        nargs="?",
        const="all",
        default="",
        metavar="LIST",
        help="also run baselines: all, or a list of "
        + "; ".join(f"{', '.join(names[operation])} ({device})" for device, names in BASELINES.items())
        + f". all leaves out {', '.join(ON_REQUEST)}, and on one node {', '.join(BETWEEN_NODES)}",
    )
    add("--baselines-only", action="store_true", help="leave moecomm out")
    add("--seed", type=int, default=20240817, metavar="N", help="seed of data and routing")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads a rank, for every path (cores // ranks, at least 1)",
    )
    add(
        "--flush",
        metavar="BYTES",
        help="bytes rewritten before each call to empty the caches (size of the L3; GPUs: 256M); 0: off",
    )
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds after which a wait for a peer fails (120)",
    )
    add(
        "--inject-error",
        action="store_true",
        help="corrupt one value of each result before it is checked, to see #wrong move",
    )
    return parser
