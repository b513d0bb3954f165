"""Operations on as many SMs as the caller says: the same bits with each number, ranks that do not agree, and
what is begun with one number and received with another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Job, Oracle

pytestmark = pytest.mark.usefixtures("cuda_only")

LIMITS = (2, 3, 8, 14, 33, 132, None)


def _all_limits(rank: int, world_size: int, job: Job) -> list[str]:
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        for limit in LIMITS:
            harness.poison(32 << 20)
            with comm.limit_sms(limit):
                out = known.dispatch(comm)
                known.check_dispatch(out)
                known.check_combine("combine", comm.combine(known.answer(out.tokens), out.handle))
                if job.wire is None and not torch.equal(
                    comm.redispatch(known.own.x_TH, out.handle), out.tokens
                ):
                    known.problems.append(f"rank {rank}: other rows along the plan")
        harness.synchronize()
        comm.check()
    return known.problems


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("top_k", [1, 4])  # 1: chunks take turns in the staging section
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_on_any_number(pool: Pools, size: int, top_k: int, wire: str | None, seed: int) -> None:
    tokens = (1500, 64, 700, 0)[:size]
    job = Job(tokens=tokens, num_experts=6 * size, hidden=1040, top_k=top_k, wire=wire, seed=seed)
    harness.assert_none(pool(size)(_all_limits, job))


def _mixed(rank: int, world_size: int, job: Job) -> list[str]:
    """Gives each rank its own number of SMs, and another one when it receives."""
    problems: list[str] = []
    with harness.communicator(**job.communicator) as comm:
        for step in range(len(LIMITS)):
            known = Oracle(replace(job, seed=job.seed + step), rank, comm.device)
            own = known.own
            with comm.limit_sms(LIMITS[(step + rank) % len(LIMITS)]):
                receive = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK)
            with comm.limit_sms(LIMITS[(step + 3 * rank + 1) % len(LIMITS)]):
                out = receive()
            known.check_dispatch(out)
            problems += known.problems
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_halves_need_not_agree(pool: Pools, size: int, top_k: int, seed: int) -> None:
    job = Job(tokens=(900, 1200, 64, 0)[:size], num_experts=8 * size, hidden=512, top_k=top_k, seed=seed)
    harness.assert_none(pool(size)(_mixed, job))


def _mistakes(rank: int, world_size: int, job: Job) -> list[str]:
    with harness.communicator(**job.communicator) as comm:
        most = torch.cuda.get_device_properties(comm.device).multi_processor_count
        bad: Any
        for bad in (0, 1, -3, most + 1, 2.5, "all"):
            with pytest.raises(moecomm.InvalidArgument, match="num_sms is"), comm.limit_sms(bad):
                pass
        with pytest.raises(ValueError, match="mine"), comm.limit_sms(8):
            raise ValueError("mine")
        known = Oracle(job, rank, comm.device)
        known.check_dispatch(known.dispatch(comm))
    with pytest.raises(moecomm.CommunicatorClosed), comm.limit_sms(8):
        pass
    return known.problems


@pytest.mark.parametrize("size", [1, 2])
def test_mistakes(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(64, 50)[:size], num_experts=4 * size, hidden=64, top_k=3, seed=seed)
    harness.assert_none(pool(size)(_mistakes, job))
