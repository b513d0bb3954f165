"""peft's LoRA adapters on experts' weights (`target_parameters`), where experts are spread over ranks.

peft adds the product of an adapter's two matrices to a weight before the forward of the weight's module. At
that point the weight is a DTensor of all ranks' experts. Here the product is added between dispatch and
combine, where the weight is a plain tensor of this rank's experts. The adapters stay as peft has made them:
each rank has those of all experts, so that peft saves and loads them as usual."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peft.tuners.lora import ParamWrapper
from torch import nn

from moecomm.arguments import require_module
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.transformers.implementation import MoecommEP


def adapt_experts(model: nn.Module) -> nn.Module:
    """Prepares the adapters on experts' weights of `model`, a PeftModel, for experts that are spread over
    ranks; returns `model`.

        model = get_peft_model(
            model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        )
        adapt_experts(model)

    Call it once, before the first forward. An adapter's gradient on a rank comes from this rank's experts.
    Its average over all ranks, which transformers' Trainer takes, is the gradient of the ranks' mean loss.

    Raises:
        InvalidArgument: no adapter is on experts to which moecomm sends tokens, or `model` is no module.
        Unsupported: ranks share their batches (tp_size above 1), or an adapter is on the experts' biases.
    """
    require_module(model)
    found = [
        (each, each.get_base_layer().moecomm)
        for each in model.modules()
        if isinstance(each, ParamWrapper) and hasattr(each.get_base_layer(), "moecomm")
    ]
    if not found:
        raise InvalidArgument(
            "model has no adapter of peft on experts whose tokens moecomm brings: name their weights in "
            "target_parameters, and load the model with ep_implementation='moecomm'"
        )
    for wrapper, implementation in found:
        if implementation.tp_mesh.size() > 1:
            raise Unsupported("adapters of experts with tp_size above 1: load the model with tp_size=1")
        if (sizes := wrapper.get_param().dim()) != 3:
            raise Unsupported(
                f"an adapter of experts' {wrapper.parameter_name}, which has {sizes} dimensions: "
                "target_parameters may name their gate_up_proj, up_proj and down_proj, which have 3"
            )
        wrapper.__class__ = _OfLocalExperts
    return model


class _OfLocalExperts(ParamWrapper):  # type: ignore[misc]
    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Makes the wrapped experts add their part of this adapter to their weights in this context."""
        implementation: MoecommEP = self.get_base_layer().moecomm
        first, count = implementation.first_local_expert, implementation.num_local_experts
        added: list[tuple[Any, ...]] = []
        for name in active_adapters:
            if name in self.lora_A:
                left, right, scale = self.get_delta_factors(name)
                added.append((left[first : first + count], right[first : first + count], scale))
        with implementation.local.adding(self.parameter_name, added):
            yield


_OfLocalExperts.__name__ = "ParamWrapper"  # by which peft knows its own, where it adds further adapters
