"""docs/results.md from the records in docs/results/: a part for each kind of device, one for whole layers
(layer_results.py) and one for what is between nodes (node_results.py), each renewed by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from . import scaling
from .report import ceiling_of

Record = dict[str, Any]
Records = Mapping[str, Record]
Key = TypeVar("Key")

_CPU_TITLES = (
    "run",
    "tokens/rank",
    "type",
    "moecomm ms",
    "algbw GB/s",
    "faster than gloo",
    "than gloo-tuned",
    "memcpy ms",
    "of ceiling",
    "#wrong",
)
_GPU_TITLES = (
    "run",
    "tokens/GPU",
    "case",
    "us",
    "remote GB/s",
    "of ceiling",
    "ceiling GB/s",
    "SMs",
    "host us",
    "faster than nccl",
    "than nccl-tuned",
    "than torch-symm",
    "#wrong",
)
_PATH_TITLES = ("run", "path", "us", "remote GB/s", "how")


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, so that a terminal shows it well too."""
    widths = [max(len(row[column]) for row in (titles, *lines)) for column in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths))
    return "\n".join([line(titles), f"|{rule}|", *(line(row) for row in lines)])


def points(record: Record) -> list[dict[str, Record]]:
    """The rows of a record, by path, for each point of its sweep."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in record["rows"]:
        place = tuple(row.get(name) for name in ("experts", "topk", "zipf", "num_sms", "dtype", "tokens"))
        found.setdefault(place, {})[row["path"]] = row
    return list(found.values())


def faster(paths: Mapping[str, Record], name: str) -> str:
    """How many times faster moecomm is than a baseline."""
    return f"{paths[name]['time_s'] / paths['moecomm']['time_s']:.2f}x" if name in paths else "-"


def wrong(paths: Mapping[str, Record]) -> str:
    """Wrong values of all paths of one point."""
    return str(sum(row["wrong"] or 0 for row in paths.values()))


def cpu_lines(records: Records) -> list[list[str]]:
    """One line per run and size, moecomm next to the baselines of the same run."""
    lines = []
    for name, record in records.items():
        for paths in points(record):
            own, ceiling = paths["moecomm"], paths["memcpy"]["time_s"]
            lines.append(
                [
                    name,
                    str(own["tokens"]),
                    own["dtype"],
                    f"{own['time_s'] * 1e3:.2f}",
                    f"{own['algbw_GBps']:.2f}",
                    faster(paths, "gloo"),
                    faster(paths, "gloo-tuned"),
                    f"{ceiling * 1e3:.2f}",
                    f"{100 * ceiling / own['time_s']:.0f}%",
                    wrong(paths),
                ]
            )
    return lines


def case_of(options: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What was run, in a few words: "bfloat16, top-8 of 256, fp8, fixed"."""
    words = [row["dtype"], f"top-{row['topk']} of {row['experts']}"]
    if options["routing"] == "zipf":
        words.append(f"zipf {row['zipf']:g}")
    elif options["routing"] not in ("uniform", "balanced"):
        words.append(options["routing"])
    if options["wire"]:
        words.append(options["wire"] if options["dequantize"] else f"{options['wire']} handed on")
    if options["graph"]:
        words.append("graph")
    elif options["capacity"] is not None:
        words.append("fixed")
    if options["kept_handle"]:
        words.append("kept handle" + (" weighted" if options["kept_handle"] == "weighted" else ""))
    if row["num_sms"] is not None:
        words.append(f"{row['num_sms']} SMs")
    return ", ".join(words)


def _where(record: Record) -> str:
    """How many GPUs a run had, where these were not all that the machine has."""
    gpus = record["options"]["ranks"]
    return "" if gpus == len(record["gpus"]["names"]) else f", {gpus} GPUs"


def gpu_lines(records: Records) -> list[list[str]]:
    """One line per run and point of its sweep; "-" for what did not run, or is not known."""
    lines = []
    for name, record in records.items():
        for paths in points(record):
            if "moecomm" not in paths:
                continue
            own = paths["moecomm"]
            ceiling = paths.get("sm-push")
            sms = own["sms"] if own["sms"] is not None else own["num_sms"]
            lines.append(
                [
                    name,
                    str(own["tokens"]),
                    case_of(record["options"], own) + _where(record),
                    f"{own['time_s'] * 1e6:.1f}",
                    f"{own['busbw_GBps']:.1f}",
                    f"{100 * ceiling['time_s'] / own['time_s']:.1f}%" if ceiling else "-",
                    f"{ceiling['busbw_GBps']:.1f}" if ceiling else "-",
                    "-" if sms is None else str(sms),
                    "-" if own["host_s"] is None else f"{own['host_s'] * 1e6:.1f}",
                    faster(paths, "nccl"),
                    faster(paths, "nccl-tuned"),
                    faster(paths, "torch-symm"),
                    wrong(paths),
                ]
            )
    return lines


def path_lines(records: Records) -> list[list[str]]:
    """Every path of the runs that looked at one point: the ceilings and baselines by themselves.

    A copy on the device crosses nothing; shown is what it reads and writes.
    """
    lines = []
    for name, record in records.items():
        for paths in points(record):
            for row in paths.values():
                how = row["note"] or "-"
                bandwidth = row["busbw_GBps"]
                if bandwidth is None:
                    bandwidth, how = 2 * row["algbw_GBps"], "on one GPU, read + written"
                sms = "" if not row["sms"] or row["path"] == "moecomm" else f"{row['sms']} SMs, "
                lines.append(
                    [name, row["path"], f"{row['time_s'] * 1e6:.1f}", f"{bandwidth:.1f}", f"{sms}{how}"]
                )
    return lines


def summary(records: Records) -> str:
    """The table of all runs of one device, for the terminal."""
    cpu = {name: record for name, record in records.items() if not record.get("gpus")}
    gpu = {name: record for name, record in records.items() if record.get("gpus")}
    found = [table(_CPU_TITLES, cpu_lines(cpu))] if cpu else []
    found += [table(_GPU_TITLES, gpu_lines(gpu))] if gpu else []
    return "\n\n".join(found)


def missing(records: Records) -> list[str]:
    """Which baselines did not run, and why."""
    found = {
        (name, each["path"], each["reason"]): None
        for name, record in records.items()
        for each in record.get("missing", ())
    }
    return [f"- {name}: {path} n/a: {reason}" for name, path, reason in found]


def commands(records: Records) -> str:
    """How each run is made again."""
    listed = "\n".join(record["command"] for record in records.values())
    return f"The commands:\n\n```\n{listed}\n```\n"


def grouped(records: Records, key: Callable[[Record, str], Key]) -> dict[Key, dict[str, Record]]:
    """Records by key(record, label), by their names without the label, which stands behind a dot if there is
    one."""
    found: dict[Key, dict[str, Record]] = {}
    for name, record in records.items():
        run, _, label = name.partition(".")
        found.setdefault(key(record, label), {})[run] = record
    return found


def machine(record: Record) -> str:
    """The host of a record."""
    hardware = record["hardware"]
    return (
        f"{hardware['cpu']}, {hardware['architecture']}, {hardware['cores']} cores, "
        f"{hardware['memory_bytes'] / 2**30:.1f} GiB memory, "
        f"{hardware['last_level_cache_bytes'] / 2**20:.0f} MiB last-level cache"
    )


def gpu_words(gpus: Mapping[str, Any]) -> str:
    """The GPUs of a record."""
    model = f"{gpus['names'][0]} ({gpus['sms']} SMs, {gpus['memory_bytes'] / 2**30:.0f} GiB)"
    return (
        f"{len(gpus['names'])} x {model}, links {gpus['links'] or 'unknown'}, "
        f"driver {gpus['driver'] or 'unknown'}"
    )


def software(records: Records) -> str:
    """Versions, commits, times and seed."""
    first = next(iter(records.values()))
    made = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "python")
    # Runs may be renewed one by one: every commit and the span of times is said.
    commits = dict.fromkeys(
        f"`{record['git']['commit']}`"
        + (" (with changes that are not committed)" if record["git"]["dirty"] else "")
        for record in records.values()
    )
    times = sorted(record["time"] for record in records.values())
    span = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    return (
        f"- software: {made}, Python {first['versions']['python']}\n"
        f"- commit {', '.join(commits)}, {span}" + (f", seed {first['seed']}" if "seed" in first else "")
    )


def cpu_part(records: Records, command: str) -> str:
    """The CPU's part of the page."""
    first = next(iter(records.values()))
    return f"""## CPU

Made by `{command}`.

- machine: {machine(first)}
{software(records)}
- {first["ranks"]} ranks of {first["threads"]} compute thread each for every path

{table(_CPU_TITLES, cpu_lines(records))}

Times are medians over iterations of the slowest rank, with cold caches; the paths of one line alternate
within the same run. *gloo* is `all_to_all_single` between torch permutes as a plain framework does it,
*gloo-tuned* the same with all buffers kept and a fused weighted sum: the difference is mostly what fresh
memory costs. *memcpy* is the ceiling: all ranks at once copy as many bytes as the operation gives them, into
memory that they own already. For combine those are the expert rows that are summed. It reads them and writes
fewer; dispatch reads fewer than it writes; so either may come out above 100 %.

{commands(records)}"""


def gpu_part(records: Records, command: str, pictures: Mapping[str, str]) -> str:
    """The GPUs' part of the page. `pictures`: file by run."""
    first = next(iter(records.values()))
    growth = {name: record for name, record in records.items() if scaling.is_one(name)}
    single = {
        name: record for name, record in records.items() if name not in growth and len(points(record)) == 1
    }
    sweeps = {name: record for name, record in records.items() if name not in growth and name not in single}
    parts = [
        f"""## GPUs

Made by `{command}`.

- machine: {gpu_words(first["gpus"])}, {first["hardware"]["cores"]} cores
{software(records)}
- {first["ranks"]} ranks, one a GPU, hidden {first["options"]["hidden"]}; links' multicast off for every path

Times are medians over iterations of the slowest rank, as called, with an empty L2; the paths of one line
alternate within the same run. *remote GB/s* counts each row once for each other GPU that needs it. The
*ceiling* is the SM-issued one, `sm-push`: the same bytes pushed by bulk copies and nothing else, on the
number of SMs that is fastest. *nccl* is `all_to_all_single` between torch permutes in the rows' own type,
*nccl-tuned* the same with kept buffers and a fused weighted sum, *host* the CPU time to issue a call."""
    ]
    if single:
        parts.append(table(_GPU_TITLES, gpu_lines(single)))
        parts.append("Every path of these runs:")
        parts.append(table(_PATH_TITLES, path_lines(single)))
    if growth:
        parts.append("### Several numbers of GPUs")
        parts.append(table(_GPU_TITLES, gpu_lines(growth)))
        if modelled := scaling.lines(growth):
            parts.append(_model_text(growth))
            parts.append(table(scaling.TITLES, modelled))
    for name, record in sweeps.items():
        parts.append(f"### {name}")
        parts.append(table(_GPU_TITLES, gpu_lines({name: record})))
        if name in pictures:
            parts.append(f"![{name}](results/{pictures[name]})")
    if missing(records):
        parts.append("Not run:\n\n" + "\n".join(missing(records)))
    parts.append(commands(records))
    return "\n\n".join(parts)


def _model_text(records: Records) -> str:
    """The model of how time grows, before its table."""
    return f"""The model beside the measurement: time = fixed cost + remote bytes of a rank / link rate, where
a rank sends T (R - 1) (1 - C(E - E/R, K) / C(E, K)) rows ([memory](memory.md#how-time-grows)). The link rate
is that of `sm-push` at the most tokens, the fixed cost what is left of the time at the fewest:

{chr(10).join(f"- {each}" for each in scaling.constants(records))}

So what it says of fewer GPUs is a prediction."""


_HEAD = """# Measured results

The records behind the tables, with every sample, are in [results/](results/). Not edited by hand. The columns
are defined in [bench/README.md](../bench/README.md).
"""


def renewed(page: str, name: str, part: str) -> str:
    """The page with one part renewed and the others kept."""
    parts = dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->\n", page, re.DOTALL))
    parts[name] = part.rstrip("\n") + "\n"
    order = sorted(parts, key=("cuda", "layers", "nodes", "cpu").index)
    return _HEAD + "".join(f"\n<!-- {each} -->\n{parts[each]}<!-- /{each} -->\n" for each in order)


def pictured(record: Record) -> bool:
    """Whether a run is worth a picture: a sweep over sizes."""
    return (
        len({row["tokens"] for row in record["rows"]}) > 3
        and ceiling_of([row["path"] for row in record["rows"]]) is not None
    )
