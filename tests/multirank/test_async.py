"""async_op: operations under way, several at a time, waited for in any order, and gradients through them."""

import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from tests import cases
from tests.cases import Case
from tests.multirank.catching import catch, refused
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle


def _combines(comm: Any, known: Oracle, out: Any) -> Any:
    """Begins a plain combine and one with weights; the function returned waits and checks both."""
    rows_PH = known.answer(out.tokens)
    weighted = known.job.layout == "expert" and known.job.weights
    works = [comm.combine(rows_PH, out.handle, async_op=True)]
    if weighted:
        works.append(comm.combine(rows_PH, out.handle, weights=out.weights, async_op=True))

    def check() -> list[str]:
        known.check_dispatch(out)
        for work, by_weights in zip(works, (False, True), strict=False):
            known.check_combine("combine", work.wait(), weighted=by_weights)
        return known.problems

    return check


@pytest.mark.parametrize(("size", "backwards"), [(1, True), (3, False), (3, True)])
@on_ranks("size")
def test_several_in_flight(rank: int, world_size: int, backwards: bool, seed: int) -> list[str]:
    base = Case(tokens=(9, 5, 7)[:world_size], num_experts=2 * world_size, hidden=16, top_k=2, seed=seed)
    base = replace(base, tokens=(9, *base.tokens[1:]))
    some = [
        replace(
            base,
            seed=seed + i,
            layout=("expert", "rank")[i % 2],
            wide_ids=i % 3 == 0,
            slack=(None, 2)[i == 3],
        )
        for i in range(5)
    ]
    order = list(reversed(range(len(some)))) if backwards else list(range(len(some)))
    with moecomm.Communicator(**some[0].communicator) as comm:
        works = [cases.dispatch(comm, case, rank, async_op=True) for case in some]
        assert all(isinstance(work, moecomm.Work) for work in works)
        outs: dict[int, Any] = {i: works[i].wait() for i in order}
        assert all(work.is_completed() for work in works)
        # wait() twice is the same object, and a finished operation stays finished.
        assert all(works[i].wait() is outs[i] for i in order)
        # All ranks start the combines in one order, whatever order they waited in.
        knowns = [Oracle(case, rank, comm.device) for case in some]
        checks = [_combines(comm, knowns[i], outs[i]) for i in range(len(some))]
        return [text for i in order for text in checks[i]()]


@on_ranks(3)
def test_mixed_with_synchronous_calls(rank: int, world_size: int, seed: int) -> list[str]:
    """Synchronous calls queue up behind what is under way, on two communicators at once."""
    base = Case(tokens=(8,) * 3, num_experts=6, hidden=8, top_k=2, seed=seed)
    some = [base, replace(base, dtype="bfloat16", hidden=24), replace(base, seed=seed + 1, layout="rank")]
    problems: list[str] = []
    with (
        moecomm.Communicator(**some[0].communicator) as left,
        moecomm.Communicator(**some[1].communicator) as right,
    ):
        for _ in range(3):
            works = [
                cases.dispatch(comm, case, rank, async_op=True)
                for comm, case in ((left, some[0]), (right, some[1]))
            ]
            sync = cases.dispatch(left, some[2], rank)
            for comm, case, out in (
                (right, some[1], works[1].wait()),
                (left, some[0], works[0].wait()),
                (left, some[2], sync),
            ):
                problems += _combines(comm, Oracle(case, rank, comm.device), out)()
    return problems


def _gradients(comm: Any, case: Case, rank: int, async_op: bool) -> list[torch.Tensor]:
    x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
    weights_TK = torch.from_numpy(case.topk_weights(rank)).requires_grad_()
    ids_TK = torch.from_numpy(case.ids(rank))

    def wait(result: Any) -> Any:
        return result.wait() if async_op else result

    first = comm.dispatch(x_TH, ids_TK, weights_TK, async_op=async_op)
    second = comm.dispatch(x_TH * 2, ids_TK, weights_TK, async_op=async_op)
    outs = [wait(first), wait(second)]
    parts = [
        comm.combine(out.tokens.sin(), out.handle, weights=out.weights, async_op=async_op) for out in outs
    ]
    y_TH = wait(parts[1]) + 3 * wait(parts[0])
    y_TH.backward(torch.from_numpy(case.grad_y(rank)))
    return [y_TH.detach(), x_TH.grad, weights_TK.grad]


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_gradients_through_work(rank: int, world_size: int, seed: int) -> None:
    tokens = (6,) * world_size
    case = Case(tokens=tokens, num_experts=3 * world_size, hidden=8, top_k=2, seed=seed, routing="holes")
    with moecomm.Communicator(**case.communicator) as comm:
        plain, waited = (_gradients(comm, case, rank, async_op) for async_op in (False, True))
    torch.testing.assert_close(waited, plain, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_the_call_does_not_wait_for_peers(rank: int, world_size: int, seed: int) -> list[str]:
    """The call returns while a peer has not come; the caller works on meanwhile."""
    case = Case(tokens=(4, 4), num_experts=2, hidden=8, top_k=2, seed=seed)
    with moecomm.Communicator(**case.communicator) as comm:
        if rank == 0:
            work = cases.dispatch(comm, case, rank, async_op=True)
            assert not work.is_completed(), "completed before the other rank had come"
            dist.barrier()
        else:
            dist.barrier()  # rank 0 has returned from its call by now, and this rank has not made its own
            work = cases.dispatch(comm, case, rank, async_op=True)
        out = work.wait()
        assert work.is_completed()
        return _combines(comm, Oracle(case, rank, comm.device), out)()


@on_ranks(3)
def test_an_error_comes_from_wait(rank: int, world_size: int, seed: int) -> list[str]:
    """An error of one operation reaches its wait(), on all ranks; those before and after are untouched."""
    case = Case(tokens=(4, 4, 4), num_experts=3, hidden=8, top_k=2, seed=seed)
    with moecomm.Communicator(**case.communicator) as comm:
        good = cases.dispatch(comm, case, rank, async_op=True)
        bad_ids = torch.full((case.tokens[rank], case.top_k), 99 if rank == 1 else -1)
        bad = comm.dispatch(torch.from_numpy(case.x(rank)), bad_ids, async_op=True)
        after = cases.dispatch(comm, case, rank, async_op=True)
        for _ in range(2):
            refused(bad.wait, "topk_idx[0, 0] is 99", name="InvalidRouting")
        good.wait()
        return _combines(comm, Oracle(case, rank, comm.device), after.wait())()


@on_ranks(2)
def test_close_waits_for_what_is_under_way(rank: int, world_size: int, seed: int) -> None:
    """close() lets what is under way finish; its result can still be fetched."""
    case = Case(tokens=(4, 4), num_experts=2, hidden=8, top_k=2, seed=seed)
    comm = moecomm.Communicator(**case.communicator)
    work = cases.dispatch(comm, case, rank, async_op=True)
    comm.close()
    assert work.is_completed()
    assert len(work.wait().tokens) == len(case.expected(rank).origin)


@on_ranks(2)
def test_check_includes_what_is_under_way(rank: int, world_size: int, seed: int) -> None:
    """So that ranks come to the same result, whichever is ahead."""
    case = Case(tokens=(4, 4), num_experts=2, hidden=8, top_k=2, seed=seed, slack=-1)
    with moecomm.Communicator(**case.communicator) as comm:
        time.sleep(0.3 * rank)
        work = cases.dispatch(comm, case, rank, async_op=True)
        time.sleep(0.3 * rank)
        refused(comm.check, "rows past it were left out", name="CapacityExceeded")
        comm.check()
        work.wait()


@pytest.mark.parametrize("comes", [True, False])
@on_ranks(2)
def test_close_and_an_operation_of_another_thread(rank: int, world_size: int, comes: bool, seed: int) -> None:
    """It is waited for as well, and gives up if the other rank does not come."""
    case = Case(tokens=(4, 4), num_experts=2, hidden=8, top_k=2, seed=seed)
    comm = moecomm.Communicator(**case.communicator)
    caught: list[Any] = []
    thread = threading.Thread(target=lambda: caught.append(catch(lambda: cases.dispatch(comm, case, rank))))
    dist.barrier()
    if rank == 0 or comes:
        time.sleep(0.1 * rank)
        thread.start()
        while rank == 0 and not comm._open()._order._running.locked():
            time.sleep(0.01)
        if rank == 0:
            comm.close()
        thread.join(10)
        assert not thread.is_alive()
        name = caught[0] and caught[0].name
        assert name == (None if comes else "CommunicatorClosed"), caught
    dist.barrier()
    comm.close()


@on_ranks(2)
def test_close_in_a_signals_handler_ends_the_wait(rank: int, world_size: int, seed: int) -> None:
    case = Case(tokens=(4, 4), num_experts=2, hidden=8, top_k=2, seed=seed)
    comm = moecomm.Communicator(**case.communicator)
    if rank == 0:
        before = signal.signal(signal.SIGALRM, lambda *_: comm.close())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        refused(lambda: cases.dispatch(comm, case, rank), "closed", name="CommunicatorClosed")
        signal.signal(signal.SIGALRM, before)
    dist.barrier()  # the other rank never comes to the dispatch
    comm.close()


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_a_dispatch_in_halves(rank: int, world_size: int, seed: int) -> list[str]:
    """`begin_dispatch` brings what `dispatch` brings; and it is received once, before the next operation."""
    case = Case(tokens=(6, 0, 9)[-world_size:], num_experts=2 * world_size, hidden=16, top_k=2, seed=seed)
    problems = []
    with moecomm.Communicator(**case.communicator) as comm:
        x_TH = cases.tensor(case.x(rank), case.torch_dtype)
        ids_TK, weights_TK = cases.tensor(case.ids(rank)), cases.tensor(case.topk_weights(rank))
        want = comm.dispatch(x_TH, ids_TK, weights_TK)
        receive = comm.begin_dispatch(x_TH, ids_TK, weights_TK)
        out = receive()
        for name in ("tokens", "weights", "offsets", "tokens_per_expert"):
            if not torch.equal(getattr(out, name), getattr(want, name)):
                problems.append(name)
        assert torch.equal(comm.combine(out.tokens, out.handle), comm.combine(want.tokens, want.handle))
        with pytest.raises(moecomm.InvalidArgument, match="received already"):
            receive()
        left, taken = (comm.begin_dispatch(x_TH, ids_TK, weights_TK) for _ in range(2))
        with pytest.raises(moecomm.InvalidArgument, match="another one was begun after it"):
            left()
        assert torch.equal(taken().tokens, want.tokens), "after one that was left"
        ended = comm.begin_dispatch(x_TH, ids_TK, weights_TK)
        comm.combine(want.tokens, want.handle)
        with pytest.raises(
            moecomm.InvalidArgument, match="another operation of this communicator came after"
        ):
            ended()
    return problems


# -- autograd and threads ------------------------------------------------------------------------------------
@on_ranks(2)
def test_wait_records_as_the_call_did_and_gives_threads_one_result(
    rank: int, world_size: int, seed: int
) -> None:
    """Whether autograd records is what it was at the call; threads that wait get one result."""
    case = Case(tokens=(5, 4), num_experts=2, hidden=8, top_k=2, seed=seed)
    with moecomm.Communicator(**case.communicator) as comm:
        x_TH = torch.from_numpy(case.x(rank)).requires_grad_()
        ids_TK = torch.from_numpy(case.ids(rank))
        for off in (torch.no_grad, torch.inference_mode):
            work = comm.dispatch(x_TH, ids_TK, async_op=True)
            with off():
                tokens = work.wait().tokens
            assert tokens.requires_grad, f"waited for within {off.__name__}: no gradient"
            tokens.sum().backward()
            with torch.no_grad():
                work = comm.dispatch(x_TH, ids_TK, async_op=True)
            assert not work.wait().tokens.requires_grad, "called within no_grad: a gradient"
        work = comm.dispatch(x_TH, ids_TK, async_op=True)
        together, found = threading.Barrier(4), []

        def wait() -> None:
            together.wait()
            found.append(work.wait())

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(found) == 4 and all(each is found[0] for each in found)
