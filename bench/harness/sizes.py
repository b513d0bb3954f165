"""Sizes on the command line: tokens or bytes, and the sweep between two of them."""

from __future__ import annotations

import math

_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str, row_bytes: int) -> int:
    """Tokens meant by `text`: "2048" is tokens, "32M" is bytes of rows of `row_bytes` each, at least one
    token.
    """
    word = text.strip().upper()
    if word.endswith("IB"):
        word = word[:-2]
    elif len(word) > 2 and word[-1] == "B" and word[-2] in "KMG":
        word = word[:-1]
    unit = _UNITS.get(word[-1:], 0)
    try:
        number = float(word[:-1]) if unit else int(word)
    except ValueError:
        raise ValueError(
            f"{text!r} is no size: give tokens (2048) or bytes with B, K, M or G (32M)"
        ) from None
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"size {text!r} has to be above 0")
    return max(1, int(number * unit) // row_bytes) if unit else int(number)


def sweep(first: int, last: int, step: int | None = None, factor: float | None = None) -> tuple[int, ...]:
    """Sizes from `first` to `last` inclusive, adding `step` or multiplying by `factor` (2 if neither is
    given).
    """
    if last < first:
        raise ValueError(f"the last size (-e, {last} tokens) is below the first (-b, {first} tokens)")
    if step is not None and factor is not None:
        raise ValueError("give -i or -f, not both")
    if step is not None and step < 1:
        raise ValueError("-i has to be at least 1")
    if factor is not None and not (math.isfinite(factor) and factor > 1.0):
        raise ValueError(f"-f has to be above 1, got {factor:g}")
    sizes = [first]
    while True:
        grown = sizes[-1] + step if step is not None else max(sizes[-1] + 1, int(sizes[-1] * (factor or 2.0)))
        if grown > last:
            return tuple(sizes)
        sizes.append(grown)
