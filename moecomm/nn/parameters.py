"""Marks which parameters belong to experts, and so differ between the ranks of an expert-parallel group."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_MARK = "moecomm_expert_parallel"


def mark_expert_parameter(parameter: nn.Parameter) -> None:
    """Marks a parameter for `is_expert_parameter`; use it for your own experts, as GroupedExperts does for
    its parameters."""
    setattr(parameter, _MARK, True)


def is_expert_parameter(parameter: Tensor) -> bool:
    """Returns True for a parameter sharded by expert over the expert-parallel group; False for one that all
    ranks share."""
    return getattr(parameter, _MARK, False)


@torch.no_grad()
def init_shared_weight(weight: Tensor, std: float) -> None:
    """Fills a weight that all ranks have with normal numbers from torch's default generator.

    It is the generator of the CPU, wherever the weight is, so that a model starts the same on every device.
    """
    weight.copy_(nn.init.normal_(torch.empty(weight.shape, dtype=weight.dtype, device="cpu"), std=std))


def init_expert_weights(weight_LAB: Tensor, *, seed: int, name: str, first_expert: int, std: float) -> None:
    """Fills weight[l] with normal numbers that depend on (seed, name, first_expert + l) alone.

    So a model starts the same at every EP size. Numbers are drawn in float32 on the CPU, so that neither
    dtype nor device matters beyond rounding.
    """
    generator = torch.Generator("cpu")
    for local, weight_AB in enumerate(weight_LAB.detach()):
        key = f"{seed}:{name}:{first_expert + local}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
        weight_AB.copy_(torch.normal(0.0, std, weight_AB.shape, generator=generator, device="cpu"))
