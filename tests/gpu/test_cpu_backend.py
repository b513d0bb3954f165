"""The same calls on the CPU backend and on the GPU, in one process: equal in every bit, also gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import cases
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.oracle import DTYPES

Found = dict[str, Any]


def _arguments(case: Case) -> dict[str, Any]:
    return {**case.communicator, "timeout": harness.COMM_TIMEOUT_S}


def _layer(comm: Any, case: Case, rank: int) -> Found:
    """Two layers whose experts multiply by powers of two: no rounding but that of moecomm itself."""
    x_TH = cases.tensor(case.x(rank), case.torch_dtype, comm.device).requires_grad_()
    weights_TK = cases.tensor(case.topk_weights(rank), None, comm.device).requires_grad_()
    ids_TK = cases.tensor(case.ids(rank), None, comm.device)
    y_TH, found = x_TH, {}
    for layer in range(2):
        out = comm.dispatch(
            y_TH,
            ids_TK,
            weights_TK,
            layout=case.layout,
            alignment=case.alignment,
            capacity=case.capacity,
        )
        rows_PH = out.tokens * 2.0 ** (rank - layer)
        if case.layout == "expert":
            y_TH = comm.combine(rows_PH, out.handle, weights=out.weights)
        else:
            y_TH = comm.combine(rows_PH, out.handle)
        found[f"y{layer}"] = cases.to_numpy(y_TH)
        found[f"offsets{layer}"] = cases.to_numpy(out.offsets)
    y_TH.backward(cases.tensor(case.grad_y(rank), case.torch_dtype, comm.device))
    found["gradient of x"] = cases.to_numpy(x_TH.grad)
    if case.layout == "expert":
        found["gradient of the weights"] = cases.to_numpy(weights_TK.grad)
    return found


def _both(rank: int, world_size: int, some: list[Case]) -> list[tuple[Found, Found]]:
    results = []
    for case in some:
        with (
            harness.communicator(**{**_arguments(case), "device": "cpu", "num_sms": None}) as on_cpu,
            harness.communicator(**_arguments(case)) as on_gpu,
        ):
            results.append((_layer(on_cpu, case, rank), _layer(on_gpu, case, rank)))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_layers_and_their_gradients(pool: Pools, size: int, dtype: str, seed: int) -> None:
    base = Case(
        tokens=(40, 0, 33, 57)[-size:],
        num_experts=6 * size,
        hidden=264,
        top_k=4,
        dtype=dtype,
        routing="holes",
        seed=seed,
    )
    some = [
        base,
        replace(base, alignment=8),
        replace(base, slack=12),
        replace(base, layout="rank"),
        replace(base, routing="one-rank"),
    ]
    for results in pool(size)(_both, some):
        for case, (left, right) in zip(some, results, strict=True):
            for name, value in left.items():
                if name == "gradient of the weights":  # dot products over H, each in an order of its own
                    largest = abs(value).max(initial=1e-30)
                    np.testing.assert_allclose(right[name] / largest, value / largest, atol=1e-4, rtol=0)
                else:
                    cases.assert_same_bits(right[name], value, f"{name} of {case}")
