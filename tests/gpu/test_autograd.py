"""Gradients as torch asks for them: gradcheck, recomputation, a backward twice, parts that need none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.gpu import harness, oracle
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Inputs, Job, Oracle


def _own(job: Job, rank: int, device: torch.device) -> tuple[Oracle, torch.Tensor, torch.Tensor]:
    known = Oracle(job, rank, device)
    return known, known.own.x_TH.clone().requires_grad_(), known.own.weights_TK.clone().requires_grad_()


def _gradcheck(rank: int, world_size: int, job: Job) -> bool:
    with harness.communicator(**job.communicator) as comm:
        known, x_TH, weights_TK = _own(job, rank, comm.device)

        def both(x_TH: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = Inputs(x_TH=x_TH, ids_TK=known.own.ids_TK, weights_TK=weights_TK)
            out = known.dispatch(comm, own)
            if job.layout == "rank":
                rows_PH = out.tokens.sin() * out.weights.sum(1, keepdim=True)
                return comm.combine(rows_PH, out.handle), out.tokens, out.weights
            return comm.combine(out.tokens.sin(), out.handle, weights=out.weights), out.tokens, out.weights

        # In float32, the widest that rows have on GPUs.
        return torch.autograd.gradcheck(both, (x_TH, weights_TK), eps=1e-2, atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_gradcheck(pool: Pools, layout: str, seed: int) -> None:
    job = Job(
        tokens=(4,),
        num_experts=5,
        hidden=4,
        top_k=3,
        dtype="float32",
        routing="holes",
        layout=layout,
        seed=seed,
    )
    assert pool(1)(_gradcheck, job) == [True]


def _finite_difference(rank: int, world_size: int, job: Job) -> float:
    """The derivative of the job's one loss along a random direction of all ranks' inputs; relative error."""
    import torch.distributed as dist

    with harness.communicator(**job.communicator) as comm:
        known, x_TH, weights_TK = _own(job, rank, comm.device)
        aim_TH = known.grad_y(rank)

        def loss(x_TH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            own = Inputs(x_TH=x_TH, ids_TK=known.own.ids_TK, weights_TK=weights_TK)
            out = known.dispatch(comm, own)
            rows_PH = torch.tanh(out.tokens) * (rank + 1)
            if job.layout == "rank":
                y_TH = comm.combine(rows_PH * (out.weights**2).sum(1, keepdim=True), out.handle)
            else:
                y_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
            return (y_TH * aim_TH).double().sum() + (out.weights**3).double().sum()

        loss(x_TH, weights_TK).backward()
        gen = oracle.generator(comm.device, job.seed, 11, rank)
        way_TH, way_TK = (
            torch.randn(each.shape, generator=gen, device=comm.device, dtype=each.dtype)
            for each in (x_TH, weights_TK)
        )
        along = (x_TH.grad * way_TH).double().sum() + (weights_TK.grad * way_TK).double().sum()
        step = 2e-3
        with torch.no_grad():
            ends = [loss(x_TH + s * step * way_TH, weights_TK + s * step * way_TK) for s in (1, -1)]
        total = torch.stack([along.detach(), (ends[0] - ends[1]) / (2 * step)]).cpu()
        dist.all_reduce(total)
        return float((total[0] - total[1]).abs() / total[0].abs().clamp_min(1e-3))


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [2, 3])
def test_finite_differences_across_ranks(pool: Pools, size: int, layout: str, seed: int) -> None:
    job = Job(
        tokens=(5, 3, 4)[:size],
        num_experts=2 * size,
        hidden=4,
        top_k=2,
        dtype="float32",
        layout=layout,
        seed=seed,
    )
    assert max(pool(size)(_finite_difference, job)) < 1e-2


def _train(rank: int, world_size: int, job: Job, mode: str) -> list[np.ndarray]:
    """Two layers, two steps, one communicator; `mode` says how the forward is kept for the backward."""
    with harness.communicator(**job.communicator) as comm:
        known, _, gates_TK = _own(job, rank, comm.device)
        scale_H = torch.linspace(0.5, 1.5, job.hidden, device=comm.device, dtype=job.torch_dtype)
        scale_H.requires_grad_()

        def layer(x_TH: torch.Tensor, which: int) -> torch.Tensor:
            own = Inputs(x_TH=x_TH, ids_TK=known.own.ids_TK.roll(which, 0), weights_TK=gates_TK)
            out = comm.dispatch(
                own.x_TH, own.ids_TK, own.weights_TK, layout=job.layout, capacity=known.capacity
            )
            rows_PH = torch.tanh(out.tokens * scale_H) * (1 + rank)
            if job.layout == "rank":
                return x_TH + comm.combine(rows_PH * out.weights.sum(1, keepdim=True), out.handle)
            return x_TH + comm.combine(rows_PH, out.handle, weights=out.weights)

        found = []
        for _ in range(2):
            x_TH = known.own.x_TH.clone().requires_grad_()
            y_TH = x_TH
            for which in range(2):
                if mode == "plain":
                    y_TH = layer(y_TH, which)
                else:
                    y_TH = checkpoint(layer, y_TH, which, use_reentrant=mode == "reentrant")
            (y_TH**2).sum().backward()
            found += [each.grad.cpu().numpy() for each in (x_TH, scale_H, gates_TK)]
            scale_H.grad = gates_TK.grad = None
        return found


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_recomputation_gives_the_same_bits(pool: Pools, size: int, layout: str, seed: int) -> None:
    job = Job(
        tokens=(7, 5, 3)[:size],
        num_experts=2 * size,
        hidden=8,
        top_k=2,
        dtype="float32",
        layout=layout,
        seed=seed,
    )
    plain = pool(size)(_train, job, "plain")
    for mode in ("reentrant", "non-reentrant"):
        for want, got in zip(plain, pool(size)(_train, job, mode), strict=True):
            for left, right in zip(want, got, strict=True):
                np.testing.assert_array_equal(left, right)


def _twice(rank: int, world_size: int, job: Job) -> list[bool]:
    """retain_graph: the second backward runs along the same plan, with other work in between."""
    with harness.communicator(**job.communicator) as comm:
        known, x_TH, weights_TK = _own(job, rank, comm.device)
        out = known.dispatch(comm, Inputs(x_TH=x_TH, ids_TK=known.own.ids_TK, weights_TK=weights_TK))
        y_TH = comm.combine(known.answer(out.tokens), out.handle, weights=out.weights)
        grads = []
        for _ in range(2):
            x_TH.grad = weights_TK.grad = None
            y_TH.backward(known.grad_y(rank), retain_graph=True)
            grads.append((x_TH.grad.clone(), weights_TK.grad.clone()))
            other = Oracle(replace(job, seed=job.seed + 1), rank, comm.device)
            other.dispatch(comm)
        return [torch.equal(left, right) for left, right in zip(*grads, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_backward_twice(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(31,) * size, num_experts=4 * size, hidden=128, top_k=4, seed=seed)
    for found in pool(size)(_twice, job):
        assert all(found)


def _parts(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    with harness.communicator(**job.communicator) as comm:
        known, x_TH, weights_TK = _own(job, rank, comm.device)
        ids_TK = known.own.ids_TK
        found: dict[str, Any] = {}
        out = comm.dispatch(x_TH, ids_TK, known.own.weights_TK)
        found["frozen weights"] = (
            out.tokens.requires_grad,
            comm.combine(out.tokens, out.handle).requires_grad,
        )
        with torch.no_grad():
            out = comm.dispatch(x_TH, ids_TK, weights_TK)
            found["no_grad"] = (out.tokens.requires_grad, comm.combine(out.tokens, out.handle).requires_grad)
        with torch.inference_mode():
            out = comm.dispatch(known.own.x_TH, ids_TK)
            found["inference"] = comm.combine(out.tokens, out.handle).is_inference()
        # Only the weights have a gradient.
        out = comm.dispatch(known.own.x_TH, ids_TK, weights_TK)
        comm.combine(out.tokens, out.handle, weights=out.weights).sum().backward()
        want_TK = known.own.x_TH.sum(1, keepdim=True) * (ids_TK >= 0)
        found["weights alone"] = torch.allclose(weights_TK.grad, want_TK, rtol=1e-4, atol=1e-4)
        # Only x has one, through a gradient that is not contiguous.
        y_TH = comm.combine(*_plain(comm.dispatch(x_TH, ids_TK)))
        y_TH.backward(torch.ones(1, 1, device=comm.device).expand_as(y_TH))
        count_T1 = (ids_TK >= 0).sum(1, keepdim=True)
        found["x alone"] = torch.equal(x_TH.grad, count_T1.expand_as(x_TH).float())
        return found


def _plain(out: Any) -> tuple[torch.Tensor, Any]:
    return out.tokens, out.handle


def test_what_needs_no_gradient_gets_none(pool: Pools, most_ranks: int, seed: int) -> None:
    size = min(2, most_ranks)
    job = Job(
        tokens=(9, 6)[:size],
        num_experts=4,
        hidden=64,
        top_k=2,
        dtype="float32",
        routing="holes",
        seed=seed,
    )
    for found in pool(size)(_parts, job):
        assert found == {
            "frozen weights": (True, True),
            "no_grad": (False, False),
            "inference": True,
            "weights alone": True,
            "x alone": True,
        }
