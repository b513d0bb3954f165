"""The torch oracle of tests/gpu against the loops of tests/reference.py, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests import cases, reference
from tests.gpu.harness import Job
from tests.oracle import Oracle

CPU = torch.device("cpu")
JOB = Job(tokens=(7, 0, 12), num_experts=12, hidden=24, top_k=3, routing="holes")
JOBS = [
    JOB,
    replace(JOB, alignment=8),
    replace(JOB, slack=-6, dtype="float16"),
    replace(JOB, slack=5, dtype="float32"),
    replace(JOB, layout="rank", dtype="float64"),
    replace(JOB, layout="rank", slack=-3),
    replace(JOB, routing="one-rank", top_k=6),
    replace(JOB, routing="one-expert"),
    replace(JOB, routing="skewed", alignment=4, slack=-2),
    replace(JOB, routing="empty"),
    replace(JOB, tokens=(9,), num_experts=4, top_k=4),
    replace(JOB, wire="fp8", hidden=136),
    replace(JOB, wire="mxfp8", hidden=136),
    replace(JOB, combine_wire="fp8", hidden=144),
    replace(JOB, combine_wire="fp8", hidden=144, dtype="float32", layout="rank"),
    replace(JOB, tokens=(7, 0, 12, 5), ranks_per_node=2),
    replace(JOB, tokens=(7, 0, 12, 5), ranks_per_node=2, combine_wire="fp8", hidden=144),
    replace(JOB, tokens=(7, 4, 12, 5), ranks_per_node=1, combine_wire="fp8", hidden=144, layout="rank"),
]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


class _Reference:
    """Stands for a communicator: hands out what the reference says."""

    def __init__(self, job: Job, rank: int) -> None:
        given = [cases.inputs(job, source, CPU) for source in range(job.size)]
        x = [_numpy(each.x_TH) for each in given]
        if job.wire is not None:
            x = [reference.through_wire(each, job.dtype, job.wire) for each in x]
        self.job, self.rank = job, rank
        self.sent = [
            reference.dispatch(
                x,
                [each.ids_TK.numpy() for each in given],
                [each.weights_TK.numpy() for each in given] if job.weights else None,
                rank=owner,
                num_experts=job.num_experts,
                layout=job.layout,
                alignment=job.alignment,
                capacity=Oracle(job, 0, CPU).capacity,
            )
            for owner in range(job.size)
        ]
        self.oracles = [Oracle(job, owner, CPU) for owner in range(job.size)]

    def dispatch(self, *_: Any, capacity: int | None, **__: Any) -> Any:
        return self.output(self.rank, capacity)

    def output(self, rank: int, capacity: int | None) -> Any:
        class Out:
            pass

        out, sent, job = Out(), self.sent[rank], self.job
        kept = len(sent.origin)
        count = kept if capacity is None else capacity
        out.tokens = torch.full((count, job.hidden), float("nan")).to(job.torch_dtype)
        out.tokens[:kept] = torch.from_numpy(sent.tokens)
        for name in ("weights", "topk_idx", "tokens_per_expert", "offsets"):
            value = getattr(sent, name)
            setattr(out, name, None if value is None else torch.from_numpy(value))
        out.overflow = torch.tensor(sent.overflow, dtype=torch.int32)
        out.expert_offsets, out.expert_starts = out.offsets, functional.pad(out.offsets, (1, 0))
        return out

    def combine(self, weighted: bool) -> torch.Tensor:
        answers = [each.answer(self.output(each.rank, each.capacity).tokens) for each in self.oracles]
        weights = [each.weights for each in self.sent] if weighted else None
        totals = reference.combine(
            [_numpy(each) for each in answers],
            self.sent,
            list(self.job.tokens),
            dtype=self.job.dtype,
            weights=weights,
            ranks_per_node=self.job.ranks_per_node,
            wire=self.job.combine_wire,
        )
        return torch.from_numpy(totals[self.rank]).to(self.job.torch_dtype)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.layout}-{job.routing}-{job.slack}-{job.dtype}")
def test_oracle_is_the_reference(job: Job, seed: int) -> None:
    job = replace(job, seed=seed)
    for rank in range(job.size):
        found, like = Oracle(job, rank, CPU), _Reference(job, rank)
        out = found.dispatch(like)
        found.check_dispatch(out)
        found.check_combine("combine", like.combine(weighted=False))
        if job.layout == "expert":
            found.check_combine("weighted combine", like.combine(weighted=True), weighted=True)
        assert found.problems == []


def test_a_wrong_bit_is_found(seed: int) -> None:
    job = replace(JOB, seed=seed)
    found, like = Oracle(job, 0, CPU), _Reference(job, 0)
    out = found.dispatch(like)
    out.tokens.view(torch.int16)[3, 5] ^= 1
    found.check_dispatch(out)
    y_TH = like.combine(weighted=False)
    y_TH.view(torch.int16)[2, 1] ^= 1
    found.check_combine("combine", y_TH)
    assert len(found.problems) == 2 and "tokens" in found.problems[0] and "[3, 5]" in found.problems[0]
