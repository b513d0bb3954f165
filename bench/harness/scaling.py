"""The model of how time grows with the GPUs, held against what was measured on several numbers of them.

    time = fixed cost + remote bytes of a rank / link rate

A row crosses once for each other rank that needs it. With uniform routing another rank needs a token with
probability 1 - C(E - E/R, K) / C(E, K), so a rank sends T (R - 1) times that many rows.

The two constants come from the run on most GPUs, so that what the model says of fewer is a prediction: the
link rate is that of the ceiling `sm-push` at the most tokens, the fixed cost what is left of the time at the
fewest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

TITLES = (
    "operation",
    "GPUs",
    "tokens/GPU",
    "experts",
    "other ranks that need a token",
    "remote MB of a rank",
    "measured us",
    "by the model us",
    "measured / model",
)


def needing(ranks: int, experts: int, topk: int) -> float:
    """How many other ranks need a token on average. 4 ranks, top-8 of 256: 2.71."""
    elsewhere = experts - experts // ranks
    return (ranks - 1) * (1 - math.comb(elsewhere, topk) / math.comb(experts, topk))


@dataclass(frozen=True)
class Model:
    fixed_s: float
    rate: float
    """Bytes a second."""

    def seconds(self, remote_bytes: float) -> float:
        return self.fixed_s + remote_bytes / self.rate


def remote_bytes(record: Record, row: Mapping[str, Any]) -> float:
    """What one rank sends, by the model."""
    row_bytes = row["size_bytes"] / row["tokens"]
    return float(needing(record["ranks"], row["experts"], row["topk"]) * row["tokens"] * row_bytes)


def fit(record: Record) -> Model:
    """The constants of the model, from a record of at least two sizes with `sm-push`."""
    own, ceiling = _by_tokens(record, "moecomm"), _by_tokens(record, "sm-push")
    fewest, most = own[min(own)], ceiling[max(ceiling)]
    rate = most["remote_bytes"] / record["ranks"] / most["time_s"]
    return Model(fewest["time_s"] - remote_bytes(record, fewest) / rate, rate)


_NAME = re.compile(r"cuda-(\w+)-on-(\d+)")


def is_one(name: str) -> bool:
    """Is this a run that the model is for? They are called cuda-dispatch-on-2."""
    return _NAME.fullmatch(name) is not None


def lines(records: Mapping[str, Record]) -> list[list[str]]:
    """Model and measurement of every such run and size, by number of GPUs."""
    shown = []
    for operation, by_gpus, model in _fitted(records):
        for gpus, record in sorted(by_gpus.items()):
            for tokens, row in sorted(_by_tokens(record, "moecomm").items()):
                sent = remote_bytes(record, row)
                shown.append(
                    [
                        operation,
                        str(gpus),
                        str(tokens),
                        str(row["experts"]),
                        f"{needing(gpus, row['experts'], row['topk']):.2f}",
                        f"{sent / 1e6:.2f}",
                        f"{row['time_s'] * 1e6:.1f}",
                        f"{model.seconds(sent) * 1e6:.1f}",
                        f"{row['time_s'] / model.seconds(sent):.2f}",
                    ]
                )
    return shown


def constants(records: Mapping[str, Record]) -> list[str]:
    """The constants in words: "dispatch: 48.1 us and 346.7 GB/s, from 4 GPUs"."""
    return [
        f"{operation}: {model.fixed_s * 1e6:.1f} us and {model.rate / 1e9:.1f} GB/s, from {max(by_gpus)} GPUs"
        for operation, by_gpus, model in _fitted(records)
    ]


def _fitted(records: Mapping[str, Record]) -> list[tuple[str, dict[int, Record], Model]]:
    """The records by operation and number of GPUs, with the model from the largest; operations without a
    ceiling there are left out."""
    by_operation: dict[str, dict[int, Record]] = {}
    for name, record in records.items():
        if match := _NAME.fullmatch(name):
            by_operation.setdefault(match[1], {})[int(match[2])] = record
    return [
        (operation, by_gpus, fit(by_gpus[max(by_gpus)]))
        for operation, by_gpus in by_operation.items()
        if _by_tokens(by_gpus[max(by_gpus)], "sm-push")
    ]


def _by_tokens(record: Record, path: str) -> dict[int, Mapping[str, Any]]:
    return {row["tokens"]: row for row in record["rows"] if row["path"] == path}
