"""Environment variables, read once for each communicator into one immutable object."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moecomm.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Env:
    """The settings of the environment; a field is None where its variable is not set."""

    timeout: float | None = None
    """MOECOMM_TIMEOUT: seconds that a wait for a peer may take where the caller gives no timeout."""

    threads: int | None = None
    """MOECOMM_THREADS: threads a rank of the CPU backend uses where the caller gives no num_sms."""

    ranks_per_node: int | None = None
    """MOECOMM_RANKS_PER_NODE: emulate nodes of this many ranks on one host where the caller gives no
    ranks_per_node."""

    fabric_provider: str | None = None
    """MOECOMM_FABRIC_PROVIDER: libfabric provider between nodes ("verbs", "efa", "cxi", "tcp", "shm"), where
    the best one found is not wanted."""

    fabric_interface: str | None = None
    """MOECOMM_FABRIC_INTERFACE: network interface ("eth0"), device ("mlx5_0") or address of this host that
    other nodes reach it by."""

    fabric_lanes: int | None = None
    """MOECOMM_FABRIC_LANES: endpoints of a rank towards other nodes, where the number chosen is not wanted:
    its share of the NICs near it, or up to eight over TCP. At most 64. Ranks of a rail use as many as all of
    them have."""

    first_epoch: int | None = None
    """MOECOMM_FIRST_EPOCH: for tests: the number of a communicator's first operation, 1 to 2^62, the same on
    all ranks; 1 where it is not set."""

    fused_tokens: int | None = None
    """MOECOMM_FUSED_TOKENS: tokens of this rank up to which one CUDA kernel does all of an operation, where
    the number of the heuristics is not wanted; at 0 sending and receiving are always kernels of their own.
    Ranks need not agree on it."""

    whole_sources: int | None = None
    """MOECOMM_WHOLE_SOURCES: sources, on CUDA, whose tokens all have a place in an owner's staging section,
    where 8 are not wanted. Where sources outnumber both this and top_k, tokens take turns there. At 0 it
    takes the least memory. The same on all ranks."""


_NUMBERS: dict[str, tuple[type, float, float]] = {
    "timeout": (float, 1e-3, math.inf),
    "threads": (int, 1, math.inf),
    "ranks_per_node": (int, 1, math.inf),
    "fabric_lanes": (int, 1, 64),  # kMostLanes in csrc/transport/fabric/provider.hpp
    "first_epoch": (int, 1, 2**62),
    "fused_tokens": (int, 0, math.inf),
    "whole_sources": (int, 0, 2**31 - 1),
}
"""Type and bounds of the fields that are numbers; the others are texts."""


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Reads the settings in `environ` (default: the process's). Raises InvalidArgument for a value that is no
    number."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for field in fields(Env):
        name = f"MOECOMM_{field.name.upper()}"
        value: Any = environ.get(name) or None
        if value is not None and field.name in _NUMBERS:
            kind, least, most = _NUMBERS[field.name]
            text = value
            try:
                value = kind(text)
            except ValueError:
                value = None
            if value is None or not least <= value <= most:
                limit = "" if most == math.inf else f" and at most {most:g}"
                raise InvalidArgument(
                    f"environment variable {name} is {text!r}, expected a number of at least {least:g}{limit}"
                )
        values[field.name] = value
    return Env(**values)
