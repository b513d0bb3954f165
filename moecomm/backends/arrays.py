"""Arrays of other libraries (CuPy, numpy, JAX) as tensors that share their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def shared_tensor(value: Any, device: torch.device) -> Any:
    """Returns `value` if it is a tensor, a tensor that shares its memory if it offers one, else `value`,
    which a later check refuses.

    With DLPack the library orders its own stream before torch's current one. An object with only
    `__cuda_array_interface__` is assumed to be ready for the current stream.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None and device.type == "cuda":
            tensor = torch.as_tensor(value, device=device)
            if tensor.numel() == 0 or tensor.data_ptr() == interface["data"][0]:
                return tensor  # otherwise it was on another GPU, and torch has copied it
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass
    return value
