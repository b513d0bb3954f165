"""Weights of tokens that travel with a combine: the bits of weights that came with the dispatch, in graphs,
too; ranks that disagree are told; other communicators refuse it."""

from contextlib import suppress

import pytest
import torch

from moecomm.errors import MismatchedArguments, MoecommError, Unsupported
from tests.gpu import harness
from tests.gpu.conftest import Pools

pytestmark = pytest.mark.usefixtures("cuda_only")
SIZES = {"hidden": 1024, "top_k": 3, "dtype": torch.bfloat16}


def _same_bits(rank: int, size: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed + rank)
    experts, found, where = 4 * size, [], harness.device()
    with harness.communicator(num_experts=experts, max_tokens=256, **SIZES) as comm, torch.no_grad():
        if not comm.weighs_tokens:
            return ["it is not possible"]
        for turn, tokens in enumerate((256, 1 + rank, 0 if rank == 0 else 99, 128)):
            ids = torch.rand(tokens, experts, generator=generator).topk(3).indices.to(where)
            ids[::5, 1] = -1
            x = torch.randn(tokens, 1024, generator=generator).to(where, torch.bfloat16)
            weights = torch.rand(tokens, 3, generator=generator).to(where)
            out = comm.dispatch(x, ids, weights, capacity=3 * 256 * size)
            want = comm.combine(out.tokens, out.handle, weights=out.weights)
            for again in range(3):
                if not torch.equal(comm.combine_weighted(out.tokens, out.handle, weights), want):
                    found.append(f"{turn}, {again}")
        graph, y = harness.captured(lambda: comm.combine_weighted(out.tokens, out.handle, weights))
        weights.mul_(2)
        graph.replay()
        if not torch.equal(y, 2 * want):
            found.append("in a graph")
        torch.cuda.synchronize()
        del graph
    return found


def _disagreeing(rank: int, size: int) -> list[str]:
    """One rank's combine has weights of rows, the others' have those of tokens; then all have the latter."""
    with harness.communicator(num_experts=2 * size, max_tokens=32, **SIZES) as comm, torch.no_grad():
        where = harness.device()
        ids = torch.arange(3, device=where).expand(32, 3)
        weights = torch.ones(32, 3, device=where)
        out = comm.dispatch(torch.ones(32, 1024, device=where, dtype=torch.bfloat16), ids, weights)
        caught: Exception | None = None
        try:
            if rank == 0:
                comm.combine(out.tokens, out.handle, weights=out.weights)
            else:
                comm.combine_weighted(out.tokens, out.handle, weights)
            torch.cuda.synchronize()
            comm.check()
        except MoecommError as error:
            caught = error
        if not isinstance(caught, MismatchedArguments) or "what travels" not in str(caught):
            return [f"rank {rank}: {caught!r}"]
        right = torch.equal(
            comm.combine_weighted(out.tokens, out.handle, weights)[0, :1].float().cpu(), torch.tensor([3.0])
        )
        return [] if right else ["the next one is wrong"]


def _refused(rank: int, size: int) -> list[str]:
    with harness.communicator(num_experts=2 * size, max_tokens=4096, **SIZES) as comm, torch.no_grad():
        where = harness.device()
        ids = torch.zeros(5, 3, dtype=torch.int64, device=where) + torch.arange(3, device=where)
        out = comm.dispatch(torch.ones(5, 1024, device=where, dtype=torch.bfloat16), ids)
        with suppress(Unsupported):
            comm.combine_weighted(out.tokens, out.handle, torch.ones(5, 3, device=where))
            return ["it was not refused"]
        y = comm.combine(out.tokens, out.handle)
        return [] if comm.weighs_tokens is False and y[0, 0] == 3 else ["after the refusal"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_bits(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_same_bits, seed))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree(pool: Pools, size: int) -> None:
    harness.assert_none(pool(size)(_disagreeing))


def test_too_many_tokens(pool: Pools) -> None:
    harness.assert_none(pool(2)(_refused))
