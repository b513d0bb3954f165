"""Environment variables, read once for each communicator into an immutable object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moecomm.errors import InvalidArgument


def _number(kind: type, least: float, most: float) -> Any:
    """Returns a field for a number of this type, within these bounds; other fields are texts."""
    return field(default=None, metadata={"number": (kind, least, most)})


@dataclass(frozen=True, kw_only=True)
class Env:
    """The settings of the environment; a field is None where its variable is not set."""

    timeout: float | None = _number(float, 0.001, 10**9)
    """MOECOMM_TIMEOUT: seconds that a wait for a peer may take, if the caller gives no timeout."""

    threads: int | None = _number(int, 1, 4096)
    """MOECOMM_THREADS: threads that a rank of the CPU backend uses, if the caller gives no num_sms."""

    ranks_per_node: int | None = _number(int, 1, 2**31 - 1)
    """MOECOMM_RANKS_PER_NODE: emulates nodes of this many ranks on one host, if the caller gives no
    ranks_per_node."""

    fabric_provider: str | None = None
    """MOECOMM_FABRIC_PROVIDER: libfabric provider between nodes ("verbs", "efa", "cxi", "tcp", "shm"), in
    place of the best one found."""

    fabric_interface: str | None = None
    """MOECOMM_FABRIC_INTERFACE: the network interface ("eth0"), device ("mlx5_0") or address of this host at
    which other nodes reach it."""

    fabric_lanes: int | None = _number(int, 1, 64)
    """MOECOMM_FABRIC_LANES: endpoints (lanes) of a rank towards other nodes, at most 64. Default: one for
    each NIC that falls to the rank, or up to eight over TCP. Ranks with one local number, a rail, use the
    least number of any of them."""

    first_epoch: int | None = _number(int, 1, 2**62)
    """MOECOMM_FIRST_EPOCH: for tests: the number of a communicator's first operation, 1 to 2^62, the same on
    all ranks; default 1."""

    fused_tokens: int | None = _number(int, 0, 2**31 - 1)
    """MOECOMM_FUSED_TOKENS: the most tokens of this rank for which one CUDA kernel does a whole operation, in
    place of the heuristics' number; 0: separate kernels always send and receive. Ranks may differ."""

    whole_sources: int | None = _number(int, 0, 2**31 - 1)
    """MOECOMM_WHOLE_SOURCES: on CUDA, the most source ranks whose tokens all fit into a rank's staging
    section at once; default 8. If there are more source ranks than this and than top_k, tokens use the
    section in turns. 0 takes the least memory. The same on all ranks."""

    log: str | None = None
    """MOECOMM_LOG: "launch": each rank on CUDA prints on stderr which kernels an operation launches, and with
    how many blocks. Each combination of these is printed once."""


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Reads the settings from `environ` (default: the process's). Raises InvalidArgument for a number that is
    malformed or out of bounds, and for an unknown MOECOMM_LOG."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for each in fields(Env):
        name = f"MOECOMM_{each.name.upper()}"
        value: Any = environ.get(name) or None
        if value is not None and "number" in each.metadata:
            kind, least, most = each.metadata["number"]
            text = value
            try:
                value = kind(text)
            except ValueError:
                value = None
            if value is None or not least <= value <= most:
                what = "an integer" if kind is int else "a number"
                raise InvalidArgument(
                    f"environment variable {name} is {text!r}, expected {what} from {least} to {most}"
                )
        values[each.name] = value
    if values["log"] not in (None, "launch"):
        raise InvalidArgument(f"environment variable MOECOMM_LOG is {values['log']!r}, expected 'launch'")
    return Env(**values)
