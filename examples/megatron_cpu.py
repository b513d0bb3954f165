"""Runs Megatron-Core on ranks without a GPU, which it does not support: replaces what it needs of a GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """A context in which the CPU acts as the current GPU: streams do nothing, and random numbers are the
    CPU's. Models must be built, trained and freed within it."""
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.token_dispatcher as dispatchers

    def nothing(*_: Any, **__: Any) -> None: ...

    def cpu_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    cuda: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "manual_seed": torch.manual_seed,
        "get_rng_state": cpu_state,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: _STREAM,
        "stream": lambda _: contextlib.nullcontext(),
        "nvtx": SimpleNamespace(
            range_push=nothing, range_pop=nothing, range=lambda _: contextlib.nullcontext()
        ),
    }
    states: dict[str, Any] = {
        "_get_cuda_rng_state": cpu_state,
        "_set_cuda_rng_state": lambda state, **_: torch.set_rng_state(state),
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(rng, **states),
        mock.patch.object(logging.getLogger(rng.__name__), "disabled", True),  # of the CPU's random numbers
        mock.patch.multiple(dispatchers, maybe_move_tensor_to_cpu=_on_host),
        mock.patch.object(torch.Tensor, "record_stream", nothing),
        mock.patch.object(torch.UntypedStorage, "resize_", _resize),
        _OfTensors(),
    ):
        yield


def without_transformer_engine() -> None:
    """Defines a name that Megatron-Core's router needs and 0.16.1 lacks without TransformerEngine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


class _OfTensors(TorchFunctionMode):
    """Creates tensors for "cuda" on the CPU, and makes CPU tensors report that they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: _Stream) -> None: ...

    def record_event(self) -> _Event:
        return _Event()


class _Event:
    def wait(self, _: _Stream | None = None) -> None: ...

    def record(self, _: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


_STREAM = _Stream()


_own_resize = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    """Megatron-Core's schedule frees tensors early, but torch cannot free moecomm's large CPU tensors."""
    return _own_resize(storage, size) if storage.resizable() else storage


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Converts the splits of its all-to-all to numbers, which it does only when copying from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
