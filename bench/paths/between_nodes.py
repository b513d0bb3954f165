"""Bytes that moecomm sends to other nodes in one call, and the least that the routing needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

import moecomm

from ..harness.case import Case, pairs
from ..harness.path import Path
from ..harness.timing import Timing, sum_over_ranks

_SETTLE_S, _MOST_SETTLING_S = 5e-3, 2.0
_PUTS_OF_A_NODE, _LEAST_PUT, _MOST_PUT = 16, 1 << 19, {"cpu": 1 << 22, "cuda": 1 << 20}


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
    return {name: int(stats[name]) for name in ("network_bytes", "network_row_bytes", "network_puts")}
