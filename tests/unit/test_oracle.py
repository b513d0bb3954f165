"""The torch oracle of tests/gpu against the loops of tests/reference.py, on the CPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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


class _Reference:
    """Stands for a communicator: hands out what the reference says."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.sent = [job.expected(owner) for owner in range(job.size)]
        self.oracles = [Oracle(job, owner, CPU) for owner in range(job.size)]

    def dispatch(self, *_: Any, capacity: int | None, **__: Any) -> Any:
        return self.output(self.rank, capacity)

    def output(self, rank: int, capacity: int | None) -> Any:
        sent, job = self.sent[rank], self.job
        kept = len(sent.origin)
        tokens = torch.full((kept if capacity is None else capacity, job.hidden), torch.nan)
        tokens = tokens.to(job.torch_dtype)
        tokens[:kept] = torch.from_numpy(sent.tokens)
        names = ("weights", "topk_idx", "tokens_per_expert", "offsets")
        others = {name: cases.tensor(getattr(sent, name)) for name in names}
        if others["topk_idx"] is not None:
            behind = (0, 0, 0, len(tokens) - kept)
            others["topk_idx"] = functional.pad(others["topk_idx"], behind, value=-1)
        starts = functional.pad(others["offsets"], (1, 0))
        others |= {"expert_offsets": others["offsets"], "expert_starts": starts}
        others["overflow"] = torch.tensor(sent.overflow, dtype=torch.int32)
        return SimpleNamespace(tokens=tokens, **others)

    def combine(self, weighted: bool) -> torch.Tensor:
        answers = [each.answer(self.output(each.rank, each.capacity).tokens) for each in self.oracles]
        totals = reference.combine(
            [cases.to_numpy(each) for each in answers],
            self.sent,
            list(self.job.tokens),
            dtype=self.job.dtype,
            weights=[each.weights for each in self.sent] if weighted else None,
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
