"""Operations between the graphs of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

from moecomm.errors import Unsupported
from moecomm.types import PLAN_VIEWS, DispatchOutput

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@_disable_dynamo
def for_trace(out: DispatchOutput) -> DispatchOutput:
    """Prepares an output for the graph that is traced next, which must not depend on the routing: otherwise
    torch.utils.checkpoint would find other saved tensors in its recomputation than in the forward. So this
    makes the views, whose numbers a trace would turn into guards, and marks row counts as dynamic."""
    for name in PLAN_VIEWS:
        getattr(out, name)
    for rows in (out.tokens, out.weights, out.topk_idx, out.expert_rows, out.expert_weights, out.scales):
        if rows is not None:
            torch._dynamo.maybe_mark_dynamic(rows, 0)
    return out


def break_graph(reason: str) -> None:
    """Ends a graph of torch.compile here; with fullgraph=True torch raises an error with this reason. In
    torch.export, whose graph cannot end, it raises Unsupported."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        raise Unsupported(reason)
    torch._dynamo.graph_break(msg=f"moecomm: {reason}")


def outside_graph(operation: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps `operation`: under torch.compile a call breaks the graph and runs outside of it."""
    outside = _disable_dynamo(operation)

    @functools.wraps(operation)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return outside(*arguments, **options)
        return operation(*arguments, **options)

    return run
