"""Arrays of other libraries go in without a copy, and what comes out can be taken over by them."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.cases import Inputs
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks
from tests.oracle import opened

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
    with opened(job, rank) as (comm, known):
        own = known.own
        out = known.dispatch(
            comm, Inputs(x_TH=wrap(own.x_TH), ids_TK=wrap(own.ids_TK), weights_TK=wrap(own.weights_TK))
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
    job = Job.on(
        size, (30, 17), experts=4, hidden=128, top_k=3, dtype=dtype, wide_ids=dtype == "float32", seed=seed
    )
    harness.assert_none(pool(size)(_play, job, way))


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@on_ranks("most_ranks")
def test_a_stream_shared_with_cupy(rank: int, world_size: int, seed: int) -> list[str]:
    """Checks that work on CuPy's current stream comes first if it is torch's current stream too."""
    import cupy

    tokens = (64,) * world_size
    job = Job(tokens=tokens, num_experts=4 * world_size, hidden=256, top_k=2, dtype="float32", seed=seed)
    with opened(job, rank) as (comm, known):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
            x = cupy.zeros(tuple(known.own.x_TH.shape), cupy.float32)
            torch.cuda._sleep(100_000_000)
            x += cupy.asarray(known.own.x_TH)
            known.check_dispatch(known.dispatch(comm, replace(known.own, x_TH=x)))
        return known.problems


@on_ranks("most_ranks")
def test_host_arrays_are_refused(rank: int, world_size: int, seed: int) -> list[str]:
    """numpy arrays are not on the GPU: refused by name, and not copied there in silence."""
    with opened(Job.on(world_size, 8, experts=1, hidden=64, top_k=1, dtype="float32", seed=seed), rank) as (
        comm,
        known,
    ):
        x = known.own.x_TH.cpu().numpy()
        refused(lambda: comm.dispatch(x, known.own.ids_TK), "x is")
        harness.settled_error(comm)
        known.check_dispatch(known.dispatch(comm))
        return known.problems
