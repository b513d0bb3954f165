"""peft's LoRA adapters on experts' weights (`target_parameters`).

peft adds the product of an adapter's two matrices to a weight before the forward of the weight's module. That
takes a copy of all weights, with a gradient, and fails where the weight is a DTensor of all ranks' experts.
Here rows are multiplied by the matrices, between dispatch and combine. The adapters stay as peft has made
them: each rank has those of all experts, so that peft saves and loads them as usual."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peft.tuners.lora import ParamWrapper
from torch import nn

from moecomm.arguments import require_module
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels.expert_ffn import LowRank
from moecomm.transformers.implementation import MoecommEP
from moecomm.transformers.whole_experts import WholeExperts, whole_experts

__all__ = ["adapt_experts"]


def adapt_experts(model: nn.Module) -> nn.Module:
    """Prepares the adapters on experts' weights of `model`, a PeftModel; returns `model`. The model was
    loaded with `ep_implementation="moecomm"` or, if no ranks share its experts, with
    `experts_implementation="moecomm"`.

        model = get_peft_model(
            model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        )
        adapt_experts(model)

    Call it once, before the first forward. Rows are then multiplied by the adapters' matrices, and the sum of
    a weight and its adapters is not made. An adapter's gradient on a rank comes from this rank's experts; its
    average over all ranks, which transformers' Trainer takes, is that of the ranks' mean loss.

    Raises:
        InvalidArgument: no adapter is on experts to which moecomm sends tokens, or `model` is no module.
        Unsupported: ranks share their batches (tp_size above 1), or an adapter is on the experts' biases.
    """
    require_module(model)
    found = [
        (each, implementation)
        for each in model.modules()
        if isinstance(each, ParamWrapper)
        and (implementation := implementation_of(each.get_base_layer())) is not None
    ]
    if not found:
        raise InvalidArgument(
            "model has no adapter of peft on experts that moecomm runs: name their weights in "
            "target_parameters, and load the model with ep_implementation='moecomm', or, if its experts are "
            "not spread over ranks, with experts_implementation='moecomm'"
        )
    for wrapper, implementation in found:
        if isinstance(implementation, MoecommEP) and implementation.tp_mesh.size() > 1:
            raise Unsupported("adapters of experts with tp_size above 1: load the model with tp_size=1")
        if (sizes := wrapper.get_param().dim()) != 3:
            raise Unsupported(
                f"an adapter of experts' {wrapper.parameter_name}, which has {sizes} dimensions: "
                "target_parameters may name their gate_up_proj, up_proj and down_proj, which have 3"
            )
        wrapper.__class__ = _OfLocalExperts
    return model


def implementation_of(experts: Any) -> MoecommEP | WholeExperts | None:
    """Returns the object by which moecomm runs a module of experts; None if it does not."""
    found = getattr(experts, "moecomm", None)
    if isinstance(found, MoecommEP):
        return found
    config = getattr(experts, "config", None)
    chosen = getattr(config, "_experts_implementation", None) == "moecomm"
    # Routers have no such attribute. Another implementation has spread the experts where it is True.
    spread = getattr(experts, "_is_expert_parallel", True)
    return whole_experts(experts) if chosen and not spread else None


class _OfLocalExperts(ParamWrapper):  # type: ignore[misc]
    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Makes the wrapped experts add their part of this adapter to their weights in this context."""
        implementation = implementation_of(self.get_base_layer())
        if implementation is None:  # set_experts_implementation has chosen another one since
            with super()._activate_lora(active_adapters):
                yield
            return
        first = implementation.first_local_expert
        end = first + implementation.num_local_experts
        added: list[LowRank] = []
        for name in active_adapters:
            if name in self.lora_A:
                left, right, scale = self.get_delta_factors(name)
                if len(left) > end - first:
                    left, right = left[first:end], right[first:end]
                added.append(LowRank(left, right, scale))
        with implementation.local.adding(self.parameter_name, added):
            yield


_OfLocalExperts.__name__ = "ParamWrapper"  # by which peft knows its own, where it adds further adapters
