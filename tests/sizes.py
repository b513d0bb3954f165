"""Sizes that describe the job of a whole-job test, whoever makes the inputs and checks the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tokens: tuple[int, ...]
    """Tokens of each rank; its length is the world size."""
    num_experts: int
    hidden: int
    top_k: int
    dtype: str
    layout: str = "expert"
    alignment: int = 1
    slack: int | None = None
    """None: dropless. Else the capacity is the largest need of any rank plus this (negative: overflow)."""
    weights: bool = True
    wide_ids: bool = False
    wire: str | None = None
    num_sms: int | None = None
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def communicator(self) -> dict[str, Any]:
        """Arguments of a communicator for this job."""
        return {
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "max_tokens": max(*self.tokens, 1),
            "dtype": self.torch_dtype,
            "num_sms": self.num_sms,
            "wire": self.wire,
        }
