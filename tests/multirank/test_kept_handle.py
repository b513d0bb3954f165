"""Calls along a kept handle: rows again, and a backward by hand, against autograd and against a dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from tests import cases
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _compare(rank: int, world_size: int, some: list[Case], async_op: bool) -> list[list[str]]:
    """Lists, for each case, where calls by hand differ in bits from autograd and a new dispatch."""
    wrong = []
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    with moecomm.Communicator(**some[0].communicator) as comm:

        def wait(result: Any) -> Any:
            return result.wait() if async_op else result

        for case in some:
            x_TH = cases.tensor(case.x(rank), case.torch_dtype).requires_grad_()
            weights_TK = cases.tensor(case.topk_weights(rank))
            if weights_TK is not None:
                weights_TK.requires_grad_()
            out = comm.dispatch(
                x_TH,
                torch.from_numpy(case.ids(rank)),
                weights_TK,
                layout=case.layout,
                alignment=case.alignment,
                capacity=case.capacity,
            )
            with contextlib.suppress(moecomm.CapacityExceeded):
                comm.check()  # else the next dispatch would raise it
            grad_rows_PH = cases.tensor(case.rows(rank, len(out.tokens)), case.torch_dtype)
            loss = (out.tokens * grad_rows_PH).sum()
            grad_weights = None
            if out.weights is not None:
                grad_weights = torch.rand(out.weights.shape, dtype=out.weights.dtype)
                loss = loss + (out.weights * grad_weights).sum()
            loss.backward()
            by_hand = wait(
                comm.dispatch_backward(grad_rows_PH, out.handle, grad_weights=grad_weights, async_op=async_op)
            )
            other_TH = cases.tensor(case.grad_y(rank), case.torch_dtype).requires_grad_()
            again_PH = wait(comm.redispatch(other_TH, out.handle, async_op=async_op))
            again_PH.backward(grad_rows_PH)
            real = out.offsets[-1]
            end = int(real) if len(out.tokens) else 0
            new = comm.dispatch(
                other_TH.detach(),
                torch.from_numpy(case.ids(rank)),
                layout=case.layout,
                alignment=case.alignment,
                capacity=case.capacity,
            )
            with contextlib.suppress(moecomm.CapacityExceeded):
                comm.check()
            plain_TH, none = wait(comm.dispatch_backward(grad_rows_PH, out.handle, async_op=async_op))
            checks = {
                "gradient of x": _same(by_hand[0], x_TH.grad),
                "gradient of weights": _same(by_hand[1], None if weights_TK is None else weights_TK.grad),
                "gradient without weights": _same(plain_TH, x_TH.grad) and none is None,
                "rows again": _same(again_PH[:end], new.tokens[:end]),
                "gradient of rows again": _same(other_TH.grad, x_TH.grad),
                "no gradient by hand": not by_hand[0].requires_grad,
            }
            wrong.append([name for name, good in checks.items() if not good])
    return wrong


@pytest.mark.parametrize(
    ("dtype", "size", "async_op"),
    [("bfloat16", 1, False), ("float32", 2, True), ("bfloat16", 3, True), ("float32", 3, False)],
)
def test_against_autograd(pool: Pools, size: int, dtype: str, async_op: bool, seed: int) -> None:
    some = cases.layouts_alignments_and_capacities(size, dtype, seed)
    for wrong in pool(size)(_compare, some, async_op):
        assert wrong == [[]] * len(some)


@needs_fabric
def test_between_nodes(pool: Pools, seed: int) -> None:
    some = cases.layouts_alignments_and_capacities(4, "float32", seed)
    some = [replace(case, ranks_per_node=2) for case in some]
    for wrong in pool(4)(_compare, some, False):
        assert wrong == [[]] * len(some)


@on_ranks(2)
def test_no_new_plan(rank: int, world_size: int, seed: int) -> None:
    case = Case(tokens=(5, 6), num_experts=4, hidden=8, top_k=2, seed=seed)
    with moecomm.Communicator(**case.communicator) as comm:
        out = cases.dispatch(comm, case, rank)
        for _ in range(3):
            comm.redispatch(torch.from_numpy(case.grad_y(rank)), out.handle)
        stats = comm.stats()
    assert stats["plans_made"] == 1 and stats["dispatch_calls"] == 4


def _mistakes(rank: int, world_size: int) -> list[str]:
    """Rank 0 makes each of them, the other does it right; all raise, and the communicator goes on."""
    case = Case(tokens=(5, 6), num_experts=4, hidden=8, top_k=2)
    texts = []
    with (
        moecomm.Communicator(**case.communicator) as comm,
        moecomm.Communicator(**case.communicator) as other,
    ):
        out, foreign = cases.dispatch(comm, case, rank), cases.dispatch(other, case, rank)
        x_TH, rows_PH = torch.zeros(out.handle.num_tokens, 8), torch.zeros_like(out.tokens)
        weights_P = torch.zeros(len(rows_PH))
        calls: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
            (comm.redispatch, {"x_TH": x_TH, "handle": out.handle}, {"x_TH": torch.zeros(4, 8)}),
            (comm.redispatch, {"x_TH": x_TH, "handle": out.handle}, {"x_TH": x_TH.double()}),
            (comm.redispatch, {"x_TH": x_TH, "handle": out.handle}, {"handle": foreign.handle}),
            (comm.dispatch_backward, {"grad_rows_PH": rows_PH, "handle": out.handle}, {"handle": "no"}),
            (
                comm.dispatch_backward,
                {"grad_rows_PH": rows_PH, "handle": out.handle},
                {"grad_rows_PH": rows_PH[:-1]},
            ),
            (
                comm.dispatch_backward,
                {"grad_rows_PH": rows_PH, "handle": out.handle, "grad_weights": weights_P},
                {"grad_weights": weights_P[:-1]},
            ),
        ]
        for call, right, wrong in calls:
            try:
                call(**{**right, **(wrong if rank == 0 else {})})
                texts.append("")
            except moecomm.InvalidArgument as error:
                texts.append(str(error))
            call(**right)
    return texts


def test_mistakes_are_told_to_all(pool: Pools) -> None:
    first, second = pool(2)(_mistakes)
    expected = [
        "x has shape (4, 8), expected (5, hidden = 8)",
        "x is torch.float64, expected the communicator's dtype torch.float32",
        "handle belongs to another communicator",
        "handle is str, expected the handle of a dispatch",
        "grad_rows has shape",
        "grad_weights has shape",
    ]
    for text, here, there in zip(expected, first, second, strict=True):
        assert here.startswith(text) and there.startswith(f"rank 0: {text}")
