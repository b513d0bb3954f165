"""Computes the experts' weight gradients of several backwards together, after these backwards.

If a microbatch brings an expert few rows, the memory traffic for the expert's gradient takes longer than the
product: every microbatch reads and writes all of `grad`. So rows of several microbatches are joined, and the
gradient is one product over all these rows, added once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecomm.autograd.in_place import add_gradient, grad_in_place, has_hooks
from moecomm.errors import InvalidArgument
from moecomm.kernels.joined import join_groups, join_rows
from moecomm.kernels.products import Products

MOST_JOINED_ROWS = 384
"""The most rows per expert and microbatch, on average, for which gradients are joined. With more rows the
product hides the memory traffic, and copying rows together costs what it saves (docs/performance.md)."""


@dataclass
class Operands:
    """The operands of a weight's gradient, which is rows^T grad for each expert: rows (P, A) and grad (P, B).
    `weight` is the parameter, or a cast of the parameter."""

    weight: Tensor
    rows: Tensor
    grad: Tensor


@dataclass
class Pending:
    """The gradients of w_in and w_out that one backward has put off, as operands; None if not needed."""

    products: Products
    groups: Tensor
    count: int
    """P: the number of rows of this backward."""
    of_in: Operands | None
    of_out: Operands | None


def run_pending(pending: list[Pending], w_in: nn.Parameter, w_out: nn.Parameter) -> None:
    """Computes all pending gradients, oldest first, adds them to the parameters' `grad`, or `main_grad`,
    and empties the list. Raises InvalidArgument where parameters have hooks, which would not run, or are
    sharded."""
    for parameter in (w_in, w_out) if pending else ():
        if has_hooks(parameter) or isinstance(parameter, DTensor):
            raise InvalidArgument(
                "defer_weights is True for experts under DistributedDataParallel (prepare_ddp) or "
                "fully_shard, or with hooks, which would not see the gradients: set it to False"
            )
    experts = w_in.shape[0]
    with torch.no_grad(), torch.autocast(w_in.device.type, enabled=False):
        while pending:
            together = _alike(pending, experts)
            del pending[: len(together)]
            products, groups, places = together[0].products, together[0].groups, None
            if len(together) > 1:
                ends = [each.groups[-experts:] for each in together]
                joined = join_groups(ends, [each.count for each in together])
                groups, places = products.groups(joined.ends_L), joined.places
            for name in ("of_out", "of_in"):
                operands = _take(together, name)
                if operands:
                    _add(products, groups, _join(operands, places))


def _take(together: Sequence[Pending], name: str) -> list[Operands]:
    """Takes the operands of one weight (`name`: of_in, of_out) out of pending gradients, so that their memory
    is freed once they are read. The list is empty if the weight needs no gradient."""
    found = [getattr(each, name) for each in together]
    for each in together:
        setattr(each, name, None)
    return [each for each in found if each is not None]


def _join(operands: list[Operands], places: Sequence[Tensor] | None) -> Operands:
    """Joins the operands of several backwards and releases the originals. `places`: for each backward the
    positions of its rows in the result; None for a single backward."""
    if places is None:
        return operands.pop()
    weight = operands[0].weight
    rows, grads = [each.rows for each in operands], [each.grad for each in operands]
    operands.clear()
    joined_rows = join_rows(rows, places)
    rows.clear()
    return Operands(weight, joined_rows, join_rows(grads, places))


def _alike(pending: Sequence[Pending], experts: int) -> list[Pending]:
    """Returns the leading gradients that can be computed together; the first alone if rows are many."""
    first = pending[0]
    found = list(itertools.takewhile(lambda each: _kind(each) == _kind(first), pending))
    rows = sum(each.count for each in found)
    return found if rows <= MOST_JOINED_ROWS * experts * len(found) else [first]


def _kind(pending: Pending) -> list[object]:
    """Returns the properties that pending gradients must share to be computed together: their products, and
    for each weight whether it is its own leaf (not a cast), and the leaf's address, which it keeps alive."""
    kind: list[object] = [pending.products]
    for each in (pending.of_in, pending.of_out):
        weight = None if each is None else each.weight
        leaf = None if weight is None else leaf_of(weight)
        kind.append(None if leaf is None else (leaf is weight, leaf.data_ptr()))
    return kind


def leaf_of(weight: Tensor) -> Tensor | None:
    """Returns a weight, or the leaf of which it is a cast; None for a weight computed in another way."""
    if weight.is_leaf:
        return weight
    node: Any = weight.grad_fn
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _add(products: Products, groups: Tensor, of: Operands) -> None:
    into = grad_in_place(of.weight) if products.adds and of.weight.is_leaf else None
    add_gradient(of.weight, products.grouped_mm_wgrad(of.rows, of.grad, groups, into=into))
