"""The section "Between nodes" of docs/results.md, from the records nodes-*.json and cuda-nodes-*.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import results

Record = dict[str, Any]
Records = Mapping[str, Record]

_TITLES = (
    "run",
    "tokens/rank",
    "case",
    "ms",
    "lanes",
    "wire GB/s",
    "fabric GB/s",
    "of ceiling",
    "cold GB/s",
    "of cold",
    "one GB/s",
    "of one",
    "memcpy ms",
    "sent / least",
    "puts / least",
)
_BASELINES = {"cpu": ("gloo", "gloo-tuned", "gloo-rows"), "cuda": ("nccl", "nccl-tuned", "nccl-rows")}
_LIMIT_TITLES = (
    "run",
    "limit",
    "MB sent",
    "without",
    "saved",
    "puts",
    "without",
    "saved",
    "ms",
    "without",
    "faster",
)
_RAW_TITLES = ("provider", "bytes a put", "in flight", "GB/s", "least", "most", "puts/s")
_PROXY_TITLES = ("commands", "producers", "a put", "M commands/s", "least", "most", "M puts/s")
_PROXY_KINDS = {"rows": "a row each", "chunks": "a chunk each", "pieces": "a piece of ids each"}


def is_one(name: str) -> bool:
    """Whether a record is of this section."""
    return name.startswith(("nodes-", "cuda-nodes-"))


def _is_native(record: Record) -> bool:
    return "lines" in record


def _case(record: Record, row: Mapping[str, Any]) -> str:
    options = record["options"]
    limit = options["limit_nodes"]
    words = f"{options['hidden']}, {results.case_of(options, row)}"
    return words if limit is None else f"{words}, at most {limit} of {_nodes(record)} nodes"


def _nodes(record: Record) -> int:
    return int(record["ranks"] // record["options"]["ranks_per_node"])


def _lanes(record: Record) -> int:
    """Endpoints of a rank; records from before there were several do not say."""
    counted = [stats.get("network_lanes", 1) for stats in record["stats"].values()]
    return max(counted, default=1)


def lines(records: Records, device: str) -> list[list[str]]:
    """One line per run and point of its sweep; "-" for what did not run."""
    found = []
    for name, record in records.items():
        for paths in results.points(record):
            own, copy = paths["moecomm"], paths.get("memcpy")
            to_send = own["least_bytes"] / record["ranks"]
            found.append(
                [
                    name,
                    str(own["tokens"]),
                    _case(record, own),
                    f"{own['time_s'] * 1e3:.2f}",
                    str(_lanes(record)),
                    f"{own['wire_GBps']:.2f}",
                    *_of_ceiling(own, paths.get("fabric"), to_send),
                    *_of_ceiling(own, paths.get("fabric-cold"), to_send),
                    *_of_ceiling(own, paths.get("fabric-one"), to_send),
                    f"{copy['time_s'] * 1e3:.2f}" if copy else "-",
                    f"{own['sent_bytes'] / own['least_bytes']:.3f}",
                    f"{own['sent_puts'] / own['least_puts']:.2f}",
                    *(results.faster(paths, each) for each in _BASELINES[device]),
                    results.wrong(paths),
                ]
            )
    return found


def _of_ceiling(own: Record, ceiling: Record | None, to_send: float) -> tuple[str, str]:
    if ceiling is None:
        return "-", "-"
    return f"{to_send / ceiling['time_s'] / 1e9:.2f}", f"{100 * ceiling['time_s'] / own['time_s']:.0f}%"


def titles(device: str) -> tuple[str, ...]:
    """Of the columns of `lines`."""
    return (*_TITLES, *(f"than {each}" for each in _BASELINES[device]), "#wrong")


def limit_lines(records: Records) -> list[list[str]]:
    """Each run with a limit on nodes beside the one that differs in nothing else."""
    found = []
    for name, record in records.items():
        plain = records.get(name.removesuffix("-limit"))
        if record["options"]["limit_nodes"] is None or plain is None or plain is record:
            continue
        for ours, others in zip(results.points(record), results.points(plain), strict=True):
            own, other = ours["moecomm"], others["moecomm"]

            def pair(
                key: str, scale: float, digits: int, ours: Record = own, theirs: Record = other
            ) -> list[str]:
                return [f"{each[key] / scale:.{digits}f}" for each in (ours, theirs)]

            found.append(
                [
                    name,
                    f"{record['options']['limit_nodes']} of {_nodes(record)}",
                    *pair("sent_bytes", 1e6, 2),
                    f"{1 - own['sent_bytes'] / other['sent_bytes']:.0%}",
                    *pair("sent_puts", 1, 0),
                    f"{1 - own['sent_puts'] / other['sent_puts']:.0%}",
                    *pair("time_s", 1e-3, 2),
                    f"{other['time_s'] / own['time_s']:.2f}x",
                ]
            )
    return found


def raw_lines(records: Records) -> list[list[str]]:
    """What fabric_raw said."""
    return [
        [
            f"{line['provider']} (libfabric {line['version']})",
            str(line["bytes"]),
            str(line["in_flight"]),
            f"{line['gb_per_s']:.3f}",
            f"{line['gb_per_s_min']:.3f}",
            f"{line['gb_per_s_max']:.3f}",
            f"{line['messages_per_s']:.0f}",
        ]
        for record in records.values()
        if record["program"] == "fabric_raw"
        for line in record["lines"]
    ]


def proxy_lines(records: Records) -> list[list[str]]:
    """What proxy_rate said."""
    return [
        [
            _PROXY_KINDS[line["kind"]],
            str(line["producers"]),
            str(line["commands_a_put"]),
            f"{line['commands_per_s'] / 1e6:.2f}",
            f"{line['commands_per_s_min'] / 1e6:.2f}",
            f"{line['commands_per_s_max'] / 1e6:.2f}",
            f"{line['puts_per_s'] / 1e6:.3f}",
        ]
        for record in records.values()
        if record["program"] == "proxy_rate"
        for line in record["lines"]
    ]


def tables(records: Records) -> list[str]:
    """All tables of one machine's records, with a line of words before those that need one."""
    runs = {name: record for name, record in records.items() if not _is_native(record)}
    native = {name: record for name, record in records.items() if _is_native(record)}
    found = []
    for device in ("cuda", "cpu"):
        of_device = {name: record for name, record in runs.items() if record["options"]["device"] == device}
        if of_device:
            found.append(results.table(titles(device), lines(of_device, device)))
        if limited := limit_lines(of_device):
            found.append("Group-limited routing beside the same without a limit, sums over ranks:")
            found.append(results.table(_LIMIT_TITLES, limited))
    if raw := raw_lines(native):
        found.append("A provider by itself, two processes that send to each other at once, of one direction:")
        found.append(results.table(_RAW_TITLES, raw))
    if proxy := proxy_lines(native):
        found.append("The proxy before a network that does nothing:")
        found.append(results.table(_PROXY_TITLES, proxy))
    return found


def summary(records: Records) -> str:
    """All tables, for the terminal."""
    return "\n\n".join(tables(records))


def by_machine(records: Records) -> list[dict[str, Record]]:
    """The records of each machine: the same hardware and label."""
    found = results.grouped(records, lambda record, label: repr((sorted(record["hardware"].items()), label)))
    return list(found.values())


_TEXT = """Nodes are emulated on one host: ranks of different nodes share no memory, all that goes from one to
the other goes through libfabric. `2x1` are two nodes of one rank each. Times are medians over iterations of
the slowest rank, with cold caches; the paths of one line alternate within the same run.

- *wire*: bytes of the rows that a rank sends to other nodes / time. *sent / least*: all bytes sent, with ids,
  weights and records, over those of one row for each (token, other node that needs it), counted from the ids
  alone; *puts / least*: all messages over those rows in full puts.
- *fabric* is the ceiling: `fabric_raw` in the same run, before and after, `fi_writedata` of the same provider
  in puts of the same size, both ways at once and nothing else, with all cores to itself, by as many endpoints
  as moecomm has *lanes*. *of ceiling* is the time that a rank's least bytes take at its rate over ours. It
  has no rows to gather, copy or sum, and its buffers, 16 MiB an endpoint, stay in the caches; those of
  *cold*, 256 MiB each, do not, and neither do the rows of a large call. *one* is the first of the two with a
  single endpoint a rank. *memcpy*: all ranks at once copy as many bytes as the operation's result has (for
  combine, its expert rows), which on a CPU is more work than the wire and wants the same cores.
- *gloo* (*nccl*) is `all_to_all_single` between torch permutes as a plain framework does it, *-tuned* the
  same with kept buffers and a fused weighted sum, *-rows* the bare exchange of the rows that other ranks
  need, which then lie unsorted. gloo goes by TCP, and NCCL, which is told that nodes are hosts
  (`NCCL_HOSTID`), by its sockets."""


def part(records: Records, command: str) -> str:
    """The section. `records`: by run, with a label behind a dot where there is one."""
    found = [f"## Between nodes\n\nMade by `{command}`.", _TEXT]
    machines = by_machine(records)
    for place, of_machine in enumerate(machines):
        if len(machines) > 1:
            found.append(f"### Machine {place + 1}")
        first = next(iter(of_machine.values()))
        ranks = [each for each in of_machine.values() if not _is_native(each)]
        threads = sorted({(each["ranks"], each["threads"]) for each in ranks})
        shared = ", ".join(f"{count} ranks {each}" for count, each in threads)
        facts = f"- machine: {results.machine(first)}\n{results.software(of_machine)}"
        if gpus := next((each["gpus"] for each in ranks if each["gpus"]), None):
            facts += f"\n- GPUs: {results.gpu_words(gpus)}"
        found.append(facts + (f"\n- threads of a rank that compute: {shared}" if shared else ""))
        found += tables(of_machine)
        if absent := results.missing(of_machine):
            found.append("Not run:\n\n" + "\n".join(absent))
        found.append(results.commands(of_machine))
    return "\n\n".join(each.rstrip("\n") for each in found)
