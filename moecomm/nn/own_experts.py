"""Experts that the user of a layer brings: an nn.Module in the place of GroupedExperts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, known_to_all
from moecomm.nn.config import MoEConfig
from moecomm.nn.parameters import mark_expert_parameter
from moecomm.types import DispatchOutput


def adopt_experts(experts: nn.Module, config: MoEConfig) -> None:
    """Marks every parameter as one of experts, after checks. Raises InvalidArgument."""
    if not isinstance(experts, nn.Module):
        raise InvalidArgument(f"experts is {type(experts).__name__}, must be an nn.Module or None")
    if config.expert_precision is not None:
        raise InvalidArgument(
            f"expert_precision is {config.expert_precision!r}, must be None with experts of one's own, whose "
            "products it does not change"
        )
    for name in ("bias", "main_grad"):
        if getattr(config, name):
            raise InvalidArgument(f"{name} is True, must be False with experts of one's own")
    parameters = dict(experts.named_parameters(remove_duplicate=False))
    others = [name for name in experts.state_dict() if name not in parameters]
    if others:
        raise InvalidArgument(
            f"experts has the buffer {others[0]!r} in its state, which a checkpoint would take for the same "
            "on all ranks: register it with persistent=False, or make it a parameter"
        )
    for parameter in parameters.values():
        mark_expert_parameter(parameter)


def _call(comm: Communicator, experts: nn.Module, rows_PH: Tensor, offsets_L: Tensor) -> Any:
    """Returns what the module returns. An exception that it raises is told to the other ranks."""
    if torch.compiler.is_compiling():  # there is no way to go on behind a graph break within a try
        return experts(rows_PH, offsets_L)
    try:
        return experts(rows_PH, offsets_L)
    except Exception as error:
        if known_to_all(error):
            raise
        comm.refuse(error)


def combine_own_experts(
    comm: Communicator, experts: nn.Module, out: DispatchOutput, has_tail: bool
) -> Tensor:
    """Returns (T, H): the sum over a token's experts of weight * the module's row. `has_tail`: rows past the
    last are unspecified, because there is a capacity."""
    rows_PH, real_P1 = out.tokens, None
    if has_tail:
        # NaN times zero is not zero: where() keeps what the tail holds from the module, and from gradients.
        real_P1 = (torch.arange(rows_PH.shape[0], device=rows_PH.device) < out.offsets[-1]).unsqueeze(1)
        rows_PH = rows_PH.where(real_P1, 0.0)
    with torch.autocast(rows_PH.device.type, enabled=False):
        expert_rows_PH = _call(comm, experts, rows_PH, out.offsets)
    if not isinstance(expert_rows_PH, Tensor):
        kind = type(expert_rows_PH).__name__
        comm.refuse(
            InvalidArgument(f"experts returned {kind}, must return the (P, H) tensor of the experts' rows")
        )
    # Rows of a wrong shape or dtype are refused by combine, on all ranks. With no rows at all the module's
    # result may not depend on its input, and this rank would be missing in the backward of the others.
    if expert_rows_PH.shape == rows_PH.shape and expert_rows_PH.dtype == rows_PH.dtype:
        if real_P1 is not None:
            expert_rows_PH = expert_rows_PH.where(real_P1, rows_PH)
        elif not rows_PH.shape[0]:
            expert_rows_PH = torch.cat((expert_rows_PH, rows_PH))
    return comm.combine(expert_rows_PH, out.handle, weights=out.weights)
