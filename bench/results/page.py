"""docs/results.md from the records in docs/results/: tables of GPUs, layers, nodes and CPU ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness import options as named
from ..harness import record
from ..harness.options import BETWEEN_NODES, DENSE, MOECOMM, OVERLAPPED
from ..harness.path import FORWARD, IN_A_ROW, STEP, WHOLE
from ..harness.record import Record, Row
from ..harness.report import machine_words, number, sent_over_least, skew_words, wrong_words
from .tables import Cells, Records, profile_table, table, table_of, titled, train_table


class Group(NamedTuple):
    """The rows of one comparison of one record, by path."""

    name: str
    record: Record
    paths: Mapping[str, Row]

    @property
    def own(self) -> Row:
        """moecomm's row."""
        return self.paths.get(MOECOMM) or self.paths[OVERLAPPED]

    def ms(self, path: str) -> str:
        """Milliseconds of a path."""
        return number(self.paths[path]["time_s"], 1e3, 3) if path in self.paths else "-"

    def faster(self, other: str, path: str | None = None) -> str:
        """Formats how many times faster moecomm, or `path`, is than the path `other`."""
        own = self.own if path is None else self.paths.get(path)
        return f"{self.paths[other]['time_s'] / own['time_s']:.2f}x" if own and other in self.paths else "-"

    def share(self, ceiling: str, digits: int = 0) -> str:
        """Time of a ceiling / time of moecomm."""
        if ceiling not in self.paths:
            return "-"
        return f"{100 * self.paths[ceiling]['time_s'] / self.own['time_s']:.{digits}f}%"

    def of(self, path: str, key: str, scale: float = 1.0, digits: int = 3) -> str:
        """A number of a path's row."""
        return number(self.paths[path].get(key), scale, digits) if path in self.paths else "-"


def groups_of(records: Records) -> list[Group]:
    """The comparisons that moecomm took part in."""
    found = [
        Group(name, content, paths)
        for name, content in records.items()
        if not is_native(content)
        for paths in record.comparisons(content["rows"])
    ]
    return [each for each in found if MOECOMM in each.paths or OVERLAPPED in each.paths]


def is_native(content: Record) -> bool:
    """Returns whether a record is of a program in C++."""
    return content["program"] in ("fabric_raw", "proxy_rate")


def section_of(content: Record) -> str:
    """The part of the page that a record belongs to."""
    if content["program"] == "train_perf":
        return "training"
    if (
        is_native(content)
        or (content["options"].get("ranks_per_node") or content["ranks"]) < content["ranks"]
    ):
        return "nodes"
    if content["program"] == "moe_layer_perf":
        return "layers"
    return "cuda" if content["gpus"] else "cpu"


def _wrong(group: Group) -> str:
    return str(sum(row["wrong"] or 0 for row in group.paths.values()))


def _of_graph(calls: int) -> str:
    return "graph" if int(calls) == 1 else f"graph of {calls}"


def _case(group: Group) -> str:
    """Describes a comparison in a few words: "bfloat16, top-8 of 256, fp8, fixed"."""
    options, row = group.record["options"], group.own
    words = [row["dtype"], f"top-{row['topk']} of {row['experts']}"]
    if row["routing"] not in ("uniform", "balanced"):
        words.append(skew_words(row))
    if options["wire"]:
        words.append(options["wire"] if options["dequantize"] else f"{options['wire']} passed on")
    if options.get("combine_wire"):
        words.append(f"{options['combine_wire']} sums")
    if options["graph"] or options["capacity"] is not None:
        words.append(_of_graph(options["graph"]) if options["graph"] else "fixed")
    if options["layout"] == "rank":
        words.append("by rank")
    if options["kept_handle"]:
        words.append("kept handle" + (" weighted" if options["kept_handle"] == "weighted" else ""))
    if row["num_sms"] is not None:
        words.append(f"{row['num_sms']} SMs")
    gpus, limit = group.record["gpus"], options.get("limit_nodes")
    if gpus and group.record["ranks"] != len(gpus["names"]):
        words.append(f"{group.record['ranks']} GPUs")
    if limit is not None:
        words.append(f"at most {limit} of {group.record['ranks'] // options['ranks_per_node']} nodes")
    return ", ".join(words)


_CPU: Cells = (
    ("run", lambda g: g.name),
    ("tokens/rank", lambda g: str(g.own["tokens"])),
    ("type", lambda g: g.own["dtype"]),
    ("moecomm ms", lambda g: number(g.own["time_s"], 1e3, 2)),
    ("algbw GB/s", lambda g: number(g.own["algbw_GBps"], 1, 2)),
    ("faster than gloo", lambda g: g.faster("gloo")),
    ("than gloo-tuned", lambda g: g.faster("gloo-tuned")),
    ("memcpy ms", lambda g: g.of("memcpy", "time_s", 1e3, 2)),
    ("of ceiling", lambda g: g.share("memcpy")),
    ("#wrong", _wrong),
)
_GPU: Cells = (
    ("run", lambda g: g.name),
    ("tokens/GPU", lambda g: str(g.own["tokens"])),
    ("case", _case),
    ("us", lambda g: number(g.own["time_s"], 1e6)),
    ("remote GB/s", lambda g: number(g.own["busbw_GBps"])),
    ("of ceiling", lambda g: g.share("sm-push", 1)),
    ("ceiling GB/s", lambda g: g.of("sm-push", "busbw_GBps", 1, 1)),
    ("least us", lambda g: g.of("sm-exchange", "time_s", 1e6, 1)),
    ("SMs", lambda g: number(g.own["num_sms"] if g.own["sms"] is None else g.own["sms"], digits=0)),
    ("host us", lambda g: number(g.own.get("host_s"), 1e6)),
    ("faster than nccl", lambda g: g.faster("nccl")),
    ("than nccl-tuned", lambda g: g.faster("nccl-tuned")),
    ("than nccl-rows", lambda g: g.faster("nccl-rows")),
    ("than torch-symm", lambda g: g.faster("torch-symm")),
    ("#wrong", _wrong),
)


_BESIDE: Cells = (  # of a comparison and a row of it
    ("run", lambda it: it[0].name),
    ("path", lambda it: it[1]["path"]),
    ("us", lambda it: number(it[1]["time_s"], 1e6)),
    ("remote GB/s", lambda it: number(it[1]["busbw_GBps"])),
    ("algbw GB/s", lambda it: number(it[1]["algbw_GBps"])),
    ("how", lambda it: it[1]["note"] or "-"),
)


def _layer(group: Group) -> str:
    return _layer_of(group.own)


def _layer_of(row: Row) -> str:
    return f"{row['preset']} ({row['hidden']}, {row['ffn']}, {row['experts']}, {row['topk']})"


_PLACE: Cells = (("layer", _layer), ("tokens/rank", lambda g: str(g.own["tokens"])))
_LAYERS: Cells = (
    *_PLACE,
    ("routing", lambda g: skew_words(g.own)),
    ("phase", lambda g: g.own["phase"]),
    ("compute only ms", lambda g: g.ms(named.COMPUTE)),
    ("overlapped ms", lambda g: g.ms(OVERLAPPED)),
    ("ratio", lambda g: g.of(OVERLAPPED, "ratio")),
    ("serial", lambda g: g.of(named.SERIAL, "ratio")),
    ("communication only ms", lambda g: g.ms(named.COMM)),
    ("exposed %", lambda g: g.of(OVERLAPPED, "exposed_share", 100, 1)),
    ("TFLOP/s", lambda g: f"{g.own['tflops']:.4g}"),
    ("of dense %", lambda g: g.of(OVERLAPPED, "share", 100, 1)),
    ("faster than baseline", lambda g: g.faster(named.BASELINE)),
    ("memory GB", lambda g: g.of(OVERLAPPED, "memory_bytes", 1e-9, 2)),
    ("#wrong", _wrong),
)
_GRAPHS: Cells = (
    *_PLACE,
    *((f"{name} ms", lambda g, name=name: g.ms(name)) for name in named.GRAPH_VARIANTS[1:]),
    ("graph than eager", lambda g: g.faster(OVERLAPPED, named.GRAPH)),
    ("than fixed", lambda g: g.faster(named.FIXED, named.GRAPH)),
    ("graphed step than eager", lambda g: g.faster(OVERLAPPED, named.GRAPHED)),
)
_KEPT_WORDS = {named.keep_name(keep): keep for keep in named.KEEPS} | {
    name: name for name in (named.SERIAL, named.BASELINE)
}
_KEPT: Cells = (  # of a comparison and a path of it
    ("layer", lambda it: _layer(it[0])),
    ("tokens/rank", lambda it: str(it[0].own["tokens"])),
    ("kept", lambda it: _KEPT_WORDS[it[1]]),
    ("step ms", lambda it: it[0].ms(it[1])),
    ("ratio", lambda it: it[0].of(it[1], "ratio")),
    ("memory GB", lambda it: it[0].of(it[1], "memory_bytes", 1e-9, 2)),
    ("kept GB", lambda it: it[0].of(it[1], "kept_bytes", 1e-9)),
)


def _kept(groups: Iterable[Group]) -> str:
    """Time and memory by what a forward keeps, and of the others that ran beside it."""
    with_keep = [g for g in groups if g.own["phase"] == STEP and named.keep_name("rows") in g.paths]
    return table_of(
        _KEPT, [(group, name) for group in with_keep for name in group.paths if name in _KEPT_WORDS]
    )


_OF_STEPS = ("preset", "hidden", "ffn", "experts", "topk", "dtype", "tokens", "routing", "zipf")
Steps = Mapping[tuple[str, str], Row]  # by path and phase


def _of_phase(name: str, phase: str, scale: float = 1.0, digits: int = 1) -> Callable[[Any], str]:
    return lambda it: number(it[0].get((it[1], phase), {}).get(name), scale, digits)


_PATHS: Cells = (  # of a layer's steps and a path of them
    ("layer", lambda it: _layer_of(it[0][it[1], STEP])),
    ("path", lambda it: it[1]),
    ("how", lambda it: it[0][it[1], STEP]["note"] or "-"),
    ("alone ms", lambda it: _ms(it[0], it[1], STEP)),
    ("in a row ms", lambda it: _ms(it[0], it[1], IN_A_ROW)),
    ("alone MHz", _of_phase("sm_mhz", STEP, digits=0)),
    ("in a row MHz", _of_phase("sm_mhz", IN_A_ROW, digits=0)),
    ("alone W", _of_phase("power_W", STEP, digits=0)),
    ("in a row W", _of_phase("power_W", IN_A_ROW, digits=0)),
    ("alone exposed %", _of_phase("exposed_share", STEP, 100)),
    ("whole step, host us", _of_phase("host_s", WHOLE, 1e6, 0)),
    ("of dense %", _of_phase("share", IN_A_ROW, 100)),
    ("#wrong", lambda it: wrong_words(it[0][it[1], STEP])),
)


def _steps(records: Iterable[Record]) -> list[str]:
    """The tables of training steps in microbatches; all times are a microbatch's."""
    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for content in records:
        for row in content["rows"]:
            if row.get("microbatches") and row["path"] != DENSE:
                place = found.setdefault(tuple(row[name] for name in _OF_STEPS), {})
                place[row["path"], row["phase"]] = row
    return [
        titled(
            "Microbatches of a training step, ms each; in brackets over torch's products. All in a row, "
            "gradients of weights added to what is there; *whole step*: from weights without gradients on. "
            "GB: its peak over what was there before.",
            _steps_table(list(found.values())),
        ),
        titled(
            "A microbatch alone beside several in a row:",
            table_of(_PATHS, [(rows, path) for rows in found.values() for path in _paths_of([rows])]),
        ),
    ]


def _steps_table(groups: Sequence[Steps]) -> str:
    paths = _paths_of(groups)
    titles = ["layer", "tokens/rank", "rows an expert", *paths]
    titles += [f"{path}, {word}" for word in ("whole step", "GB") for path in paths]
    lines = []
    for rows in groups:
        first = next(iter(rows.values()))
        line = [_layer_of(first), str(first["tokens"]), str(first["rows"] // first["experts"])]
        line += [_ms(rows, path, phase) for phase in (IN_A_ROW, WHOLE) for path in paths]
        for path in paths:
            last = rows.get((path, WHOLE)) or rows.get((path, IN_A_ROW), {})
            line.append(number(last.get("memory_bytes"), 1e-9, 2))
        lines.append(line)
    kept = [place for place in range(len(titles)) if place < 3 or any(line[place] != "-" for line in lines)]
    return table([titles[place] for place in kept], [[line[place] for place in kept] for line in lines])


def _paths_of(groups: Sequence[Steps]) -> list[str]:
    return list(dict.fromkeys(path for rows in groups for path, _ in rows))


def _ms(rows: Steps, path: str, phase: str) -> str:
    """Milliseconds of a microbatch, and their ratio over torch's products if there is one."""
    row = rows.get((path, phase))
    if row is None:
        return "-"
    count = 1 if phase == STEP else row["microbatches"]
    ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f})"
    return number(row["time_s"] / count, 1e3, 2) + ratio


def _ceiling(name: str) -> Cells:
    """Rate of a rank's least bytes at a ceiling between nodes, and the share of it."""

    def rate(group: Group) -> str:
        if name not in group.paths:
            return "-"
        to_send = group.own["least_bytes"] / group.record["ranks"]
        return number(to_send / group.paths[name]["time_s"], 1e-9, 2)

    return (f"{name} GB/s", rate), (f"of {name}", lambda group: group.share(name))


def _nodes(backend: str) -> Cells:
    return (
        ("run", lambda g: g.name),
        ("tokens/rank", lambda g: str(g.own["tokens"])),
        ("case", lambda g: f"{g.own['hidden']}, {_case(g)}"),
        ("ms", lambda g: number(g.own["time_s"], 1e3, 2)),
        ("lanes", lambda g: str(max(each.get("network_lanes", 1) for each in g.record["stats"].values()))),
        ("wire GB/s", lambda g: number(g.own["wire_GBps"], 1, 2)),
        *(cell for name in BETWEEN_NODES for cell in _ceiling(name)),
        ("memcpy ms", lambda g: g.of("memcpy", "time_s", 1e3, 2)),
        ("sent / least", lambda g: sent_over_least(g.own)),
        ("puts / least", lambda g: number(g.own["sent_puts"] / g.own["least_puts"], 1, 2)),
        *(
            (f"than {backend}{kind}", lambda g, kind=kind: g.faster(f"{backend}{kind}"))
            for kind in ("", "-tuned", "-rows")
        ),
        ("#wrong", _wrong),
    )


def _limit_table(groups: Sequence[Group]) -> str:
    """Makes the table of each run with a limit on nodes beside the run that differs in nothing else."""
    plain = {(group.name, group.own["tokens"]): group.own for group in groups}
    lines = []
    for group in groups:
        own, other = group.own, plain.get((group.name.removesuffix("-limit"), group.own["tokens"]))
        if group.record["options"].get("limit_nodes") is None or other is None or other is own:
            continue
        line = [group.name]
        for key, scale, digits in (("sent_bytes", 1e-6, 2), ("sent_puts", 1, 0), ("time_s", 1e3, 2)):
            line += [number(own[key], scale, digits), number(other[key], scale, digits)]
        line += [
            f"{1 - own['sent_bytes'] / other['sent_bytes']:.0%}",
            f"{other['time_s'] / own['time_s']:.2f}x",
        ]
        lines.append(line)
    titles = ("run", "MB sent", "without", "puts", "without", "ms", "without", "bytes saved", "faster")
    return table(titles, lines)


def _native_table(program: str, records: Records, columns: Sequence[tuple[str, str, float, int]]) -> str:
    """Makes the table of a program in C++: columns by title, key, scale and digits, after its first words."""
    rows = [row for content in records.values() if content["program"] == program for row in content["rows"]]
    lines = [
        [str(row.get("kind") or f"{row['provider']} (libfabric {row['version']})")]
        + [number(row[key], scale, digits) for _, key, scale, digits in columns]
        for row in rows
    ]
    return table(["what", *(title for title, *_ in columns)], lines)


_RAW = (
    ("bytes a put", "bytes", 1, 0),
    ("in flight", "in_flight", 1, 0),
    ("GB/s", "gb_per_s", 1, 3),
    ("least", "gb_per_s_min", 1, 3),
    ("most", "gb_per_s_max", 1, 3),
    ("puts/s", "messages_per_s", 1, 0),
)
_PROXY = (("producers", "producers", 1, 0), ("commands a put", "commands_a_put", 1, 0),
          ("M commands/s", "commands_per_s", 1e-6, 2), ("least", "commands_per_s_min", 1e-6, 2),
          ("most", "commands_per_s_max", 1e-6, 2), ("M puts/s", "puts_per_s", 1e-6, 3))  # fmt: skip


# -- the sections --------------------------------------------------------------------------------------------


def _facts(records: Records) -> str:
    """Machines, software, commits and times of some records."""
    runs = list(records.values())
    of_machine = [each for each in runs if each["gpus"]] or runs[:1]
    made = ", ".join(f"{name} {version}" for name, version in of_machine[0]["versions"].items())
    # Runs may be renewed one by one: every machine and commit and the span of times is said.
    machines = dict.fromkeys(machine_words(each["hardware"], each["gpus"]) for each in of_machine)
    commits = dict.fromkeys(f"`{str(each['git']['commit'])[:7]}`" for each in runs)
    times = sorted(each["time"] for each in runs)
    return (
        f"- machine: {'; '.join(machines)}\n- software: {made}\n"
        f"- commit {', '.join(commits)}, {' to '.join(dict.fromkeys((times[0], times[-1])))}"
    )


def _missing(records: Records) -> str:
    found = dict.fromkeys(
        f"- {name}: {each['path']}{' failed' if each['failed'] else ' n/a'}: {each['reason']}"
        for name, content in records.items()
        for each in content.get("missing", ())
    )
    return titled("Not run:", "\n".join(found))


def _gpus(records: Records) -> list[str]:
    """Returns the section of operations; records with a label, of other machines, have a table each behind
    it."""
    others = {name: content for name, content in records.items() if "." in name}
    found = _gpus_of({name: content for name, content in records.items() if name not in others})
    for machine, of_one in _by_machine(others):
        found += [f"### On {machine}", _facts(of_one), table_of(_GPU, groups_of(of_one)), _missing(of_one)]
    return found


def _gpus_of(records: Records) -> list[str]:
    if not records:
        return ["## GPUs"]
    grown = {name: content for name, content in records.items() if re.fullmatch(r"cuda-\w+-on-\d+", name)}
    groups = groups_of({name: content for name, content in records.items() if name not in grown})
    points = [each.name for each in groups]
    single = [group for group in groups if points.count(group.name) == 1]
    paths = [(group, row) for group in single if len(group.paths) > 3 for row in group.paths.values()]
    return [
        "## GPUs",
        _facts(records),
        "Times are as called, with an empty L2. The ceiling is `sm-push`; *nccl* moves rows as they are.",
        table_of(_GPU, single),
        titled(
            "Every path of the runs beside all baselines (memcpy reads and writes *algbw* on one GPU):",
            table_of(_BESIDE, paths),
        ),
        "### Sweeps",
        table_of(_GPU, [group for group in groups if group not in single]),
        "### Several numbers of GPUs",
        titled("Beside a [formula](memory.md#how-time-grows):", table_of(_GPU, groups_of(grown))),
        _missing(records),
    ]


def _layer_parts(records: Records) -> list[str]:
    found = [
        "## Layers",
        "A layer is (hidden, ffn, experts, top-k). It has the shape of the named model's and nothing else of "
        "it; *-wide* is what wide expert parallelism leaves of one: four experts a rank. The router is in no "
        "time.",
    ]
    for machine, of_one in _by_machine(records):
        first = next(iter(of_one.values()))
        dense = sorted(row["dense_tflops"] for each in of_one.values() for row in each["rows"])
        groups = groups_of(of_one)
        eager = [group for group in groups if not group.own["graphs"]]
        graphs = [group for group in groups if group.own["graphs"] and group.own["phase"] == STEP]
        steps = sorted(eager, key=lambda group: group.own["phase"] == FORWARD)
        shape = " x ".join(map(str, first["options"]["dense"]))
        found += [
            f"### Layers on {machine}",
            f"{_facts(of_one)}\n- a dense product of {shape} makes {dense[0]:.4g} to {dense[-1]:.4g} TFLOP/s",
            *_steps(of_one.values()),
            table_of(_LAYERS, steps),
            titled("Few tokens, eager and replayed from a graph:", table_of(_GRAPHS, graphs)),
            titled("By what a forward keeps for its backward:", _kept(eager)),
        ]
    return [*found, _missing(records)]


def _by_machine(records: Records) -> list[tuple[str, dict[str, Record]]]:
    """Returns records by the machine that made them and their label, GPUs and most ranks first; by their
    names without the label."""
    found: dict[tuple[bool, int, str, str], dict[str, Record]] = {}
    for name, content in records.items():
        run, _, label = name.partition(".")
        on_cpu, ranks = not content["gpus"], content["ranks"]
        machine = f"{ranks} CPU ranks" if on_cpu else f"{ranks} x {content['gpus']['names'][0]}"
        found.setdefault((on_cpu, -ranks, label, machine), {})[run] = content
    return [(key[-1], of_one) for key, of_one in sorted(found.items(), key=lambda each: each[0])]


def _node_parts(records: Records) -> list[str]:
    found = [
        "## Between nodes",
        "Nodes are emulated on one host, over libfabric: `2x1` are two nodes of one rank each.",
    ]
    machines: dict[str, dict[str, Record]] = {}
    for name, content in records.items():
        run, _, label = name.partition(".")
        machines.setdefault(f"{sorted(content['hardware'].items())} {label}", {})[run] = content
    for place, of_one in enumerate(machines.values()):
        groups = groups_of(of_one)
        backend = "nccl" if any(each["gpus"] for each in of_one.values()) else "gloo"
        raw, proxy = _native_table("fabric_raw", of_one, _RAW), _native_table("proxy_rate", of_one, _PROXY)
        found += [
            f"### Machine {place + 1}",
            _facts(of_one),
            table_of(_nodes(backend), groups),
            titled("Group-limited routing beside the same without, over all ranks:", _limit_table(groups)),
            titled("A provider by itself, both ways at once, of one direction:", raw),
            titled("The proxy before a network that does nothing, by kind of command:", proxy),
        ]
    return [*found, _missing(records)]


def _cpus(records: Records) -> list[str]:
    first = next(iter(records.values()))
    threads = f"- {first['ranks']} ranks of {first['threads']} compute thread each for every path"
    return [
        "## CPU",
        f"{_facts(records)}\n{threads}",
        table_of(_CPU, groups_of(records)),
        "The ceiling is *memcpy*, a yardstick: shares above 100 % occur.",
        _missing(records),
    ]


def _training(records: Records) -> list[str]:
    found = [
        "## Training",
        "Optimizer steps of [train_lm.py](models.md) on real text. The variant *torch* is the same model "
        "with its MoE layers in torch alone, rows by NCCL. MFU is by active parameters and attention.",
    ]
    for machine, of_one in _by_machine(records):
        found += [
            f"### Steps on {machine}",
            _facts(of_one),
            train_table(of_one),
            titled("Kernels of one step; kinds run beside each other:", profile_table(of_one)),
        ]
    return found


_SECTIONS: Mapping[str, Callable[[Records], list[str]]] = {
    "cuda": _gpus,
    "layers": _layer_parts,
    "training": _training,
    "nodes": _node_parts,
    "cpu": _cpus,
}
_HEAD = """# Measured results

Made by `python bench/run_all.py --page` from the records in [results/](results/), which have every sample,
the command, commit and versions of each run. Paths and columns are defined in
[bench/README.md](../bench/README.md). Times are medians over iterations of the slowest rank; paths of one
line took turns in one run, each verified first; variants of a training step ran one after the other. Commands
are those of their commits: versions since have no `--engine` (*sm*, *auto*) and no *merged* microbatches
([taken out](performance.md#taken-out)), name the ways of a layer by `--variants`, and have no `--both`."""


def tables(records: Records) -> dict[str, str]:
    """The sections of some records, by name."""
    found: dict[str, str] = {}
    for section, make in _SECTIONS.items():
        of_one = {name: content for name, content in records.items() if section_of(content) == section}
        if of_one:
            found[section] = "\n\n".join(text for text in make(of_one) if text)
    return found


def page(records: Records) -> str:
    """The whole page."""
    return "\n\n".join([_HEAD, *tables(records).values()]) + "\n"


def read_all(folder: Path) -> dict[str, Record]:
    """Reads all records of a folder, by name, in the order in which they were made."""
    found = {path.stem: record.read(path) for path in folder.glob("*.json")}
    return dict(sorted(found.items(), key=lambda each: (each[1]["time"], each[0])))


def summary(records: Mapping[str, Any]) -> str:
    """The tables of some records for the terminal."""
    return "\n\n".join(tables(records).values())
