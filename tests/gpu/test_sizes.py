"""Jobs of real size against the oracle, bit for bit, with all gradients."""

from dataclasses import replace
from typing import Any

import pytest

from tests import oracle
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.harness import RankPool
from tests.multirank.test_dispatch_combine import test_tokens_of_a_long_window  # noqa: F401
from tests.oracle import DTYPES


def _play(rank: int, world_size: int, some: list[Job]) -> list[str]:
    problems = []
    for job in some:
        with harness.communicator(**job.communicator) as comm:
            harness.poison()
            problems += oracle.play(comm, job, rank)
    return problems


def _check(pool: RankPool, job: Job, *changes: dict[str, Any]) -> None:
    """The job, and the job with each of the changes."""
    some = [job, *(replace(job, **each) for each in changes)]
    oracle.assert_none(pool(_play, [_small(each) for each in some]))


def _job(size: int, seed: int, most: int = 1000, **shape: Any) -> Job:
    """The ranks have most tokens, none, and what lies between."""
    tokens = (most, 0, most // 3, most - 1)[:size] if size > 1 else (most,)
    return Job(
        **{"tokens": tokens, "num_experts": 16 * size, "hidden": 1024, "top_k": 8, "seed": seed, **shape}
    )


def _small(job: Job) -> Job:
    """A size that the CPU backend plays in moments, where the suite runs on it."""
    if not harness.on_cpu():
        return job
    return replace(job, tokens=tuple(min(t, 40) for t in job.tokens), hidden=min(job.hidden, 136))


BY_RANK, ALIGNED, LOOSE = {"layout": "rank"}, {"alignment": 128}, {"slack": 1000, "alignment": 128}


@pytest.mark.parametrize("hidden", [8, 1032, 2880, 7160, 7168])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_hidden(pool: Pools, size: int, hidden: int, seed: int) -> None:
    """One unit of 16 bytes, odd multiples of it that are less and more than a chunk's, what is no power of
    two, and the largest of today's models."""
    narrow = [{"dtype": "float32", "hidden": hidden // 2}, {**BY_RANK, "dtype": "float16"}]
    _check(pool(size), _job(size, seed, hidden=hidden), BY_RANK, LOOSE, *narrow)


@pytest.mark.parametrize("experts", [8, 60, 256, 896])
def test_experts(pool: Pools, most_ranks: int, experts: int, seed: int) -> None:
    """Few a rank; no power of two; as many as a block has threads; more than that."""
    job = _job(most_ranks, seed, num_experts=experts - experts % most_ranks, top_k=4)
    _check(pool(most_ranks), job, BY_RANK, ALIGNED, {"slack": -50})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("routing", ["skewed", "one-rank", "one-expert", "holes", "empty"])
def test_routing(pool: Pools, size: int, routing: str, seed: int) -> None:
    job = _job(size, seed, most=1500, num_experts=8 * size, hidden=2048, top_k=6, routing=routing)
    _check(pool(size), job, BY_RANK, {"alignment": 8, "slack": 64}, {"slack": -100})


@pytest.mark.parametrize("tokens", [1, 31, 129, 4096])
def test_tokens(pool: Pools, most_ranks: int, tokens: int, seed: int) -> None:
    """Every rank has the same count of tokens; then one rank alone has tokens; then one rank has none."""
    job = _job(most_ranks, seed, tokens=(tokens,) * most_ranks)
    alone = (*(0,) * (most_ranks - 1), tokens)
    _check(pool(most_ranks), job, {"tokens": alone}, {"tokens": alone[::-1], **BY_RANK})


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    job = _job(most_ranks, seed, most=1200, hidden=1536, top_k=6, dtype=dtype)
    _check(pool(most_ranks), job, BY_RANK, {"slack": 10}, {"alignment": 16, "weights": False})


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_sms_gives_the_same_bits(pool: Pools, size: int, layout: str, seed: int) -> None:
    """Each count of SMs is compared with the oracle: results equal to it are equal to each other."""
    counts = [2, 3] if harness.on_cpu() else [2, 5, 24, 64, 132, None]
    job = _job(size, seed, most=1100, hidden=2880, layout=layout)
    _check(pool(size), job, *({"num_sms": count} for count in counts))


@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "num_experts", "num_sms"),
    [
        (600, 9000, 4, 16, 8),  # rows in two pieces, of which a stage does not hold one
        (5001, 520, 6, 256, 2),
        (9000, 64, 8, 2048, 66),
        (17000, 64, 20, 64, 30),  # chunks of more places than a list has
        (17000, 2056, 32, 256, 8),  # pipes whose lists have fewer tokens than a chunk
        (17000, 1024, 2, 256, 66),  # short rows, without pipes
    ],
)
def test_borders_of_kernels(
    pool: Pools, tokens: int, hidden: int, top_k: int, num_experts: int, num_sms: int, seed: int
) -> None:
    shape = {"hidden": hidden, "top_k": top_k, "num_experts": num_experts, "num_sms": num_sms}
    job = _job(2, seed, tokens=(tokens, tokens), **shape)
    _check(pool(2), job, BY_RANK, {"routing": "holes"}, {"routing": "one-rank"})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_many_tokens(pool: Pools, size: int, layout: str, seed: int) -> None:
    """32768 tokens on some rank, top-8 of 256, hidden 4096."""
    tokens = (32768, 20000, 1, 32767)[:size]
    _check(
        pool(size), _job(size, seed, tokens=tokens, num_experts=256 - 256 % size, hidden=4096, layout=layout)
    )


@pytest.mark.slow
def test_many_tokens_all_to_one_rank(pool: Pools, most_ranks: int, seed: int) -> None:
    shape = {"num_experts": 64 * most_ranks, "hidden": 2048, "routing": "one-rank"}
    _check(pool(most_ranks), _job(most_ranks, seed, tokens=(16384,) * most_ranks, **shape), BY_RANK)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [8, 22])
def test_large_models(pool: Pools, most_ranks: int, top_k: int, seed: int) -> None:
    """4096 tokens a rank, hidden 7168, 896 experts (one less a rank where ranks do not divide them)."""
    shape = {"num_experts": 896 - 896 % most_ranks, "hidden": 7168, "top_k": top_k}
    job = _job(most_ranks, seed, tokens=(4096,) * most_ranks, **shape)
    _check(pool(most_ranks), job, {"alignment": 128, "slack": 0})
