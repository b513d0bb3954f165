"""What a program was asked to do: its flags, checked against each other.

Imports nothing heavy, so that a bad flag is answered at once, in one line, with exit status 2, before any
rank starts.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .flags import BASELINES, build_parser
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
class Options:
    """Everything a program was asked to do. Plain values only: it travels to the ranks and into the JSON
    file.
    """

    operation: str  # dispatch | combine | alltoall
    ranks: int
    sizes: tuple[int, ...]  # tokens per rank, ascending
    dtypes: tuple[str, ...]
    iters: int
    warmup: int
    checks: int
    hidden: int
    experts: int
    topk: int
    layout: Literal["expert", "rank"]
    alignment: int
    capacity: int | str | None  # rows, "auto" or None
    routing: str
    zipf: float
    trace: str | None
    input: str  # tensor | window
    ids: str  # fresh | same
    baselines: tuple[str, ...]
    json: str | None
    plot: str | None
    seed: int
    threads: int
    flush_bytes: int | None  # None: as large as the last-level cache
    timeout: float
    inject_error: bool
    command: str

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


def _ranks(given: int | None) -> int:
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world is not None:
        if given is not None and given != int(world):
            raise ValueError(f"-g {given} disagrees with torchrun, which started {world} ranks; leave -g out")
        return int(world)
    return 2 if given is None else given


def _dtypes(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(DTYPES)
    names = tuple(_DTYPE_ALIASES.get(word, word) for word in text.split(","))
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"-d {name!r} is not known: use {', '.join(DTYPES)} or all")
    return tuple(dict.fromkeys(names))


def _baselines(operation: str, text: str) -> tuple[str, ...]:
    known = BASELINES[operation]
    wanted = known if text == "all" else tuple(word for word in text.split(",") if word)
    for name in wanted:
        if name not in known:
            raise ValueError(f"--baselines {name!r} is not known: use all or a list of {', '.join(known)}")
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


def _capacity(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--capacity {text!r} has to be a number of rows above 0, or auto")
    return int(text)


def _writable(path: str | None, flag: str) -> str | None:
    if path is not None:
        parent = Path(path).resolve().parent
        if not parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {parent}")
        if Path(path).is_dir():
            raise ValueError(f"{flag} {path} is a folder")
    return path


def _at_least(value: int, least: int, flag: str) -> int:
    if value < least:
        raise ValueError(f"{flag} has to be at least {least}, got {value}")
    return value


def _checked(operation: str, given: argparse.Namespace, program: str, arguments: list[str]) -> Options:
    ranks = _at_least(_ranks(given.ranks), 1, "-g")
    hidden = _at_least(given.hidden, 1, "--hidden")
    dtypes = _dtypes(given.dtype)
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
    options = Options(
        operation=operation,
        ranks=ranks,
        sizes=sizes,
        dtypes=dtypes,
        iters=_at_least(given.iters, 1, "-n"),
        warmup=_at_least(given.warmup, 0, "-w"),
        checks=_at_least(given.check, 0, "-c"),
        hidden=hidden,
        experts=ranks,
        topk=1,
        layout="expert",
        alignment=1,
        capacity=None,
        routing="balanced",
        zipf=1.0,
        trace=None,
        input=given.input,
        ids=given.ids,
        baselines=_baselines(operation, given.baselines),
        json=_writable(given.json, "-J"),
        plot=_writable(given.plot, "--plot"),
        seed=_at_least(given.seed, 0, "--seed"),
        threads=_at_least(given.threads, 1, "--threads")
        if given.threads is not None
        else threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), available_cores()),
        flush_bytes=flush_bytes,
        timeout=given.timeout,
        inject_error=given.inject_error,
        command=" ".join([program, *arguments]),
    )
    if options.inject_error and options.checks == 0:
        raise ValueError("--inject-error needs a check to catch it, and -c 0 turns checks off")
    return options if operation == "alltoall" else _with_routing(options, given)


def _with_routing(options: Options, given: argparse.Namespace) -> Options:
    routing, trace = _routing(given.routing)
    if trace is not None:
        from .routing import load_trace  # numpy only when a trace is asked for

        trace_topk = load_trace(trace, given.experts).shape[-1]
        if given.topk is not None and given.topk != trace_topk:
            raise ValueError(
                f"--topk {given.topk} disagrees with {trace}, which has {trace_topk} ids a token"
            )
        topk = trace_topk
    else:
        topk = 4 if given.topk is None else given.topk
    experts = _at_least(given.experts, 1, "--experts")
    if experts % options.ranks:
        raise ValueError(f"--experts {experts} cannot be shared evenly by {options.ranks} ranks (-g)")
    if not 1 <= topk <= experts:
        raise ValueError(f"--topk has to be between 1 and --experts ({experts}), got {topk}")
    if not (math.isfinite(given.zipf) and given.zipf >= 0):
        raise ValueError(f"--zipf has to be 0 or above, got {given.zipf:g}")
    if given.layout == "rank" and given.alignment != 1:
        raise ValueError("--alignment is for --layout expert: rank-major rows have no expert groups to align")
    return replace(
        options,
        experts=experts,
        topk=topk,
        layout=given.layout,
        alignment=_at_least(given.alignment, 1, "--alignment"),
        capacity=_capacity(given.capacity),
        routing=routing,
        zipf=given.zipf,
        trace=trace,
    )
