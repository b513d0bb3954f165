"""Experts that the user of a layer brings: an nn.Module in the place of GroupedExperts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, known_to_all
from moecomm.nn.config import MoEConfig
from moecomm.nn.parameters import mark_expert_parameter
from moecomm.types import DispatchOutput

_HELD = "moecomm_experts"
"""The record of experts: its name in the metadata of a state_dict, and as an attribute of a module."""


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
    if others and others[0].endswith("_extra_state"):
        raise InvalidArgument(
            f"experts has {others[0]!r} in its state, a record that moecomm does not save (a GroupedExperts "
            "has one): around the layer's own experts put hooks, or torch.nn.utils.parametrize for their "
            "weights, with MoELayer(experts=None); a module of one's own has parameters alone"
        )
    if others:
        raise InvalidArgument(
            f"experts has the buffer {others[0]!r} in its state, which a checkpoint would take for the same "
            "on all ranks: register it with persistent=False, or make it a parameter"
        )
    for parameter in parameters.values():
        if not isinstance(parameter, DTensor):  # of which `refuse_mixed_shards` has to see the mesh
            mark_expert_parameter(parameter)


class _Held:
    """The record of which experts a module holds: first expert, L, E. It is written into the metadata of
    its state_dict, which torch.save keeps, and compared when a state is loaded."""

    def __init__(self, held: Sequence[int]) -> None:
        self.held = list(held)

    def __str__(self) -> str:
        return self._says(self.held)

    @staticmethod
    def _says(held: Sequence[int]) -> str:
        first, count, of = held
        return f"experts {first}..{first + count - 1} of {of}"

    def __call__(
        self, experts: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        """Writes the record, as a hook of state_dict."""
        metadata[_HELD] = list(self.held)

    def compare(
        self,
        experts: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Compares the record with that of a state, as a hook of load_state_dict before a weight changes.
        Raises InvalidArgument for a state of other experts."""
        found = metadata.get(_HELD)
        if found is not None and list(found) != self.held:
            raise InvalidArgument(
                f"the state holds {self._says(found)}, this module {self}: each rank's state_dict is of its "
                "own experts. Save and load with torch.distributed.checkpoint and "
                "moecomm.nn.sharded_state, which has all of them"
            )
        names = dict(experts.named_parameters(remove_duplicate=False))
        has_some = any(f"{prefix}{name}" in state for name in names)
        if found is None and has_some and self.held[1] < self.held[2]:
            warnings.warn(
                f"the state has no record in its metadata of which experts {prefix.rstrip('.') or 'it'} "
                "holds, as those of earlier versions, and dicts made anew of a state_dict: it is taken to "
                f"hold {self}",
                stacklevel=2,
            )


def keep_record(experts: nn.Module, held: Sequence[int]) -> None:
    """Makes states of the module say which experts they hold, (first expert, L, E), and has it refuse a state
    of others."""
    record = getattr(experts, _HELD, None)
    if isinstance(record, _Held):  # of another layer
        record.held = list(held)
        return
    record = _Held(held)
    setattr(experts, _HELD, record)
    experts.register_state_dict_post_hook(record)
    experts.register_load_state_dict_pre_hook(record.compare)


def record_of(experts: nn.Module) -> str | None:
    """Says which experts a module holds of which `keep_record` was called; None for others."""
    record = getattr(experts, _HELD, None)
    return None if record is None else str(record)


def call_or_tell(comm: Communicator, part: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns what a module, or another part of a layer, returns. An exception of this rank alone that it or
    its hooks raise is told to the other ranks."""
    if torch.compiler.is_compiling():  # there is no way to go on behind a graph break within a try
        return part(*arguments, **options)
    try:
        return part(*arguments, **options)
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
        expert_rows_PH = call_or_tell(comm, experts, rows_PH, out.offsets)
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
