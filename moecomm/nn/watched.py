"""Whether somebody watches a module of a layer by hooks, or has changed its forward.

Rows travel within the calls of a layer's shared experts and experts (MoELayer._run), which are then of
other tensors than their own: tokens at home, and the sum of all experts. Such calls are right for hooks of
FSDP2 and for those that make a weight ready (torch.nn.utils); any other one expects what the module itself
computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_WEIGHTS = ("moecomm.", "torch.distributed.", "torch.nn.utils.")
"""The packages of hooks that have to do with weights alone: they gather them, average gradients, or make a
weight ready."""


def watcher(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Returns what expects of a module's calls what the module itself computes: a hook of it, or of the
    `kind` that it wraps, or a forward other than that of `kind`. None: nothing does. Hooks that have to do
    with weights alone are not looked at."""
    for each in module.modules():
        wrapped = isinstance(each, kind)
        if not (wrapped or each is module):
            continue
        for hook in _hooks(each):
            if not _package(hook).startswith(_OF_WEIGHTS):
                return f"a hook ({_name(hook)})"
        if wrapped and getattr(each.forward, "__func__", None) is not kind.forward:
            return f"another forward ({_name(each.forward)})"
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    for kind in _KINDS:
        yield from getattr(module, kind).values()


def _package(function: Any) -> str:
    """Returns the module in which a function, or the class of a callable, was defined."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
