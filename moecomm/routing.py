"""Checks of a call's arguments. Pure: an InvalidArgument here is announced to all ranks by the caller."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.errors import InvalidArgument, InvalidRouting
from moecomm.types import Layout


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of routing weights and sums for rows of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _require_tensor(name: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} is {type(value).__name__}, expected a torch.Tensor")
    if value.device.type != device.type:
        raise InvalidArgument(f"{name} is on {value.device}, expected {device}")
    if value.layout != torch.strided:
        raise InvalidArgument(f"{name} has layout {value.layout}, expected a dense tensor")


def _require_shape(name: str, value: torch.Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(value.shape) != shape:
        raise InvalidArgument(f"{name} has shape {tuple(value.shape)}, expected {letters} = {shape}")


def require_integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """`value` as an int within bounds, or InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"{name} is {value!r}, expected an integer from {least} to {most}")
    return value


def check_rows(
    name: str, rows_XH: Any, count: int | None, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    """`rows_XH` is (count, hidden) of dtype on device; count None: any."""
    _require_tensor(name, rows_XH, device)
    if rows_XH.dim() != 2 or rows_XH.shape[1] != hidden or count not in (None, rows_XH.shape[0]):
        raise InvalidArgument(
            f"{name} has shape {tuple(rows_XH.shape)}, "
            f"expected ({'any' if count is None else count}, hidden = {hidden})"
        )
    if rows_XH.dtype != dtype:
        raise InvalidArgument(f"{name} is {rows_XH.dtype}, expected the communicator's dtype {dtype}")


def check_dispatch(
    x_TH: Any,
    topk_idx_TK: Any,
    topk_weights_TK: Any,
    *,
    hidden: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The tensors of a dispatch, all but the values of the ids, which the runtime checks as it copies
    them."""
    check_rows("x", x_TH, None, hidden, dtype, device)
    tokens = x_TH.shape[0]
    if tokens > max_tokens:
        raise InvalidArgument(f"x has {tokens} tokens, expected at most max_tokens = {max_tokens}")
    _require_tensor("topk_idx", topk_idx_TK, device)
    if topk_idx_TK.dtype not in (torch.int32, torch.int64):
        raise InvalidRouting(f"topk_idx is {topk_idx_TK.dtype}, expected int32 or int64")
    _require_shape("topk_idx", topk_idx_TK, (tokens, top_k), "(T, K)")
    if topk_weights_TK is not None:
        check_weights("topk_weights", topk_weights_TK, (tokens, top_k), "(T, K)", dtype, device)


def check_weights(
    name: str, weights: Any, shape: tuple[int, ...], letters: str, dtype: torch.dtype, device: torch.device
) -> None:
    """`weights` has the shape and the weight type of `dtype`."""
    _require_tensor(name, weights, device)
    if weights.dtype != weight_dtype(dtype):
        raise InvalidArgument(f"{name} is {weights.dtype}, expected {weight_dtype(dtype)}")
    _require_shape(name, weights, shape, letters)


def check_options(layout: Any, alignment: Any, capacity: Any) -> tuple[Layout, int, int]:
    """(layout, alignment, capacity) of a dispatch, capacity -1 for None."""
    if layout not in ("expert", "rank"):
        raise InvalidArgument(f"layout is {layout!r}, expected 'expert' or 'rank'")
    require_integer("alignment", alignment, 1, 1 << 20)
    if layout == "rank" and alignment != 1:
        raise InvalidArgument(
            f"alignment is {alignment}, expected 1: rows in the rank layout have no expert groups"
        )
    if capacity is not None:
        require_integer("capacity", capacity, 0)
    return layout, alignment, -1 if capacity is None else capacity
