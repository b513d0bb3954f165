"""Which parameters of a layer's experts are of this rank's experts alone."""

from __future__ import annotations

from torch import nn

from moecomm.errors import InvalidArgument
from moecomm.nn.experts import GroupedExperts
from moecomm.nn.layer import MoELayer
from moecomm.nn.parameters import is_expert_parameter


def spread_parameters(layer: MoELayer) -> dict[str, nn.Parameter]:
    """Returns the parameters of a layer's experts that are of this rank's experts alone, by their names in
    `layer.experts`: all of a module of one's own; of GroupedExperts those that have a part for each expert,
    or were marked."""
    return {name: each for name, each in layer.experts.named_parameters() if _is_spread(layer, name, each)}


def common_parameters(layer: MoELayer) -> dict[str, nn.Parameter]:
    """Returns the other parameters of a layer's experts: those that all ranks have, such as one adapter of
    all experts."""
    return {n: each for n, each in layer.experts.named_parameters() if not _is_spread(layer, n, each)}


def _is_spread(layer: MoELayer, name: str, parameter: nn.Parameter) -> bool:
    experts = layer.experts
    if not isinstance(experts, GroupedExperts) or is_expert_parameter(parameter):
        return True
    of_each = experts.is_per_expert(name, parameter)
    if of_each is None and layer.comm.size > 1:
        raise InvalidArgument(
            f"experts.{name} has shape {tuple(parameter.shape)}, whose first dimension is the "
            f"{experts.num_local_experts} experts of this rank, and could be a part for each of them or one "
            "for the experts of all ranks: say it, moecomm.nn.mark_adapter(module, per_expert=...) with the "
            "module that has it"
        )
    return bool(of_each)
