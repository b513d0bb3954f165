"""The ceiling between nodes: what the libfabric provider gives by itself, measured in the same run.

fabric_raw (bench/fabric_raw.cpp) sends puts as large as moecomm's between two processes of this host, both
ways at once as ranks do it, and nothing else; as many such pairs at a time as there are pairs of ranks, times
the lanes that moecomm uses. The ranks sleep meanwhile, so it has all cores. The ceiling's time is that of the
least bytes of rows that a rank has to send (between_nodes.least), at the rate of one direction.

There are three: "fabric", whose buffers stay in the CPU's caches; "fabric-cold", whose buffers are so many
that none does, as the rows of a large call and of one that is timed with flushed caches; and "fabric-one",
which is "fabric" with a single endpoint a rank, whatever moecomm has.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path as FilePath
from typing import Any

import torch.distributed as dist

from ..harness import native
from ..harness.case import Case
from ..harness.path import NotMeasured, NotRun, Yardstick
from . import between_nodes

_SECONDS, _REPEATS = 0.15, 5
_MOST_S = 60.0  # for one measurement
_COLD_BYTES = 256 << 20  # larger than the caches


def command(
    binary: FilePath, put_bytes: int, provider: str | None, interface: str | None, cold: bool
) -> list[str]:
    """Returns the command that measures one pair of processes."""
    asked = ["--provider", provider] if provider else []
    asked += ["--interface", interface] if interface else []
    asked += ["--area", str(_COLD_BYTES)] if cold else []
    times = ["--seconds", str(_SECONDS), "--repeats", str(_REPEATS)]
    return [str(binary), "--both", "--sizes", str(put_bytes), *times, *asked]


def measure(line: list[str], pairs: int) -> list[dict[str, Any]]:
    """The records of `pairs` pairs at a time. Raises NotMeasured."""
    running = []
    try:
        for _ in range(pairs):
            running.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        records = []
        for each in running:
            out, err = each.communicate(timeout=_MOST_S)
            if each.returncode != 0:
                raise NotMeasured(" ".join(err.split()) or f"fabric_raw ended with status {each.returncode}")
            records.append(json.loads(out))
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"fabric_raw took more than {_MOST_S:g} s") from None
    except (OSError, ValueError) as problem:
        raise NotMeasured(f"fabric_raw: {problem}") from None
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    return records


def rate(records: list[dict[str, Any]], lanes: int) -> float:
    """Bytes a second that a rank sends by `lanes` endpoints, while it receives as many: the pairs' mean."""
    return float(lanes * sum(record["gb_per_s"] for record in records) / len(records) * 1e9)


def described(records: list[dict[str, Any]], pairs: int, lanes: int) -> str:
    """Describes all measurements together in words; the rates are those of one endpoint."""
    first = records[0]
    low = min(record["gb_per_s_min"] for record in records)
    high = max(record["gb_per_s_max"] for record in records)
    return (
        f"{first['provider']} (libfabric {first['version']}) on {first['interface']}, "
        f"puts of {first['bytes']} bytes in {first['area'] >> 20} MiB, "
        f"{pairs} {'pair' if pairs == 1 else 'pairs'} of ranks both ways, "
        f"{lanes} {'endpoint' if lanes == 1 else 'endpoints'} each: {low:.2f} to {high:.2f} GB/s an endpoint"
    )


def yardstick(name: str, case: Case, lanes: int) -> Yardstick | NotRun:
    """The yardstick of one size, "fabric" or one of its kin; rank 0 measures for all. `lanes`: moecomm's."""
    options = case.options
    if os.environ.get("LOCAL_WORLD_SIZE", str(options.ranks)) != str(options.ranks):
        return NotRun(name, "the ranks are on several hosts, fabric_raw measures within one")
    least_bytes, _ = between_nodes.least(case)
    if least_bytes == 0:
        return NotRun(name, "no row goes to another node")
    binary = native.program("fabric_raw")
    if binary is None:
        return NotRun(name, native.missing("fabric_raw"))
    pairs = max(1, options.ranks // 2)
    lanes = 1 if name == "fabric-one" else lanes
    asked = options.fabric_provider, options.fabric_interface
    line = command(binary, between_nodes.put_bytes(case), *asked, cold=name == "fabric-cold")
    seen: list[dict[str, Any]] = []

    def sample() -> float:
        said: list[Any] = [None, ""]  # records, or why there are none
        if dist.get_rank() == 0:
            try:
                said[0] = measure(line, pairs * lanes)
            except NotMeasured as problem:
                said[1] = str(problem)
        dist.broadcast_object_list(said, src=0)
        if said[0] is None:
            raise NotMeasured(said[1][:200])
        seen.extend(said[0])
        return least_bytes / options.ranks / rate(said[0], lanes)

    return Yardstick(name, sample, lambda: described(seen, pairs, lanes))
