"""The mark of parameters that belong to this rank's experts."""

from __future__ import annotations

from torch import Tensor, nn

_MARK = "moecomm_expert_parallel"


def mark_expert_parameter(parameter: nn.Parameter) -> None:
    """Marks a parameter for `is_expert_parameter`; call it for your own experts, as GroupedExperts does for
    its parameters."""
    setattr(parameter, _MARK, True)


def unmark_expert_parameter(parameter: nn.Parameter) -> None:
    """Removes the mark of `mark_expert_parameter`."""
    setattr(parameter, _MARK, False)


def is_expert_parameter(parameter: Tensor) -> bool:
    """Returns True for a parameter of this rank's experts, False for one that all ranks share.

    It works for the parameters that `parameters()` of a model returns, which marks those of parametrizations.
    It does not work for parameters with which FSDP replaces others."""
    return getattr(parameter, _MARK, False)
