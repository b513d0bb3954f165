"""torch.compile(fullgraph=True) over dispatch, experts and combine: no graph break, equal results."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Job, Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")


def _compiled(rank: int, world_size: int, job: Job, backend: str) -> list[str]:
    torch._dynamo.reset()
    problems = []
    with harness.communicator(**job.communicator) as comm:
        knowns = [Oracle(replace(job, seed=job.seed + i), rank, comm.device) for i in range(3)]
        capacity = max(max(each.needed) for each in knowns) + 5
        scale_H = torch.linspace(0.5, 2, job.hidden, device=comm.device).to(job.torch_dtype).requires_grad_()

        def layer(
            x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            out = comm.dispatch(
                x_TH, ids_TK, weights_TK, layout=job.layout, alignment=job.alignment, capacity=capacity
            )
            rows_PH = out.tokens * scale_H
            if job.layout == "rank":
                y_TH = comm.combine(rows_PH, out.handle)
            else:
                y_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
            return x_TH + y_TH, out.offsets, out.overflow

        fast = torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)
        for i, known in enumerate(knowns):
            found = []
            for call in (layer, fast):
                x_TH = known.own.x_TH.clone().requires_grad_()
                weights_TK = known.own.weights_TK.clone().requires_grad_()
                scale_H.grad = None
                y_TH, offsets, overflow = call(x_TH, known.own.ids_TK, weights_TK)
                y_TH.backward(known.grad_y(rank))
                found.append(
                    {
                        "y": y_TH.detach(),
                        "offsets": offsets,
                        "overflow": overflow,
                        "dx": x_TH.grad,
                        "dw": weights_TK.grad,
                        "dscale": scale_H.grad,
                    }
                )
            problems += _compare(f"rank {rank}, call {i}", *found, exact=backend != "inductor")
    return problems


def _compare(text: str, want: dict[str, Any], got: dict[str, Any], exact: bool) -> list[str]:
    problems = []
    for name, left in want.items():
        right = got[name]
        if left is None or right is None:
            good = left is right
        elif exact or left.dtype == torch.int32:
            good = torch.equal(left, right)
        else:  # inductor fuses, and then rounds less often
            good = torch.allclose(left, right, rtol=3e-2, atol=3e-2 * float(left.abs().max()))
        if not good:
            problems.append(f"{text}: {name} differs")
    return problems


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2])
def test_no_graph_break_and_equal_results(
    pool: Pools, size: int, layout: str, backend: str, seed: int
) -> None:
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("inductor needs a C compiler")
    job = Job(
        tokens=(64, 48)[:size],
        num_experts=4 * size,
        hidden=256,
        top_k=2,
        layout=layout,
        alignment=8 if layout == "expert" else 1,
        seed=seed,
    )
    harness.assert_none(pool(size)(_compiled, job, backend))
