"""Jobs of real size against the torch oracle, bit for bit, with all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu import harness, oracle
from tests.gpu.conftest import Pools
from tests.gpu.harness import GpuPool
from tests.gpu.oracle import DTYPES, Job


def _play(rank: int, world_size: int, some: list[Job]) -> list[str]:
    problems = []
    for job in some:
        with harness.communicator(**job.communicator) as comm:
            harness.poison()
            problems += oracle.play(comm, job, rank)
    return problems


def _check(pool: GpuPool, some: list[Job]) -> None:
    harness.assert_none(pool(_play, some))


def _unequal(size: int, most: int) -> tuple[int, ...]:
    """most, none, and what lies between."""
    return (most, 0, most // 3, most - 1)[:size] if size > 1 else (most,)


def _small(job: Job) -> Job:
    """A size that the CPU backend plays in moments, where the suite runs on it."""
    if not harness.on_cpu():
        return job
    return replace(job, tokens=tuple(min(t, 40) for t in job.tokens), hidden=min(job.hidden, 136))


@pytest.mark.parametrize("hidden", [1024, 2880, 3584, 4096, 6144, 7168])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_hidden(pool: Pools, size: int, hidden: int, seed: int) -> None:
    job = Job(tokens=_unequal(size, 1000), num_experts=16 * size, hidden=hidden, top_k=8, seed=seed)
    some = [job, replace(job, layout="rank"), replace(job, alignment=128, slack=1000)]
    _check(pool(size), [_small(each) for each in some])


@pytest.mark.parametrize("units", [1, 7, 129, 333, 895])
def test_odd_hidden(pool: Pools, most_ranks: int, units: int, seed: int) -> None:
    """Odd multiples of 16 bytes."""
    job = Job(
        tokens=_unequal(most_ranks, 500), num_experts=8 * most_ranks, hidden=8 * units, top_k=4, seed=seed
    )
    some = [
        job,
        replace(job, dtype="float32", hidden=4 * units),
        replace(job, layout="rank", dtype="float16"),
    ]
    _check(pool(most_ranks), [_small(each) for each in some])


@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8, 10, 16, 22])
def test_top_k(pool: Pools, most_ranks: int, top_k: int, seed: int) -> None:
    job = Job(
        tokens=_unequal(most_ranks, 777), num_experts=24 * most_ranks, hidden=1024, top_k=top_k, seed=seed
    )
    some = [job, replace(job, layout="rank"), replace(job, routing="holes", alignment=8, wide_ids=True)]
    _check(pool(most_ranks), [_small(each) for each in some])


@pytest.mark.parametrize("experts", [8, 16, 32, 60, 128, 256, 384, 512, 896])
def test_experts(pool: Pools, most_ranks: int, experts: int, seed: int) -> None:
    experts -= experts % most_ranks
    job = Job(tokens=_unequal(most_ranks, 900), num_experts=experts, hidden=1024, top_k=4, seed=seed)
    some = [job, replace(job, layout="rank"), replace(job, alignment=128), replace(job, slack=-50)]
    _check(pool(most_ranks), [_small(each) for each in some])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("routing", ["skewed", "one-rank", "one-expert", "holes", "empty"])
def test_routing(pool: Pools, size: int, routing: str, seed: int) -> None:
    job = Job(
        tokens=_unequal(size, 1500), num_experts=8 * size, hidden=2048, top_k=6, routing=routing, seed=seed
    )
    some = [job, replace(job, layout="rank"), replace(job, alignment=8, slack=64), replace(job, slack=-100)]
    _check(pool(size), [_small(each) for each in some])


@pytest.mark.parametrize("tokens", [1, 2, 31, 128, 129, 1023, 4096])
def test_tokens(pool: Pools, most_ranks: int, tokens: int, seed: int) -> None:
    """Every rank has the same count of tokens; then one rank alone has tokens; then one rank has none."""
    job = Job(tokens=(tokens,) * most_ranks, num_experts=64, hidden=1024, top_k=8, seed=seed)
    alone = (*(0,) * (most_ranks - 1), tokens)
    some = [job, replace(job, tokens=alone), replace(job, tokens=alone[::-1], layout="rank")]
    if most_ranks == 3:
        some = [replace(each, num_experts=63) for each in some]
    _check(pool(most_ranks), [_small(each) for each in some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    job = Job(
        tokens=_unequal(most_ranks, 1200),
        num_experts=8 * most_ranks,
        hidden=1536,
        top_k=6,
        dtype=dtype,
        seed=seed,
    )
    some = [
        job,
        replace(job, layout="rank"),
        replace(job, slack=10),
        replace(job, alignment=16, weights=False),
    ]
    _check(pool(most_ranks), [_small(each) for each in some])


def _on_each_count_of_sms(rank: int, world_size: int, job: Job) -> list[str]:
    """Compares each count of SMs with the oracle: results equal to it are equal to each other."""
    problems = []
    for count in harness.sm_counts():
        with harness.communicator(**{**job.communicator, "num_sms": count}) as comm:
            harness.poison()
            problems += [f"num_sms {count}: {text}" for text in oracle.play(comm, job, rank)]
    return problems


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_sms_gives_the_same_bits(pool: Pools, size: int, layout: str, seed: int) -> None:
    job = Job(
        tokens=_unequal(size, 1100), num_experts=16 * size, hidden=2880, top_k=8, layout=layout, seed=seed
    )
    harness.assert_none(pool(size)(_on_each_count_of_sms, _small(job)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_many_tokens(pool: Pools, size: int, layout: str, seed: int) -> None:
    """32768 tokens on some rank, top-8 of 256, hidden 4096."""
    job = Job(
        tokens=(32768, 20000, 1, 32767)[:size],
        num_experts=252 if size == 3 else 256,
        hidden=4096,
        top_k=8,
        layout=layout,
        seed=seed,
    )
    _check(pool(size), [_small(job)])


@pytest.mark.slow
def test_many_tokens_all_to_one_rank(pool: Pools, most_ranks: int, seed: int) -> None:
    job = Job(
        tokens=(16384,) * most_ranks,
        num_experts=64 * most_ranks,
        hidden=2048,
        top_k=8,
        routing="one-rank",
        seed=seed,
    )
    _check(pool(most_ranks), [_small(job), _small(replace(job, layout="rank"))])


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [8, 22])
def test_large_models(pool: Pools, most_ranks: int, top_k: int, seed: int) -> None:
    """4096 tokens a rank, hidden 7168, 896 experts (one less a rank where ranks do not divide them)."""
    job = Job(
        tokens=(4096,) * most_ranks,
        num_experts=896 - 896 % most_ranks,
        hidden=7168,
        top_k=top_k,
        seed=seed,
    )
    _check(pool(most_ranks), [_small(job), _small(replace(job, alignment=128, slack=0))])
