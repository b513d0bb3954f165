"""The formula of how time grows with the GPUs (docs/memory.md), held against measurements on several numbers.

    time = fixed cost + remote bytes of a rank / link rate

A row crosses once for each other rank that needs it. With uniform routing another rank needs a token with
probability 1 - C(E - E/R, K) / C(E, K), so a rank sends T (R - 1) times that many rows. Both constants come
from the run on most GPUs, so that what the formula says of fewer is a prediction: the link rate is that of
the ceiling sm-push at the most tokens, the fixed cost what is left of the time at the fewest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
TITLES = ("operation", "GPUs", "tokens/GPU", "other ranks that need a token", "remote MB of a rank",
          "measured us", "by the formula us", "measured / formula")  # fmt: skip
_NAME = re.compile(r"cuda-(\w+)-on-(\d+)")


def needing(ranks: int, experts: int, topk: int) -> float:
    """Returns the mean number of other ranks that need a token. 4 ranks, top-8 of 256: 2.71."""
    elsewhere = experts - experts // ranks
    return (ranks - 1) * (1 - math.comb(elsewhere, topk) / math.comb(experts, topk))


def is_one(name: str) -> bool:
    """Returns whether a record is of a run that the formula is fitted to, such as cuda-dispatch-on-2."""
    return _NAME.fullmatch(name) is not None


def _sent(record: Record, row: Mapping[str, Any]) -> float:
    """Bytes that one rank sends, by the formula."""
    return needing(record["ranks"], row["experts"], row["topk"]) * float(row["size_bytes"])


def _by_tokens(record: Record, path: str) -> dict[int, Mapping[str, Any]]:
    return {row["tokens"]: row for row in record["rows"] if row["path"] == path}


def tables(records: Mapping[str, Record]) -> tuple[list[str], list[list[str]]]:
    """The constants in words, and formula and measurement of every run and size by number of GPUs."""
    by_operation: dict[str, dict[int, Record]] = {}
    for name, record in records.items():
        if match := _NAME.fullmatch(name):
            by_operation.setdefault(match[1], {})[int(match[2])] = record
    constants, lines = [], []
    for operation, by_gpus in sorted(by_operation.items(), reverse=True):  # dispatch first
        most = by_gpus[max(by_gpus)]
        own, ceiling = _by_tokens(most, "moecomm"), _by_tokens(most, "sm-push")
        if not ceiling:
            continue
        fewest, largest = own[min(own)], ceiling[max(ceiling)]
        rate = largest["remote_bytes"] / most["ranks"] / largest["time_s"]
        fixed_s = fewest["time_s"] - _sent(most, fewest) / rate
        words = f"{fixed_s * 1e6:.1f} us and {rate / 1e9:.1f} GB/s"
        constants.append(f"- {operation}: {words}, from {max(by_gpus)} GPUs")
        for gpus, record in sorted(by_gpus.items()):
            for tokens, row in sorted(_by_tokens(record, "moecomm").items()):
                sent = _sent(record, row)
                seconds = fixed_s + sent / rate
                needed = f"{needing(gpus, row['experts'], row['topk']):.2f}"
                times = [
                    f"{row['time_s'] * 1e6:.1f}",
                    f"{seconds * 1e6:.1f}",
                    f"{row['time_s'] / seconds:.2f}",
                ]
                lines.append([operation, str(gpus), str(tokens), needed, f"{sent / 1e6:.2f}", *times])
    return constants, lines
