"""The mark of parameters that are of this rank's experts."""

from __future__ import annotations

from torch import Tensor, nn

_MARK = "moecomm_expert_parallel"


def mark_expert_parameter(parameter: nn.Parameter) -> None:
    """Marks a parameter for `is_expert_parameter`; use it for your own experts, as GroupedExperts does for
    its parameters."""
    setattr(parameter, _MARK, True)


def unmark_expert_parameter(parameter: nn.Parameter) -> None:
    """Takes the mark of `mark_expert_parameter` away."""
    setattr(parameter, _MARK, False)


def is_expert_parameter(parameter: Tensor) -> bool:
    """Returns True for a parameter that is of this rank's experts alone, False for one that all ranks share.

    It knows what `parameters()` of a model returns; one that a parametrization adds is marked then. It does
    not know parameters that FSDP puts in the place of others."""
    return getattr(parameter, _MARK, False)
