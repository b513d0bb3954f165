"""What goes between nodes: bytes that moecomm sends in one call, the least that the routing needs, and the
ceiling, which is what the libfabric provider gives by itself in the same run.

fabric_raw (bench/fabric_raw.cpp) sends puts as large as moecomm's between two processes of this host, both
ways at once as ranks do it, and nothing else; as many such pairs at a time as there are pairs of ranks, times
the lanes that moecomm uses. The ranks sleep meanwhile, so it has all cores. The ceiling's time is that of the
least bytes of rows that a rank has to send, at the rate of one direction.

There are three: "fabric", whose buffers stay in the CPU's caches; "fabric-cold", whose buffers are so many
that none does, as the rows of a large call and of one that is timed with flushed caches; and "fabric-one",
which is "fabric" with a single endpoint a rank, whatever moecomm has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

import moecomm

from ..harness import native
from ..harness.case import Case, pairs
from ..harness.path import NotMeasured, NotRun, Path, Yardstick
from ..harness.timing import Timing, sum_over_ranks

_SETTLE_S, _MOST_SETTLING_S = 5e-3, 2.0
_PUTS_OF_A_NODE, _LEAST_PUT, _MOST_PUT = 16, 1 << 19, {"cpu": 1 << 22, "cuda": 1 << 20}
_COLD_BYTES = 256 << 20  # larger than the caches
_MOST_S = 60.0  # for one measurement of the ceiling, while all ranks wait
_COUNTERS = ("network_bytes", "network_row_bytes", "network_puts")


def rows_of_put(case: Case) -> int:
    """Rows of a full put as moecomm.MemoryPlan has it: a sixteenth of what the window holds, in bounds. As
    many of a wire format as of plain rows.
    """
    most, row_bytes = case.options.most_tokens, case.point.row_bytes
    wanted = min(max(most * row_bytes // _PUTS_OF_A_NODE, _LEAST_PUT), _MOST_PUT[case.options.device])
    return min(max(1, -(-wanted // row_bytes)), most)


def put_bytes(case: Case) -> int:
    """Bytes of a full put of rows."""
    return rows_of_put(case) * case.wire_row_bytes


def least(case: Case) -> tuple[int, int]:
    """(bytes of rows, puts) that have to go to other nodes, all ranks together; from the ids alone.

    A combine sends as many sums backwards.
    """
    per_node = case.options.ranks // case.options.nodes
    rows_RN = pairs(case.ids_R, case.point.experts, per_node)
    for rank in range(case.options.ranks):
        rows_RN[rank, rank // per_node] = 0  # its own node
    return int(rows_RN.sum()) * case.wire_row_bytes, int((-(-rows_RN // rows_of_put(case))).sum())


def count(comm: moecomm.Communicator, path: Path, case: Case) -> dict[str, int]:
    """Makes one call on all ranks and counts what all of them send. Least: one row for each (token, other
    node that needs it), in puts as full as moecomm's own.
    """
    if path.before is not None:
        path.before()
    before = _settled(comm)
    for call in path.calls.values():
        call()
    after = _settled(comm)
    sent = {name: sum_over_ranks(after[name] - before[name]) for name in after}
    least_bytes, least_puts = least(case)
    return {
        "sent_bytes": sent["network_bytes"],
        "sent_row_bytes": sent["network_row_bytes"],
        "sent_puts": sent["network_puts"],
        "least_bytes": least_bytes,
        "least_puts": least_puts,
    }


def figures(sent: Mapping[str, Any], ranks: int, timing: Timing) -> dict[str, Any]:
    """Returns the counts that `count` found, with the rate that follows from them, mean over ranks."""
    return {**sent, "wire_GBps": sent["sent_row_bytes"] / ranks / timing.median / 1e9}


def _settled(comm: moecomm.Communicator) -> dict[str, int]:
    """The counters of this rank's proxy, when all ranks are done and it has nothing more to send."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)  # nothing may have been sent yet
    sum_over_ranks(0)
    until = time.monotonic() + _MOST_SETTLING_S
    found = _counters(comm)
    while time.monotonic() < until:
        time.sleep(_SETTLE_S)
        last, found = found, _counters(comm)
        if found == last:
            break
    sum_over_ranks(0)  # no rank begins anew before all have read
    return found


def _counters(comm: moecomm.Communicator) -> dict[str, int]:
    stats = comm.stats()
    return {name: int(stats[name]) for name in _COUNTERS}


# -- the ceiling ---------------------------------------------------------------------------------------------


def yardstick(name: str, case: Case, lanes: int) -> Yardstick | NotRun:
    """The ceiling of one size, "fabric" or one of its kin; rank 0 measures for all. `lanes`: moecomm's."""
    options = case.options
    if os.environ.get("LOCAL_WORLD_SIZE", str(options.ranks)) != str(options.ranks):
        return NotRun(name, "the ranks are on several hosts, fabric_raw measures within one")
    least_bytes, _ = least(case)
    if least_bytes == 0:
        return NotRun(name, "no row goes to another node")
    try:
        native.program("fabric_raw")
    except RuntimeError as problem:
        return NotRun(name, str(problem))
    pairs_of_ranks = max(1, options.ranks // 2)
    lanes = 1 if name == "fabric-one" else lanes
    flags = ["--sizes", str(put_bytes(case)), "--seconds", "0.15"]
    flags += ["--provider", options.fabric_provider] if options.fabric_provider else []
    flags += ["--interface", options.fabric_interface] if options.fabric_interface else []
    flags += ["--area", str(_COLD_BYTES)] if name == "fabric-cold" else []
    seen: list[dict[str, Any]] = []

    def sample() -> float:
        said: list[Any] = [None, ""]  # records, or why there are none
        if dist.get_rank() == 0:
            try:
                said[0] = measure(flags, pairs_of_ranks * lanes)
            except RuntimeError as problem:
                said[1] = str(problem)
        dist.broadcast_object_list(said, src=0)
        if said[0] is None:
            raise NotMeasured(said[1][:200])
        seen.extend(said[0])
        # The pairs' mean of one endpoint, times the endpoints of a rank.
        rate = lanes * sum(record["gb_per_s"] for record in said[0]) / len(said[0]) * 1e9
        return float(least_bytes / options.ranks / rate)

    def described() -> str:
        first = seen[0]
        low, high = min(each["gb_per_s_min"] for each in seen), max(each["gb_per_s_max"] for each in seen)
        return (
            f"{first['provider']} (libfabric {first['version']}) on {first['interface']}, "
            f"puts of {first['bytes']} bytes in {first['area'] >> 20} MiB, "
            f"{pairs_of_ranks} {'pair' if pairs_of_ranks == 1 else 'pairs'} of ranks both ways, "
            f"{lanes} {'endpoint' if lanes == 1 else 'endpoints'} each: "
            f"{low:.2f} to {high:.2f} GB/s an endpoint"
        )

    return Yardstick(name, sample, described)


def measure(flags: list[str], pairs_of_processes: int) -> list[dict[str, Any]]:
    """The records of so many runs of fabric_raw at the same time. Raises RuntimeError if one fails."""
    with ThreadPoolExecutor(pairs_of_processes) as pool:
        runs = [pool.submit(native.lines, "fabric_raw", flags, _MOST_S) for _ in range(pairs_of_processes)]
        return [run.result()[0] for run in runs]
