"""Thousands of random steps: every kind of call and size mixed, every result checked, no memory growing.

MOECOMM_SOAK_STEPS sets the number of steps (500 by default; 10000 for a release).
"""

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle, ranks
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.oracle import Oracle

STEPS = int(os.environ.get("MOECOMM_SOAK_STEPS", "500"))
SECONDS_A_STEP = 0.3  # generous: what a step with its check may take
WINDOW = 250  # steps between two looks at memory


def _communicators(size: int, seed: int, cuda: bool) -> list[Job]:
    """Returns one job for each communicator, with the largest count of tokens that it serves."""
    base = Job(tokens=(600,) * size, num_experts=16 * size, hidden=1024, top_k=8, seed=seed)
    some = [
        base,
        replace(base, num_experts=4 * size, hidden=264, top_k=3, dtype="float32", num_sms=5),
        replace(base, tokens=(3000,) * size, hidden=512, top_k=4, dtype="float16"),
        replace(base, tokens=(40,) * size, hidden=7168, top_k=2, dtype="float32"),
    ]
    if cuda:
        some.append(replace(base, hidden=1040, wire="fp8"))
    else:
        some = [replace(job, tokens=(20,) * size, hidden=16, num_sms=None) for job in some]
    return some


def _next(dice: random.Random, job: Job) -> Job:
    """A random job that the communicator of `job` can serve; the same on every rank."""
    most = job.tokens[0]
    kind = dice.random()
    if kind < 0.3:
        tokens = tuple(dice.choice((0, 1, 2, 3, most)) for _ in job.tokens)
    else:
        tokens = tuple(int(most * dice.random() ** 3) for _ in job.tokens)
    layout = dice.choice(("expert", "expert", "rank"))
    return replace(
        job,
        tokens=tokens,
        seed=dice.randrange(1 << 30),
        layout=layout,
        alignment=dice.choice((1, 1, 8, 128)) if layout == "expert" else 1,
        slack=dice.choice((None, None, 0, 17, 300, -5)),
        routing=dice.choice(("uniform", "uniform", "skewed", "holes", "one-rank", "one-expert", "empty")),
        weights=dice.random() < 0.8,
        wide_ids=dice.random() < 0.5,
    )


def _step(comm: Any, job: Job, rank: int, full: bool, dice: random.Random) -> list[str]:
    if full:
        return oracle.play(comm, job, rank)
    known = Oracle(job, rank, comm.device)
    async_op = dice.random() < 0.3
    out: Any = known.dispatch(comm, async_op=async_op)
    out = out.wait() if async_op else out
    known.check_dispatch(out)
    if known.problems:
        return known.problems
    for _ in range(dice.choice((0, 1, 2))):  # a handle may be used never, or often
        known.check_combine("combine", comm.combine(known.answer(out.tokens), out.handle))
    return known.problems


def _memory() -> tuple[int, int]:
    """(allocated by torch, in use on the device) in bytes."""
    if harness.on_cpu():
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def _soak(rank: int, world_size: int, seed: int, steps: int) -> tuple[list[str], list[tuple[int, int]]]:
    dice = random.Random(seed)  # the same on every rank
    jobs = _communicators(world_size, seed, not harness.on_cpu())
    comms = [harness.communicator(**job.communicator) for job in jobs]
    memory = []
    for step in range(steps):
        if step % WINDOW == WINDOW - 1:
            memory.append(_memory())
        which = dice.randrange(len(jobs))
        job, full = _next(dice, jobs[which]), dice.random() < 0.4
        problems = _step(comms[which], job, rank, full, dice)
        harness.settled_error(comms[which])  # an overflow of this step belongs to it alone
        if problems:
            return [f"step {step}: {text}" for text in problems], memory
        if dice.random() < 0.01:
            dist.barrier()
            comms[which].close()
            comms[which] = harness.communicator(**jobs[which].communicator)
    memory.append(_memory())
    for comm in comms:
        comm.close()
    return [], memory


@pytest.mark.slow
@pytest.mark.timeout(60 + STEPS * SECONDS_A_STEP * 2)
@pytest.mark.parametrize("size", [2, 4])
def test_random_steps(pool: Pools, size: int, seed: int) -> None:
    results = pool(size)(_soak, seed, STEPS, timeout=60 + STEPS * SECONDS_A_STEP)
    harness.assert_none([problems for problems, _ in results])
    for rank, (_, memory) in enumerate(results):
        allocated, used = zip(*memory, strict=True)
        print(f"rank {rank}: allocated {[a >> 20 for a in allocated]}, in use {[u >> 20 for u in used]} MiB")
        assert max(allocated) - allocated[0] < 8 << 20, allocated
        if not ranks.shares_its_gpus():
            assert max(used) - used[0] < 64 << 20, used
