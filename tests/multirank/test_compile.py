"""torch.compile over several ranks: the same numbers as without, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.multirank.cases import Case
from tests.multirank.conftest import Pools


def _train(rank: int, world_size: int, case: Case, backend: str | None) -> list[list[np.ndarray]]:
    """Two layers that share a communicator, and two dispatches that do not depend on each other."""
    import moecomm

    with moecomm.Communicator(**case.communicator) as comm:
        capacity = comm.size * comm.max_tokens * case.top_k

        def model(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            for layer in range(2):
                left = comm.dispatch(x_TH.sin(), ids_TK, weights_TK, capacity=capacity)
                right = comm.dispatch(x_TH.cos(), ids_TK.flip(1), layout="rank", capacity=capacity)
                second = comm.combine(right.tokens * 2, right.handle)
                first = comm.combine(left.tokens * (layer + 2), left.handle, weights=left.weights)
                x_TH = first + second
            return x_TH

        if backend is not None:
            model = torch.compile(model, backend=backend, fullgraph=True)
        found = []
        for step in range(3):
            tokens = case.tokens[rank] - step
            x_TH = torch.from_numpy(case.x(rank)[:tokens]).requires_grad_()
            weights_TK = torch.from_numpy(case.topk_weights(rank)[:tokens]).requires_grad_()
            y_TH = model(x_TH, torch.from_numpy(case.ids(rank)[:tokens]), weights_TK)
            y_TH.backward(torch.from_numpy(case.grad_y(rank)[:tokens]))
            found.append([each.detach().numpy() for each in (y_TH, x_TH.grad, weights_TK.grad)])
        comm.check()
        return found


def test_training(pool: Pools, seed: int) -> None:
    case = Case(tokens=(7, 4, 6), num_experts=6, hidden=8, top_k=2, seed=seed, routing="holes")
    plain: Any = pool(3)(_train, case, None)
    for eager, compiled in zip(plain, pool(3)(_train, case, "aot_eager"), strict=True):
        for left, right in zip(eager, compiled, strict=True):
            for want, got in zip(left, right, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
