"""Options of the benchmark programs: one set for all of them.

The command line that they come from is in command_line.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

OPERATIONS = ("dispatch", "combine", "alltoall")
LAYER = "moe_layer"
WIRES = ("fp8", "mxfp8")  # formats in which rows can travel
MOECOMM = "moecomm"  # the path of an operation that is moecomm's own
DEEP_EP = "deep_ep"  # the same by the module that stands in for DeepEP's
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
LAYER_ROUTINGS = ("uniform", "zipf", "hot", "balanced")
ROUTINGS = (*LAYER_ROUTINGS, "one-hot")
RECORDED = ".npy"  # how the name of a file of recorded ids ends, which is a routing too

# Baselines of operations. What --baselines without a list leaves out: on one node those between nodes, and
# ON_REQUEST: torch-symm takes all symmetric memory of its process, gloo-rows is nccl-rows on a CPU,
# sm-exchange is for few tokens, and fabric-one says nothing that fabric does not where moecomm has one
# endpoint a rank.
BETWEEN_NODES = ("fabric", "fabric-cold", "fabric-one")
ON_REQUEST = ("torch-symm", "gloo-rows", "sm-exchange", "fabric-one")

DENSE = "dense product"  # the path whose rate the layers' TFLOP/s are shares of
WAYS = ("layer", "microbatches")  # of timing a layer: one call of it, or the microbatches of a training step
# Variants of one call.
COMPUTE, COMM = "compute only", "communication only"
SERIAL, OVERLAPPED = "serial", "overlapped"
FIXED, GRAPH, GRAPHED = "fixed", "graph replay", "graphed step"
BASELINE, LIGER = "baseline", "LigerCute"
PEERS = (BASELINE, LIGER)  # the variants that are not moecomm's
VARIANTS = (COMPUTE, COMM, SERIAL, OVERLAPPED, BASELINE)  # LIGER, which has to be installed, on request
GRAPH_VARIANTS = (COMPUTE, OVERLAPPED, FIXED, GRAPH, GRAPHED)  # those at --graph-tokens
HEADROOM = 1.25  # rows of the fixed variants, of what the fullest rank needs
KEEPS: tuple[Literal["all", "rows", "nothing"], ...] = ("all", "rows", "nothing")
# Variants of microbatches: products without communication, and the names of paths/training.py's schedules.
TORCH_PRODUCTS, QUACK_PRODUCTS = "torch products", "quack products"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of an operation, or of a layer with SwiGLU experts of `hidden` x 2 `ffn` and `ffn` x `hidden`."""

    preset: str | None = None
    hidden: int
    ffn: int | None = None
    experts: int  # over all ranks
    topk: int
    shared: int = 0  # shared experts, as wide as the others


PRESETS = {
    name: Shape(preset=name, hidden=hidden, ffn=ffn, experts=experts, topk=topk)
    for name, hidden, ffn, experts, topk in (
        ("deepseek-v3", 7168, 2048, 256, 8),
        ("kimi-k2", 7168, 2048, 384, 8),
        ("qwen3-235b", 4096, 1536, 128, 8),
        ("qwen3-30b", 2048, 768, 128, 8),
        ("mixtral-8x7b", 4096, 14336, 8, 2),
        ("mixtral-8x22b", 6144, 16384, 8, 2),
        ("gpt-oss-120b", 2880, 2880, 128, 4),
    )
}
# What wide expert parallelism leaves of a layer: four experts a rank, with as many rows each as a rank has
# tokens (four of a token's experts are among those of these ranks).
_WIDE_LOCAL = WIDE_TOPK = 4
WIDE_TOKENS = 8192
WIDE = {f"{name}-wide": name for name in ("deepseek-v3", "qwen3-235b")}
SHARED = {"deepseek-v3-shared": replace(PRESETS["deepseek-v3"], preset="deepseek-v3-shared", shared=1)}


def shape_of(preset: str, ranks: int) -> Shape:
    """The layer of a name in PRESETS, SHARED or WIDE, on so many ranks."""
    if preset not in WIDE:
        return (PRESETS | SHARED)[preset]
    return replace(PRESETS[WIDE[preset]], preset=preset, experts=_WIDE_LOCAL * ranks, topk=WIDE_TOPK)


@dataclass(frozen=True, kw_only=True)
class Point(Shape):
    """One comparison: the sizes and routing that all compared paths have in common."""

    dtype: str
    tokens: int  # per rank
    routing: str
    zipf: float | None  # None: the routing has no exponent
    num_sms: int | None  # None: moecomm's own choice
    graphs: bool = False  # the layer variants around graph replay
    microbatches: int = 0  # of a training step; 0: one call of a layer

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in its own type."""
        return self.hidden * DTYPES[self.dtype]

    @property
    def setup(self) -> tuple[object, ...]:
        """Returns a key: points with equal keys can use the same communicator."""
        shape = (self.preset, self.hidden, self.ffn, self.experts, self.topk, self.shared)
        return (*shape, self.dtype, self.num_sms)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a program in plain values, which are sent to the ranks and written into the record.

    A field with a default is that of a flag that not every program has.
    """

    program: str
    command: str
    device: str  # cpu | cuda
    ranks: int
    shapes: tuple[Shape, ...]
    sizes: tuple[int, ...]  # tokens per rank, ascending
    dtypes: tuple[str, ...]
    num_sms: tuple[int | None, ...]  # None: moecomm's own choice
    iters: int
    warmup: int
    checks: int
    json: str | None
    seed: int
    threads: int
    flush_bytes: int | None  # None: as large as the last-level cache
    timeout: float
    inject_error: bool
    commit: str | None
    # of operations
    routings: tuple[tuple[str, float | None], ...] = (("balanced", None),)  # kind and, of zipf, exponent
    limit_nodes: int | None = None  # most nodes of a token
    ranks_per_node: int | None = None  # None: found by the hosts
    fabric_provider: str | None = None  # None: chosen
    fabric_interface: str | None = None
    layout: Literal["expert", "rank"] = "expert"
    alignment: int = 1
    capacity: int | str | None = None  # rows, "auto" or None
    wire: str | None = None  # None: rows travel in their type; else one of WIRES
    combine_wire: str | None = None  # likewise the sums of a combine: None or "fp8"
    dequantize: bool = True
    kept_handle: str | None = None  # None | plain | weighted
    api: str = MOECOMM  # what is timed: moecomm's own calls, or also those of DEEP_EP
    graph: int = 0  # calls in a CUDA graph; 0: none
    baselines: tuple[str, ...] = ()
    # of layers
    ways: tuple[str, ...] = ("layer",)
    products: tuple[str | None, ...] = (None,)  # MoEConfig(products=)
    activation: str = "swiglu"
    microbatches: int = 4
    variants: tuple[str, ...] = ()
    graph_tokens: int = 0  # tokens per rank of the variants around graph replay; 0: none
    dense: tuple[int, int, int] = (1, 1, 1)

    @property
    def is_layer(self) -> bool:
        """True if the program times whole layers instead of one operation."""
        return self.program == LAYER

    @property
    def nodes(self) -> int:
        """The number of nodes that was asked for."""
        return 1 if self.ranks_per_node is None else self.ranks // self.ranks_per_node

    @property
    def calls_at_once(self) -> int:
        """How many calls of an operation one timed call makes: those of a graph, or itself."""
        return max(1, self.graph)

    @property
    def most_tokens(self) -> int:
        """The most tokens per rank of any point."""
        return max(*self.sizes, self.graph_tokens)

    def points(self) -> Iterator[Point]:
        """Yields all comparisons; those that use the same communicator follow one another."""
        sizes: list[tuple[int, dict[str, int]]] = []
        if "layer" in self.ways:
            sizes += [(tokens, {}) for tokens in self.sizes]
            if self.graph_tokens:
                sizes.append((self.graph_tokens, {"graphs": True}))
        if "microbatches" in self.ways:
            sizes += [(tokens, {"microbatches": self.microbatches}) for tokens in self.sizes]
        for shape, sms, dtype, (routing, zipf), (tokens, kind) in itertools.product(
            self.shapes, self.num_sms, self.dtypes, self.routings, sizes
        ):
            yield Point(
                **asdict(shape),
                dtype=dtype,
                tokens=tokens,
                routing=routing,
                zipf=zipf,
                num_sms=sms,
                **kind,  # type: ignore[arg-type]  # graphs is a bool
            )


def available_cores() -> int:
    """The number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def keep_name(keep: str) -> str:
    """The variant of the overlapped layer that keeps this for its backward."""
    return OVERLAPPED if keep == "all" else f"{OVERLAPPED}, keep {keep}"
