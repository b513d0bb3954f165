"""Arrays of other libraries go in without a copy, and what comes out can be taken over by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.cases import Inputs
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.catching import catch
from tests.oracle import Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")


@dataclass
class Interface:
    """An array that has nothing but __cuda_array_interface__ (which knows no bfloat16)."""

    kept: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.kept.__cuda_array_interface__


@dataclass
class Capsule:
    """An array that has nothing but DLPack."""

    kept: torch.Tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.kept.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.kept.__dlpack_device__()


def _cupy(tensor: torch.Tensor) -> Any:
    import cupy

    return cupy.asarray(tensor) if tensor.dtype != torch.bfloat16 else Capsule(tensor)


WAYS = {"interface": Interface, "dlpack": Capsule, "cupy": _cupy}


def _play(rank: int, world_size: int, job: Job, way: str) -> list[str]:
    wrap = WAYS[way]
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        own = known.own
        out = known.dispatch(
            comm,
            Inputs(x_TH=wrap(own.x_TH), ids_TK=wrap(own.ids_TK), weights_TK=wrap(own.weights_TK)),
        )
        known.check_dispatch(out)
        if not isinstance(out.tokens, torch.Tensor):
            return [f"tokens are {type(out.tokens).__name__}"]
        rows_PH, weights = known.answer(out.tokens), out.weights
        known.check_combine("combine", comm.combine(wrap(rows_PH), out.handle))
        if job.layout == "expert":
            y_TH = comm.combine(wrap(rows_PH), out.handle, weights=wrap(weights))
            known.check_combine("weighted combine", y_TH, weighted=True)
        if way == "cupy":
            import cupy

            taken = cupy.asarray(out.offsets)
            if taken.data.ptr != out.offsets.data_ptr() or taken.tolist() != out.offsets.tolist():
                known.problems.append("cupy copied, or misread, the offsets")
            if job.dtype != "bfloat16":
                rows = cupy.asarray(out.tokens)
                if rows.data.ptr != out.tokens.data_ptr() or rows.shape != tuple(out.tokens.shape):
                    known.problems.append("cupy copied, or misread, the tokens")
        return known.problems


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_in_and_out(pool: Pools, most_ranks: int, way: str, dtype: str, seed: int) -> None:
    if way == "cupy":
        pytest.importorskip("cupy")
    if way == "interface" and dtype == "bfloat16":
        pytest.skip("__cuda_array_interface__ has no bfloat16")
    size = min(2, most_ranks)
    job = Job(
        tokens=(30, 17)[:size],
        num_experts=4 * size,
        hidden=128,
        top_k=3,
        dtype=dtype,
        wide_ids=dtype == "float32",
        seed=seed,
    )
    harness.assert_none(pool(size)(_play, job, way))


def _cupy_stream(rank: int, world_size: int, job: Job) -> list[str]:
    """Checks that work on CuPy's current stream comes first if it is torch's current stream too."""
    import cupy

    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
            x = cupy.zeros(tuple(known.own.x_TH.shape), cupy.float32)
            torch.cuda._sleep(100_000_000)
            x += cupy.asarray(known.own.x_TH)
            out = known.dispatch(
                comm, Inputs(x_TH=x, ids_TK=known.own.ids_TK, weights_TK=known.own.weights_TK)
            )
            known.check_dispatch(out)
        return known.problems


def test_a_stream_shared_with_cupy(pool: Pools, most_ranks: int, seed: int) -> None:
    pytest.importorskip("cupy")
    size = min(2, most_ranks)
    job = Job(tokens=(64,) * size, num_experts=4 * size, hidden=256, top_k=2, dtype="float32", seed=seed)
    harness.assert_none(pool(size)(_cupy_stream, job))


def _host_arrays(rank: int, world_size: int, job: Job) -> list[Any]:
    """numpy arrays are not on the GPU: refused by name, and not copied there in silence."""
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        x = known.own.x_TH.cpu().numpy()
        error = catch(lambda: comm.dispatch(x, known.own.ids_TK))
        harness.settled_error(comm)
        known.check_dispatch(known.dispatch(comm))
        return [error, known.problems]


def test_host_arrays_are_refused(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(
        tokens=(8,) * most_ranks, num_experts=most_ranks, hidden=64, top_k=1, dtype="float32", seed=seed
    )
    for error, problems in pool(most_ranks)(_host_arrays, job):
        assert error is not None and error.name == "InvalidArgument" and "x is" in error.text, error
        assert problems == []
