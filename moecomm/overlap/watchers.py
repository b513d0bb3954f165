"""Finds hooks and changed forwards, which expect that a module is called with its own inputs and results."""

from __future__ import annotations

from typing import Any

from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_WEIGHTS = ("moecomm.", "torch.distributed.", "torch.nn.utils.")
"""The packages of hooks that concern weights alone: they gather or prepare weights, or average gradients."""


def watcher(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Returns what depends on the module's own results: a hook of it, or of the `kind` that it wraps, or a
    forward other than that of `kind`. None: nothing does. Hooks that concern weights alone do not count."""
    plain = type(module) is kind and not (module._modules or "forward" in module.__dict__)
    if plain and not any(getattr(module, hooks) for hooks in _KINDS):
        return None  # found at once, since each forward of a layer asks
    for each in module.modules():
        wrapped = isinstance(each, kind)
        if not (wrapped or each is module):
            continue
        for hook in [hook for kind_of in _KINDS for hook in getattr(each, kind_of).values()]:
            if not _package(hook).startswith(_OF_WEIGHTS):
                return f"a hook ({_name(hook)})"
        if wrapped and getattr(each.forward, "__func__", None) is not kind.forward:
            return f"another forward ({_name(each.forward)})"
    return None


def _package(function: Any) -> str:
    """Returns the module that defines a function, or the class of a callable."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
