"""Dispatch, combine and their gradients against the oracle, bit for bit."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moecomm
from tests import cases, oracle, ranks
from tests.cases import Case
from tests.multirank.conftest import Pools
from tests.multirank.harness import RankPool
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, opened
from tests.reference import DTYPES

SIZES = [1, 2, 3, 4]


def play_here(rank: int, world_size: int, some: list[Case], gradients: bool = True) -> list[str]:
    """Cases that follow each other and ask for the same communicator share one."""
    problems = []
    for arguments, alike in itertools.groupby(some, lambda case: case.communicator):
        ranks.poison(8 << 20)
        with ranks.communicator(**arguments) as comm:
            assert (comm.rank, comm.size) == (rank, world_size)
            assert comm.device.type == ranks.device().type
            assert comm.num_local_experts == arguments["num_experts"] // world_size
            for case in alike:
                problems += oracle.play(comm, case, rank, gradients=gradients)
    return problems


def check(pool: RankPool, some: list[Case], *, gradients: bool = True) -> None:
    if pool.ranks_per_node is not None:
        some = [replace(case, ranks_per_node=pool.ranks_per_node) for case in some]
    oracle.assert_none(pool(play_here, some, gradients))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, dtype) for size in (2, 3) for dtype in DTYPES), *((size, "bfloat16") for size in (1, 4, 7))],
)
def test_layouts_alignments_and_capacities(pool: Pools, size: int, dtype: str, seed: int) -> None:
    check(pool(size), cases.layouts_alignments_and_capacities(size, dtype, seed))


@pytest.mark.parametrize("size", SIZES[1:])
def test_top_k(pool: Pools, size: int, seed: int) -> None:
    some = []
    for top_k in (1, 2, 8, 22, 32):
        base = Case.on(
            size, cases.unequal_tokens(size, 9, seed), experts=32, hidden=4, top_k=top_k, seed=seed
        )
        wide = replace(base, layout="rank", dtype="bfloat16", hidden=8)
        some += [base, replace(base, routing="holes"), wide]
    check(pool(size), some)


@pytest.mark.parametrize("size", SIZES)
def test_all_tokens_to_one_rank(pool: Pools, size: int, seed: int) -> None:
    check(pool(size), cases.all_tokens_to_one_rank(size, seed))


@pytest.mark.parametrize("size", SIZES)
def test_nothing_to_do(pool: Pools, size: int, seed: int) -> None:
    check(pool(size), cases.nothing_to_do(size, seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_sizes(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    """A row is any multiple of 16 bytes, also one that fits no vector width or block of the kernels."""
    some = []
    for blocks in (1, 3, 7, 17, 31, 65, 129):
        base = Case.on(
            most_ranks,
            cases.unequal_tokens(most_ranks, 10, seed),
            experts=2,
            hidden=blocks * 16 // getattr(torch, dtype).itemsize,
            top_k=min(4, 2 * most_ranks),
            dtype=dtype,
            routing="holes",
            seed=seed,
        )
        some += [base, replace(base, layout="rank")]
    check(pool(most_ranks), some)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_rows(pool: Pools, dtype: str, seed: int) -> None:
    """Large enough for the recycled outputs and the streaming stores."""
    base = Case(tokens=(300, 411), num_experts=8, hidden=2048, top_k=4, dtype=dtype, num_sms=2, seed=seed)
    check(pool(2), [base, replace(base, layout="rank", num_sms=1)])


@on_ranks(2)
def test_tokens_of_a_long_window(rank: int, world_size: int) -> None:
    """Moves 65 536 tokens of each rank to eight of 64 experts and back, half of a window of 131 072. A row
    tells its source and token, in digits that bfloat16 holds, and so does its sum. On GPUs the rows of the
    output take 7.5 GB, with more than 2^31 elements."""
    tokens, top_k, experts = 65_536, 8, 64
    hidden = 16 if ranks.on_cpu() else 7168

    def brought(source: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers_T = torch.arange(tokens, device=ranks.device()) + source * tokens
        digits_TH = torch.stack([numbers_T // 128**i % 128 for i in range(4)], dim=1).repeat(1, hidden // 4)
        choices_K = torch.arange(0, experts, experts // top_k, device=ranks.device())
        return digits_TH.bfloat16(), (numbers_T * numbers_T // 7).unsqueeze(1).add(choices_K) % experts

    every = [brought(source) for source in range(world_size)]
    x_TH, ids_TK = every[rank]
    sizes = {"num_experts": experts, "hidden": hidden, "top_k": top_k, "max_tokens": tokens}
    with ranks.communicator(**sizes, dtype=torch.bfloat16) as comm:
        out = comm.dispatch(x_TH, ids_TK)
        first, end = rank * comm.num_local_experts, 0
        for expert in range(comm.num_local_experts):
            want = [x[(ids == first + expert).any(1)] for x, ids in every]
            begin, end = end, end + sum(map(len, want))
            assert int(out.offsets[expert]) == end
            assert torch.equal(out.tokens[begin:end], torch.cat(want)), f"expert {first + expert}"
        assert len(out.tokens) == end, f"{len(out.tokens)} rows, expected {end}"
        assert torch.equal(comm.combine(out.tokens, out.handle), top_k * x_TH)


@pytest.mark.parametrize("size", SIZES)
def test_many_steps_on_one_communicator(pool: Pools, size: int, seed: int) -> None:
    """Steps on one communicator are independent: results show nothing of an earlier step."""
    some = cases.many_steps(size, seed)
    assert all(case.communicator == some[0].communicator for case in some)
    check(pool(size), some)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plans_are_reused_only_where_every_rank_repeats_its_ids(pool: Pools, size: int, seed: int) -> None:
    """Each rank draws its ids from two sets at each step: repeated and fresh ids occur in all mixtures."""
    rng = np.random.default_rng(seed)
    base = Case(tokens=(7,) * size, num_experts=2 * size, hidden=4, top_k=2, routing="holes")
    some = [
        replace(
            base,
            seed=seed + step,
            id_seeds=tuple(int(each) for each in rng.integers(0, 2, size)),
            layout=("expert", "rank")[int(rng.integers(0, 4)) == 0],
            slack=None if rng.random() < 0.7 else 4,
            weights=bool(rng.random() < 0.5),
        )
        for step in range(40)
    ]
    check(pool(size), some)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(pool: Pools, most_ranks: int, dtype: str, seed: int) -> None:
    """Infinities, NaN, subnormals, and sums that overflow the dtype but not the type they run in."""
    size = min(2, most_ranks)
    base = Case(tokens=(20,) * size, num_experts=8, hidden=40, top_k=4, dtype=dtype, extremes=True, seed=seed)
    check(pool(size), [base, replace(base, layout="rank")])


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_handles_serve_in_any_order(rank: int, world_size: int, seed: int) -> None:
    """Handles of earlier dispatches serve combines and backwards in any order that all ranks share."""
    tokens = (8,) * world_size
    base = Case(tokens=tokens, num_experts=2 * world_size, hidden=8, top_k=2, routing="holes")
    some = [cases.inputs(replace(base, seed=seed + i), rank, torch.device("cpu")) for i in range(5)]
    with moecomm.Communicator(**base.communicator) as comm:
        inputs = [own.x_TH.requires_grad_() for own in some]
        outs = [comm.dispatch(x_TH, own.ids_TK) for own, x_TH in zip(some, inputs, strict=True)]
        combined = {i: comm.combine(outs[i].tokens, outs[i].handle) for i in (3, 0, 4, 2, 1, 3)}
        for i in (1, 4, 0, 3, 2):
            combined[i].sum().backward()
        for i, own in enumerate(some):
            count_T1 = (own.ids_TK >= 0).sum(1, keepdims=True)
            assert torch.allclose(combined[i].detach(), inputs[i].detach() * count_T1, rtol=1e-5)
            assert torch.equal(inputs[i].grad, count_T1.expand_as(inputs[i]).float())


@pytest.mark.parametrize("in_window", [False, True], ids=["copied", "in the window"])
@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size")
def test_rows_are_not_overwritten_while_peers_read(
    rank: int, world_size: int, in_window: bool, seed: int
) -> None:
    """Inputs are filled, dispatched and dropped in turn, every other time with a combine, now and then late.
    No rank reads what comes later."""
    case = Case.on(world_size, 16, experts=2, hidden=512, top_k=2, weights=False, seed=seed)
    rng = np.random.default_rng([case.seed, rank])
    some = [replace(case, seed=case.seed + i) for i in range(5)]
    wants = [each.expected(rank) for each in some]
    inputs = [torch.from_numpy(each.x(rank)) for each in some]
    ids = [torch.from_numpy(each.ids(rank)) for each in some]
    with moecomm.Communicator(**{**case.communicator, "max_tokens": 2 * case.tokens[0]}) as comm:
        for step in range(120):
            count = case.tokens[rank] + 3
            inside = comm.empty_input(count) if in_window else torch.empty(count, case.hidden)
            # Rows from the middle of the input are a view into the window as well.
            part_TH = inside[2 : 2 + case.tokens[rank]]
            part_TH.copy_(inputs[step % 5])
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.002)
            out = comm.dispatch(part_TH, ids[step % 5])
            del inside, part_TH
            cases.assert_same_bits(cases.to_numpy(out.tokens), wants[step % 5].tokens, f"step {step}")
            if step % 2:
                y_TH = comm.combine(out.tokens, out.handle)
                torch.testing.assert_close(y_TH, inputs[step % 5] * case.top_k)


@on_ranks(3)
def test_several_combines_leave_the_input_alone(rank: int, world_size: int, seed: int) -> list[str]:
    """Rows that peers send back, to either of the sections that take turns, leave the input in the window."""
    case = Case(tokens=(16,) * 3, num_experts=6, hidden=512, top_k=2, seed=seed)
    with opened(case, rank) as (comm, known):
        x_TH = comm.empty_input(case.tokens[rank])
        x_TH.copy_(known.own.x_TH)
        out = known.dispatch(comm, replace(known.own, x_TH=x_TH))
        for turn in range(3):
            known.check_combine(f"combine {turn}", comm.combine(known.answer(out.tokens), out.handle))
        dist.barrier()  # who is late has sent its rows, too
        return known.problems + ([] if torch.equal(x_TH, known.own.x_TH) else [f"rank {rank}: x has changed"])


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_several_communicators_at_once(rank: int, world_size: int, widest: str, seed: int) -> list[str]:
    """Dispatch on all communicators, then combine in another order; some serve on when others have closed."""
    some = [
        Case(tokens=(5,) * world_size, num_experts=2 * world_size, hidden=8, top_k=2, seed=seed),
        Case.on(world_size, 9, experts=4, hidden=24, top_k=3, dtype="bfloat16", layout="rank", seed=seed),
        Case.on(
            world_size,
            cases.unequal_tokens(world_size, 7, seed),
            experts=1,
            hidden=8,
            top_k=1,
            dtype=widest,
            seed=seed,
        ),
    ]
    some = some * 2
    comms = [ranks.communicator(**case.communicator) for case in some]
    knowns = [Oracle(case, rank, comm.device) for comm, case in zip(comms, some, strict=True)]
    outs = [known.dispatch(comm) for comm, known in zip(comms, knowns, strict=True)]
    for comm, known, out in list(zip(comms, knowns, outs, strict=True))[::-1]:
        known.check_dispatch(out)
        known.check_combine("combine", comm.combine(known.answer(out.tokens), out.handle))
    problems = [text for known in knowns for text in known.problems]
    for comm in comms[1::2]:
        comm.close()
    for comm, case in zip(comms[::2], some[::2], strict=True):
        problems += oracle.play(comm, case, rank)
        comm.close()
    return problems


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size")
def test_two_subgroups_and_the_world(rank: int, world_size: int, seed: int) -> list[str]:
    """Ranks with even and with odd numbers have a communicator each, and all of them share a third."""
    case = Case(tokens=(8, 3, 0, 7)[:world_size], num_experts=12, hidden=16, top_k=3, seed=seed)
    halves = [list(range(first, world_size, 2)) for first in range(2)]
    groups = [dist.new_group(members) for members in halves]
    mine = halves[rank % 2]
    part = replace(case, tokens=tuple(case.tokens[r] for r in mine), seed=case.seed + rank % 2)
    with (
        ranks.communicator(group=groups[rank % 2], **part.communicator) as some,
        ranks.communicator(**case.communicator) as everybody,
    ):
        assert (some.rank, some.size) == (rank // 2, len(mine))
        return oracle.play(some, part, rank // 2) + oracle.play(everybody, case, rank)


@on_ranks("most_ranks")
def test_stats_count_calls_rows_and_bytes(rank: int, world_size: int, seed: int) -> None:
    tokens = (10, 4, *(0,) * world_size)[:world_size]
    case = Case(tokens=tokens, num_experts=2 * world_size, hidden=8, top_k=2, seed=seed)
    with opened(case, rank) as (comm, known):
        for step in range(4):
            if step == 1:
                ranks.synchronize()
                comm.reset_stats()
                assert comm.stats()["dispatch_calls"] == 0
            out = known.dispatch(comm)
            rows_PH = known.answer(out.tokens)
            comm.combine(rows_PH, out.handle)
            comm.combine(rows_PH, out.handle, weights=out.weights)
        ranks.synchronize()
        stats = comm.stats()
    want = case.expected(rank)
    far = {(source, token) for row in want.origin for source, token, _ in row if source != rank}
    assert stats["dispatch_calls"] == 3 and stats["combine_calls"] == 6
    assert stats["rows_in"] == 3 * case.tokens[rank]
    if ranks.on_cpu():
        assert stats["rows_out"] == 3 * len(want.origin)
        assert stats["bytes_wire"] == (3 + 6) * len(far) * case.hidden * 4
        assert 0 <= stats["wait_seconds"] <= stats["dispatch_seconds"] + stats["combine_seconds"]


@on_ranks("most_ranks")
def test_rows_that_a_capacity_left_out_do_not_count_as_received(
    rank: int, world_size: int, seed: int
) -> None:
    """Rank 0 is brought more rows than the capacity, and counts the capacity."""
    case = Case(tokens=(5,) * world_size, num_experts=world_size, hidden=8, top_k=1, routing="one-expert")
    with opened(replace(case, seed=seed, slack=-2), rank) as (comm, known):
        known.check_dispatch(known.dispatch(comm))
        ranks.synchronize()
        assert comm.stats()["rows_out"] == (5 * world_size - 2 if rank == 0 else 0)


@on_ranks("most_ranks")
def test_a_slow_rank_is_seen_by_the_others(rank: int, world_size: int, seed: int) -> None:
    case = Case(tokens=(10,) * world_size, num_experts=2 * world_size, hidden=8, top_k=2, seed=seed)
    slow = 1
    with opened(case, rank) as (comm, known):
        known.dispatch(comm)
        ranks.synchronize()
        dist.barrier()
        comm.reset_stats()
        assert comm.stats()["late_seconds"] == [0.0] * world_size
        for _ in range(3):
            if rank == slow:
                time.sleep(0.2)
            known.dispatch(comm)
            ranks.synchronize()
            dist.barrier()
        late = comm.stats()["late_seconds"]
    assert len(late) == world_size and min(late) >= 0
    if rank != slow < world_size:
        assert late[slow] > 0.3 and late.index(max(late)) == slow, late


@on_ranks(3)
def test_rows_are_copied_where_others_pull_them_and_nowhere_else(
    rank: int, world_size: int, seed: int
) -> None:
    """The bytes that each call of this rank copies are those that it has to."""
    case = Case(tokens=(12, 7, 0), num_experts=6, hidden=16, top_k=2, seed=seed)
    needed = {
        (source, token)
        for other in range(world_size)
        for row in case.expected(other).origin
        for source, token, _ in row
        if source == rank != other
    }
    row_bytes = case.hidden * 4
    assert needed or case.tokens[rank] == 0

    def count(what: str, want: int, call: Callable[[], Any]) -> Any:
        before = comm.stats()["bytes_staged"]
        result = call()
        assert comm.stats()["bytes_staged"] - before == want * row_bytes, what
        return result

    with opened(case, rank) as (comm, known):
        count("dispatch", len(needed), lambda: known.dispatch(comm))
        x_TH = comm.empty_input(case.tokens[rank])
        x_TH.copy_(known.own.x_TH)
        placed = replace(known.own, x_TH=x_TH.requires_grad_())
        out = count("dispatch from the window", 0, lambda: known.dispatch(comm, placed))
        rows_PH = known.answer(out.tokens)
        y_TH = count("combine", 0, lambda: comm.combine(rows_PH, out.handle, weights=out.weights))
        # The gradient of y goes the way of a dispatch, that of x the way of a combine.
        count("backward", len(needed), lambda: y_TH.sum().backward())
