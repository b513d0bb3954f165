"""Bad input: a typed error that names argument, value and bound, on all ranks; memory is untouched, and then
work goes on as usual.

On the CPU every rank hears of it from the call. On GPUs what the host can see raises from the call on the
rank that made the mistake; what the device finds (ids, ranks that disagree, a peer's mistake) raises from a
dropless dispatch, which waits anyway, and else from check() once the work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import cases, oracle, ranks
from tests.cases import Case
from tests.multirank.catching import Caught, catch
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, settled_error

MAX_TOKENS = 6
Arguments = dict[str, Any]
Told = tuple[Caught | None, Caught | None]
"""What a call raised, and then check()."""


def small(size: int, seed: int = 0, **changes: Any) -> Case:
    tokens = (6, 4, 5, 6)[-size:]
    return Case(tokens=tokens, num_experts=12, hidden=64, top_k=2, seed=seed, **changes)


def communicator(case: Case) -> Any:
    return ranks.communicator(**{**case.communicator, "max_tokens": MAX_TOKENS})


def arguments_of(known: Oracle) -> Arguments:
    own = known.own
    return {
        "x_TH": own.x_TH.clone(),
        "topk_idx_TK": own.ids_TK.clone(),
        "topk_weights_TK": own.weights_TK.clone(),
        "capacity": known.capacity,
    }


def told(call: Callable[[], Any], comm: Any) -> Told:
    called = catch(call)
    dist.barrier()
    return called, settled_error(comm)


def _set(**values: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(values)


def _change(name: str, by: Callable[[torch.Tensor], Any]) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        arguments[name] = by(arguments[name])

    return change


def _id(value: int, dtype: torch.dtype = torch.int32) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        arguments["topk_idx_TK"] = arguments["topk_idx_TK"].to(dtype)
        arguments["topk_idx_TK"][1, 1] = value

    return change


def _long(arguments: Arguments) -> None:
    for name in ("x_TH", "topk_idx_TK", "topk_weights_TK"):
        arguments[name] = arguments[name][:1].repeat(MAX_TOKENS + 1, 1)


# What is wrong: how a dispatch's arguments become bad, and words that the error's text has to hold.
Bad = dict[str, tuple[Callable[[Arguments], None], list[str]]]
HOST: Bad = {
    "x of one dimension": (_change("x_TH", lambda x: x[0]), ["x has shape (64,)", "hidden = 64"]),
    "x too wide": (_change("x_TH", lambda x: torch.cat([x, x], 1)), ["x has shape", "128", "hidden = 64"]),
    "x of another dtype": (_change("x_TH", torch.Tensor.double), ["x is torch.float64", "torch.float32"]),
    "x on meta": (_change("x_TH", lambda x: x.to("meta")), ["x is on meta"]),
    "x on the CPU": (_change("x_TH", torch.Tensor.cpu), ["x is on cpu", "cuda"]),
    "x no tensor": (_set(x_TH=[[1.0]]), ["x is list", "torch.Tensor"]),
    "x sparse": (_change("x_TH", torch.Tensor.to_sparse), ["x", "sparse"]),
    "x too long": (_long, ["7 tokens", "max_tokens = 6"]),
    "ids too few": (_change("topk_idx_TK", lambda ids: ids[:-1]), ["topk_idx has shape", "(T, K)"]),
    "ids too wide": (_change("topk_idx_TK", lambda ids: ids[:, :1]), ["topk_idx", ", 1)", ", 2)"]),
    "ids of floats": (_change("topk_idx_TK", torch.Tensor.float), ["topk_idx", "float32", "int32"]),
    "ids on meta": (_change("topk_idx_TK", lambda ids: ids.to("meta")), ["topk_idx", "meta"]),
    "ids on the CPU": (_change("topk_idx_TK", torch.Tensor.cpu), ["topk_idx is on cpu"]),
    "weights too few": (_change("topk_weights_TK", lambda w: w[1:]), ["topk_weights has shape"]),
    "weights of another dtype": (
        _change("topk_weights_TK", torch.Tensor.bfloat16),
        ["topk_weights is torch.bfloat16", "torch.float32"],
    ),
    "weights on the CPU": (_change("topk_weights_TK", torch.Tensor.cpu), ["topk_weights is on cpu"]),
    "layout": (_set(layout="token"), ["layout is 'token'", "'expert'", "'rank'"]),
    "alignment 0": (_set(alignment=0), ["alignment is 0", "1"]),
    "alignment no integer": (_set(alignment=2.0), ["alignment is 2.0"]),
    "alignment of the rank layout": (_set(alignment=2, layout="rank"), ["alignment is 2", "1"]),
    "capacity negative": (_set(capacity=-1), ["capacity is -1", "0"]),
    "capacity no integer": (_set(capacity="8"), ["capacity is '8'"]),
}
DEVICE: Bad = {
    "id too large": (_id(12), ["topk_idx[1, 1] is 12", "11"]),
    "id too small": (_id(-2), ["topk_idx[1, 1] is -2"]),
    "wide id": (_id(2**32 + 1, torch.int64), ["topk_idx[1, 1] is 4294967297"]),
    "huge id": (_id(2**62, torch.int64), ["topk_idx[1, 1] is"]),
    "id repeated": (_change("topk_idx_TK", lambda ids: ids * 0 + 1), ["topk_idx[", "is 1", "once"]),
}
ROUTING = {"ids of floats", *DEVICE}
"""These are InvalidRouting, all others InvalidArgument."""
BAD = HOST | DEVICE


def _guilty(step: int, size: int) -> Sequence[int]:
    """Each mistake is made twice: by one rank, another one each time, and by all."""
    return range(size) if step % 2 else [step // 2 % size]


def _bad_dispatches(rank: int, world_size: int, case: Case, names: list[str]) -> tuple[list[Told], list[str]]:
    """After each bad call the communicator must work, bit for bit."""
    played = []
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        for step, name in enumerate(names):
            arguments = arguments_of(known)
            if rank in _guilty(step, world_size):
                BAD[name][0](arguments)
            played.append(told(lambda kept=arguments: comm.dispatch(**kept), comm))
            known.check_dispatch(known.dispatch(comm))
        return played, known.problems + oracle.play(comm, case, rank)


@pytest.mark.parametrize("fixed", [False, True], ids=["dropless", "fixed"])
@pytest.mark.parametrize("alone", [False, True], ids=["ranks", "alone"])
def test_dispatch_arguments(pool: Pools, most_ranks: int, alone: bool, fixed: bool, seed: int) -> None:
    size = 1 if alone else most_ranks
    on_cpu = pool(size).on_cpu
    unfit = "on the CPU" if on_cpu else "nothing"
    names = [name for name in BAD if unfit not in name and not (fixed and "capacity" in name)]
    names = [name for name in names for _ in range(2)]
    case = small(size, seed, slack=3 if fixed else None)
    results = pool(size)(_bad_dispatches, case, names)
    oracle.assert_none([problems for _, problems in results])
    for step, name in enumerate(names):
        guilty = _guilty(step, size)
        words, type_name = BAD[name][1], "InvalidRouting" if name in ROUTING else "InvalidArgument"
        for rank, (played, _) in enumerate(results):
            called, later = played[step]
            text = f"{name} on ranks {list(guilty)}: rank {rank} raised {called}, then {later}"
            error = called or later
            assert error is not None, text
            assert error.name == type_name and "MoecommError" in error.bases, text
            if on_cpu or not fixed or (rank in guilty and name not in DEVICE):
                assert called is not None, f"expected from the call: {text}"
            if on_cpu or rank in guilty:
                assert all(word in error.text for word in words), text
            if rank not in guilty and (on_cpu or name not in DEVICE):
                assert f"rank {guilty[0]}" in error.text, f"which rank? {text}"


def _wild_ids(rank: int, world_size: int, case: Case) -> list[str]:
    """Ids of all bit patterns: no memory but the output's own may change."""
    problems = []
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        gen = cases.generator(comm.device, case.seed, 21, rank)
        guards = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device=comm.device) for _ in range(64)]
        for step in range(12):
            arguments = {**arguments_of(known), "capacity": None if step % 4 < 2 else 7}
            shape = known.own.ids_TK.shape
            wild = torch.randint(-(2**62), 2**62, shape, generator=gen, device=comm.device)
            arguments["topk_idx_TK"] = wild if step % 2 else wild.int()
            called, later = told(lambda kept=arguments: comm.dispatch(**kept), comm)
            error = called or later
            if error is None or error.name != "InvalidRouting":
                problems.append(f"rank {rank}, step {step}: {error}")
        problems += [f"rank {rank}: a guard changed" for guard in guards if not bool((guard == 0x5A).all())]
        return problems + oracle.play(comm, case, rank)


@pytest.mark.parametrize("alone", [False, True], ids=["ranks", "alone"])
def test_wild_ids_change_no_memory(pool: Pools, most_ranks: int, alone: bool, seed: int) -> None:
    size = 1 if alone else most_ranks
    oracle.assert_none(pool(size)(_wild_ids, small(size, seed)))


@on_ranks("most_ranks")
def test_non_contiguous_input_works(rank: int, world_size: int) -> list[str]:
    """Inputs that are not contiguous."""
    case = small(world_size)
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        x_TH, ids_TK, weights_TK, _ = arguments_of(known).values()
        x_TH = x_TH.t().contiguous().t()
        ids_TK, weights_TK = (torch.stack([each, each], 2)[:, :, 1] for each in (ids_TK, weights_TK))
        assert not (x_TH.is_contiguous() or ids_TK.is_contiguous() or weights_TK.is_contiguous())
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        known.check_dispatch(out)
        rows_PH = known.answer(out.tokens).t().contiguous().t()
        weights_P = torch.stack([out.weights, out.weights], 1)[:, 0]
        known.check_combine("combine", comm.combine(rows_PH, out.handle, weights=weights_P), weighted=True)
        return known.problems


# -- combine -------------------------------------------------------------------------------------------------

COMBINE_WORDS = {
    "handle of another communicator": ["handle", "another communicator"],
    "handle of nothing": ["handle is NoneType"],
    "rows too few": ["rows has shape", "expected ("],
    "rows too narrow": ["rows has shape", "64"],
    "rows of another dtype": ["rows is torch.float16", "torch.float32"],
    "rows on meta": ["rows is on meta"],
    "weights of two dimensions": ["weights has shape", "(P,)"],
    "weights of another dtype": ["weights is torch.float64", "torch.float32"],
}


def _bad_combines(rank: int, world_size: int, case: Case) -> tuple[dict[str, Told], list[str]]:
    """The last rank makes each mistake."""
    with communicator(case) as comm, communicator(case) as other:
        known = Oracle(case, rank, comm.device)
        out, foreign = known.dispatch(comm), known.dispatch(other)
        rows_PH, weights_P = known.answer(out.tokens), out.weights
        bad: dict[str, tuple[Any, Any, Any]] = {
            "handle of another communicator": (rows_PH, foreign.handle, None),
            "handle of nothing": (rows_PH, None, None),
            "rows too few": (rows_PH[:-1], out.handle, None),
            "rows too narrow": (rows_PH[:, :4], out.handle, None),
            "rows of another dtype": (rows_PH.half(), out.handle, None),
            "rows on meta": (rows_PH.to("meta"), out.handle, None),
            "weights of two dimensions": (rows_PH, out.handle, weights_P.view(-1, 1)),
            "weights of another dtype": (rows_PH, out.handle, weights_P.double()),
        }
        caught = {}
        for name, (rows, handle, weights) in bad.items():
            if rank != world_size - 1:
                rows, handle, weights = rows_PH, out.handle, None
            caught[name] = told(lambda r=rows, h=handle, w=weights: comm.combine(r, h, weights=w), comm)
            known.check_combine("combine", comm.combine(rows_PH, out.handle))
        return caught, known.problems + oracle.play(comm, case, rank)


@pytest.mark.parametrize("alone", [False, True], ids=["ranks", "alone"])
def test_combine_arguments(pool: Pools, most_ranks: int, alone: bool, seed: int) -> None:
    """On GPUs the guilty rank hears of it from the call, the others from check()."""
    size = 1 if alone else most_ranks
    results = pool(size)(_bad_combines, small(size, seed))
    oracle.assert_none([problems for _, problems in results])
    for name, words in COMBINE_WORDS.items():
        for rank, (caught, _) in enumerate(results):
            called, later = caught[name]
            text = f"{name}: rank {rank} raised {called}, then {later}"
            error = called or later
            assert error is not None and error.name == "InvalidArgument", text
            if rank == size - 1 or pool(size).on_cpu:
                assert called is not None and all(word in error.text for word in words), text
            if rank != size - 1:
                assert f"rank {size - 1}" in error.text, text


# -- ranks that disagree -------------------------------------------------------------------------------------


def _different_calls(rank: int, world_size: int, case: Case) -> tuple[dict[str, Caught | None], list[str]]:
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        odd = rank == world_size - 1
        plain = arguments_of(known)
        out, second = (
            comm.dispatch(**plain),
            comm.dispatch(**plain | {"topk_idx_TK": known.own.ids_TK.flip(0)}),
        )
        changes: dict[str, tuple[Arguments, Arguments]] = {
            "layout": ({"layout": "rank"}, {}),
            "alignment": ({"alignment": 4}, {"alignment": 1}),
            "capacity": ({"capacity": 64}, {}),
            "capacity value": ({"capacity": 64}, {"capacity": 65}),
            "weights": ({"topk_weights_TK": None}, {}),
            "layer": ({"_layer": SimpleNamespace(_caller=7)}, {"_layer": SimpleNamespace(_caller=3)}),
        }
        calls: dict[str, Callable[[], Any]] = {
            name: lambda changed=changed: comm.dispatch(**{**plain, **changed[0 if odd else 1]})
            for name, changed in changes.items()
        }

        def combine(of: Any, **options: Any) -> Any:
            return comm.combine(of.tokens, of.handle, **options)

        calls["operation"] = lambda: combine(out) if odd else comm.dispatch(**plain)
        calls["operation, the other way"] = lambda: comm.dispatch(**plain) if odd else combine(out)
        calls["weights of combine"] = lambda: combine(out, weights=out.weights if odd else None)
        if ranks.on_cpu():
            calls["handle"] = lambda: combine(second if odd else out)
        caught = {}
        for name, call in calls.items():
            called, later = told(call, comm)
            caught[name] = called or later
            known.check_dispatch(known.dispatch(comm))
        return caught, known.problems + oracle.play(comm, case, rank)


@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_differ_between_ranks(pool: Pools, size: int, seed: int) -> None:
    results = pool(size)(_different_calls, small(size, seed))
    oracle.assert_none([problems for _, problems in results])
    words = {
        "layout": ["layout"],
        "alignment": ["alignment", "1", "4"],
        "capacity": ["capacity", "64"],
        "capacity value": ["capacity", "64", "65"],
        "weights": ["weights"],
        "layer": ["layer that calls", "3", "7"],
        "operation": ["combine", "dispatch"],
        "operation, the other way": ["combine", "dispatch"],
        "handle": ["handle"],
    }
    who = f"rank {size - 1}" if pool(size).on_cpu else "rank"
    for caught, _ in results:
        # Weights are an owner's own affair: each rank may use them or not.
        assert caught.pop("weights of combine") is None
        assert len(caught) == (9 if pool(size).on_cpu else 8)
        for name, error in caught.items():
            assert error is not None and error.name == "MismatchedArguments", f"{name}: {error}"
            assert all(word in error.text for word in [*words[name], who]), f"{name}: {error.text!r}"


# -- closed communicators, inputs in the window --------------------------------------------------------------


@on_ranks("most_ranks")
def test_use_after_close(rank: int, world_size: int) -> None:
    case = small(world_size)
    comm = communicator(case)
    known = Oracle(case, rank, comm.device)
    out = known.dispatch(comm)
    pending = comm.dispatch(known.own.x_TH.clone().requires_grad_(), known.own.ids_TK)
    ranks.synchronize()
    dist.barrier()
    comm.close()
    comm.close()
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: known.dispatch(comm),
        "combine": lambda: comm.combine(out.tokens, out.handle),
        "async": lambda: known.dispatch(comm, async_op=True),
        "check": comm.check,
        "stats": comm.stats,
        "empty_input": lambda: comm.empty_input(1),
        "backward": lambda: pending.tokens.sum().backward(),
    }
    caught = {name: catch(call) for name, call in calls.items()}
    known.check_dispatch(out)  # outputs are ordinary memory and outlive the communicator
    assert known.problems == []
    for name, error in caught.items():
        assert error is not None and error.name == "CommunicatorClosed", f"{name}: {error}"
        assert "closed" in error.text


@on_ranks(3)
def test_empty_input_arguments(rank: int, world_size: int) -> None:
    with communicator(small(world_size)) as comm:
        kept = [comm.empty_input(2), comm.empty_input(3)]
        caught = {
            "too long": catch(lambda: comm.empty_input(MAX_TOKENS + 1)),
            "negative": catch(lambda: comm.empty_input(-1)),
            "a third": catch(lambda: comm.empty_input(1)),
        }
        assert [tuple(each.shape) for each in kept] == [(2, 64), (3, 64)]
        del kept
        comm.empty_input(1)
    assert caught["too long"].name == "InvalidArgument" and "7" in caught["too long"].text
    assert caught["negative"].name == "InvalidArgument" and "-1" in caught["negative"].text
    assert caught["a third"].name == "OutOfMemory" and "empty_input" in caught["a third"].text


# -- too small a capacity ------------------------------------------------------------------------------------


def _overflows(rank: int, world_size: int, case: Case) -> tuple[list[Caught | None], list[str]]:
    """CapacityExceeded from check(), or where nobody checked from a later dispatch; once, on all ranks."""
    with communicator(case) as comm:
        known = Oracle(case, rank, comm.device)
        known.check_dispatch(known.dispatch(comm))
        dist.barrier()
        found = [settled_error(comm), settled_error(comm)]
        # On GPUs fixed dispatches go on, and the next dropless one says it.
        for _ in range(1 if ranks.on_cpu() else 3):
            known.check_dispatch(known.dispatch(comm))
        roomy = Oracle(replace(case, slack=None), rank, comm.device)
        found += [catch(lambda: roomy.dispatch(comm)) for _ in range(2)]
        return found, known.problems + oracle.play(comm, roomy.job, rank)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("alone", [False, True], ids=["ranks", "alone"])
def test_too_small_a_capacity(pool: Pools, most_ranks: int, alone: bool, layout: str, seed: int) -> None:
    size = 1 if alone else most_ranks
    case = small(size, seed, slack=-3, layout=layout)
    needed = max(case.needed())
    results = pool(size)(_overflows, case)
    oracle.assert_none([problems for _, problems in results])
    for (check, again, dropless, after), _ in results:
        for error in (check, dropless):
            assert error is not None and error.name == "CapacityExceeded", error
            assert (error.needed, error.capacity) == (needed, case.capacity), error
            assert str(needed) in error.text and str(case.capacity) in error.text
        assert again is None and after is None


def _overflow_then_mistake(
    rank: int, world_size: int, case: Case, mistake: str
) -> tuple[Caught | None, list[str]]:
    """An overflow that nobody checked, then a dispatch that is wrong on rank 0 only."""
    with ranks.communicator(**{**case.communicator, "max_tokens": MAX_TOKENS, "timeout": 5.0}) as comm:
        known = Oracle(replace(case, slack=None), rank, comm.device)
        cases.dispatch(comm, case, rank)
        arguments = arguments_of(known)
        if rank == 0:
            BAD[mistake][0](arguments)
        caught = catch(lambda: comm.dispatch(**arguments))
        dist.barrier()
        return caught, oracle.play(comm, known.job, rank)


def _overflow_that_one_checks(
    rank: int, world_size: int, case: Case, later: list[Case]
) -> tuple[list[Caught | None], list[str]]:
    """An overflow of which rank 0 alone asks `check()`, then dispatches of other rows each."""
    with ranks.communicator(**{**case.communicator, "max_tokens": MAX_TOKENS, "timeout": 5.0}) as comm:
        known = Oracle(case, rank, comm.device)
        known.check_dispatch(known.dispatch(comm))
        dist.barrier()
        found = [settled_error(comm) if rank == 0 else None]
        first = Oracle(later[0], rank, comm.device)
        found.append(catch(lambda: first.dispatch(comm)))
        return found, [each for case in later for each in oracle.play(comm, case, rank)]


def test_ranks_stay_in_step_when_one_alone_checks_an_overflow(pool: Pools, seed: int) -> None:
    if not pool(3).on_cpu:
        pytest.skip("on GPUs the dispatch that raises has sent its rows, and the operation behind it says so")
    later = [small(3, seed + number, slack=None) for number in (1, 2)]
    results = pool(3)(_overflow_that_one_checks, small(3, seed, slack=-3), later)
    oracle.assert_none([problems for _, problems in results])
    (checked, told), *others = (found for found, _ in results)
    assert checked is not None and checked.name == "CapacityExceeded"
    assert told is not None and told.name == "MismatchedArguments"
    assert "call it on all ranks or on none" in told.text and str(checked.needed) in told.text
    assert all(each is not None and each.name == "CapacityExceeded" for _, each in others)


@pytest.mark.parametrize("mistake", ["id too large", "x of another dtype", "alignment 0"])
def test_ranks_stay_in_step_when_an_overflow_and_a_mistake_meet(pool: Pools, mistake: str) -> None:
    results = pool(3)(_overflow_then_mistake, small(3, slack=-3), mistake)
    oracle.assert_none([problems for _, problems in results])
    assert all(caught is not None and "MoecommError" in caught.bases for caught, _ in results)
