"""Checks of a call's arguments on one rank, without communication. If a check raises InvalidArgument, the
caller tells the other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moecomm.errors import InvalidArgument, InvalidRouting
from moecomm.types import WIRE_FORMATS, Layout

_MOST_ALIGNMENT = 1 << 20
_MOST_ROWS = 2**31 - 1  # rows of an output: plans count them in 32 bits


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of routing weights and sums for rows of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is(value: Any, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether `value` is a dense tensor with memory, of this shape, dtype and device (quick)."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and value.dtype is dtype
        and value.device == device
        and value.layout is torch.strided
        and _has_memory(value)
    )


def _has_memory(value: torch.Tensor) -> bool:
    """Returns True for a plain tensor with elements in memory; False for wrappers (DTensor, tensors of
    torch.func) and for fake tensors and torch's efficient zero tensors, which have no memory."""
    if torch.compiler.is_compiling():  # `value` stands for tensors of later calls
        return True
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        from torch._subclasses.fake_tensor import FakeTensor  # imported late: slow, and seldom needed

        if is_traceable_wrapper_subclass(value) or isinstance(value, FakeTensor):
            return False
    return not (value._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(value))


def waited(value: Any) -> Any:
    """If `value` is the result of a collective that may still run (torch's tensor parallelism passes such
    results), waits for the collective and returns a plain tensor. Returns other values unchanged."""
    if isinstance(value, AsyncCollectiveTensor):
        return torch.ops.aten._unsafe_view(value, value.shape)  # waits, copies nothing, and has a gradient
    return value


def require_tensor(name: str, value: Any, device: torch.device) -> None:
    """Raises InvalidArgument if `value` is not a dense tensor on `device`, with memory of its own."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"{name} is {type(value).__name__}, expected a torch.Tensor, or an array that DLPack or "
            f"__cuda_array_interface__ can share with torch on {device}"
        )
    place = value.device
    if place.type != device.type or (device.index is not None and place.index != device.index):
        raise InvalidArgument(f"{name} is on {place}, expected {device}")
    if value.layout != torch.strided:
        raise InvalidArgument(f"{name} has layout {value.layout}, expected a dense tensor")
    if not _has_memory(value):
        raise InvalidArgument(
            f"{name} is a {type(value).__name__} without memory of its own, expected a plain tensor: of a "
            "DTensor its to_local(), and no tensor of torch.func or of a fake mode"
        )


def require_values(**modules: torch.nn.Module | None) -> None:
    """Raises InvalidArgument for a module's own parameter on the meta device, by which torch multiplies on
    a CPU all the same, to any numbers."""
    for module_name, module in modules.items():
        for name, parameter in module._parameters.items() if module is not None else ():
            if parameter is not None and parameter.is_meta:
                raise InvalidArgument(
                    f"{module_name}.{name} is on meta, must have values: call model.to_empty(device=...) and "
                    "each module's reset_parameters(), or load a state with assign=True"
                )


def _require_shape(name: str, value: torch.Tensor, shape: tuple[int, ...], letters: str) -> None:
    if value.shape != shape:
        raise InvalidArgument(f"{name} has shape {tuple(value.shape)}, expected {letters} = {shape}")


def _require_dtype(name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        raise InvalidArgument(f"{name} is {value.dtype}, expected {dtype}")


def require_integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """Returns `value` as an int; raises InvalidArgument if it is not an integer or out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"{name} is {value!r}, expected an integer from {least} to {most}")
    return value


def require_number(name: str, value: Any, holds: Callable[[float], bool], bound: str) -> float:
    """Returns `value`, a number or a tensor of one number, as a float. Raises InvalidArgument for anything
    else, and if holds(number) is False. `holds` must refuse NaN; `bound` says in words what it accepts."""
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not holds(number):
        raise InvalidArgument(f"{name} is {value!r}, must be {bound}")
    return number


def require_ascending(name: str, values_N: torch.Tensor, most: int, first: int | None = None) -> bool:
    """Raises InvalidArgument if a value is negative, above `most`, or below the value before it, or if the
    first is above `first` (unless None). Returns whether it has looked at the values: it does not on a GPU,
    for which the host would wait, and where they are unknown."""
    if values_N.device.type != "cpu" or torch.compiler.is_compiling() or not _has_memory(values_N):
        return False
    least, highest = 0, most if first is None else first
    for place, value in enumerate(values_N.tolist()):
        if not least <= value <= highest:
            raise InvalidArgument(f"{name}[{place}] is {value}, must be from {least} to {highest}")
        least, highest = value, most
    return True


def require_module(model: Any) -> None:
    """Raises InvalidArgument if `model` is not an nn.Module."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"model is {type(model).__name__}, must be an nn.Module: which parameters are of experts, and on "
            "which ranks, its layers tell"
        )


def require_ends(ends_L: torch.Tensor, device: torch.device, whose: str) -> None:
    """Raises InvalidArgument unless `ends_L` is (L,) int32, L at least 1, on `device`, as `whose` is."""
    if ends_L.dim() != 1 or ends_L.shape[0] < 1:
        raise InvalidArgument(f"ends has shape {tuple(ends_L.shape)}, expected (L,) with L at least 1")
    if ends_L.dtype != torch.int32:
        raise InvalidArgument(f"ends is {ends_L.dtype}, expected {torch.int32}")
    if ends_L.device != device:
        raise InvalidArgument(f"ends is on {ends_L.device}, expected {device}, where {whose} is")


def check_rows(
    name: str,
    rows_XH: Any,
    count: int | None,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    whose: str = "the communicator's dtype",
) -> None:
    """Checks `rows_XH`; count None allows any number of rows. `whose`: what prescribes `dtype`, in errors."""
    first = rows_XH.shape[:1] if count is None and isinstance(rows_XH, torch.Tensor) else (count,)
    if _is(rows_XH, (*first, hidden), dtype, device):
        return
    require_tensor(name, rows_XH, device)
    if rows_XH.dim() != 2 or rows_XH.shape[1] != hidden or count not in (None, rows_XH.shape[0]):
        raise InvalidArgument(
            f"{name} has shape {tuple(rows_XH.shape)}, "
            f"expected ({'any' if count is None else count}, hidden = {hidden})"
        )
    if rows_XH.dtype != dtype:
        raise InvalidArgument(f"{name} is {rows_XH.dtype}, expected {whose} {dtype}")


def check_dispatch(
    x_TH: Any,
    topk_idx_TK: Any,
    topk_weights_TK: Any,
    hidden: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    x_scales: Any = None,
    wire: str | None = None,
) -> None:
    """Checks the tensors of a dispatch, but not the values of the expert ids, which the runtime checks as it
    copies them. With `x_scales`, x is in the communicator's wire format, `wire`."""
    if x_scales is None or wire is None:
        check_rows("x", x_TH, None, hidden, dtype, device)
    else:
        travels = WIRE_FORMATS[wire]
        check_rows("x", x_TH, None, hidden, travels.values, device, "the wire's")
        require_tensor("scales of x", x_scales, device)
        _require_dtype("scales of x", x_scales, travels.scales)
        shape = travels.scales_shape(x_TH.shape[0], hidden)
        _require_shape("scales of x", x_scales, shape, f"(T, hidden / {travels.scale_columns} rounded up)")
    tokens = x_TH.shape[0]
    if tokens > max_tokens:
        raise InvalidArgument(f"x has {tokens} tokens, expected at most max_tokens = {max_tokens}")
    shape = (tokens, top_k)
    if not (_is(topk_idx_TK, shape, torch.int64, device) or _is(topk_idx_TK, shape, torch.int32, device)):
        require_tensor("topk_idx", topk_idx_TK, device)
        if topk_idx_TK.dtype not in (torch.int32, torch.int64):
            raise InvalidRouting(f"topk_idx is {topk_idx_TK.dtype}, expected int32 or int64")
        _require_shape("topk_idx", topk_idx_TK, shape, "(T, K)")
    if topk_weights_TK is not None:
        check_weights("topk_weights", topk_weights_TK, shape, "(T, K)", dtype, device)


def check_weights(
    name: str, weights: Any, shape: tuple[int, ...], letters: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Checks that `weights` has this shape (`letters` in errors) and weight_dtype(dtype) on `device`."""
    if _is(weights, shape, weight_dtype(dtype), device):
        return
    require_tensor(name, weights, device)
    _require_dtype(name, weights, weight_dtype(dtype))
    _require_shape(name, weights, shape, letters)


def check_weights_of_rows(
    name: str, weights: Any, handle: Any, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Checks, as check_weights does, weights of the rows that a dispatch with this `handle` has brought:
    (P,), in the rank layout (P, K)."""
    rows, by_rank = handle.num_rows, handle.layout == "rank"
    shape, letters = ((rows, top_k), "(P, K)") if by_rank else ((rows,), "(P,)")
    check_weights(name, weights, shape, letters, dtype, device)


def check_wire_options(wire: str | None, dequantize: Any, x_scales: Any) -> None:
    """Checks that `dequantize` is a bool. Without a wire format it must be True, and x no pair."""
    if dequantize is True and x_scales is None:
        return
    if not isinstance(dequantize, bool):
        raise InvalidArgument(f"dequantize is {dequantize!r}, expected a bool")
    if wire is not None:
        return
    why = "rows of this communicator travel in its dtype (wire=None)"
    if not dequantize:
        raise InvalidArgument(f"dequantize is False, expected True: {why}")
    raise InvalidArgument(f"x is a pair (data, scales), expected rows in the communicator's dtype: {why}")


def most_alignment(most_rows: int, local_experts: int) -> int:
    """Returns the largest alignment, up to 2**20, with which a rank's output, of at most `most_rows` rows
    without alignment, has fewer than 2**31 rows."""
    return max(1, min(_MOST_ALIGNMENT, (_MOST_ROWS - most_rows) // local_experts))


def check_options(
    layout: Any,
    alignment: Any,
    capacity: Any,
    expert_capacity: Any,
    most_experts: int,
    largest_alignment: int = _MOST_ALIGNMENT,
    local_experts: int = 1,
    most_rows: int = 0,
) -> tuple[Layout, int, int, int]:
    """Returns the checked options of a dispatch with -1 in place of None. `most_experts`: the most experts of
    one rank that a token can choose; `most_rows`: the most tokens that can choose one expert."""
    if layout not in ("expert", "rank"):
        raise InvalidArgument(f"layout is {layout!r}, expected 'expert' or 'rank'")
    require_integer("alignment", alignment, 1, largest_alignment)
    if layout == "rank" and alignment != 1:
        raise InvalidArgument(
            f"alignment is {alignment}, expected 1: rows in the rank layout have no expert groups"
        )
    if capacity is not None:
        require_integer("capacity", capacity, 0)
    if expert_capacity is not None and layout == "expert":  # every group has expert_capacity rows
        require_integer("expert_capacity", expert_capacity, max(1, most_rows), (2**31 - 1) // local_experts)
        rows = local_experts * expert_capacity
        if alignment != 1 or capacity not in (None, rows):
            raise InvalidArgument(
                f"alignment is {alignment} and capacity {capacity}, expected 1 and None with expert_capacity "
                f"in the expert layout: each of the {local_experts} groups has {expert_capacity} rows"
            )
        capacity = rows
    elif expert_capacity is not None:
        if capacity is None:
            raise InvalidArgument(
                f"expert_capacity is {expert_capacity!r}, expected None without a capacity in the rank layout"
            )
        require_integer("expert_capacity", expert_capacity, 0)
    elif layout == "rank" and capacity is not None:
        expert_capacity = require_integer("capacity * min(K, L)", capacity * most_experts, 0)
    rows = -1 if capacity is None else capacity
    return layout, alignment, rows, -1 if expert_capacity is None else expert_capacity


# -- losses of routers -------------------------------------------------------------------------------------


def check_balancing(probs_TE: Any, ids_TK: Any, sequence_len: Any, cu_seqlens: Any) -> None:
    """Checks the arguments of `moecomm.nn.load_balancing_loss`, but not their values."""
    integers = {"topk_idx_TK": ids_TK} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    for name, value in {"probs_TE": probs_TE, **integers}.items():
        if not isinstance(value, torch.Tensor) or value.device != probs_TE.device:
            place = getattr(probs_TE, "device", "a device")
            raise InvalidArgument(f"{name} is {described(value)}, must be a tensor on {place}")
        if name in integers and (value.is_floating_point() or value.dtype is torch.bool):
            raise InvalidArgument(f"{name} is {value.dtype}, must have integers")
    if probs_TE.dim() != 2 or ids_TK.dim() != 2 or probs_TE.shape[0] != ids_TK.shape[0]:
        raise InvalidArgument(
            f"probs_TE has shape {tuple(probs_TE.shape)}, topk_idx_TK {tuple(ids_TK.shape)}, must be "
            "(T, E) and (T, K)"
        )
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or not cu_seqlens.numel()):
        raise InvalidArgument(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, must be (sequences + 1,)")
    if sequence_len is not None and cu_seqlens is not None:
        raise InvalidArgument(f"sequence_len is {sequence_len}, must be None with cu_seqlens")


def require_mask(mask_T: Any, num_tokens: int) -> None:
    """Raises InvalidArgument if `mask_T` is neither None nor (T,) bool."""
    is_one = isinstance(mask_T, torch.Tensor) and mask_T.shape == (num_tokens,) and mask_T.dtype == torch.bool
    if mask_T is not None and not is_one:
        raise InvalidArgument(f"mask_T is {described(mask_T)}, must be bool of shape ({num_tokens},)")


def described(value: Any) -> str:
    """Returns the dtype, shape and device of a tensor, or the type of something else."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
