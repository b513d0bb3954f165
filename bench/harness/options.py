"""Command line of the benchmark programs, in nccl-tests' spelling.

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
from typing import Any, Literal, NoReturn

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
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
BASELINES = {
    "dispatch": ("memcpy", "gloo", "gloo-tuned"),
    "combine": ("memcpy", "gloo", "gloo-tuned"),
    "alltoall": ("memcpy", "gloo"),  # nothing around the bare exchange to tune
}
ROUTINGS = ("uniform", "zipf", "one-hot", "balanced", "trace")

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
  busbw    remote bytes / time, mean over ranks, GB/s: one row per (token, other rank that owns one of its
  experts),
           the least that has to leave a rank. The same numerator for every path, whatever the path really
           sends.
  #wrong   values that differ from an independent numpy computation, summed over ranks; N/A with -c 0
"""

USEFUL_TEXT = {
    "dispatch": "Useful are the bytes of the real\n           rows in the result (padding not counted).",
    "combine": "Useful are the bytes of the real\n           rows summed (those that dispatch wrote).",
    "alltoall": "Useful are the bytes of the rows\n           that a rank ends up with.",
}


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


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and nothing else."""

    def error(self, message: str) -> NoReturn:
        # Under torchrun every rank parses the same line; one of them speaks.
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def parse_size(text: str, row_bytes: int) -> int:
    """Tokens meant by `text`: "2048" is tokens, "32M" is bytes of rows of `row_bytes` each, at least one
    token.
    """
    word = text.strip().upper()
    if word.endswith("IB"):
        word = word[:-2]
    elif len(word) > 2 and word[-1] == "B" and word[-2] in "KMG":
        word = word[:-1]
    unit = _UNITS.get(word[-1:], 0)
    try:
        number = float(word[:-1]) if unit else int(word)
    except ValueError:
        raise ValueError(
            f"{text!r} is no size: give tokens (2048) or bytes with B, K, M or G (32M)"
        ) from None
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"size {text!r} has to be above 0")
    return max(1, int(number * unit) // row_bytes) if unit else int(number)


def sweep(first: int, last: int, step: int | None = None, factor: float | None = None) -> tuple[int, ...]:
    """Sizes from `first` to `last` inclusive, adding `step` or multiplying by `factor` (2 if neither is
    given).
    """
    if last < first:
        raise ValueError(f"the last size (-e, {last} tokens) is below the first (-b, {first} tokens)")
    if step is not None and factor is not None:
        raise ValueError("give -i or -f, not both")
    if step is not None and step < 1:
        raise ValueError("-i has to be at least 1")
    if factor is not None and not (math.isfinite(factor) and factor > 1.0):
        raise ValueError(f"-f has to be above 1, got {factor:g}")
    sizes = [first]
    while True:
        grown = sizes[-1] + step if step is not None else max(sizes[-1] + 1, int(sizes[-1] * (factor or 2.0)))
        if grown > last:
            return tuple(sizes)
        sizes.append(grown)


def threads_for(ranks: int, cores: int) -> int:
    """Compute threads a rank gets when all ranks of one host share its cores evenly."""
    return 1 if ranks >= cores else cores // ranks


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def build_parser(operation: str, prog: str) -> argparse.ArgumentParser:
    """The parser of one program; `alltoall` has no routing flags (its routing is what makes it an
    all-to-all).
    """
    parser = _Parser(
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
        help="ranks to start on this host (2); under torchrun its own count",
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
        add("--experts", type=int, default=32, metavar="E", help="experts over all ranks (32)")
        add("--topk", type=int, default=None, metavar="K", help="experts per token (4; of a trace: its own)")
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
        add("--zipf", type=float, default=1.0, metavar="S", help="exponent of the zipf routing (1.0)")
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
        help="also run baselines: all, or a list of " + ", ".join(BASELINES[operation]),
    )
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
        help="bytes a rank rewrites between iterations to empty the caches (size of the L3); 0: off",
    )
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
