"""Formats of rows on their way: bit for bit what the contract says, and within the bound of the error, in all
ways to use them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moecomm.types import WIRE_FORMATS
from tests import oracle, reference
from tests.cases import Case
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.gpu.test_sizes import _play as play
from tests.multirank.catching import catch
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_dispatch_combine import check as check_small
from tests.oracle import DTYPES, opened

pytestmark = pytest.mark.usefixtures("cuda_only")  # the CPU backend has no other wire than the dtype


def small(size: int, dtype: str, seed: int, tokens: tuple[int, ...] = (9, 0, 12, 30), **wires: Any) -> Case:
    return Case(
        tokens=tokens[-size:],
        num_experts=4 * size,
        hidden=144,
        top_k=3,
        dtype=dtype,
        routing="holes",
        seed=seed,
        **wires,
    )


def large(size: int, hidden: int, seed: int, **wires: Any) -> Job:
    tokens = (1000, 0, 333, 999)[:size]
    return Job(tokens=tokens, num_experts=16 * size, hidden=hidden, top_k=8, seed=seed, **wires)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_cases_match_the_reference(pool: Pools, size: int, dtype: str, wire: str, seed: int) -> None:
    base = small(size, dtype, seed, (9, 0, 12), wire=wire)
    some = [replace(base, hidden=hidden) for hidden in (16, 48, 112, 128, 272)]
    some += [replace(base, layout="rank"), replace(base, alignment=8, slack=3), replace(base, slack=-2)]
    check_small(pool(size), some)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_special_values(pool: Pools, most_ranks: int, dtype: str, wire: str, seed: int) -> None:
    """NaN, infinities, subnormals and the largest numbers; an infinity takes its block with it."""
    size = min(2, most_ranks)
    base = Case(
        tokens=(20,) * size,
        num_experts=8,
        hidden=656,
        top_k=4,
        dtype=dtype,
        wire=wire,
        extremes=True,
        seed=seed,
    )
    check_small(pool(size), [base])


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("hidden", [1024, 2880, 3600, 4096, 7168])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_real_sizes(pool: Pools, size: int, hidden: int, wire: str, seed: int) -> None:
    job = large(size, hidden, seed, wire=wire)
    some = [job, replace(job, layout="rank"), replace(job, alignment=128, slack=100)]
    harness.assert_none(pool(size)(play, some))


# -- data and scales, in and out -----------------------------------------------------------------------------
def _handed_on(rank: int, world_size: int, job: Job, given: bool) -> list[str]:
    """dequantize=False hands on what the reference's quantisation gives; also where the caller quantised."""
    problems = []
    wire = str(job.wire)
    travels = WIRE_FORMATS[wire]
    with opened(job, rank) as (comm, known):
        every = [oracle.quantised(each.x_TH, wire) for each in known.all]
        if given:
            every = [(data, _other_scales(scales)) for data, scales in every]
        x: Any = every[rank] if given else known.own.x_TH
        blocks = -(-job.hidden // travels.scale_columns)
        harness.poison(64 << 20)
        out = comm.dispatch(
            x,
            known.own.ids_TK,
            known.own.weights_TK,
            layout=job.layout,
            alignment=job.alignment,
            capacity=known.capacity,
            dequantize=False,
        )
        count = known.kept if known.capacity is None else known.capacity
        if out.tokens.dtype != torch.float8_e4m3fn or tuple(out.tokens.shape) != (count, job.hidden):
            return [f"rank {rank}: tokens are {out.tokens.dtype} {tuple(out.tokens.shape)}"]
        if out.scales.dtype != travels.scales or tuple(out.scales.shape) != (count, blocks):
            return [f"rank {rank}: scales are {out.scales.dtype} {tuple(out.scales.shape)}"]
        data_NH = torch.cat([data.view(torch.uint8) for data, _ in every])
        scales_N = torch.cat([scales.view(torch.uint8) for _, scales in every])
        token_P = known.mine.token_P[: known.kept]
        real_P = token_P >= 0
        got = out.tokens[: known.kept].view(torch.uint8)
        want = data_NH[token_P.clamp_min(0)]
        if not torch.equal(got[real_P], want[real_P]):
            problems.append(f"rank {rank}: data differ in {int((got[real_P] != want[real_P]).sum())} places")
        got_scales = out.scales[: known.kept].view(torch.uint8)
        if not torch.equal(got_scales[real_P], scales_N[token_P.clamp_min(0)][real_P]):
            problems.append(f"rank {rank}: scales differ")
        if bool(got[~real_P].bitwise_and(0x7F).any()):
            problems.append(f"rank {rank}: an alignment row is not zero")
        if not bool(oracle.factors_of(out.scales)[: known.kept][~real_P].isfinite().all()):
            problems.append(f"rank {rank}: the scales of an alignment row are not finite")
        if not torch.equal(out.weights[: known.kept], known.weights_P()[: known.kept]):
            problems.append(f"rank {rank}: weights differ")
        # The handle serves combine, which travels in the dtype.
        if not given:
            rows_PH = oracle.dequantised(out.tokens, out.scales, job.torch_dtype, wire)
            known.check_combine("combine", comm.combine(known.answer(rows_PH), out.handle))
        # The caller's own (data, scales) also arrive dequantised.
        plain = comm.dispatch(x, known.own.ids_TK, alignment=job.alignment, layout=job.layout)
        data_NH = data_NH.view(torch.float8_e4m3fn)
        scales_N = scales_N.view(travels.scales)
        want = oracle.dequantised(data_NH, scales_N, job.torch_dtype, wire)[known.mine.token_P.clamp_min(0)]
        want[known.mine.token_P < 0] = 0
        if not torch.equal(plain.tokens, want):
            problems.append(f"rank {rank}: dequantised rows differ")
    return problems + known.problems


def _other_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales of the caller's own choice, not amax / 448: they must travel as they are."""
    more = torch.arange(scales.shape[1], device=scales.device) % 3
    if scales.dtype == torch.float32:
        return scales * (1 + more)
    return (scales.view(torch.uint8).int() + more).clamp_max(254).to(torch.uint8).view(scales.dtype)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("given", [False, True], ids=["quantised on the way", "by the caller"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_and_scales(pool: Pools, size: int, given: bool, wire: str, seed: int) -> None:
    job = Job.on(
        size, (299, 123, 0, 300), experts=8, hidden=1040, top_k=4, wire=wire, alignment=16, seed=seed
    )
    some = [job, replace(job, slack=9), replace(job, hidden=7168), replace(job, layout="rank", alignment=1)]
    for each in some:
        harness.assert_none(pool(size)(_handed_on, each, given))


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks("most_ranks")
def test_error_against_float64(rank: int, world_size: int, dtype: str, wire: str, seed: int) -> None:
    """The bounds are derived at reference.wire_error_bound."""
    job = Job.on(world_size, 200, experts=4, hidden=1024, top_k=2, dtype=dtype, wire=wire, seed=seed)
    with opened(job, rank) as (comm, known):
        out = known.dispatch(comm)
        sent = torch.cat([each.x_TH for each in known.all])[known.mine.token_P].double().cpu().numpy()
        error = np.abs(out.tokens.double().cpu().numpy() - sent)
        bound = reference.wire_error_bound(sent, dtype, wire)
        columns = reference.SCALE_COLUMNS[wire]
        amax = np.abs(sent.reshape(len(sent), -1, columns)).max(2).repeat(columns, 1)
        assert (error / bound).max(initial=0) <= 1
        most = reference.LARGEST_MOVE[wire] + torch.finfo(job.torch_dtype).eps / 2
        assert (error / amax).max(initial=0) <= most


# -- sums of a combine ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_in_fp8(pool: Pools, size: int, dtype: str, seed: int) -> None:
    """Combine alone travels so; the backward of a dispatch, which is a combine too, has sums in the dtype."""
    base = small(size, dtype, seed, combine_wire="fp8")
    some = [replace(base, hidden=hidden) for hidden in (16, 128, 272)]
    some += [replace(base, layout="rank"), replace(base, alignment=8, slack=-2), replace(base, wire="mxfp8")]
    check_small(pool(size), some)


@pytest.mark.parametrize("hidden", [2880, 7168])
@pytest.mark.parametrize("size", [2, 4])
def test_many_sums_in_fp8(pool: Pools, size: int, hidden: int, seed: int) -> None:
    job = large(size, hidden, seed, combine_wire="fp8")
    harness.assert_none(pool(size)(play, [job, replace(job, layout="rank"), replace(job, num_sms=5)]))


# -- gradients -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_in_narrow_formats(pool: Pools, size: int, dtype: str, wire: str, seed: int) -> None:
    """The backward of a combine without weights travels so; with weights, in the dtype."""
    base = small(size, dtype, seed, gradient_wire=wire)
    some = [replace(base, hidden=hidden) for hidden in (16, 272)]
    some += [replace(base, layout="rank"), replace(base, alignment=8, slack=-2)]
    some += [replace(base, wire="mxfp8"), replace(base, wire="fp8", combine_wire="fp8")]
    check_small(pool(size), some)


@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("size", [2, 4])
def test_many_gradients_in_narrow_formats(pool: Pools, size: int, wire: str, seed: int) -> None:
    job = large(size, 7168, seed, gradient_wire=wire)
    harness.assert_none(pool(size)(play, [job, replace(job, layout="rank"), replace(job, num_sms=5)]))


# -- arguments -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", WIRE_FORMATS)
@on_ranks("most_ranks")
def test_bad_pairs(rank: int, world_size: int, wire: str, seed: int) -> list[str]:
    job, problems = Job.on(world_size, 7, experts=2, hidden=272, top_k=2, wire=wire, seed=seed), []
    with opened(job, rank) as (comm, known):
        data_TH, scales = oracle.quantised(known.own.x_TH, wire)
        bad: dict[str, Any] = {
            "scales of another dtype": (data_TH, oracle.factors_of(scales).double()),
            "scales too few": (data_TH, scales[:, :-1].contiguous()),
            "data of another dtype": (data_TH.float(), scales),
            "no pair": (data_TH, scales, scales),
            "data without scales": data_TH,
        }
        for name, x in bad.items():
            error = catch(lambda given=x: comm.dispatch(given, known.own.ids_TK))
            assert error is not None and error.name == "InvalidArgument", f"{name}: {error}"
            harness.settled_error(comm)
            problems += oracle.play(comm, job, rank)
    return problems
