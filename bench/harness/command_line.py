"""The command line of the benchmark programs: argparse checks each flag, `_check_together` all of them.

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
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from . import options as named
from .options import Options, Shape

_LINKS = {"cpu": ("memcpy",), "cuda": ("sm-push", "sm-exchange", "memcpy")}
_BACKEND = {"cpu": "gloo", "cuda": "nccl"}
_DENSE = {"cpu": (128, 128, 128), "cuda": (16384, 7168, 4096)}
_OPERATION = Shape(hidden=4096, experts=32, topk=4)  # where flags do not say otherwise
_WIDTH_MULTIPLE = 16  # elements: rows and products of every type are aligned then


# -- types of flags ------------------------------------------------------------------------------------------


def _at_least(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no number") from None
        if not (math.isfinite(value) and value >= least):
            raise ArgumentTypeError(f"has to be at least {least}, got {text}")
        return value

    return read


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text!r} is not known: use {', '.join(known)}")
        return text

    return read


def _routing_of(known: Sequence[str]) -> Callable[[str], str]:
    read = _one_of((*known, f"FILE{named.RECORDED}"))
    return lambda text: text if text.endswith(named.RECORDED) and Path(text).is_file() else read(text)


def _list_of(read: Callable[[str], Any], everything: Sequence[Any] = ()) -> Callable[[str], tuple[Any, ...]]:
    """A list with commas; "all" means `everything`, if there is such a thing."""

    def read_list(text: str) -> tuple[Any, ...]:
        if text == "all" and everything:
            return tuple(everything)
        return tuple(dict.fromkeys(read(word.strip()) for word in text.split(",")))

    return read_list


def file_to_write(text: str) -> str:
    """Returns the path of a file that can be made."""
    if not Path(text).resolve().parent.is_dir() or Path(text).is_dir():
        raise ArgumentTypeError(f"{text} is a folder, or in a folder that is not there")
    return text


# -- the flags -----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and nothing else."""

    def error(self, message: str) -> NoReturn:
        # Under torchrun every rank parses the same line; one of them speaks.
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def build_parser(program: str) -> Parser:
    """The parser of one program. What a flag is stored as is the field of Options of that name, or a word
    that `_derived` makes fields of.
    """
    parser = Parser(
        prog=f"{program}_perf.py",
        allow_abbrev=False,
        description=f"Times {program.replace('_', ' ')} of moecomm, verified first, next to its baselines.",
        epilog="bench/README.md explains columns, baselines and variants.",
    )
    is_layer, count, positive = program == named.LAYER, _at_least(0), _at_least(1)
    known = named.LAYER_ROUTINGS if is_layer else named.ROUTINGS
    add = parser.add_argument
    # fmt: off
    add("-g", "--ranks", type=positive, metavar="N",
        help="ranks to start here (2; GPUs: all of them); torchrun says its own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="GPUs if there are any (auto)")
    add("-b", "--min", type=positive, metavar="TOKENS", help="first number of tokens per rank "
        + (f"(4096; {named.WIDE_TOKENS} if all presets are wide)" if is_layer else "(2048)"))
    add("-e", "--max", type=positive, metavar="TOKENS", help="the last (the first)")
    add("-f", "--factor", type=float, default=2.0, metavar="X", help="multiply by this between sizes (2)")
    add("-n", "--iters", type=positive, default=20, metavar="N", help="timed iterations (20)")
    add("-w", "--warmup", type=count, default=5, metavar="N", help="untimed iterations before them (5)")
    add("-c", "--check", dest="checks", type=count, default=1, metavar="N",
        help="verified calls before timing, new data each; 0: none (1)")
    add("-d", "--dtype", dest="dtypes", type=_list_of(_one_of(tuple(named.DTYPES)), tuple(named.DTYPES)),
        default="bfloat16" if is_layer else "float32", metavar="TYPE",
        help=f"{', '.join(named.DTYPES)}, a list, all")
    add("-J", "--json", type=file_to_write, metavar="FILE", help="write everything measured as JSON")
    add("--hidden", type=positive, metavar="H", help="values per row (4096; layers: the preset's)")
    if program != "alltoall":
        add("--experts", type=_list_of(positive), metavar="E",
            help="experts over all ranks, or a list (32; preset's)")
        add("--topk", type=_list_of(positive), metavar="K",
            help="experts per token, or a list (4; preset's)")
        add("--routing", type=_list_of(_routing_of(known)), default="uniform", metavar="LIST",
            help=f"of {', '.join(known)}, or FILE{named.RECORDED} of recorded ids (uniform)")
        add("--zipf", type=_list_of(_at_least(0, float)), default="1", metavar="S",
            help="exponent of zipf, or a list (1)")
    if program in ("dispatch", "combine"):
        add("--limit-nodes", type=positive, metavar="M", help="a token's experts are on at most M nodes")
        add("--layout", choices=("expert", "rank"), default="expert", help="result layout (expert)")
        add("--alignment", type=positive, default=1, metavar="A",
            help="rows an expert's group is padded to (1)")
        add("--capacity", type=lambda text: text if text == "auto" else positive(text), metavar="ROWS",
            help="fixed rows, or auto: what the fullest rank needs (exact)")
        add("--wire", choices=named.WIRES, help="rows travel in that format (GPUs; in their type)")
        add("--api", choices=(named.MOECOMM, named.DEEP_EP), default=named.MOECOMM,
            help="deep_ep: also by compat/deep_ep; by expert its low-latency calls (moecomm)")
        add("--no-dequantize", dest="dequantize", action="store_false", help="hand on data, scales")
    if program == "combine":
        add("--combine-wire", choices=("fp8",),
            help="sums travel in that format (GPUs; in their type)")
    if program == "dispatch":
        add("--kept-handle", nargs="?", const="plain", choices=("plain", "weighted"),
            help="the dispatch along an earlier handle, combine's backward; weighted: with weights")
    if not is_layer:
        cpu, cuda = (", ".join(_known_baselines(program, device)) for device in ("cpu", "cuda"))
        add("--graph", nargs="?", type=positive, const=1, default=0, metavar="CALLS",
            help="replay a CUDA graph of so many calls (--capacity; 1)")
        add("--baselines", nargs="?", const="all", metavar="LIST",
            help=f"also run baselines: all, or a list of {cpu}; GPUs: {cuda}")
        add("--ranks-per-node", type=positive, metavar="N",
            help="ranks that share memory; fewer than all: emulated nodes")
        add("--fabric-provider", metavar="NAME", help="libfabric provider: tcp, shm, ... (best found)")
    else:
        variants, presets, others = named.VARIANTS, tuple(named.PRESETS), (*named.WIDE, *named.SHARED)
        add("--presets", type=_list_of(_one_of((*presets, *others)), presets), default="all", metavar="LIST",
            help=f"all, or a list of {', '.join(presets)}; not in all: {', '.join(others)}")
        add("--ways", type=_list_of(_one_of(named.WAYS), named.WAYS), default="layer", metavar="LIST",
            help=f"all, or a list of {', '.join(named.WAYS)}: one call, a training step (layer)")
        add("--microbatches", type=positive, default=4, metavar="N", help="of a training step (4)")
        add("--products", type=_list_of(_one_of(("torch", "quack"))), default=(None,), metavar="LIST",
            help="what computes: torch, quack (moecomm's choice)")
        add("--activation", choices=("swiglu", "swiglu_interleaved"), default="swiglu",
            help="gates in halves, or in even columns, which quack fuses (%(default)s)")
        add("--ffn", type=positive, metavar="F", help="inner width of an expert (the preset's)")
        add("--variants", type=_list_of(_one_of((*variants, named.LIGER)), variants), default="all",
            metavar="LIST", help=f"of one call: all, or a list of {', '.join(variants)}; not in all: "
            f"{named.LIGER}, of a training step too")
        add("--keep", type=_list_of(_one_of(named.KEEPS)), default="all", metavar="LIST",
            help="overlapped with each kept: all,rows,nothing")
        add("--graph-tokens", type=count, default=512, metavar="T",
            help="tokens of graph replay beside eager; 0: none (512)")
    add("--num-sms", type=_list_of(positive), default=(None,), metavar="N",
        help="SMs of one operation, or a list (moecomm's own choice)")
    add("--seed", type=count, default=20240817, metavar="N", help="seed of data and routing")
    add("--threads", type=positive, metavar="N",
        help="compute threads a rank, for every path (cores // ranks, at least 1)")
    add("--flush", dest="flush_bytes", type=count, metavar="BYTES",
        help="rewritten before a call (as large as the L3; GPUs: 256 MiB); 0: off")
    add("--timeout", type=_at_least(1e-3, float), default=120.0, metavar="S", help="seconds of a wait (120)")
    add("--commit", default=os.environ.get("MOECOMM_BENCH_COMMIT"), metavar="HASH",
        help="commit to record where the source is no git checkout")
    add("--inject-error", action="store_true",
        help="corrupt one value of each result before it is checked, to see #wrong move")
    # fmt: on
    return parser


def parse(program: str, argv: Sequence[str] | None = None) -> Options:
    """Parses and checks the command line; ends the program with one line and status 2 if it cannot be
    followed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(program)
    given = vars(parser.parse_args(arguments))
    try:
        derived = _derived(program, given)  # takes what it is made of out of `given`
        command = shlex.join(["python", f"bench/{program}_perf.py", *arguments])
        options = Options(program=program, command=command, **{**given, **derived})
        _check_together(options)
    except (ValueError, OSError, EOFError) as problem:
        parser.error(str(problem))
    return options


# -- what follows from several flags, or from the machine ----------------------------------------------------


def _derived(program: str, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of Options that are more than one flag's value."""
    device = find_device(given["device"])
    ranks = _find_ranks(given["ranks"], device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    found: dict[str, Any] = {
        "device": device,
        "ranks": ranks,
        "threads": given["threads"] or max(1, named.available_cores() // local),
    }
    if program == named.LAYER:
        found["dense"] = _DENSE[device]
        keep = [named.keep_name(each) for each in given.pop("keep")]
        found["variants"] = tuple(
            each for name in given["variants"] for each in (keep if name == named.OVERLAPPED else [name])
        )
    else:
        per_node = _ranks_per_node(given["ranks_per_node"], ranks)
        nodes = ranks // (per_node or ranks)
        baselines = _baselines(program, device, nodes, given["baselines"])
        found |= {"ranks_per_node": per_node, "baselines": baselines}
        if nodes > 1:
            provider = given["fabric_provider"] or os.environ.get("MOECOMM_FABRIC_PROVIDER")
            interface = os.environ.get("MOECOMM_FABRIC_INTERFACE")
            found |= {"fabric_provider": provider, "fabric_interface": interface}
    if program != "alltoall":
        exponents = given.pop("zipf")
        found["routings"] = tuple(
            (kind, exponent)
            for kind in given.pop("routing")
            for exponent in (exponents if kind == "zipf" else (None,))
        )
    found["shapes"] = shapes = _shapes(program, given, ranks)
    wide = all(shape.preset in named.WIDE for shape in shapes)
    first = given.pop("min") or (named.WIDE_TOKENS if wide else 4096 if program == named.LAYER else 2048)
    found["sizes"] = sweep(first, given.pop("max") or first, given.pop("factor"))
    return found


def sweep(first: int, last: int, factor: float = 2.0) -> tuple[int, ...]:
    """Sizes from `first` to `last` inclusive, each `factor` times the one before, and at least one more."""
    if last < first:
        raise ValueError(f"the last size (-e, {last} tokens) is below the first (-b, {first} tokens)")
    if not (math.isfinite(factor) and factor > 1.0):
        raise ValueError(f"-f has to be above 1, got {factor:g}")
    sizes = [first]
    while (grown := max(sizes[-1] + 1, int(sizes[-1] * factor))) <= last:
        sizes.append(grown)
    return tuple(sizes)


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
    if given is not None or device == "cpu":
        return given or 2
    import torch

    if not torch.cuda.device_count():
        raise ValueError("--device cuda: torch finds no GPU here")
    return torch.cuda.device_count()


def _ranks_per_node(given: int | None, ranks: int) -> int | None:
    """The number asked for, by flag or environment, else what torchrun started on each host."""
    asked = given or int(os.environ.get("MOECOMM_RANKS_PER_NODE", "0"))
    local = asked or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if asked and (asked < 1 or ranks % asked):
        raise ValueError(f"--ranks-per-node {asked} does not divide the {ranks} ranks (-g)")
    return local if asked or (local < ranks and ranks % local == 0) else None


def _known_baselines(program: str, device: str) -> tuple[str, ...]:
    backend = _BACKEND[device]
    own = (backend,) if program == "alltoall" else (backend, f"{backend}-tuned", f"{backend}-rows")
    symmetric = ("torch-symm",) if device == "cuda" and program != "alltoall" else ()
    return (*named.BETWEEN_NODES, *_LINKS[device], *own, *symmetric)


def _baselines(program: str, device: str, nodes: int, text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    known = _known_baselines(program, device)
    left_out = named.ON_REQUEST if nodes > 1 else (*named.ON_REQUEST, *named.BETWEEN_NODES)
    try:
        wanted = _list_of(_one_of(known), [name for name in known if name not in left_out])(text)
    except ArgumentTypeError as problem:
        raise ValueError(f"--baselines {problem}") from None
    if nodes == 1 and (between := set(wanted) & set(named.BETWEEN_NODES)):
        raise ValueError(f"--baselines {min(between)} is for several nodes (--ranks-per-node)")
    return wanted


def _shapes(program: str, given: dict[str, Any], ranks: int) -> tuple[Shape, ...]:
    hidden, ffn, experts, topks = (given.pop(name, None) for name in ("hidden", "ffn", "experts", "topk"))
    if program == "alltoall":
        return (Shape(hidden=hidden or _OPERATION.hidden, experts=ranks, topk=1),)
    chosen = [_OPERATION]
    if program == named.LAYER:
        chosen = [named.shape_of(word, ranks) for word in given.pop("presets")]
    shapes = tuple(
        replace(shape, hidden=hidden or shape.hidden, ffn=ffn or shape.ffn, experts=count, topk=topk)
        for shape in chosen
        for count in (experts or (shape.experts,))
        for topk in (topks or (shape.topk,))
    )
    for shape in shapes:
        if shape.topk > shape.experts:
            raise ValueError(f"--topk {shape.topk} is more than the {shape.experts} experts (--experts)")
        if program != named.LAYER and shape.experts % ranks:
            raise ValueError(f"--experts {shape.experts} cannot be shared evenly by {ranks} ranks (-g)")
        for flag, width in (("--hidden", shape.hidden), ("--ffn", shape.ffn)):
            if program == named.LAYER and (width or 0) % _WIDTH_MULTIPLE:
                raise ValueError(f"{flag} {width} has to be a multiple of {_WIDTH_MULTIPLE}")
    return shapes


def _check_together(options: Options) -> None:
    """Refuses what single flags allow and together makes no sense."""
    on_cpu, on_one_node = options.device == "cpu", options.nodes == 1
    exact, by_rank = options.capacity is None, options.layout == "rank"
    kept, by_deep_ep = options.kept_handle is not None, options.api == named.DEEP_EP
    whole, wire = "layer" in options.ways, options.wire or options.combine_wire
    refusals = (
        (options.inject_error and not options.checks, "--inject-error needs a check to catch it: not -c 0"),
        (on_cpu and options.num_sms != (None,), "--num-sms is for GPUs (--device cuda)"),
        (on_cpu and options.graph, "--graph is for GPUs (--device cuda)"),
        (on_cpu and wire, "--wire and --combine-wire are for GPUs (--device cuda)"),
        (options.graph and kept, "--graph: not with --kept-handle, whose backward has the forward's stream"),
        (options.graph and exact, "--graph needs --capacity: exact sizes make the host wait"),
        (by_rank and options.alignment != 1, "--alignment is for --layout expert"),
        (by_rank and options.kept_handle == "weighted", "--kept-handle weighted is for --layout expert"),
        (not options.dequantize and options.wire is None, "--no-dequantize is for --wire fp8 and mxfp8"),
        (on_one_node and options.fabric_provider is not None, "--fabric-provider needs --ranks-per-node"),
        (by_deep_ep and (kept or options.wire), "--api deep_ep is not for --kept-handle and --wire"),
        (options.is_layer and len(options.dtypes) > 1, "-d has to be one type for layers"),
        (whole and len(options.products) > 1, "--products takes a list for other --ways than layer"),
    )
    for refused, text in refusals:
        if refused:
            raise ValueError(text)
    for shape, (kind, _) in itertools.product(options.shapes, options.routings):
        if kind.endswith(named.RECORDED):
            from .inputs import read_ids  # late, since torch takes seconds

            read_ids(kind, shape.topk, shape.experts)
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        if (row_bytes := shape.hidden * named.DTYPES[dtype]) % 16:
            raise ValueError(f"--hidden {shape.hidden} of {dtype} is {row_bytes} bytes, no multiple of 16")
    limit = options.limit_nodes
    if limit is None:
        return
    if limit > options.nodes:
        raise ValueError(f"--limit-nodes has to be between 1 and the nodes ({options.nodes})")
    for kind, _ in options.routings:
        if kind not in ("uniform", "zipf"):
            raise ValueError(f"--limit-nodes is for --routing uniform and zipf, not {kind}")
    for shape in options.shapes:
        if shape.topk > (reachable := limit * (shape.experts // options.nodes)):
            raise ValueError(f"--topk {shape.topk} is more than the {reachable} experts of --limit-nodes")
