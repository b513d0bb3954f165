"""Extracts what a checkpoint can hold of an optimizer's state, and creates the state of parameters before
their first step."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from moecomm.errors import InvalidArgument
from moecomm.train.model_parts import local, zero_gradient

_NUMBERS = (numbers.Number, str, type(None))
"""The types, besides tensors, that an optimizer's state may have."""


def require_savable(optimizer: torch.optim.Optimizer, named: dict[Any, str]) -> None:
    """Raises InvalidArgument for state that a checkpoint of the optimizer would lack: anything but tensors
    and numbers, state that belongs to no parameter, and parameters without a name in `named`."""
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise InvalidArgument(f"optimizer is {type(optimizer).__name__}, must be an optimizer of torch")
    of_groups = (each for group in optimizer.param_groups for each in group["params"])
    outside = [tuple(each.shape) for each in of_groups if each not in named]
    if outside:
        raise InvalidArgument(
            f"the optimizer has {len(outside)} parameters that are not in the model, one of shape "
            f"{outside[0]}: a checkpoint would leave their state out. Pass a model that has all of them, an "
            "nn.ModuleList of several for example"
        )
    for owner, values in optimizer.state.items():
        if not isinstance(owner, Tensor):
            raise InvalidArgument(
                f"the optimizer's state has {owner!r}, which is of no parameter, and a checkpoint would "
                "leave it out: use an optimizer that keeps its state by parameter, or in its param_groups"
            )
        for key, value in values.items() if owner in named else ():
            if not isinstance(value, (Tensor, *_NUMBERS)):
                raise InvalidArgument(
                    f"the optimizer's {key} of {named[owner]} is a {type(value).__name__}, must be a tensor "
                    "or a number: a checkpoint would leave it out. Use another optimizer"
                )


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer, named: dict[Any, str]) -> None:
    """Creates the initial state of trained parameters that have none, by a trial step with zero gradients, a
    rate of zero and no weight decay. All that this step may leave is zeros and a count of 1 in "step", which
    becomes 0. Raises InvalidArgument for other state. After an error the optimizer is unchanged."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [parameter for group in groups for parameter in group["params"]]
    missing = [each for each in parameters if each.requires_grad and not state.get(each)]
    if not missing:
        return
    known, gradients, settings = set(state), [p.grad for p in parameters], [dict(each) for each in groups]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in missing:
            parameter.grad = zero_gradient(parameter)
        for group in groups:  # a step may count in place in a tensor of its group
            group.update({key: value.clone() for key, value in group.items() if isinstance(value, Tensor)})
            group.update({key: group[key] * 0 for key in ("lr", "weight_decay") if key in group})
        _plain_step(optimizer)
        require_savable(optimizer, named)
        for parameter in missing:
            _reset(state.get(parameter, {}), named[parameter])
    except BaseException:
        for owner in [each for each in state if each not in known or each in missing]:
            del state[owner]
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, setting in zip(groups, settings, strict=True):
            group.clear()
            group.update(setting)


def _plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Runs the class's own `step`, without the wrappers of schedulers and hooks."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    try:
        step(optimizer)
    except Exception as error:
        raise InvalidArgument(
            f"the optimizer is a {type(optimizer).__name__}, whose step with zero gradients raises "
            f"{type(error).__name__} ({error}): its state before the first step is unknown. {_LATER}"
        ) from error


def _reset(values: dict[str, Any], of: str) -> None:
    """Turns the state of a parameter after a trial step into that before it."""
    step = values.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step.zero_()
    elif isinstance(step, numbers.Number):
        values["step"] = 0
    for key, value in values.items():
        if bool(local(value).any() if isinstance(value, Tensor) else value):
            raise InvalidArgument(
                f"the optimizer's {key} of {of} is not zero after a step of zero gradients: what it is "
                f"before the first step is unknown. {_LATER}"
            )


_LATER = (
    "Call sharded_state, to load as well, after a step in which all trained parameters have gradients, or "
    "requires_grad_(False) for those without"
)


def _numbers_of(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in values.items() if isinstance(value, _NUMBERS)}


class Numbers:
    """The numbers in an optimizer's state, by parameter; a Stateful like `ParamGroups`."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[Any, str]) -> None:
        self._state, self._named = optimizer.state, named

    def state_dict(self) -> dict[str, Any]:
        found = {name: _numbers_of(self._state.get(p, {})) for p, name in self._named.items()}
        return {name: each for name, each in found.items() if each}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for parameter, name in self._named.items():
            own = self._state.get(parameter, {})
            own.update({key: state[name][str(key)] for key in _numbers_of(own)})


class ParamGroups:
    """The settings of an optimizer's groups by the names of their parameters, as a Stateful. Parameters may
    be grouped otherwise than when saved, if all of a group were saved with the same settings."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[Any, str]) -> None:
        self._groups, self._named = optimizer.param_groups, named

    def state_dict(self) -> dict[str, Any]:
        groups = [(group, tuple(_settings(group).items())) for group in self._groups]
        return {name: settings for group, settings in groups for name in self._names(group)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = [self._found(index, group, state) for index, group in enumerate(self._groups)]
        for group, settings in zip(self._groups, found, strict=True):
            group.update({key: _in_place(group.get(key), value) for key, value in settings.items()})

    def _names(self, group: dict[str, Any]) -> list[str]:
        return [self._named[parameter] for parameter in group["params"]]

    def _found(self, index: int, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Returns the saved settings of a group's parameters. Raises InvalidArgument if they were
        saved with different settings for these parameters, or without a setting that the group has."""
        names = self._names(group)
        settings = {name: _settings(dict(state[name])) for name in names}  # older states have _MEMBERS, too
        first = settings[names[0]] if names else {}
        for name, other in settings.items():
            if other != first:
                key = next(key for key in first | other if (key, first.get(key)) not in other.items())
                raise InvalidArgument(
                    f"param_groups[{index}] of the optimizer has {names[0]} and {name}, which the checkpoint "
                    f"has with different settings ({key} {first.get(key)!r} and {other.get(key)!r}): put them"
                    " into groups of their own, as when it was saved, or leave 'param_groups' out of what is "
                    "loaded"
                )
        missing = [key for key in _settings(group) if names and key not in first]
        if missing:
            raise InvalidArgument(
                f"param_groups[{index}] of the optimizer has {missing[0]!r}, which the checkpoint lacks for "
                f"{names[0]}: load it with the optimizer that it was saved with, or leave 'param_groups' out "
                "of what is loaded"
            )
        return first


_MEMBERS = ("params", "param_names")
"""The keys of a group that say which parameters it has; torch adds the second to optimizers that are given
`model.named_parameters()`."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group, with numbers in place of tensors, which have a device."""
    return {key: _plain(value) for key, value in group.items() if key not in _MEMBERS}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else value


def _in_place(own: Any, value: Any) -> Any:
    """Returns the setting after a load. If the group's own setting is a tensor, fills it in place, since an
    optimizer's step in a CUDA graph reads it there."""
    if isinstance(own, tuple) and isinstance(value, tuple) and len(own) == len(value):
        return tuple(map(_in_place, own, value))
    return own.copy_(own.new_tensor(value)) if isinstance(own, Tensor) else value
