"""Extracts what a checkpoint can hold of an optimizer's state, and creates the state of parameters before
their first step."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moecomm.errors import InvalidArgument
from moecomm.train.model_parts import local, zero_gradient

_NUMBERS = (numbers.Number, str, type(None))
"""The types, besides tensors, that an optimizer's state may have."""
_KNOWN: dict[str, float | None] = {"eta": None, "mu": 1.0, "step_size": None, "mu_product": 1.0}
"""Keys of torch's ASGD, Rprop and NAdam whose initial values are not zero, with these values. None stands for
the learning rate."""


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


def _numbers_of(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in values.items() if isinstance(value, _NUMBERS)}


def _before_steps(name: str, rate: float | Tensor) -> float | Tensor:
    """Returns the value of the state `name` of an optimizer before its first step. rate: learning rate."""
    value = _KNOWN.get(name, 0.0)
    return rate if value is None else value


def _before_counting(key: str, of: str, seen: list[Any], rate: float | Tensor) -> Any:
    """Returns the initial value of a number that had the values `seen` after three trial steps: seen[0] if
    the number stayed, seen[0] minus one increment if it counts up. Raises InvalidArgument otherwise."""
    if key in _KNOWN:
        return float(_before_steps(key, rate))
    first, second, third = seen
    if first == second == third:
        return first
    if all(isinstance(each, numbers.Number) for each in seen) and third - second == second - first:
        return first - (second - first)
    raise InvalidArgument(
        f"the optimizer's {key} of {of} is {first!r}, {second!r}, {third!r} after steps of zero gradients: "
        "what it is before the first step cannot be told. Call sharded_state, to load as well, after a step "
        "in which all trained parameters have gradients, or requires_grad_(False) for those without"
    )


def _is_copy(value: Tensor, parameter: Tensor | None) -> bool:
    """Returns True for a state tensor with the parameter's own values, the initial state of optimizers that
    average weights; False for a single number, which may be a count."""
    if parameter is None or not value.dim() or value.shape != parameter.shape:
        return False
    value, parameter = map(local, (value, parameter))
    return value.shape == parameter.shape and torch.equal(value.to(parameter), parameter)


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer, named: dict[Any, str]) -> None:
    """Creates the initial state of trained parameters that have none: runs trial steps on them, with zero
    gradients and learning rate zero. After an error the optimizer is unchanged."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [parameter for group in groups for parameter in group["params"]]
    missing = {p: g["lr"] for g in groups for p in g["params"] if p.requires_grad and not state.get(p)}
    if not missing:
        return
    step = _plain_step(optimizer)
    known, gradients, settings = set(state), [p.grad for p in parameters], [dict(each) for each in groups]
    kept = [(v, v.clone()) for group in groups for v in group.values() if isinstance(v, Tensor)]
    added: list[dict[str, Any]] = []
    try:
        trials = [_try_step(optimizer, step, missing, parameters, settings)]
        while any(trials[0]) and len(trials) < 3:  # as many tell whether a number counts up, or stays
            trials.append(_try_step(optimizer, step, missing, parameters, settings))
        require_savable(optimizer, named)
        seen = list(zip(*trials, strict=True))  # first those of the groups, then those of the parameters
        for index, (group, setting) in enumerate(zip(groups, settings, strict=True)):
            new = {key: value for key, value in group.items() if key not in setting}
            added.append(_before(new, f"param_groups[{index}]", seen[index], setting["lr"]))
        for (parameter, rate), counts in zip(missing.items(), seen[len(groups) :], strict=True):
            values = state.get(parameter, {})
            values.update(_before(values, named[parameter], counts, rate, parameter))
    except BaseException:
        for owner in [each for each in state if each not in known or each in missing]:
            del state[owner]
        added = [{} for _ in groups]
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for value, before in kept:
            value.copy_(before)
        for group, setting, new in zip(groups, settings, added, strict=True):
            group.clear()
            group.update(setting | new)


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns the class's own `step`, without the wrappers of schedulers and hooks. Raises InvalidArgument if
    `step` needs arguments."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    _, *others = inspect.signature(step).parameters.values()
    required = [each for each in others if each.default is each.empty]
    if any(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in required):
        raise InvalidArgument(
            f"the optimizer is a {type(optimizer).__name__}, whose step needs a closure: what its state is "
            "before the first step cannot be told. Use another optimizer, AdamW for example"
        )
    return step


def _try_step(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    trained: dict[Any, Any],
    parameters: list[Tensor],
    settings: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Runs `step` with zero gradients at rate zero for `trained` alone. Returns the numbers that are now in
    each of the param_groups, without those in `settings`, and in the state of each of `trained`."""
    for parameter in parameters:
        parameter.grad = zero_gradient(parameter) if parameter in trained else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    step(optimizer)
    of_groups = [
        {key: value for key, value in _numbers_of(group).items() if key not in setting}
        for group, setting in zip(optimizer.param_groups, settings, strict=True)
    ]
    return of_groups + [_numbers_of(optimizer.state.get(parameter, {})) for parameter in trained]


def _before(
    values: dict[str, Any],
    of: str,
    seen: Sequence[dict[str, Any]],
    rate: float | Tensor,
    parameter: Tensor | None = None,
) -> dict[str, Any]:
    """Turns the state after steps with zero gradients into the initial state, and returns it. `seen`: the
    numbers in it after each of these steps. Tensors are changed in place."""
    for key, value in values.items():
        if isinstance(value, Tensor) and (key in _KNOWN or not _is_copy(value, parameter)):
            value.fill_(_before_steps(key, rate))
    counts = {key: [each.get(key) for each in seen] for key in _numbers_of(values)}
    return values | {key: _before_counting(key, of, each, rate) for key, each in counts.items()}


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
    return own.copy_(torch.tensor(value)) if isinstance(own, Tensor) else value
