"""Bad input: a typed error that names argument, value and bound, on all ranks; memory is untouched, and then
work goes on as usual.

On the CPU every rank hears of it from the call. On GPUs what the host can see raises from the call on the
rank that made the mistake; what the device finds (ids, ranks that disagree, a peer's mistake) raises from a
dropless dispatch, which waits anyway, and else from check() once the work is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import cases, oracle, ranks
from tests.cases import Case
from tests.multirank.catching import Caught, catch, refused, require
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, opened, settled_error

MAX_TOKENS = 6
Arguments = dict[str, Any]
Call = Callable[[], Any]
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


def told(call: Call, comm: Any) -> Told:
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


# What is wrong, one mistake of each kind (tests/unit/test_arguments.py has all checks): how a dispatch's
# arguments become bad, and words that the error's text has to hold.
Bad = dict[str, tuple[Callable[[Arguments], None], list[str]]]
HOST: Bad = {
    "x of one dimension": (_change("x_TH", lambda x: x[0]), ["x has shape (64,)", "hidden = 64"]),
    "x of another dtype": (_change("x_TH", torch.Tensor.double), ["x is torch.float64", "torch.float32"]),
    "x on meta": (_change("x_TH", lambda x: x.to("meta")), ["x is on meta"]),
    "x on the CPU": (_change("x_TH", torch.Tensor.cpu), ["x is on cpu", "cuda"]),
    "x no tensor": (_set(x_TH=[[1.0]]), ["x is list", "torch.Tensor"]),
    "x too long": (_long, ["7 tokens", "max_tokens = 6"]),
    "ids of floats": (_change("topk_idx_TK", torch.Tensor.float), ["topk_idx", "float32", "int32"]),
    "ids on the CPU": (_change("topk_idx_TK", torch.Tensor.cpu), ["topk_idx is on cpu"]),
    "weights on the CPU": (_change("topk_weights_TK", torch.Tensor.cpu), ["topk_weights is on cpu"]),
    "layout": (_set(layout="token"), ["layout is 'token'", "'expert'", "'rank'"]),
    "capacity negative": (_set(capacity=-1), ["capacity is -1", "0"]),
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


@pytest.mark.parametrize("fixed", [False, True], ids=["dropless", "fixed"])
@on_ranks("ranks_or_alone")
def test_dispatch_arguments(rank: int, world_size: int, fixed: bool, seed: int) -> list[str]:
    """After each bad call the communicator must work, bit for bit."""
    unfit, on_cpu = "on the CPU" if ranks.on_cpu() else "nothing", ranks.on_cpu()
    names = [name for name in BAD if unfit not in name and not (fixed and "capacity" in name)]
    case = small(world_size, seed, slack=3 if fixed else None)
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known):
        for step, name in enumerate(name for name in names for _ in range(2)):
            arguments, guilty = arguments_of(known), _guilty(step, world_size)
            change, words = BAD[name]
            if rank in guilty:
                change(arguments)
            called, later = told(lambda kept=arguments: comm.dispatch(**kept), comm)
            text = f"{name} on ranks {list(guilty)}: raised {called}, then {later}"
            error = called or later
            assert error is not None, text
            assert error.name == ("InvalidRouting" if name in ROUTING else "InvalidArgument"), text
            assert "MoecommError" in error.bases, text
            if on_cpu or not fixed or (rank in guilty and name not in DEVICE):
                assert called is not None, f"expected from the call: {text}"
            if on_cpu or rank in guilty:
                assert all(word in error.text for word in words), text
            if rank not in guilty and (on_cpu or name not in DEVICE):
                assert f"rank {guilty[0]}" in error.text, f"which rank? {text}"
            known.check_dispatch(known.dispatch(comm))
        return known.problems + oracle.play(comm, case, rank)


@on_ranks("ranks_or_alone")
def test_wild_ids_change_no_memory(rank: int, world_size: int, seed: int) -> list[str]:
    """Ids of all bit patterns: no memory but the output's own may change."""
    case = small(world_size, seed)
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known):
        gen = cases.generator(comm.device, case.seed, 21, rank)
        guards = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device=comm.device) for _ in range(64)]
        for step in range(12):
            arguments = {**arguments_of(known), "capacity": None if step % 4 < 2 else 7}
            shape = known.own.ids_TK.shape
            wild = torch.randint(-(2**62), 2**62, shape, generator=gen, device=comm.device)
            arguments["topk_idx_TK"] = wild if step % 2 else wild.int()
            called, later = told(lambda kept=arguments: comm.dispatch(**kept), comm)
            require(called or later, name="InvalidRouting")
        assert all(bool((guard == 0x5A).all()) for guard in guards), "a guard changed"
        return oracle.play(comm, case, rank)


@on_ranks("most_ranks")
def test_non_contiguous_input_works(rank: int, world_size: int) -> list[str]:
    """Inputs that are not contiguous."""
    case = small(world_size)
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known):
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
@on_ranks("ranks_or_alone")
def test_combine_arguments(rank: int, world_size: int, seed: int) -> list[str]:
    """The last rank makes each mistake. On GPUs it hears of it from the call, the others from check()."""
    case, last = small(world_size, seed), world_size - 1
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known), communicator(case) as other:
        out, foreign = known.dispatch(comm), known.dispatch(other)
        rows_PH, weights_P, handle = known.answer(out.tokens), out.weights, out.handle
        bad: list[tuple[tuple[Any, Any, Any], list[str]]] = [
            ((rows_PH, foreign.handle, None), ["handle", "another communicator"]),
            ((rows_PH, None, None), ["handle is NoneType"]),
            ((rows_PH[:-1], handle, None), ["rows has shape", "expected ("]),
            ((rows_PH[:, :4], handle, None), ["rows has shape", "64"]),
            ((rows_PH.half(), handle, None), ["rows is torch.float16", "torch.float32"]),
            ((rows_PH.to("meta"), handle, None), ["rows is on meta"]),
            ((rows_PH, handle, weights_P.view(-1, 1)), ["weights has shape", "(P,)"]),
            ((rows_PH, handle, weights_P.double()), ["weights is torch.float64", "torch.float32"]),
        ]
        for given, words in bad:
            rows, of, weights = given if rank == last else (rows_PH, handle, None)
            called, later = told(lambda r=rows, h=of, w=weights: comm.combine(r, h, weights=w), comm)
            if rank == last or ranks.on_cpu():
                require(called, *words)
            require(called or later, *([] if rank == last else [f"rank {last}"]))
            known.check_combine("combine", comm.combine(rows_PH, handle))
        return known.problems + oracle.play(comm, case, rank)


# -- ranks that disagree -------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_calls_that_differ_between_ranks(rank: int, world_size: int, seed: int) -> list[str]:
    case, odd = small(world_size, seed), rank == world_size - 1
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known):
        plain = arguments_of(known)
        other_ids = {"topk_idx_TK": known.own.ids_TK.flip(0)}
        out, second = comm.dispatch(**plain), comm.dispatch(**plain | other_ids)

        def dispatch(of_odd: Arguments, of_others: Arguments | None = None) -> Call:
            return lambda: comm.dispatch(**plain | (of_odd if odd else of_others or {}))

        def combine(of: Any, **options: Any) -> Call:
            return lambda: comm.combine(of.tokens, of.handle, **options)

        layers = ({"_layer": SimpleNamespace(_caller=number)} for number in (7, 3))
        calls: list[tuple[Call, list[str]]] = [
            (dispatch({"layout": "rank"}), ["layout"]),
            (dispatch({"alignment": 4}, {"alignment": 1}), ["alignment", "1", "4"]),
            (dispatch({"capacity": 64}), ["capacity", "64"]),
            (dispatch({"capacity": 64}, {"capacity": 65}), ["capacity", "64", "65"]),
            (dispatch({"topk_weights_TK": None}), ["weights"]),
            (dispatch(*layers), ["layer that calls", "3", "7"]),
            (combine(out) if odd else dispatch({}), ["combine", "dispatch"]),
            (dispatch({}) if odd else combine(out), ["combine", "dispatch"]),
        ]
        if ranks.on_cpu():
            calls.append((combine(second if odd else out), ["handle"]))
        who = f"rank {world_size - 1}" if ranks.on_cpu() else "rank"
        for call, words in calls:
            called, later = told(call, comm)
            require(called or later, *words, who, name="MismatchedArguments")
            known.check_dispatch(known.dispatch(comm))
        # Weights are an owner's own affair: each rank may use them or not.
        assert told(combine(out, weights=out.weights if odd else None), comm) == (None, None)
        return known.problems + oracle.play(comm, case, rank)


# -- closed communicators, inputs in the window --------------------------------------------------------------
@on_ranks("most_ranks")
def test_use_after_close(rank: int, world_size: int) -> list[str]:
    case = small(world_size)
    comm = communicator(case)
    known = Oracle(case, rank, comm.device)
    out = known.dispatch(comm)
    pending = comm.dispatch(known.own.x_TH.clone().requires_grad_(), known.own.ids_TK)
    ranks.synchronize()
    dist.barrier()
    comm.close()
    comm.close()
    calls: list[Call] = [
        lambda: known.dispatch(comm),
        lambda: comm.combine(out.tokens, out.handle),
        lambda: known.dispatch(comm, async_op=True),
        comm.check,
        comm.stats,
        lambda: comm.empty_input(1),
        lambda: pending.tokens.sum().backward(),
    ]
    for call in calls:
        refused(call, "closed", name="CommunicatorClosed")
    known.check_dispatch(out)  # outputs are ordinary memory and outlive the communicator
    return known.problems


@on_ranks(3)
def test_empty_input_arguments(rank: int, world_size: int) -> None:
    with communicator(small(world_size)) as comm:
        kept = [comm.empty_input(2), comm.empty_input(3)]
        refused(lambda: comm.empty_input(MAX_TOKENS + 1), "7")
        refused(lambda: comm.empty_input(-1), "-1")
        refused(lambda: comm.empty_input(1), "empty_input", name="OutOfMemory")
        assert [tuple(each.shape) for each in kept] == [(2, 64), (3, 64)]
        del kept
        comm.empty_input(1)


# -- too small a capacity ------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["expert", "rank"])
@on_ranks("ranks_or_alone")
def test_too_small_a_capacity(rank: int, world_size: int, layout: str, seed: int) -> list[str]:
    """CapacityExceeded from check(), or where nobody checked from a later dispatch; once, on all ranks."""
    case = small(world_size, seed, slack=-3, layout=layout)
    needed = max(case.needed())
    with opened(case, rank, max_tokens=MAX_TOKENS) as (comm, known):
        known.check_dispatch(known.dispatch(comm))
        dist.barrier()
        found = [settled_error(comm), settled_error(comm)]
        # On GPUs fixed dispatches go on, and the next dropless one says it.
        for _ in range(1 if ranks.on_cpu() else 3):
            known.check_dispatch(known.dispatch(comm))
        roomy = Oracle(replace(case, slack=None), rank, comm.device)
        found += [catch(lambda: roomy.dispatch(comm)) for _ in range(2)]
        for error in found[::2]:
            require(error, str(needed), str(case.capacity), name="CapacityExceeded")
            assert (error.needed, error.capacity) == (needed, case.capacity), error
        assert found[1::2] == [None, None]
        return known.problems + oracle.play(comm, roomy.job, rank)


@pytest.mark.parametrize("mistake", ["id too large", "x of another dtype"])
@on_ranks(3)
def test_ranks_stay_in_step_when_an_overflow_and_a_mistake_meet(
    rank: int, world_size: int, mistake: str
) -> list[str]:
    """An overflow that nobody checked, then a dispatch that is wrong on rank 0 only."""
    case = small(3, slack=-3)
    with ranks.communicator(**{**case.communicator, "max_tokens": MAX_TOKENS, "timeout": 5.0}) as comm:
        known = Oracle(replace(case, slack=None), rank, comm.device)
        cases.dispatch(comm, case, rank)
        arguments = arguments_of(known)
        if rank == 0:
            BAD[mistake][0](arguments)
        caught = catch(lambda: comm.dispatch(**arguments))
        assert caught is not None and "MoecommError" in caught.bases
        dist.barrier()
        return oracle.play(comm, known.job, rank)


@on_ranks(3)
def test_ranks_stay_in_step_when_one_alone_checks_an_overflow(
    rank: int, world_size: int, seed: int
) -> list[str]:
    """An overflow of which rank 0 alone asks `check()`, then dispatches of other rows each. On GPUs the
    dispatch that raises has sent its rows, and the operation behind it says so."""
    later = [small(3, seed + number, slack=None) for number in (1, 2)]
    case = small(3, seed, slack=-3)
    with opened(case, rank, max_tokens=MAX_TOKENS, timeout=5.0) as (comm, known):
        known.check_dispatch(known.dispatch(comm))
        dist.barrier()
        checked = settled_error(comm) if rank == 0 else None
        told = catch(lambda: Oracle(later[0], rank, comm.device).dispatch(comm))
        if checked is None:
            require(told, name="CapacityExceeded")
        else:
            require(checked, name="CapacityExceeded")
            says = ("call it on all ranks or on none", str(checked.needed))
            require(told, *says, name="MismatchedArguments")
        return known.problems + [each for case in later for each in oracle.play(comm, case, rank)]
