"""Calls along a kept handle: rows again, and a backward by hand, against autograd and against a dispatch."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import moecomm
from tests import cases
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _check(rank: int, some: list[Case]) -> None:
    """Calls by hand have the bits of autograd and of a new dispatch."""
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    with moecomm.Communicator(**some[0].communicator) as comm:

        def dispatch(case: Case, x_TH: torch.Tensor, weights_TK: torch.Tensor | None = None) -> Any:
            shape = {"layout": case.layout, "alignment": case.alignment, "capacity": case.capacity}
            out = comm.dispatch(x_TH, torch.from_numpy(case.ids(rank)), weights_TK, **shape)
            with contextlib.suppress(moecomm.CapacityExceeded):
                comm.check()  # else the next dispatch would raise it
            return out

        for case in some:
            x_TH = cases.tensor(case.x(rank), case.torch_dtype).requires_grad_()
            weights_TK = cases.tensor(case.topk_weights(rank))
            if weights_TK is not None:
                weights_TK.requires_grad_()
            out = dispatch(case, x_TH, weights_TK)
            grad_rows_PH = cases.tensor(case.rows(rank, len(out.tokens)), case.torch_dtype)
            loss = (out.tokens * grad_rows_PH).sum()
            grad_weights = None
            if out.weights is not None:
                grad_weights = torch.rand(out.weights.shape, dtype=out.weights.dtype)
                loss = loss + (out.weights * grad_weights).sum()
            loss.backward()
            by_hand = comm.dispatch_backward(grad_rows_PH, out.handle, grad_weights=grad_weights)
            other_TH = cases.tensor(case.grad_y(rank), case.torch_dtype).requires_grad_()
            again_PH = comm.redispatch(other_TH, out.handle)
            again_PH.backward(grad_rows_PH)
            real = out.offsets[-1]
            end = int(real) if len(out.tokens) else 0
            new = dispatch(case, other_TH.detach())
            plain_TH, none = comm.dispatch_backward(grad_rows_PH, out.handle)
            checks = {
                "gradient of x": _same(by_hand[0], x_TH.grad),
                "gradient of weights": _same(by_hand[1], None if weights_TK is None else weights_TK.grad),
                "gradient without weights": _same(plain_TH, x_TH.grad) and none is None,
                "rows again": _same(again_PH[:end], new.tokens[:end]),
                "gradient of rows again": _same(other_TH.grad, x_TH.grad),
                "no gradient by hand": not by_hand[0].requires_grad,
            }
            assert all(checks.values()), (case, checks)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1), ("float32", 2), ("bfloat16", 3)])
@on_ranks("size")
def test_against_autograd(rank: int, world_size: int, dtype: str, seed: int) -> None:
    _check(rank, cases.layouts_alignments_and_capacities(world_size, dtype, seed))


@needs_fabric
@on_ranks(4)
def test_between_nodes(rank: int, world_size: int, seed: int) -> None:
    some = cases.layouts_alignments_and_capacities(4, "float32", seed)
    _check(rank, [replace(case, ranks_per_node=2) for case in some])


@on_ranks(2)
def test_no_new_plan(rank: int, world_size: int, seed: int) -> None:
    case = Case(tokens=(5, 6), num_experts=4, hidden=8, top_k=2, seed=seed)
    with moecomm.Communicator(**case.communicator) as comm:
        out = cases.dispatch(comm, case, rank)
        for _ in range(3):
            comm.redispatch(torch.from_numpy(case.grad_y(rank)), out.handle)
        stats = comm.stats()
    assert stats["plans_made"] == 1 and stats["dispatch_calls"] == 4


@on_ranks(2)
def test_mistakes_are_told_to_all(rank: int, world_size: int) -> None:
    """Rank 0 makes each of them, the other does it right; all raise, and the communicator goes on."""
    case = Case(tokens=(5, 6), num_experts=4, hidden=8, top_k=2)
    with (
        moecomm.Communicator(**case.communicator) as comm,
        moecomm.Communicator(**case.communicator) as other,
    ):
        out, foreign = cases.dispatch(comm, case, rank), cases.dispatch(other, case, rank)
        x_TH, rows_PH = torch.zeros(out.handle.num_tokens, 8), torch.zeros_like(out.tokens)
        weights_P = torch.zeros(len(rows_PH))
        again = partial(comm.redispatch, x_TH=x_TH, handle=out.handle)
        backward = partial(comm.dispatch_backward, grad_rows_PH=rows_PH, handle=out.handle)
        calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "x has shape (4, 8), expected (5, hidden = 8)": (again, {"x_TH": torch.zeros(4, 8)}),
            "x is torch.float64, expected the communicator's dtype": (again, {"x_TH": x_TH.double()}),
            "handle belongs to another communicator": (again, {"handle": foreign.handle}),
            "handle is str, expected the handle of a dispatch": (backward, {"handle": "no"}),
            "grad_rows has shape": (backward, {"grad_rows_PH": rows_PH[:-1]}),
            "grad_weights has shape": (
                partial(backward, grad_weights=weights_P),
                {"grad_weights": weights_P[:-1]},
            ),
        }
        for text, (call, wrong) in calls.items():
            given = wrong if rank == 0 else {}
            refused(partial(call, **given), begins=text if rank == 0 else f"rank 0: {text}")
            call()
