"""torch.compile over dispatch, experts and combine: equal results."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.gpu.harness import Job
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_compile import FIXED, train_layer
from tests.oracle import Oracle

TOLERANCE = 3e-2
"""Of Inductor's results, relative to a value and to the largest one: a few roundings to bfloat16."""


NO_COMPILER = not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"))
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C compiler")
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_equal_results(rank: int, world_size: int, backend: str, seed: int) -> list[str]:
    torch._dynamo.reset()
    job, problems = Job.on(world_size, (64, 48), experts=4, hidden=256, top_k=2, alignment=8, seed=seed), []
    with harness.communicator(**job.communicator) as comm:
        knowns = [Oracle(replace(job, seed=job.seed + i), rank, comm.device) for i in range(3)]
        capacity = max(max(each.needed) for each in knowns) + 5
        scale_H = torch.linspace(0.5, 2, job.hidden, device=comm.device).to(job.torch_dtype).requires_grad_()

        def layer(
            x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            out = comm.dispatch(x_TH, ids_TK, weights_TK, alignment=job.alignment, capacity=capacity)
            # Rows past the last are unspecified, and so are their gradients: both ways they count as zero.
            past_P1 = torch.arange(capacity, device=x_TH.device).unsqueeze(1) >= out.offsets[-1]
            rows_PH = (out.tokens.masked_fill(past_P1, 0) * scale_H).masked_fill(past_P1, 0)
            y_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
            return x_TH + y_TH, out.offsets, out.overflow

        fast = torch.compile(layer, backend=backend, dynamic=False)
        for i, known in enumerate(knowns):
            found = []
            for call in (layer, fast):
                x_TH = known.own.x_TH.clone().requires_grad_()
                weights_TK = known.own.weights_TK.clone().requires_grad_()
                scale_H.grad = None
                y_TH, offsets, overflow = call(x_TH, known.own.ids_TK, weights_TK)
                y_TH.backward(known.grad_y(rank))
                grads = {"dx": x_TH.grad, "dw": weights_TK.grad, "dscale": scale_H.grad}
                found.append({"y": y_TH.detach(), "offsets": offsets, "overflow": overflow, **grads})
            problems += _compare(f"rank {rank}, call {i}", *found, exact=backend != "inductor")
    return problems


def _compare(text: str, want: dict[str, Any], got: dict[str, Any], exact: bool) -> list[str]:
    problems = []
    for name, left in want.items():
        right = got[name]
        if left is None or right is None:
            same = left is right
        elif exact or not left.is_floating_point():
            same = torch.equal(left, right)
        else:
            # Inductor fuses, and then rounds less often: each product that eager sums, to bfloat16.
            allowed = TOLERANCE * (left.float().abs() + left.float().abs().max())
            same = bool(((left.float() - right.float()).abs() <= allowed).all())
        if not same:
            problems.append(f"{text}: {name} is {right}, expected {left}")
    return problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(1)
def test_a_compiled_layer_trains(rank: int, world_size: int, dtype: torch.dtype, seed: int) -> list[str]:
    return train_layer(rank, world_size, {**FIXED, "dtype": dtype, "num_shared_experts": 1}, seed)
