"""Recomputation: which parts of a transformer block its backward computes again, and which are kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lm.attention import LatentAttention
from lm.model import Run, Transformer
from lm.options import Options
from moecomm.nn import MoELayer, OverlapConfig, keep_plans


def overlap_config(options: Options) -> OverlapConfig:
    """Returns settings of layers with experts: what they keep, and when they compute weights' gradients."""
    chosen = options.recompute
    return OverlapConfig(
        keep="nothing" if "dispatch" in chosen else "rows" if "fc1" in chosen else "all",
        keep_shared="shared" not in chosen,
        defer_weights=options.delay_wgrad,
    )


def save_memory(model: Transformer, options: Options) -> None:
    """Makes the model's blocks recompute what --recompute says."""
    chosen = set(options.recompute)
    for block in model.own_blocks():
        parts = {"all", "attention", "moe"} & chosen
        if not isinstance(block.ffn, MoELayer):
            parts -= {"moe"}
        for part in parts:
            block.runs[part] = checkpointed(block if part == "all" else getattr(block, HELD[part]))
        # A checkpointed part keeps nothing in between anyway.
        block.drops_attention_norm = "norms" in chosen and not parts & {"all", "attention"}
        block.drops_ffn_norm = "norms" in chosen and not parts & {"all", "moe"}
        if isinstance(block.attention, LatentAttention):
            block.attention.drops_up = "mla-up" in chosen and not parts & {"all", "attention"}


HELD = {"attention": "attention", "moe": "ffn"}
"""The attribute of a block that holds each named part."""


class _Holder(nn.Module):
    """Calls functions with other weights in place of a module's (torch.func.functional_call)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Run, *tensors: Tensor) -> Tensor:
        return function(*tensors)


def checkpointed(module: nn.Module) -> Run:
    """Returns run(function, *tensors), which computes function(*tensors), a part of a block that contains the
    module, and keeps only the tensors. Its recomputed layers with experts follow their first plans."""
    holder = _Holder(module)
    has_experts = any(isinstance(each, MoELayer) for each in module.modules())
    options: dict[str, Any] = {"context_fn": keep_plans(module)} if has_experts else {}

    def run(function: Run, *tensors: Tensor) -> Tensor:
        # In bfloat16, casts replace the experts' weights during the forward (lm.precision).
        weights: dict[str, Tensor] = dict(holder.named_parameters())
        casts = {name: each for name, each in weights.items() if not isinstance(each, nn.Parameter)}
        # A block draws no random numbers, whose state a capture could not save.
        return checkpoint(
            lambda *tensors: (
                functional_call(holder, casts, (function, *tensors)) if casts else function(*tensors)
            ),
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            **options,
        )

    return run
