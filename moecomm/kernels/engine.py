"""Chooses what computes the experts' products: torch or quack."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.kernels import quack
from moecomm.kernels.products import Products


def make_products(config: Any, device: torch.device, rows: int | None = None) -> Products:
    """Makes the products of a MoEConfig's experts on a device. rows: average rows of an expert in a call, by
    which tiles are chosen. Raises Unsupported if config.products is "quack" and quack does not support the
    layer."""
    if config.products == "torch":
        return Products()
    sizes: dict[str, Any] = {"hidden": config.hidden, "ffn": config.ffn_hidden}
    sizes |= {"dtype": config.dtype, "device": device}
    if config.products == "quack" or quack.missing_on(**sizes) is None:
        return quack.make_quack_products(**sizes, activation=config.activation, bias=config.bias, rows=rows)
    return Products()
