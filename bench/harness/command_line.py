"""The command line of the benchmark programs: one table of flags, checked against each other.

This file imports nothing heavy, so that a bad flag is answered at once, in one line, with exit status 2,
before any rank starts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from .options import (
    BETWEEN_NODES,
    DTYPES,
    FP8_VARIANTS,
    KEEPS,
    KEPT_HANDLES,
    LAYER,
    LAYER_ROUTINGS,
    ON_REQUEST,
    OPERATIONS,
    OVERLAPPED,
    PRESETS,
    PROGRAMS,
    ROUTINGS,
    VARIANTS,
    Options,
    Shape,
    available_cores,
    keep_name,
)

_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "double": "float64",
    "fp64": "float64",
}
_LINKS = {"cpu": ("memcpy",), "cuda": ("sm-push", "copy-engine", "memcpy")}
_BACKEND = {"cpu": "gloo", "cuda": "nccl"}
_DENSE = {"cpu": (512, 512, 512), "cuda": (16384, 7168, 4096)}
_WIDTH_MULTIPLE = 16  # elements: rows and products of every type are aligned then


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and nothing else."""

    def error(self, message: str) -> NoReturn:
        # Under torchrun every rank parses the same line; one of them speaks.
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def _number(default: int | None = None, metavar: str = "N") -> dict[str, Any]:
    return {"type": int, "default": default, "metavar": metavar}


_ROUTED = ("dispatch", "combine")
_OF_LAYERS: dict[str, Any] = {"min": "4096", "dtype": "bfloat16", "host_calls": 5}  # other defaults there
# Names, the programs that have the flag, argparse's arguments, help.
_FLAGS: tuple[tuple[str, Sequence[str], dict[str, Any], str], ...] = (
    ("-g --ranks", PROGRAMS, _number(), "ranks to start here (2; GPUs: all of them); torchrun says its own"),
    ("--device", PROGRAMS, {"choices": ("auto", "cpu", "cuda"), "default": "auto"}, "GPUs if any (auto)"),
    ("-b --min", PROGRAMS, {"default": "2048", "metavar": "SIZE"}, "first size per rank: tokens, or bytes"),
    ("-e --max", PROGRAMS, {"metavar": "SIZE"}, "last size per rank (the first)"),
    ("-i --increment", PROGRAMS, {"metavar": "SIZE"}, "add this between sizes"),
    ("-f --factor", PROGRAMS, {"type": float, "metavar": "X"}, "multiply by this between sizes (2)"),
    ("-n --iters", PROGRAMS, _number(20), "timed iterations (20)"),
    ("-w --warmup", PROGRAMS, _number(5), "untimed iterations before them (5)"),
    ("-c --check", PROGRAMS, _number(1), "verified calls before timing, new data each; 0: none (1)"),
    ("-d --dtype", PROGRAMS, {"default": "float32", "metavar": "TYPE"}, f"{', '.join(DTYPES)}, a list, all"),
    ("-J --json", PROGRAMS, {"metavar": "FILE"}, "write everything measured as JSON"),
    ("--plot", OPERATIONS, {"metavar": "FILE"}, "draw bandwidth over size (.png, .svg, .pdf)"),
    ("--presets", [LAYER], {"default": "all", "metavar": "LIST"}, f"all, or a list of {', '.join(PRESETS)}"),
    ("--scale", [LAYER], _number(1), "divide hidden and ffn of presets by N (1)"),
    ("--hidden", PROGRAMS, _number(metavar="H"), "values per row (4096; layers: the preset's)"),
    ("--ffn", [LAYER], _number(metavar="F"), "inner width of an expert (the preset's)"),
    ("--experts", [*_ROUTED, LAYER], {"metavar": "E"}, "experts over all ranks, or a list (32; preset's)"),
    ("--topk", [*_ROUTED, LAYER], {"metavar": "K"}, "experts per token, or a list (4; preset's; trace's)"),
    ("--routing", [*_ROUTED, LAYER], {"nargs": "+", "default": ["uniform"], "metavar": "HOW"},
     f"a list of {', '.join(ROUTINGS[:-1])}, or trace FILE (.npy, .npz with top-k ids); layers:"
     f" {', '.join(LAYER_ROUTINGS)}"),
    ("--zipf", [*_ROUTED, LAYER], {"default": "1", "metavar": "S"}, "exponent of zipf, or a list (1)"),
    ("--limit-nodes", _ROUTED, _number(metavar="M"), "a token's experts are on at most M nodes"),
    ("--layout", _ROUTED, {"choices": ("expert", "rank"), "default": "expert"}, "result layout (expert)"),
    ("--alignment", _ROUTED, _number(1, "A"), "rows an expert's group is padded to (1)"),
    ("--capacity", _ROUTED, {"metavar": "ROWS"}, "fixed rows, or auto: what the fullest rank needs (exact)"),
    ("--wire", _ROUTED, {"choices": ("fp8",)}, "rows travel as e4m3 with scales (GPUs; in their type)"),
    ("--no-dequantize", _ROUTED, {"action": "store_true", "default": False}, "hand on data, scales"),
    ("--kept-handle", ["dispatch"], {"nargs": "?", "const": "plain", "choices": KEPT_HANDLES},
     "the dispatch along an earlier handle, combine's backward; weighted: with the weights' gradients"),
    ("--graph", OPERATIONS, {"action": "store_true", "default": False}, "replay a CUDA graph (--capacity)"),
    ("--ids", OPERATIONS, {"choices": ("fresh", "same"), "default": "fresh"},
     "timed dispatches get new ids, as in training, or the same again, as when recomputing"),
    ("--baselines", OPERATIONS, {"nargs": "?", "const": "all", "default": "", "metavar": "LIST"},
     "also run baselines: all, or a list"),
    ("--baselines-only", OPERATIONS, {"action": "store_true", "default": False}, "leave moecomm out"),
    ("--variants", [LAYER], {"default": "all", "metavar": "LIST"},
     f"all, or a list of {', '.join((*VARIANTS, *FP8_VARIANTS))} (all: without the last three)"),
    ("--keep", [LAYER], {"default": "all", "metavar": "LIST"}, "overlapped with each kept: all,rows,nothing"),
    ("--graph-tokens", [LAYER], _number(512, "T"), "tokens of graph replay beside eager; 0: none (512)"),
    ("--headroom", [LAYER], {"type": float, "default": 1.25, "metavar": "X"}, "fixed / needed rows (1.25)"),
    ("--dense", [LAYER], {"metavar": "MxKxN"}, "the dense product that shares are of"),
    ("--records", [LAYER], _number(5), "recorded steps of overlapped (5)"),
    ("--trace", [LAYER], {"metavar": "DIR"}, "write recorded timelines as Chrome traces and pictures"),
    ("--num-sms", PROGRAMS, {"metavar": "N"}, "SMs of one operation, or a list (moecomm's own choice)"),
    ("--overlap-num-sms", [LAYER], _number(), "SMs of what travels beside products; 0: nothing (own choice)"),
    ("--ranks-per-node", OPERATIONS, _number(), "ranks that share memory; fewer than all: emulated nodes"),
    ("--fabric-provider", OPERATIONS, {"metavar": "NAME"}, "libfabric provider: tcp, shm, ... (best found)"),
    ("--host-calls", PROGRAMS, _number(20), "calls to time the CPU with (GPUs)"),
    ("--seed", PROGRAMS, _number(20240817), "seed of data and routing"),
    ("--threads", PROGRAMS, _number(), "compute threads a rank, for every path (cores // ranks, at least 1)"),
    ("--flush", PROGRAMS, {"metavar": "BYTES"}, "bytes rewritten before a call (L3; GPUs: 256M); 0: off"),
    ("--timeout", PROGRAMS, {"type": float, "default": 120.0, "metavar": "S"}, "seconds of a wait (120)"),
    ("--commit", PROGRAMS, {"metavar": "HASH"}, "commit to record where the source is no git checkout"),
    ("--inject-error", PROGRAMS, {"action": "store_true", "default": False},
     "corrupt one value of each result before it is checked, to see #wrong move"),
)  # fmt: skip

HELP = """\
sizes: a bare number counts tokens per rank (-b 2048); with B, K, M or G, powers of 1024, it is bytes of input
rows per rank, as in nccl-tests (-b 32M), rounded down to whole tokens, at least one.

columns:
  time     microseconds of one call: of each iteration the slowest rank, of those the median; min: the least
  algbw    useful bytes / time, mean over ranks, GB/s (1e9): rows of the result, or rows summed by combine
  busbw    remote bytes / time, mean over ranks: one row per (token, other rank that owns one of its experts)
  wire, sent, puts  (several nodes) rows to other nodes / time, all bytes / the least, messages a rank
  SMs, host  (GPUs) multiprocessors at work, where known; CPU microseconds to issue a call
  ratio    (layers) time / time of compute only; exposed: share of a step in which only communication runs
  TFLOP/s, of dense, memory  (layers) of the products, beside one dense product, GB at a step's peak (GPUs)
  error    (layers) largest deviation, of a value's magnitude plus the root mean square of its row
  #wrong   values that differ from an independent computation, summed over ranks; N/A with -c 0
All columns, baselines and variants are explained in bench/README.md.
"""


def build_parser(program: str) -> Parser:
    """The parser of one program. A flag that the program does not have still gives its default."""
    parser = Parser(
        prog=f"{program}_perf.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description=f"Times {program.replace('_', ' ')} of moecomm, verified first, next to its baselines.",
        epilog=HELP,
    )
    for names, programs, how, text in _FLAGS:
        destination = names.split()[-1].strip("-").replace("-", "_")
        default = how.get("default")
        if program == LAYER:
            default = _OF_LAYERS.get(destination, default)
        if program in programs:
            if names == "--baselines":
                text += f" of {', '.join(_known_baselines(program, 'cpu'))}; GPUs: "
                text += ", ".join(_known_baselines(program, "cuda"))
            parser.add_argument(*names.split(), **{**how, "default": default}, help=text)
        else:
            parser.set_defaults(**{destination: default})
    return parser


def parse(program: str, argv: Sequence[str] | None = None) -> Options:
    """Parses and checks the command line; ends the program with one line and status 2 if it cannot be
    followed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(program)
    given = parser.parse_args(arguments)
    try:
        return _checked(program, given, shlex.join(["python", f"bench/{program}_perf.py", *arguments]))
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


# -- values --------------------------------------------------------------------------------------------------

_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str, row_bytes: int) -> int:
    """Tokens meant by `text`: "2048" is tokens, "32M" is bytes of rows of `row_bytes` each, at least one."""
    word = text.strip().upper().removesuffix("IB")
    if len(word) > 2 and word[-1] == "B" and word[-2] in "KMG":
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
    """Sizes from `first` to `last` inclusive, adding `step` or multiplying by `factor` (2)."""
    if last < first:
        raise ValueError(f"the last size (-e, {last} tokens) is below the first (-b, {first} tokens)")
    if step is not None and factor is not None:
        raise ValueError("give -i or -f, not both")
    if factor is not None and not (math.isfinite(factor) and factor > 1.0):
        raise ValueError(f"-f has to be above 1, got {factor:g}")
    sizes = [first]
    while True:
        grown = sizes[-1] + step if step is not None else max(sizes[-1] + 1, int(sizes[-1] * (factor or 2.0)))
        if grown > last:
            return tuple(sizes)
        sizes.append(grown)


def find_device(given: str) -> str:
    """The device, cpu or cuda, that --device means."""
    if given != "auto":
        return given
    if not Path("/dev/nvidiactl").exists():  # spares loading torch where there can't be a GPU
        return "cpu"
    import torch

    import moecomm

    return "cuda" if torch.cuda.is_available() and "cuda" in moecomm.available_devices() else "cpu"


def _find_ranks(given: int | None, device: str) -> int:
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world is not None:
        if given is not None and given != int(world):
            raise ValueError(f"-g {given} disagrees with torchrun, which started {world} ranks; leave -g out")
        return int(world)
    if given is not None:
        return _at_least(given, 1, "-g")
    if device == "cpu":
        return 2
    import torch

    if not torch.cuda.device_count():
        raise ValueError("--device cuda: torch finds no GPU here")
    return torch.cuda.device_count()


def _ranks_per_node(given: int | None, ranks: int) -> int | None:
    """The number asked for, by flag or environment, else what torchrun started on each host."""
    source = "--ranks-per-node"
    if given is None and (text := os.environ.get("MOECOMM_RANKS_PER_NODE")):
        source = "MOECOMM_RANKS_PER_NODE"
        (given,) = _numbers(text, source)
    if given is None and "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local if local < ranks and ranks % local == 0 else None
    if given is not None:
        _at_least(given, 1, source)
        if ranks % given:
            raise ValueError(f"{source} {given} does not divide the {ranks} ranks (-g)")
    return given


def _at_least(value: int, least: int, flag: str) -> int:
    if value < least:
        raise ValueError(f"{flag} has to be at least {least}, got {value}")
    return value


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{flag} {text!r} has to be a number above 0, or a list of them: 8,24")
    return tuple(dict.fromkeys(map(int, words)))


def _words(
    text: str, known: Sequence[str], flag: str, default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The words of a list, all of them known; "all" is the default."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if words == ("all",) and "all" not in known:
        return tuple(known if default is None else default)
    for word in words:
        if word not in known:
            raise ValueError(f"{flag} {word!r} is not known: use {', '.join(known)}")
    if not words and flag != "--baselines":
        raise ValueError(f"{flag} is empty: use {', '.join(known)}")
    return words


def _known_baselines(program: str, device: str) -> tuple[str, ...]:
    backend = _BACKEND[device]
    own = (backend,) if program == "alltoall" else (backend, f"{backend}-tuned", f"{backend}-rows")
    symmetric = ("torch-symm",) if device == "cuda" and program != "alltoall" else ()
    return (*BETWEEN_NODES, *_LINKS[device], *own, *symmetric)


def _baselines(program: str, device: str, nodes: int, text: str) -> tuple[str, ...]:
    known = _known_baselines(program, device)
    left_out = ON_REQUEST if nodes > 1 else (*ON_REQUEST, *BETWEEN_NODES)
    wanted = _words(text, known, "--baselines", [name for name in known if name not in left_out])
    if nodes == 1 and (between := set(wanted) & set(BETWEEN_NODES)):
        raise ValueError(f"--baselines {min(between)} is for several nodes (--ranks-per-node)")
    return wanted


def _routings(
    program: str, words: Sequence[str], exponents: str
) -> tuple[tuple[tuple[str, float | None], ...], str | None]:
    """The routings, and the file of a trace."""
    if words[0] == "trace" and program != LAYER:
        if len(words) != 2:
            raise ValueError("--routing trace takes one file: --routing trace ids.npy")
        return (("trace", None),), words[1]
    if len(words) > 1:
        raise ValueError(f"--routing {words[0]} takes nothing after it, got {' '.join(words[1:])!r}")
    try:
        zipf = tuple(dict.fromkeys(float(word) for word in exponents.split(",")))
    except ValueError:
        raise ValueError(f"--zipf {exponents!r} is no number, nor a list of them: 0.5,1") from None
    if not all(math.isfinite(each) and each >= 0 for each in zipf):
        raise ValueError(f"--zipf has to be 0 or above, got {exponents}")
    known = LAYER_ROUTINGS if program == LAYER else ROUTINGS[:-1]
    kinds = _words(words[0], known, "--routing")
    return tuple(
        each for kind in kinds for each in ([(kind, e) for e in zipf] if kind == "zipf" else [(kind, None)])
    ), None


def _shapes(program: str, given: argparse.Namespace, ranks: int, trace: str | None) -> tuple[Shape, ...]:
    if program == "alltoall":
        return (Shape(hidden=given.hidden or 4096, experts=ranks, topk=1),)
    experts = None if given.experts is None else _numbers(given.experts, "--experts")
    topks = None if given.topk is None else _numbers(given.topk, "--topk")
    if trace is not None:
        from .inputs import load_trace  # numpy only when a trace is asked for

        own = load_trace(trace, min(experts or (32,))).shape[-1]
        if topks not in (None, (own,)):
            raise ValueError(f"--topk {given.topk} disagrees with {trace}, which has {own} ids a token")
        topks = (own,)
    if program == LAYER:
        divisor = _at_least(given.scale, 1, "--scale")
        named = [
            _scaled(PRESETS[word], divisor) for word in _words(given.presets, tuple(PRESETS), "--presets")
        ]
    else:
        named = [Shape(hidden=4096, experts=32, topk=4)]
    shapes = [
        replace(
            shape,
            hidden=shape.hidden if given.hidden is None else given.hidden,
            ffn=shape.ffn if given.ffn is None else given.ffn,
            experts=count,
            topk=topk,
        )
        for shape in named
        for count in (experts or (shape.experts,))
        for topk in (topks or (shape.topk,))
    ]
    for shape in shapes:
        if shape.topk > shape.experts:
            raise ValueError(f"--topk {shape.topk} is more than the {shape.experts} experts (--experts)")
        if program != LAYER and shape.experts % ranks:
            raise ValueError(f"--experts {shape.experts} cannot be shared evenly by {ranks} ranks (-g)")
        for flag, width in (("--hidden", shape.hidden), ("--ffn", shape.ffn)):
            if program == LAYER and (width is None or width < 1 or width % _WIDTH_MULTIPLE):
                raise ValueError(f"{flag} {width} has to be a multiple of {_WIDTH_MULTIPLE}")
    return tuple(shapes)


def _scaled(shape: Shape, divisor: int) -> Shape:
    """The layer with hidden and ffn divided, to multiples of 16: gpt-oss-120b by 16 has 176 and 176."""

    def down(width: int) -> int:
        return max(_WIDTH_MULTIPLE, width // divisor // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE)

    return shape if divisor == 1 else replace(shape, hidden=down(shape.hidden), ffn=down(shape.ffn or 0))


def _dtypes(text: str) -> tuple[str, ...]:
    names = text if text == "all" else ",".join(_ALIASES.get(word, word) for word in text.split(","))
    return _words(names, tuple(DTYPES), "-d")


def _capacity(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--capacity {text!r} has to be a number of rows above 0, or auto")
    return int(text)


def _writable(path: str | None, flag: str) -> str | None:
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {Path(path).resolve().parent}")
    if path is not None and Path(path).is_dir():
        raise ValueError(f"{flag} {path} is a folder")
    return path


def _dense(text: str | None, device: str) -> tuple[int, int, int]:
    words = text.split("x") if text else list(map(str, _DENSE[device]))
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--dense {text!r} has to be three sizes: 16384x7168x4096")
    rows, inner, columns = map(int, words)
    return rows, inner, columns


def _layer_variants(given: argparse.Namespace) -> tuple[str, ...]:
    """The variants asked for; overlapped once for each choice of --keep."""
    found: list[str] = []
    for name in _words(given.variants, (*VARIANTS, *FP8_VARIANTS), "--variants", VARIANTS):
        found += (
            [keep_name(keep) for keep in _words(given.keep, KEEPS, "--keep")]
            if name == OVERLAPPED
            else [name]
        )
    return tuple(found)


def _checked(program: str, given: argparse.Namespace, command: str) -> Options:
    device = find_device(given.device)
    ranks = _find_ranks(given.ranks, device)
    is_operation = program != LAYER
    if given.hidden is not None:
        _at_least(given.hidden, 1, "--hidden")
    ranks_per_node = _ranks_per_node(given.ranks_per_node, ranks) if is_operation else None
    nodes = ranks // (ranks_per_node or ranks)
    routings, trace = _routings(program, given.routing, given.zipf)
    if program == "alltoall":
        routings = (("balanced", None),)
    shapes, dtypes = _shapes(program, given, ranks, trace), _dtypes(given.dtype)
    row_bytes = shapes[0].hidden * DTYPES[dtypes[0]]
    first = parse_size(given.min, row_bytes)
    last = first if given.max is None else parse_size(given.max, row_bytes)
    step = None if given.increment is None else parse_size(given.increment, row_bytes)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    threads = max(1, available_cores() // local) if given.threads is None else given.threads
    options = Options(
        program=program,
        device=device,
        ranks=ranks,
        shapes=shapes,
        sizes=sweep(first, last, step, given.factor),
        graph_tokens=0 if is_operation else _at_least(given.graph_tokens, 0, "--graph-tokens"),
        dtypes=dtypes,
        routings=routings,
        trace=trace,
        limit_nodes=given.limit_nodes,
        num_sms=(None,) if given.num_sms is None else _numbers(given.num_sms, "--num-sms"),
        overlap_num_sms=given.overlap_num_sms,
        ranks_per_node=ranks_per_node,
        fabric_provider=given.fabric_provider or _between("MOECOMM_FABRIC_PROVIDER", nodes),
        fabric_interface=_between("MOECOMM_FABRIC_INTERFACE", nodes),
        layout=given.layout,
        alignment=_at_least(given.alignment, 1, "--alignment"),
        capacity=_capacity(given.capacity),
        wire=given.wire,
        dequantize=not given.no_dequantize,
        kept_handle=given.kept_handle,
        graph=given.graph,
        ids=given.ids,
        baselines=_baselines(program, device, nodes, given.baselines) if is_operation else (),
        baselines_only=given.baselines_only,
        variants=() if is_operation else _layer_variants(given),
        headroom=given.headroom,
        dense=_dense(given.dense, device),
        iters=_at_least(given.iters, 1, "-n"),
        warmup=_at_least(given.warmup, 0, "-w"),
        checks=_at_least(given.check, 0, "-c"),
        recorded_steps=_at_least(given.records, 1, "--records"),
        host_calls=_at_least(given.host_calls, 0, "--host-calls"),
        json=_writable(given.json, "-J"),
        plot=_writable(given.plot, "--plot"),
        timelines=given.trace,
        seed=_at_least(given.seed, 0, "--seed"),
        threads=_at_least(threads, 1, "--threads"),
        flush_bytes=None if given.flush is None else 0 if given.flush == "0" else parse_size(given.flush, 1),
        timeout=given.timeout,
        inject_error=given.inject_error,
        commit=given.commit or os.environ.get("MOECOMM_BENCH_COMMIT"),
        command=command,
    )
    _check_together(options)
    return options


def _between(variable: str, nodes: int) -> str | None:
    return os.environ.get(variable) if nodes > 1 else None


def _check_together(options: Options) -> None:
    """Refuses what single flags allow and together makes no sense."""
    on_cpu, on_one_node = options.device == "cpu", options.nodes == 1
    exact, by_rank = options.capacity is None, options.layout == "rank"
    suffix = Path(options.plot or "x.png").suffix.lower()
    refusals = (
        (options.timeout <= 0, f"--timeout has to be above 0, got {options.timeout:g}"),
        (not 1 <= options.headroom < 1e3, f"--headroom has to be at least 1, got {options.headroom:g}"),
        (options.inject_error and not options.checks, "--inject-error needs a check to catch it: not -c 0"),
        (options.baselines_only and not options.baselines, "--baselines-only needs --baselines"),
        (on_cpu and options.num_sms != (None,), "--num-sms is for GPUs (--device cuda)"),
        (on_cpu and options.overlap_num_sms is not None, "--overlap-num-sms is for GPUs (--device cuda)"),
        (on_cpu and options.graph, "--graph is for GPUs (--device cuda)"),
        (on_cpu and options.wire is not None, "--wire is for GPUs (--device cuda)"),
        (options.graph and exact, "--graph needs --capacity: exact sizes make the host wait"),
        (by_rank and options.alignment != 1, "--alignment is for --layout expert"),
        (by_rank and options.kept_handle == "weighted", "--kept-handle weighted is for --layout expert"),
        (not options.dequantize and options.wire is None, "--no-dequantize is for --wire fp8"),
        (on_one_node and options.fabric_provider is not None, "--fabric-provider needs --ranks-per-node"),
        (options.is_layer and len(options.dtypes) > 1, "-d has to be one type for layers"),
        (suffix not in (".png", ".svg", ".pdf"), f"--plot {options.plot} has to end in .png, .svg or .pdf"),
    )
    for refused, text in refusals:
        if refused:
            raise ValueError(text)
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        if (row_bytes := shape.hidden * DTYPES[dtype]) % 16:
            raise ValueError(f"--hidden {shape.hidden} of {dtype} is {row_bytes} bytes, no multiple of 16")
    limit = options.limit_nodes
    if limit is None:
        return
    if not 1 <= limit <= options.nodes:
        raise ValueError(f"--limit-nodes has to be between 1 and the nodes ({options.nodes})")
    for kind, _ in options.routings:
        if kind not in ("uniform", "zipf"):
            raise ValueError(f"--limit-nodes is for --routing uniform and zipf, not {kind}")
    for shape in options.shapes:
        if shape.topk > (reachable := limit * (shape.experts // options.nodes)):
            raise ValueError(f"--topk {shape.topk} is more than the {reachable} experts of --limit-nodes")
