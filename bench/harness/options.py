"""What a program was asked to do: its flags, checked against each other.

Imports nothing heavy, so that a bad flag is answered at once, in one line, with exit status 2, before any
rank starts.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .flags import BASELINES, BETWEEN_NODES, ON_REQUEST, build_parser
from .sizes import parse_size, sweep

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_DTYPE_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "double": "float64",
    "fp64": "float64",
}
ROUTINGS = ("uniform", "zipf", "one-hot", "balanced", "trace")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One point of a sweep over anything but sizes and types. num_sms None: moecomm's own choice."""

    experts: int
    topk: int
    zipf: float
    num_sms: int | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything a program was asked to do. Plain values only: it travels to the ranks and into the JSON
    file.
    """

    operation: str  # dispatch | combine | alltoall
    device: str  # cpu | cuda
    ranks: int
    sizes: tuple[int, ...]  # tokens per rank, ascending
    dtypes: tuple[str, ...]
    iters: int
    warmup: int
    checks: int
    hidden: int
    experts: int  # this and what else a Variant has: of the first variant, or in `each` of each
    topk: int
    zipf: float
    num_sms: int | None
    variants: tuple[Variant, ...]
    ranks_per_node: int | None  # None: found by the hosts
    fabric_provider: str | None  # None: chosen
    fabric_interface: str | None
    fabric_lanes: int | None  # None: chosen
    layout: Literal["expert", "rank"]
    alignment: int
    capacity: int | str | None  # rows, "auto" or None
    routing: str
    limit_nodes: int | None  # most nodes of a token
    trace: str | None
    wire: str | None  # None: rows travel in their type; fp8
    dequantize: bool
    kept_handle: str | None  # None | plain | weighted
    graph: bool
    host_calls: int
    input: str  # tensor | window
    ids: str  # fresh | same
    baselines: tuple[str, ...]
    baselines_only: bool
    json: str | None
    plot: str | None
    seed: int
    threads: int
    flush_bytes: int | None  # None: as large as the last-level cache
    timeout: float
    inject_error: bool
    commit: str | None
    command: str

    def each(self) -> Iterator[Options]:
        """The options of every variant."""
        for variant in self.variants:
            yield replace(self, **asdict(variant), variants=(variant,))

    @property
    def nodes(self) -> int:
        """Nodes that were asked for."""
        return 1 if self.ranks_per_node is None else self.ranks // self.ranks_per_node

    def label(self) -> str:
        """What sets this variant apart, in words for a table."""
        skew = f" zipf {self.zipf:g}" if self.routing == "zipf" else ""
        sms = "" if self.num_sms is None else f" SMs {self.num_sms}"
        return f"experts {self.experts} topk {self.topk}{skew}{sms}"

    def as_dict(self) -> dict[str, Any]:
        """Plain dict for the JSON record."""
        return asdict(self)


def threads_for(ranks: int, cores: int) -> int:
    """Compute threads a rank gets when all ranks of one host share its cores evenly."""
    return 1 if ranks >= cores else cores // ranks


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def parse(operation: str, argv: Sequence[str] | None = None, prog: str | None = None) -> Options:
    """Parses and checks the command line. Ends the program with one line and status 2 if it cannot be
    followed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(operation, prog or f"{operation}_perf.py")
    given = parser.parse_args(arguments)
    try:
        return _checked(operation, given, f"python bench/{operation}_perf.py", arguments)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


def find_device(given: str) -> str:
    """cpu or cuda for what --device says."""
    if given != "auto":
        return given
    if not Path("/dev/nvidiactl").exists():  # spares loading torch where there can't be a GPU
        return "cpu"
    import torch

    import moecomm

    return "cuda" if torch.cuda.is_available() and "cuda" in moecomm.available_devices() else "cpu"


def _gpus() -> int:
    import torch

    found = int(torch.cuda.device_count())
    if not found:
        raise ValueError("--device cuda: torch finds no GPU here")
    return found


def find_ranks(given: int | None, device: str) -> int:
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world is not None:
        if given is not None and given != int(world):
            raise ValueError(f"-g {given} disagrees with torchrun, which started {world} ranks; leave -g out")
        return int(world)
    if given is None:
        return _gpus() if device == "cuda" else 2
    return given


def find_threads(given: int | None, ranks: int) -> int:
    """Those of a rank: as given, or its share of this host's cores."""
    if given is not None:
        return at_least(given, 1, "--threads")
    return threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), available_cores())


def types_named(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(DTYPES)
    names = tuple(_DTYPE_ALIASES.get(word, word) for word in text.split(","))
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"-d {name!r} is not known: use {', '.join(DTYPES)} or all")
    return tuple(dict.fromkeys(names))


def _baselines(operation: str, device: str, nodes: int, text: str) -> tuple[str, ...]:
    known = BASELINES[device][operation]
    left_out = ON_REQUEST if nodes > 1 else (*ON_REQUEST, *BETWEEN_NODES)
    standard = tuple(name for name in known if name not in left_out)
    wanted = standard if text == "all" else tuple(word for word in text.split(",") if word)
    for name in wanted:
        if name not in known:
            raise ValueError(f"--baselines {name!r} is not known: use all or a list of {', '.join(known)}")
        if name in BETWEEN_NODES and nodes == 1:
            raise ValueError(f"--baselines {name} is for several nodes (--ranks-per-node)")
    return tuple(dict.fromkeys(wanted))


def _routing(words: Sequence[str]) -> tuple[str, str | None]:
    kind, rest = words[0], list(words[1:])
    if kind not in ROUTINGS:
        raise ValueError(f"--routing {kind!r} is not known: use {', '.join(ROUTINGS[:-1])} or trace FILE")
    if kind == "trace":
        if len(rest) != 1:
            raise ValueError("--routing trace takes one file: --routing trace ids.npy")
        return kind, rest[0]
    if rest:
        raise ValueError(f"--routing {kind} takes nothing after it, got {' '.join(rest)!r}")
    return kind, None


def _ranks_per_node(given: int | None, ranks: int) -> int | None:
    """What was asked for, here or in the environment, else what torchrun started on each host."""
    source = "--ranks-per-node"
    if given is None and (text := os.environ.get("MOECOMM_RANKS_PER_NODE")):
        source = "MOECOMM_RANKS_PER_NODE"
        (given,) = numbers(text, source)
    if given is None and "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local if local < ranks and ranks % local == 0 else None
    if given is not None:
        at_least(given, 1, source)
        if ranks % given:
            raise ValueError(f"{source} {given} does not divide the {ranks} ranks (-g)")
    return given


def _capacity(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--capacity {text!r} has to be a number of rows above 0, or auto")
    return int(text)


def writable(path: str | None, flag: str) -> str | None:
    if path is not None:
        parent = Path(path).resolve().parent
        if not parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {parent}")
        if Path(path).is_dir():
            raise ValueError(f"{flag} {path} is a folder")
    return path


def numbers(text: str, flag: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{flag} {text!r} has to be a number above 0, or a list of them: 8,24")
    return tuple(dict.fromkeys(int(word) for word in words))


def exponents_named(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        raise ValueError(f"--zipf {text!r} is no number, nor a list of them: 0.5,1") from None
    for value in found:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--zipf has to be 0 or above, got {value:g}")
    return found


def at_least(value: int, least: int, flag: str) -> int:
    if value < least:
        raise ValueError(f"{flag} has to be at least {least}, got {value}")
    return value


def _checked(operation: str, given: argparse.Namespace, program: str, arguments: list[str]) -> Options:
    device = find_device(given.device)
    ranks = at_least(find_ranks(given.ranks, device), 1, "-g")
    ranks_per_node = _ranks_per_node(given.ranks_per_node, ranks)
    nodes = ranks // (ranks_per_node or ranks)
    for flag, used in (("--fabric-provider", given.fabric_provider), ("--fabric-lanes", given.fabric_lanes)):
        if used is not None and nodes == 1:
            raise ValueError(f"{flag} is for several nodes (--ranks-per-node)")
    hidden = at_least(given.hidden, 1, "--hidden")
    dtypes = types_named(given.dtype)
    for name in dtypes:
        if hidden * DTYPES[name] % 16:
            raise ValueError(
                f"--hidden {hidden} of {name} is {hidden * DTYPES[name]} bytes a row, no multiple of 16"
            )
    if given.plot and Path(given.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {given.plot} has to end in .png, .svg or .pdf")
    if given.timeout <= 0:
        raise ValueError(f"--timeout has to be above 0, got {given.timeout:g}")
    row_bytes = hidden * DTYPES[dtypes[0]]
    first = parse_size(given.min, row_bytes)
    step = None if given.increment is None else parse_size(given.increment, row_bytes)
    sizes = sweep(first, first if given.max is None else parse_size(given.max, row_bytes), step, given.factor)
    flush_bytes = None if given.flush is None else 0 if given.flush == "0" else parse_size(given.flush, 1)
    num_sms: tuple[int | None, ...] = (
        (None,) if given.num_sms is None else numbers(given.num_sms, "--num-sms")
    )
    if device == "cpu":
        for flag, used in (("--num-sms", given.num_sms), ("--graph", given.graph)):
            if used:
                raise ValueError(f"{flag} is for GPUs (--device cuda)")
    alike = [Variant(experts=ranks, topk=1, zipf=1.0, num_sms=sms) for sms in num_sms]
    options = Options(
        operation=operation,
        device=device,
        ranks=ranks,
        sizes=sizes,
        dtypes=dtypes,
        iters=at_least(given.iters, 1, "-n"),
        warmup=at_least(given.warmup, 0, "-w"),
        checks=at_least(given.check, 0, "-c"),
        hidden=hidden,
        **asdict(alike[0]),
        variants=tuple(alike),
        ranks_per_node=ranks_per_node,
        # What moecomm would take from the environment, so that the ceiling has it and the record says it.
        fabric_provider=(given.fabric_provider or os.environ.get("MOECOMM_FABRIC_PROVIDER") or None)
        if nodes > 1
        else None,
        fabric_interface=(os.environ.get("MOECOMM_FABRIC_INTERFACE") or None) if nodes > 1 else None,
        fabric_lanes=None
        if given.fabric_lanes is None
        else at_least(given.fabric_lanes, 1, "--fabric-lanes"),
        layout="expert",
        alignment=1,
        capacity=None,
        routing="balanced",
        limit_nodes=None,
        trace=None,
        wire=None,
        dequantize=True,
        kept_handle=None,
        graph=given.graph,
        host_calls=at_least(given.host_calls, 0, "--host-calls"),
        input=given.input,
        ids=given.ids,
        baselines=_baselines(operation, device, nodes, given.baselines),
        baselines_only=given.baselines_only,
        json=writable(given.json, "-J"),
        plot=writable(given.plot, "--plot"),
        seed=at_least(given.seed, 0, "--seed"),
        threads=find_threads(given.threads, ranks),
        flush_bytes=flush_bytes,
        timeout=given.timeout,
        inject_error=given.inject_error,
        commit=given.commit or os.environ.get("MOECOMM_BENCH_COMMIT"),
        command=" ".join([program, *arguments]),
    )
    if options.inject_error and options.checks == 0:
        raise ValueError("--inject-error needs a check to catch it, and -c 0 turns checks off")
    if options.baselines_only and not options.baselines:
        raise ValueError("--baselines-only needs --baselines")
    if operation == "alltoall":
        if options.graph:
            raise ValueError("--graph is for dispatch and combine with --capacity")
        return options
    return _with_routing(options, given)


def _with_routing(options: Options, given: argparse.Namespace) -> Options:
    routing, trace = _routing(given.routing)
    counts = numbers(given.experts, "--experts")
    if trace is not None:
        from .routing import load_trace  # numpy only when a trace is asked for

        trace_topk = load_trace(trace, min(counts)).shape[-1]
        if given.topk is not None and numbers(given.topk, "--topk") != (trace_topk,):
            raise ValueError(
                f"--topk {given.topk} disagrees with {trace}, which has {trace_topk} ids a token"
            )
        topks: tuple[int, ...] = (trace_topk,)
    else:
        topks = (4,) if given.topk is None else numbers(given.topk, "--topk")
    for experts in counts:
        if experts % options.ranks:
            raise ValueError(f"--experts {experts} cannot be shared evenly by {options.ranks} ranks (-g)")
        for topk in topks:
            if topk > experts:
                raise ValueError(f"--topk has to be between 1 and --experts ({experts}), got {topk}")
    _check_limit_nodes(given.limit_nodes, routing, options.nodes, counts, topks)
    if given.layout == "rank" and given.alignment != 1:
        raise ValueError("--alignment is for --layout expert: rank-major rows have no expert groups to align")
    kept_handle = getattr(given, "kept_handle", None)
    if kept_handle == "weighted" and given.layout == "rank":
        raise ValueError("--kept-handle weighted is for --layout expert: others are combined without weights")
    if given.no_dequantize and given.wire is None:
        raise ValueError("--no-dequantize is for --wire fp8: other rows arrive in their type")
    if given.wire is not None and options.device == "cpu":
        raise ValueError("--wire is for GPUs (--device cuda)")
    exponents = exponents_named(given.zipf)
    variants = tuple(
        replace(each, experts=experts, topk=topk, zipf=zipf)
        for experts in counts
        for topk in topks
        for zipf in (exponents if routing == "zipf" else exponents[:1])
        for each in options.variants
    )
    capacity = _capacity(given.capacity)
    if options.graph and capacity is None:
        raise ValueError("--graph needs --capacity: exact sizes make the host wait, which no capture can")
    return replace(
        options,
        **asdict(variants[0]),
        variants=variants,
        layout=given.layout,
        alignment=at_least(given.alignment, 1, "--alignment"),
        capacity=capacity,
        routing=routing,
        limit_nodes=given.limit_nodes,
        trace=trace,
        wire=given.wire,
        dequantize=not given.no_dequantize,
        kept_handle=kept_handle,
    )


def _check_limit_nodes(
    limit: int | None, routing: str, nodes: int, experts: Sequence[int], topks: Sequence[int]
) -> None:
    if limit is None:
        return
    if not 1 <= limit <= nodes:
        raise ValueError(f"--limit-nodes has to be between 1 and the nodes ({nodes}, by --ranks-per-node)")
    if routing not in ("uniform", "zipf"):
        raise ValueError(f"--limit-nodes is for --routing uniform and zipf, not {routing}")
    reachable = limit * (min(experts) // nodes)
    if max(topks) > reachable:
        raise ValueError(
            f"--topk {max(topks)} is more than the {reachable} experts that {limit} of {nodes} nodes have"
        )
