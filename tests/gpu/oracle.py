from __future__ import annotations

from dataclasses import dataclass

from tests.cases import Case, Inputs, generator, inputs
from tests.oracle import DTYPES, Oracle, dequantised, play, quantised, rows, through_fp8

__all__ = [
    "DTYPES",
    "Inputs",
    "Oracle",
    "dequantised",
    "generator",
    "inputs",
    "play",
    "quantised",
    "rows",
    "through_fp8",
]


@dataclass(frozen=True, kw_only=True)
class Job(Case):
    dtype: str = "bfloat16"
