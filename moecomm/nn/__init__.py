"""A thin mixture-of-experts layer on moecomm's dispatch and combine.

    config = MoEConfig(hidden=512, ffn_hidden=1024, num_experts=16, top_k=2)
    layer = MoELayer(config, max_tokens=4096)    # every rank of the default group holds 16 / R experts
    y = layer(x)                                 # x: (T, 512) or (B, S, 512), each rank its own tokens
    y.square().mean().backward()
    sync_gradients(layer)

After that every rank has the gradients of the mean of all ranks' losses. An expert's gradient includes other
ranks' tokens, since dispatch brought them to the expert.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import moecomm.kernels.flops  # noqa: F401 (tells torch the FLOPs of the products)
from moecomm.autograd.attached_loss import attach_loss
from moecomm.kernels.parameters import is_expert_parameter, mark_adapter, mark_expert_parameter
from moecomm.nn.config import MoEConfig, OverlapConfig
from moecomm.nn.experts import GroupedExperts, SharedExperts
from moecomm.nn.layer import MoELayer
from moecomm.nn.losses import load_balancing_loss, z_loss
from moecomm.nn.router import Routing, TopKRouter

if TYPE_CHECKING:
    from moecomm.graphs import GraphedStep
    from moecomm.train import (
        backward_weights,
        clip_grad_norm,
        fully_shard_experts,
        keep_plans,
        mark_synchronized,
        prepare_ddp,
        set_loss_scale,
        sharded_state,
        sync_gradients,
        update_expert_bias,
    )

__all__ = [
    "GraphedStep",
    "GroupedExperts",
    "MoEConfig",
    "MoELayer",
    "OverlapConfig",
    "Routing",
    "SharedExperts",
    "TopKRouter",
    "attach_loss",
    "backward_weights",
    "clip_grad_norm",
    "fully_shard_experts",
    "is_expert_parameter",
    "keep_plans",
    "load_balancing_loss",
    "mark_adapter",
    "mark_expert_parameter",
    "mark_synchronized",
    "prepare_ddp",
    "set_loss_scale",
    "sharded_state",
    "sync_gradients",
    "update_expert_bias",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "moecomm.graphs" if name == "GraphedStep" else "moecomm.train"
    value = getattr(importlib.import_module(package), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
