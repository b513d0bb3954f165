"""Chooses what computes the experts' products: torch, quack, or the fp8 kernels."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.kernels import operators, quack
from moecomm.kernels.fp8_products import Fp8Products
from moecomm.kernels.products import Products
from moecomm.kernels.scaled_mm import missing_on


def make_products(config: Any, device: torch.device, rows: int | None = None) -> Products:
    """Makes the products of a MoEConfig's experts on a device. rows: average rows of an expert in a call, by
    which tiles are chosen. Raises Unsupported if experts are in fp8 and torch has no e4m3 product there,
    or if config.products is "quack" and quack does not support the layer."""
    if config.expert_precision is not None:
        if device.type == "cuda":
            if (reason := missing_on(device)) is not None:
                raise Unsupported(
                    f"expert_precision is {config.expert_precision!r}, but {reason}. Use "
                    "expert_precision=None there"
                )
            operators.prepare("quantize", device, config.dtype)
        return Fp8Products()
    if config.products == "torch":
        return Products()
    sizes: dict[str, Any] = {"hidden": config.hidden, "ffn": config.ffn_hidden}
    sizes |= {"dtype": config.dtype, "device": device}
    if config.products == "quack" or quack.missing_on(**sizes) is None:
        return quack.make_quack_products(**sizes, activation=config.activation, bias=config.bias, rows=rows)
    return Products()
