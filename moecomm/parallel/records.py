"""Records in a state_dict which experts a rank holds, and refuses to load states of other experts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from moecomm.errors import InvalidArgument
from moecomm.kernels.activation import INTERLEAVED

_HELD = "moecomm_experts"
"""The key of the record in a state_dict's metadata, and the module attribute with the hooks (_Held)."""


def is_grouped(experts: nn.Module) -> bool:
    """Returns whether a module is a GroupedExperts, whose package (moecomm.nn) imports this one."""
    return hasattr(type(experts), "is_per_expert")


def says(record: Sequence[int]) -> str:
    """Returns a text for a record [first expert, L, E, ...]; see GroupedExperts.get_extra_state."""
    first, count, of, *more = record
    share = f", part {more[1]} of {more[2]} of each" if more and more[2] > 1 else ""
    return f"experts {first}..{first + count - 1} of {of}{share}"


def _of_others(held: Sequence[int], own: Sequence[int]) -> InvalidArgument:
    """Returns the error for loading a state with the record `held` into a module of other experts."""
    return InvalidArgument(
        f"the state holds {says(held)}, this module {says(own)}: each rank's state_dict is of its own "
        "experts. Save and load with torch.distributed.checkpoint and moecomm.nn.sharded_state, which has "
        "all of them"
    )


def accept_interleaved(module: Any, state: dict[str, Any], prefix: str) -> bool:
    """Renames w_in.interleaved, from a `sharded_state` checkpoint, to w_in. Returns whether the state had it.
    Raises InvalidArgument if the module's gates are not interleaved."""
    name, own = f"{prefix}w_in.interleaved", f"{prefix}w_in"
    if name not in state:
        return False
    if module.config.activation not in INTERLEAVED:
        raise InvalidArgument(
            f"the state has {name}, whose gates and up values are interleaved, and this module's activation "
            f"is {module.config.activation!r}: build it with that of the saved model, or reorder the columns"
        )
    state[own] = state.pop(name)
    return True


def require_same_experts(experts: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Raises InvalidArgument, before a weight changes, if the state's record is not that of `experts`, a
    GroupedExperts. A state without a record gets the record of `experts`, with a warning if the state has
    weights that may be of other experts or in another order."""
    record = experts.get_extra_state()
    own, name = record.tolist(), f"{prefix}_extra_state"
    known_order = accept_interleaved(experts, state_dict, prefix) or not own[3]
    has_some = any(f"{prefix}{each}" in state_dict for each, _ in experts.named_parameters())
    if name not in state_dict and has_some and not (experts.has_all and known_order):
        order = "" if known_order else ", with interleaved gates and up values"
        warnings.warn(
            f"the state has no record {name} of which experts it holds, as those of earlier versions: it "
            f"is taken to hold {says(own)}{order}",
            stacklevel=3,
        )
    held = state_dict.setdefault(name, record).tolist()
    held += [0, 0, 1][len(held) - 3 :] if len(held) < len(own) else []
    if held[3] != own[3]:
        raise InvalidArgument(
            f"the state's gates and up values are {'' if held[3] else 'not '}interleaved, and "
            f"this module's activation is {experts.config.activation!r}: build it with that of the saved "
            "model, or reorder the columns of w_in"
        )
    if held != own:
        raise _of_others(held, own)


class _Held:
    """Hooks that write and compare a module's record (first expert, L, E) in the metadata of state_dicts."""

    def __init__(self, held: Sequence[int]) -> None:
        self.held = list(held)

    def __call__(
        self, experts: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        """Writes the record into `metadata`, as a hook of state_dict."""
        metadata[_HELD] = list(self.held)

    def compare(
        self, experts: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """As a hook of load_state_dict, refuses a state with a record of other experts, before weights
        change. Warns of weights without a record if the module does not hold all experts."""
        found = metadata.get(_HELD)
        if found is not None and list(found) != self.held:
            raise _of_others(found, self.held)
        names = dict(experts.named_parameters(remove_duplicate=False))
        has_some = any(f"{prefix}{name}" in state for name in names)
        if found is None and has_some and self.held[1] < self.held[2]:
            warnings.warn(
                f"the state has no record in its metadata of which experts {prefix.rstrip('.') or 'it'} "
                "holds, as those of earlier versions, and dicts made anew of a state_dict: it is taken to "
                f"hold {says(self.held)}",
                stacklevel=2,
            )


def keep_record(experts: nn.Module, held: Sequence[int]) -> None:
    """Makes a module's state_dict record its experts, and its load_state_dict refuse other experts."""
    record = getattr(experts, _HELD, None)
    if isinstance(record, _Held):  # another layer has the module too
        record.held = list(held)
        return
    record = _Held(held)
    setattr(experts, _HELD, record)
    experts.register_state_dict_post_hook(record)
    experts.register_load_state_dict_pre_hook(record.compare)


def grouped_in(experts: nn.Module) -> tuple[Any, str]:
    """Returns the GroupedExperts that `experts` is or wraps, and the prefix of its parameters' names in
    `experts`; None and "" for custom experts."""
    if is_grouped(experts):
        return experts, ""
    if record_of(experts) is not None:
        return None, ""
    found = ((each, f"{path}.") for path, each in experts.named_modules() if is_grouped(each))
    return next(found, (None, ""))


def record_of(experts: nn.Module) -> str | None:
    """Returns a text for the experts of a module that `keep_record` has set up; None for other modules."""
    record = getattr(experts, _HELD, None)
    return None if record is None else says(record.held)
