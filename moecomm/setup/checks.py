"""Checks of the arguments from which a Communicator is built, and their defaults.

moecomm/arguments.py checks the arguments of a communicator's operations.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from moecomm.arguments import require_integer
from moecomm.env import read_env
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.setup.memory_plan import CUDA_DTYPES, window_shape
from moecomm.setup.topology import NodeMap
from moecomm.types import WIRE_FORMATS

DEFAULT_TIMEOUT = 60.0
"""The default deadline of a wait, in seconds."""

DEFAULT_ABSENCE = 1800.0
"""The default deadline, in seconds, of a wait for a rank that is alive and has not begun the operation."""


def timeout_seconds(timeout: float | timedelta | None) -> float:
    """Returns how many seconds a wait for peers may take; for None MOECOMM_TIMEOUT, or 60."""
    if timeout is None:
        return read_env().timeout or DEFAULT_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1e-3 <= seconds <= 1e9:
        raise InvalidArgument(f"timeout is {timeout!r}, expected 0.001 to 1e9 seconds, or a timedelta")
    return float(seconds)


def absence_seconds(timeout: float | timedelta | None) -> float:
    """Returns DEFAULT_ABSENCE; 0 if the caller or MOECOMM_TIMEOUT has set a timeout, which then bounds this
    wait as well."""
    return DEFAULT_ABSENCE if timeout is None and read_env().timeout is None else 0.0


def check_sizes(size: int, num_experts: Any, hidden: Any, top_k: Any, max_tokens: Any, dtype: Any) -> None:
    """Raises InvalidArgument for sizes that a communicator of `size` ranks cannot have."""
    window_shape(ranks=size, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype)
    require_integer("num_experts", num_experts, 1)
    if num_experts % size != 0:
        raise InvalidArgument(
            f"num_experts is {num_experts}, expected a multiple of the {size} ranks of the group"
        )
    if top_k > num_experts:
        raise InvalidArgument(f"top_k is {top_k}, expected at most num_experts = {num_experts}")
    rows = size * max_tokens * min(top_k, num_experts // size)
    if rows >= 2**31:
        raise InvalidArgument(
            f"max_tokens is {max_tokens}: a rank could get {rows} rows, expected fewer than {2**31}; "
            "lower max_tokens"
        )


def check_formats(
    device: torch.device,
    hidden: int,
    dtype: torch.dtype,
    wire: Any = None,
    combine_wire: Any = None,
    gradient_wire: Any = None,
) -> None:
    """Raises Unsupported or InvalidArgument for a dtype or wire formats that the device cannot have."""
    if device.type == "cuda" and dtype not in CUDA_DTYPES:
        raise Unsupported(
            f"dtype is {dtype} on {device}, expected {', '.join(map(str, CUDA_DTYPES))}: use float32 there, "
            "or device='cpu' for float64"
        )
    for name, what, formats, asked in (
        ("wire", "rows", tuple(WIRE_FORMATS), wire),
        ("combine_wire", "sums", ("fp8",), combine_wire),
        ("gradient_wire", "gradients", ("fp8", "mxfp8"), gradient_wire),
    ):
        if asked is None:
            continue
        if device.type != "cuda":
            raise Unsupported(
                f"{name} is {asked!r}: on the {device.type} {what} travel in their own dtype; pass "
                f"{name}=None"
            )
        if asked not in formats:
            names = " and ".join(map(repr, formats))
            raise Unsupported(f"{name} is {asked!r}, this version has None (the rows' dtype) and {names}")
        if hidden % 16 != 0:
            raise InvalidArgument(f"hidden is {hidden}, expected a multiple of 16 with {name}={asked!r}")


def check_ranks_per_node(size: int, ranks_per_node: Any) -> int | None:
    """Returns the ranks per node that the caller or the environment asks for; None: a host is a node."""
    if ranks_per_node is None:
        ranks_per_node = read_env().ranks_per_node
    if ranks_per_node is None:
        return None
    wanted = min(require_integer("ranks_per_node", ranks_per_node, 1), size)
    return NodeMap(size, wanted).ranks_per_node


def check_num_sms(num_sms: Any, device: torch.device) -> int | None:
    """Returns the number of SMs (on the CPU, threads) of an operation; None: the backend chooses."""
    if device.type == "cpu":
        return read_env().threads if num_sms is None else require_integer("num_sms", num_sms, 1, 4096)
    if num_sms is None:
        return None
    most = torch.cuda.get_device_properties(device).multi_processor_count
    return require_integer("num_sms", num_sms, 2, most)
