"""Streams: work starts after what the caller's stream holds, and nothing makes the host wait that need not.

`torch.cuda._sleep` holds a stream for a while. That an event after it has not happened when a call returns
proves that the call did not wait for the stream; no time is measured.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.overlap import SideStream
from tests import oracle
from tests.cases import Inputs
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, opened

pytestmark = pytest.mark.usefixtures("cuda_only")

LONG = 2_000_000_000  # clock cycles: about a second
SHORT = 50_000_000


def _job(size: int, seed: int, **options: Any) -> Job:
    return Job.on(
        size, (200, 0, 150, 100), experts=8, hidden=512, top_k=4, seed=seed, **{"slack": 10, **options}
    )


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def _sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _leaves(known: Oracle) -> Inputs:
    return Inputs(
        x_TH=known.own.x_TH.clone().requires_grad_(),
        ids_TK=known.own.ids_TK,
        weights_TK=known.own.weights_TK.clone().requires_grad_(),
    )


# -- the host never waits in the fixed mode ------------------------------------------------------------------
def _step(comm: Any, known: Oracle, own: Inputs, grad_TH: torch.Tensor) -> tuple[Any, torch.Tensor]:
    out = known.dispatch(comm, own)
    weights = out.weights if known.job.layout == "expert" else None
    y_TH = comm.combine(out.tokens * 2, out.handle, weights=weights)
    y_TH.backward(grad_TH)
    return out, y_TH


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_fixed_mode_never_waits(rank: int, world_size: int, layout: str, seed: int) -> list[str]:
    """Forward and backward under torch's sync debug mode, and behind a stream that is busy for a second."""
    with opened(_job(world_size, seed, layout=layout), rank) as (comm, known):
        grad_TH = known.grad_y(rank)
        for _ in range(2):  # the allocator gets its memory
            _step(comm, known, _leaves(known), grad_TH)
        torch.cuda.synchronize()
        dist.barrier()
        own = _leaves(known)
        with _sync_is_an_error():
            _step(comm, known, own, grad_TH)
        torch.cuda.synchronize()
        dist.barrier()
        own = _leaves(known)
        torch.cuda._sleep(LONG)
        asleep = _mark()
        out, _ = _step(comm, known, own, grad_TH)
        assert not asleep.query(), "forward and backward waited for the stream"
        known.check_dispatch(out)
    return known.problems


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_dropless_waits_for_its_own_count_only(rank: int, world_size: int, seed: int) -> list[str]:
    """A dropless dispatch waits for its row count, not for the device: another stream may be busy."""
    job = _job(world_size, seed, slack=None)
    with opened(job, rank) as (comm, known):
        for _ in range(2):
            oracle.play(comm, job, rank)
        torch.cuda.synchronize()
        dist.barrier()
        busy = torch.cuda.Stream()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(LONG)
            asleep = _mark()
        with _sync_is_an_error():
            out = known.dispatch(comm)
            y_TH = comm.combine(out.tokens, out.handle)
        assert not asleep.query(), "a dropless dispatch waited for another stream"
        known.check_dispatch(out)
        assert y_TH.shape == known.own.x_TH.shape, f"y is {tuple(y_TH.shape)}"
    return known.problems


# -- order with the caller's work ----------------------------------------------------------------------------
@pytest.mark.parametrize("slack", [None, 10], ids=["dropless", "fixed"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@on_ranks("most_ranks")
def test_work_is_in_order_with_the_callers(
    rank: int, world_size: int, slack: int | None, side: bool, async_op: bool, seed: int
) -> list[str]:
    """Inputs are written by a kernel that runs late; results are read by one right behind. No host sync."""
    job = _job(world_size, seed, slack=slack)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with harness.communicator(**job.communicator) as comm, torch.cuda.stream(stream):
        known = Oracle(job, rank, comm.device)
        problems: list[str] = []

        def wait(result: Any) -> Any:
            return result.wait() if async_op else result

        for turn in range(3):
            x_TH, ids_TK = torch.zeros_like(known.own.x_TH), torch.full_like(known.own.ids_TK, -1)
            weights_TK = torch.zeros_like(known.own.weights_TK)
            torch.cuda._sleep(SHORT * (1 + (rank + turn) % 3))
            x_TH.copy_(known.own.x_TH)
            ids_TK.copy_(known.own.ids_TK)
            weights_TK.copy_(known.own.weights_TK)
            own = Inputs(x_TH=x_TH, ids_TK=ids_TK, weights_TK=weights_TK)
            out = wait(known.dispatch(comm, own, async_op=async_op))
            tokens_PH = out.tokens.clone()
            if not async_op:
                # The caller may write to its inputs right after the call: that is later on the stream.
                for each in (x_TH, weights_TK):
                    each.fill_(float("nan"))
                ids_TK.fill_(-1)
            answer_PH = known.answer(tokens_PH)
            torch.cuda._sleep(SHORT)
            y_TH = wait(comm.combine(answer_PH, out.handle, async_op=async_op))
            y_TH = y_TH.clone()
            if not async_op:
                answer_PH.fill_(float("nan"))
            known.check_dispatch(replace(out, tokens=tokens_PH))
            known.check_combine("combine", y_TH)
            problems += [f"turn {turn}: {text}" for text in known.problems]
            known.problems = []
    return problems


@pytest.mark.parametrize("slack", [None, 10], ids=["dropless", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_the_caller_changes_streams(rank: int, world_size: int, slack: int | None, seed: int) -> list[str]:
    """The caller changes streams from call to call: operations of one communicator still run in turn."""
    job = _job(world_size, seed, slack=slack)
    with harness.communicator(**job.communicator) as comm:
        knowns = [Oracle(replace(job, seed=job.seed + i), rank, comm.device) for i in range(6)]
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        outs = []
        for i, known in enumerate(knowns):
            with torch.cuda.stream(streams[i % 3]):
                if i % 3 == rank % 3:
                    torch.cuda._sleep(SHORT)
                outs.append(known.dispatch(comm))
        ys = []
        for i, (known, out) in enumerate(zip(knowns, outs, strict=True)):
            streams[(i + 1) % 3].wait_stream(streams[i % 3])  # the caller's own affair: rows come from there
            with torch.cuda.stream(streams[(i + 1) % 3]):
                ys.append(comm.combine(known.answer(out.tokens), out.handle))
        torch.cuda.synchronize()
        problems = []
        for known, out, y_TH in zip(knowns, outs, ys, strict=True):
            known.check_dispatch(out)
            known.check_combine("combine", y_TH)
            problems += known.problems
        return problems


# -- async_op ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_async_follows_torch_distributed(rank: int, world_size: int, seed: int) -> list[str]:
    """Returns at once, runs beside the caller's stream, and wait() holds the stream and not the host."""
    job = _job(world_size, seed)

    def expect(good: bool, text: str) -> None:
        assert good, text

    with opened(job, rank, num_sms=24) as (comm, known):
        for _ in range(2):
            out = known.dispatch(comm, async_op=True).wait()
            comm.combine(known.answer(out.tokens), out.handle, async_op=True).wait()
        torch.cuda.synchronize()
        dist.barrier()
        expect(isinstance(comm.stream, torch.cuda.Stream), f"comm.stream is {type(comm.stream).__name__}")

        # What the caller queues after the call does not hold the operation back.
        work = known.dispatch(comm, async_op=True)
        expect(isinstance(work, moecomm.Work), f"async_op returns {type(work).__name__}")
        torch.cuda._sleep(LONG)
        asleep = _mark()
        comm.stream.synchronize()
        # The rows of few tokens are received from the first question on.
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            comm.stream.synchronize()
        expect(work.is_completed(), "not completed when comm.stream is done")
        expect(not asleep.query(), "the operation waited for what the caller queued after it")
        out = work.wait()
        expect(work.wait() is out, "wait() twice gives two results")
        expect(not asleep.query(), "wait() made the host wait")
        torch.cuda.synchronize()
        known.check_dispatch(out)

        # What was queued before does: and the call, and wait(), return meanwhile.
        dist.barrier()
        torch.cuda._sleep(LONG)
        asleep = _mark()
        with _sync_is_an_error():
            work = known.dispatch(comm, async_op=True)
            expect(not work.is_completed(), "completed before the caller's stream came that far")
            out = work.wait()
            y_TH = comm.combine(out.tokens, out.handle, async_op=True).wait()
            y_TH.mul_(1)
        expect(not asleep.query(), "the host waited for the caller's stream")
        known.check_dispatch(out)
    return known.problems


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_few_tokens_are_sent_and_then_received(rank: int, world_size: int, seed: int) -> list[str]:
    """A combine of few tokens that is begun with async_op has sent its sums, and waits for nobody, until
    somebody waits for it: the other ranks begin when it has."""
    job = _job(world_size, seed)
    with opened(job, rank) as (comm, known):
        out = known.dispatch(comm)
        answer_PH = known.answer(out.tokens)
        for first in range(world_size):
            torch.cuda.synchronize()
            dist.barrier()
            if rank == first:
                work = comm.combine(answer_PH, out.handle, async_op=True)
                comm.stream.synchronize()
            dist.barrier()
            if rank != first:
                work = comm.combine(answer_PH, out.handle, async_op=True)
            known.check_combine(f"combine, rank {first} first", work.wait())
    return known.problems


@pytest.mark.parametrize("slack", [None, 10], ids=["dropless", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_several_in_flight(rank: int, world_size: int, slack: int | None, seed: int) -> list[str]:
    """Several under way, waited for in another order, their outputs freed meanwhile; gradients too."""
    job = _job(world_size, seed, slack=slack)
    problems = []
    with harness.communicator(**{**job.communicator, "num_sms": 24}) as comm:
        knowns = [Oracle(replace(job, seed=job.seed + i), rank, comm.device) for i in range(5)]
        for _ in range(4):
            leaves = [_leaves(known) for known in knowns]
            works = [k.dispatch(comm, own, async_op=True) for k, own in zip(knowns, leaves, strict=True)]
            outs = {i: works[i].wait() for i in (3, 0, 4, 2, 1)}
            ways = [
                comm.combine(k.answer(outs[i].tokens), outs[i].handle, async_op=True)
                for i, k in enumerate(knowns)
            ]
            for i in (4, 1, 0, 3, 2):
                known, y_TH = knowns[i], ways[i].wait()
                known.check_dispatch(outs[i])
                known.check_combine("combine", y_TH)
                del outs[i]
                junk = torch.full((1 << 20,), float("nan"), device=comm.device)
                y_TH.backward(known.grad_y(rank))
                del junk, y_TH
                assert bool(leaves[i].x_TH.grad.isfinite().all()), f"operation {i}"
                problems += known.problems
                known.problems = []
            del works, ways
    return problems


# -- several communicators -----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks("size")
def test_several_communicators_on_streams_of_their_own(rank: int, world_size: int, seed: int) -> list[str]:
    """Runs each communicator on its own stream, with few SMs each, so that all fit the GPU at once."""
    some = [
        _job(world_size, seed),
        _job(world_size, seed + 1, layout="rank", dtype="float16"),
        replace(_job(world_size, seed + 2), hidden=1024, slack=0, alignment=8),
        replace(
            _job(world_size, seed + 3),
            tokens=(7,) * world_size,
            num_experts=world_size,
            top_k=1,
            dtype="float32",
        ),
    ]
    steps = 8
    comms = [harness.communicator(**{**job.communicator, "num_sms": 16}) for job in some]
    streams = [torch.cuda.Stream() for _ in some]
    problems: list[str] = []
    for step in range(steps):
        knowns = [Oracle(replace(job, seed=job.seed + step), rank, comms[0].device) for job in some]
        torch.cuda.synchronize()

        def on_each(call: Callable[[int], Any]) -> list[Any]:
            results = []
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results.append(call(i))
            return results

        outs = on_each(lambda i, k=knowns: k[i].dispatch(comms[i]))
        ys = on_each(lambda i, k=knowns, o=outs: comms[i].combine(k[i].answer(o[i].tokens), o[i].handle))
        torch.cuda.synchronize()
        for known, out, y_TH in zip(knowns, outs, ys, strict=True):
            known.check_dispatch(out)
            known.check_combine("combine", y_TH)
            problems += known.problems
    for comm in comms[1::2] + comms[::2]:
        comm.close()
    return problems


def _beside_products(rank: int, world_size: int, job: Job) -> list[str]:
    """Transfers beside products have the bits of those that have nothing beside them."""
    problems = []
    with opened(job, rank) as (comm, known):
        out = known.dispatch(comm)
        rows_PH = known.answer(out.tokens)
        factor = torch.randn(2048, 2048, device=comm.device)
        transfers: dict[str, Callable[[], torch.Tensor]] = {
            "redispatch": lambda: comm.redispatch(known.own.x_TH, out.handle),
            "combine": lambda: comm.combine(rows_PH, out.handle),
        }
        for step in range(10):
            for name, transfer in transfers.items():
                with (side := SideStream(comm)):
                    moved = transfer()
                for _ in range(4):
                    factor = (factor @ factor).clamp(-1, 1)
                side.join(moved)
                if not torch.equal(moved, transfer()):
                    problems.append(f"rank {rank}: {name} {step} beside products")
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("size", [2, 4])
def test_beside_products_with_few_connections(pool: Pools, size: int, connections: str, seed: int) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM sets it, what is put on any stream of a process
    reaches the GPU in the order of the calls."""
    job = Job(tokens=(700,) * size, num_experts=4 * size, hidden=512, top_k=4, seed=seed)
    ranks = pool(size, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    harness.assert_none(ranks(_beside_products, job))
