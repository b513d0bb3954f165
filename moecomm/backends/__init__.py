"""Backends: each turns tensors into pointers for one kind of memory. No other code passes torch's tensors to
the runtime."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.backends.base import Backend
from moecomm.backends.cpu import CpuBackend
from moecomm.backends.cuda import CudaBackend
from moecomm.errors import MoecommError
from moecomm.setup.rendezvous import Rendezvous


def make_backend(
    device: torch.device,
    rendezvous: Rendezvous,
    arguments: dict[str, Any],
    error: MoecommError | None,
    dtype: torch.dtype,
    num_sms: int | None,
) -> Backend:
    """Builds the backend of `device` together with the other ranks of `rendezvous`. `arguments`, `error`: as
    in `setup.handshake.handshake`."""
    if device.type == "cuda":
        return CudaBackend(device, rendezvous, arguments, error, dtype, num_sms)
    return CpuBackend(rendezvous, arguments, error, dtype, num_sms)
