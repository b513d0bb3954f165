"""Row data: random, never zero, and known to every rank from (seed, round, rank) alone.

Arrays are numpy in storage form: the type itself, or for bfloat16 (which numpy lacks) its bits as uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Storage = npt.NDArray[Any]
_ROWS_STREAM, _WEIGHTS_STREAM = 2, 3
_STORAGE = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class DataKey:
    """Names one set of inputs: another `round` is other data of the same shape."""

    seed: int
    round: int
    tokens: int
    hidden: int
    dtype: str


def round_to(values: npt.NDArray[np.floating[Any]], dtype: str) -> Storage:
    """float32 or float64 values in storage form of `dtype`, to nearest, ties to even. No NaN may be among
    them.
    """
    if dtype != "bfloat16":
        return values.astype(_STORAGE[dtype], copy=False)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(stored: Storage, dtype: str) -> npt.NDArray[np.floating[Any]]:
    """Storage form as float64 for float64, else as float32 (exactly)."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64 if dtype == "float64" else np.float32, copy=False)


def rows(key: DataKey, rank: int) -> Storage:
    """The (T, H) rows that `rank` puts in: signed, magnitudes in [0.25, 1.25), so that no value is zero."""
    rng = np.random.default_rng([key.seed, _ROWS_STREAM, key.round, key.tokens, rank])
    wide: Any = np.float64 if key.dtype == "float64" else np.float32
    values = rng.random((key.tokens, key.hidden), dtype=wide)
    values -= wide(0.5)
    values *= wide(2.0)
    values += np.copysign(wide(0.25), values)
    return round_to(values, key.dtype)


def weights(key: DataKey, rank: int, topk: int) -> npt.NDArray[np.float32]:
    """The (T, K) float32 weights of `rank`'s tokens: positive, each row sums to 1."""
    rng = np.random.default_rng([key.seed, _WEIGHTS_STREAM, key.round, key.tokens, rank])
    values = rng.random((key.tokens, topk), dtype=np.float32) + np.float32(0.25)
    values /= values.sum(axis=1, keepdims=True)
    return values


def answer(rows_NH: Storage, key_N: npt.NDArray[Any], dtype: str) -> Storage:
    """What "expert" (or rank) `key` answers to a row: the row times 1 + (key mod 7) / 8, rounded to `dtype`.

    Stands in for the expert's network in the combine benchmark: cheap, and different for neighbouring
    experts.
    """
    wide = widen(rows_NH, dtype)
    scale = (1.0 + (key_N % 7) / 8.0).astype(wide.dtype)
    return round_to(wide * scale[:, None], dtype)
