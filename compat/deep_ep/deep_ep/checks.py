"""Checks of the arguments of DeepEP's calls, before anything travels, on the rank that gave them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moecomm.errors import InvalidArgument, MoecommError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
INTEGERS = (torch.int32, torch.int64)

_TENSOR, _PAIR, _INTEGER, _EVENT = "a tensor", "a pair of tensors", "an integer", "an event"
_KINDS = {
    "Tensor": _TENSOR,
    "tuple[Tensor, Tensor]": _PAIR,
    "int": _INTEGER,
    "EventHandle": _EVENT,
    "EventOverlap": _EVENT,
    "None": "None",
}


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a call. If the call fails with an error of Python or torch, it raises InvalidArgument instead
    for an argument that is not as annotated (tensors, pairs of tensors, integers and events), or for a tensor
    on another device than the first. (To check each call beforehand would take the host 5 us.)"""
    parameters = inspect.signature(function).parameters
    kinds = {name: _kinds_of(str(each.annotation)) for name, each in parameters.items()}

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **options)
        except MoecommError:
            raise
        except (AttributeError, IndexError, TypeError, ZeroDivisionError, RuntimeError) as error:
            given = dict((*zip(kinds, arguments, strict=False), *options.items()))
            for name, value in given.items():
                wanted = kinds.get(name, [])
                if wanted and not any(_is(kind, value) for kind in wanted):
                    text = f"{name} is {_described(value)}, expected {' or '.join(wanted)}"
                    raise InvalidArgument(text) from error
            _check_devices(given, error)
            raise

    return call


def _check_devices(given: dict[str, Any], cause: Exception) -> None:
    first: tuple[str, torch.device] | None = None
    for name, value in given.items():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(each, Tensor):
                continue
            first = first or (name, each.device)
            if each.device != first[1]:
                raise InvalidArgument(
                    f"{name} is on {each.device}, expected {first[1]}, as {first[0]}"
                ) from cause


def _kinds_of(annotation: str) -> list[str]:
    """Returns the kinds that an annotation allows; none if it names a type that is not in _KINDS."""
    names = [each.strip() for each in annotation.split("|")]
    return [_KINDS[each] for each in names] if all(each in _KINDS for each in names) else []


def _is(kind: str, value: Any) -> bool:
    if kind == _TENSOR:
        return isinstance(value, Tensor)
    if kind == _PAIR:
        return isinstance(value, tuple) and len(value) == 2 and all(_is(_TENSOR, v) for v in value)
    if kind == _INTEGER:
        return hasattr(value, "__index__") and not isinstance(value, (bool, Tensor))
    if kind == _EVENT:
        return hasattr(value, "current_stream_wait")
    return value is None


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) or value is None else type(value).__name__


def require_shape(
    name: str, value: Tensor, letters: str, *shape: int | None, dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    """Raises InvalidArgument unless a tensor has this shape (None: any size) and one of `dtypes`, if any are
    given. `letters`: the shape for the error's text."""
    sizes = value.shape
    if len(sizes) != len(shape) or any(a is not None and a != b for a, b in zip(shape, sizes, strict=True)):
        raise InvalidArgument(f"{name} has shape {tuple(sizes)}, expected {letters}")
    if dtypes and value.dtype not in dtypes:
        raise InvalidArgument(f"{name} is {value.dtype}, expected {' or '.join(map(str, dtypes))}")


def require_counts(counts: Tensor | None, local: int) -> None:
    """Raises InvalidArgument unless `counts` is None, or integers (L,) to which counts can be added."""
    if counts is not None:
        require_shape("cumulative_local_expert_recv_stats", counts, f"({local},)", local, dtypes=INTEGERS)


def top_k_of(topk_idx: Tensor) -> int:
    """Returns K of (T, K) ids. Raises InvalidArgument for another shape."""
    if topk_idx.dim() != 2:  # takes the host a tenth of the time of require_shape
        require_shape("topk_idx", topk_idx, "(T, K)", None, None)
    return topk_idx.shape[1]
