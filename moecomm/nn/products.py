"""The choice of what computes the products of a layer's experts."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.kernels import quack
from moecomm.kernels.products import Products
from moecomm.nn.config import MoEConfig
from moecomm.nn.fp8 import make_fp8_products


def make_products(config: MoEConfig, device: torch.device, rows: int | None = None) -> Products:
    """Makes the products of a config's experts on a device: those of config.expert_precision, of
    config.products, or of quack where it serves them and else of torch. rows: those that an expert gets on
    average in a call, if known; kernels' tiles are chosen by it. Raises Unsupported where the device
    has no product of e4m3, or quack is asked for and does not serve."""
    if config.expert_precision is not None:
        return make_fp8_products(config, device)
    if config.products == "torch":
        return Products()
    sizes: dict[str, Any] = {"hidden": config.hidden, "ffn": config.ffn_hidden}
    sizes |= {"dtype": config.dtype, "device": device}
    if config.products == "quack" or quack.missing_on(**sizes) is None:
        return quack.make_quack_products(
            **sizes,
            activation=config.activation,
            bias=config.bias,
            rows=rows,
        )
    return Products()
