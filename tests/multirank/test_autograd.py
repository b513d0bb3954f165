"""Gradients: against finite differences, under checkpointing, and as autograd asks for them. Their bits are
checked by test_dispatch_combine.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests import cases, ranks
from tests.cases import Case
from tests.multirank.on_ranks import on_ranks


def _inputs(case: Case, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of this rank; x and weights are leaves that want a gradient."""
    own = cases.inputs(case, rank, device)
    return own.x_TH.requires_grad_(), own.ids_TK, own.weights_TK.requires_grad_()


def _holes(size: int, seed: int) -> Case:
    tokens = tuple(9 - 3 * rank for rank in range(size))
    return Case(tokens=tokens, num_experts=4 * size, hidden=64, top_k=2, routing="holes", seed=seed)


# -- across ranks: the derivative of the job's one loss by an input of any rank ------------------------------
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_finite_differences_across_ranks(
    rank: int, world_size: int, widest: str, layout: str, seed: int
) -> None:
    """The derivative of the job's one loss along a random direction of all ranks' inputs."""
    shape = {"dtype": widest, "layout": layout, "seed": seed}
    case = Case.on(world_size, (5, 3, 4), experts=2, hidden=4, top_k=2, **shape)
    step, bound = (1e-6, 1e-5) if widest == "float64" else (2e-3, 1e-2)
    with ranks.communicator(**case.communicator) as comm:
        x_TH, ids_TK, weights_TK = _inputs(case, rank, comm.device)
        aim_TH = cases.tensor(case.grad_y(rank), case.torch_dtype, comm.device)

        def loss(x_TH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            """Returns this rank's part of a loss that all ranks' inputs enter by experts on all ranks."""
            out = comm.dispatch(x_TH, ids_TK, weights_TK, layout=case.layout)
            rows_PH = torch.tanh(out.tokens) * (rank + 1) + out.tokens**2
            if case.layout == "rank":
                y_TH = comm.combine(rows_PH * (out.weights**2).sum(1, keepdim=True), out.handle)
            else:
                y_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
            return (y_TH * aim_TH).double().sum() + (out.weights**3).double().sum()

        loss(x_TH, weights_TK).backward()
        rng = np.random.default_rng([case.seed, 11, rank])
        for part in ("x", "weights"):
            way_TH, way_TK = (
                cases.tensor(rng.standard_normal(each.shape) * moves, case.torch_dtype, comm.device)
                for each, moves in ((x_TH, part == "x"), (weights_TK, part == "weights"))
            )
            along = (x_TH.grad * way_TH).double().sum() + (weights_TK.grad * way_TK).double().sum()
            with torch.no_grad():
                ends = [loss(x_TH + s * step * way_TH, weights_TK + s * step * way_TK) for s in (1, -1)]
            size = (x_TH.grad * way_TH).abs().double().sum() + (weights_TK.grad * way_TK).abs().double().sum()
            total = torch.stack([along.detach(), (ends[0] - ends[1]) / (2 * step), size]).cpu()
            dist.all_reduce(total)
            assert (total[0] - total[1]).abs() < bound * total[2].clamp_min(1e-3), (part, total)


# -- checkpointing -------------------------------------------------------------------------------------------
def _train(rank: int, case: Case, mode: str) -> list[torch.Tensor]:
    """Two layers, three steps, one communicator; `mode` says how the forward is kept for the backward."""
    with ranks.communicator(**case.communicator) as comm:
        _, _, gates_TK = _inputs(case, rank, comm.device)
        ids = [cases.tensor(replace(case, seed=case.seed + i).ids(rank), None, comm.device) for i in range(2)]
        scale_H = torch.linspace(0.5, 1.5, case.hidden, device=comm.device, dtype=case.torch_dtype)
        scale_H.requires_grad_()

        def layer(x_TH: torch.Tensor, which: int) -> torch.Tensor:
            out = comm.dispatch(x_TH, ids[which], gates_TK, layout=case.layout)
            rows_PH = torch.tanh(out.tokens * scale_H) * (1 + rank)
            if case.layout == "rank":
                return x_TH + comm.combine(rows_PH * out.weights.sum(1, keepdim=True), out.handle)
            return x_TH + comm.combine(rows_PH, out.handle, weights=out.weights)

        found = []
        for _ in range(3):
            x_TH, _, _ = _inputs(case, rank, comm.device)
            y_TH = x_TH
            for which in range(2):
                if mode == "plain":
                    y_TH = layer(y_TH, which)
                else:
                    y_TH = checkpoint(layer, y_TH, which, use_reentrant=mode == "reentrant")
            (y_TH**2).sum().backward()
            found += [each.grad for each in (x_TH, scale_H, gates_TK)]
            scale_H.grad = gates_TK.grad = None
        # 2 layers x 3 steps are computed twice; each recompute finds the plan of its forward.
        assert mode == "plain" or not ranks.on_cpu() or comm.stats()["plans_reused"] >= 6
        return found


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_checkpointing_gives_the_same_bits_and_reuses_plans(
    rank: int, world_size: int, widest: str, layout: str, seed: int
) -> None:
    shape = {"dtype": widest, "layout": layout, "seed": seed}
    case = Case.on(world_size, (7, 5, 3), experts=2, hidden=8, top_k=2, **shape)
    plain, *others = (_train(rank, case, mode) for mode in ("plain", "reentrant", "non-reentrant"))
    for found in others:
        assert all(map(torch.equal, found, plain)) and len(found) == len(plain)


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_a_backward_twice(rank: int, world_size: int, seed: int) -> None:
    """retain_graph: the second backward runs along the same plan, with other work in between."""
    case = Case.on(world_size, 31, experts=4, hidden=128, top_k=4, dtype="bfloat16", seed=seed)
    with ranks.communicator(**case.communicator) as comm:
        x_TH, ids_TK, weights_TK = _inputs(case, rank, comm.device)
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        y_TH = comm.combine(out.tokens * (rank + 1), out.handle, weights=out.weights)
        grads = []
        for _ in range(2):
            x_TH.grad = weights_TK.grad = None
            y_TH.backward(cases.tensor(case.grad_y(rank), case.torch_dtype, comm.device), retain_graph=True)
            grads.append((x_TH.grad.clone(), weights_TK.grad.clone()))
            cases.dispatch(comm, replace(case, seed=case.seed + 1), rank)
    assert all(map(torch.equal, *grads))


@on_ranks("most_ranks")
def test_what_needs_no_gradient_gets_none(rank: int, world_size: int, seed: int) -> None:
    case = _holes(world_size, seed)
    with ranks.communicator(**case.communicator) as comm:
        x_TH, ids_TK, weights_TK = _inputs(case, rank, comm.device)
        out = comm.dispatch(x_TH, ids_TK, weights_TK.detach())
        assert out.tokens.requires_grad and comm.combine(out.tokens, out.handle).requires_grad
        y_TH = comm.combine(out.tokens, out.handle, weights=out.weights)
        (grad_TH,) = torch.autograd.grad(y_TH.sum(), x_TH)
        want_TH = (weights_TK.detach() * (ids_TK >= 0)).sum(1, keepdim=True).expand_as(grad_TH)
        assert torch.allclose(grad_TH, want_TH), "x beside frozen weights"
        with torch.no_grad():
            out = comm.dispatch(x_TH, ids_TK, weights_TK)
            assert not out.tokens.requires_grad and not comm.combine(out.tokens, out.handle).requires_grad
        with torch.inference_mode():
            out = comm.dispatch(x_TH.detach(), ids_TK)
            y_TH = comm.combine(out.tokens, out.handle)
            assert y_TH.is_inference() and bool(torch.isfinite(y_TH).all())
        # Only the weights have a gradient.
        out = comm.dispatch(x_TH.detach(), ids_TK, weights_TK)
        comm.combine(out.tokens, out.handle, weights=out.weights).sum().backward()
        want_TK = x_TH.detach().sum(1, keepdim=True) * (ids_TK >= 0)
        assert torch.allclose(weights_TK.grad, want_TK, rtol=1e-4, atol=1e-4)
        # Only x has one, through a gradient that is not contiguous.
        out = comm.dispatch(x_TH, ids_TK)
        y_TH = comm.combine(out.tokens, out.handle)
        y_TH.backward(torch.ones(1, 1, device=comm.device).expand_as(y_TH))
        count_T1 = (ids_TK >= 0).sum(1, keepdim=True)
        assert torch.equal(x_TH.grad, count_T1.expand_as(x_TH).float())


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("what", ["tokens", "weights", "y"])
@on_ranks("most_ranks")
def test_results_may_be_changed_in_place(
    rank: int, world_size: int, layout: str, what: str, seed: int
) -> None:
    """A result that is doubled in place has the gradients of one that is doubled in a new tensor."""
    case = _holes(world_size, seed)
    with ranks.communicator(**case.communicator) as comm:
        found = []
        for in_place in (True, False):
            x_TH, ids_TK, weights_TK = _inputs(case, rank, comm.device)

            def double(tensor: torch.Tensor, name: str, in_place: bool = in_place) -> torch.Tensor:
                if name != what:
                    return tensor
                return tensor.mul_(2) if in_place else tensor * 2

            out = comm.dispatch(x_TH, ids_TK, weights_TK, layout=layout)
            tokens, weights = double(out.tokens, "tokens"), double(out.weights, "weights")
            if layout == "rank":
                y_TH = comm.combine(tokens.sin() * weights.sum(1, keepdim=True), out.handle)
            else:
                y_TH = comm.combine(tokens.sin(), out.handle, weights=weights)
            y_TH = double(y_TH, "y")
            y_TH.square().sum().backward()
            found.append((y_TH.detach(), x_TH.grad, weights_TK.grad))
        # What a backward needs must not change; torch says so.
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        y_TH = comm.combine(out.tokens, out.handle, weights=out.weights)
        out.tokens.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y_TH.sum().backward()
        assert all(map(torch.equal, *found))
