"""Bad input: a typed error that names argument, value and bound, on all ranks; and then work as usual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multirank import cases
from tests.multirank.cases import Case
from tests.multirank.catching import Caught, catch
from tests.multirank.conftest import Pools

CASE = Case(tokens=(5, 3, 6), num_experts=6, hidden=8, top_k=2)
MAX_TOKENS = 6


def _arguments(rank: int) -> dict[str, Any]:
    return {
        "x_TH": torch.from_numpy(CASE.x(rank)),
        "topk_idx_TK": torch.from_numpy(CASE.ids(rank)),
        "topk_weights_TK": torch.from_numpy(CASE.topk_weights(rank)),
    }


def _bad_ids(arguments: dict[str, Any], value: int, dtype: torch.dtype = torch.int32) -> None:
    ids_TK = arguments["topk_idx_TK"].to(dtype)
    ids_TK[1, 1] = value
    arguments["topk_idx_TK"] = ids_TK


def _repeat(arguments: dict[str, Any]) -> None:
    arguments["topk_idx_TK"][2] = 4


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update(values)


def _change(name: str, by: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = by(arguments[name])

    return change


def _long(arguments: dict[str, Any]) -> None:
    arguments["x_TH"] = torch.zeros(MAX_TOKENS + 1, CASE.hidden)
    arguments["topk_idx_TK"] = torch.full((MAX_TOKENS + 1, CASE.top_k), -1)
    arguments["topk_weights_TK"] = torch.zeros(MAX_TOKENS + 1, CASE.top_k)


# What is wrong: how a dispatch's arguments become bad, the type of the error, and words its text has to hold.
BAD_DISPATCH: dict[str, tuple[Callable[[dict[str, Any]], None], str, list[str]]] = {
    "x of one dimension": (
        _change("x_TH", lambda x: x[0]),
        "InvalidArgument",
        ["x has shape (8,)", "hidden = 8"],
    ),
    "x too wide": (_set(x_TH=torch.zeros(3, 12)), "InvalidArgument", ["x has shape (3, 12)", "8"]),
    "x of another dtype": (
        _change("x_TH", torch.Tensor.double),
        "InvalidArgument",
        ["x is torch.float64", "torch.float32"],
    ),
    "x on another device": (
        _change("x_TH", lambda x: x.to("meta")),
        "InvalidArgument",
        ["x is on meta", "cpu"],
    ),
    "x no tensor": (_set(x_TH=[[1.0]]), "InvalidArgument", ["x is list", "torch.Tensor"]),
    "x sparse": (_change("x_TH", torch.Tensor.to_sparse), "InvalidArgument", ["x", "sparse"]),
    "x too long": (_long, "InvalidArgument", ["7 tokens", "max_tokens = 6"]),
    "ids too few": (
        _change("topk_idx_TK", lambda ids: ids[:-1]),
        "InvalidArgument",
        ["topk_idx has shape", "(T, K)"],
    ),
    "ids too wide": (
        _change("topk_idx_TK", lambda ids: ids[:, :1]),
        "InvalidArgument",
        ["topk_idx", ", 1)", ", 2)"],
    ),
    "ids of floats": (
        _change("topk_idx_TK", torch.Tensor.float),
        "InvalidRouting",
        ["topk_idx", "float32", "int32"],
    ),
    "ids on another device": (
        _change("topk_idx_TK", lambda ids: ids.to("meta")),
        "InvalidArgument",
        ["topk_idx", "meta"],
    ),
    "id too large": (lambda a: _bad_ids(a, 6), "InvalidRouting", ["topk_idx[1, 1] is 6", "5"]),
    "id too small": (lambda a: _bad_ids(a, -2), "InvalidRouting", ["topk_idx[1, 1] is -2", "-1"]),
    "wide id": (
        lambda a: _bad_ids(a, 2**32 + 1, torch.int64),
        "InvalidRouting",
        ["topk_idx[1, 1] is 4294967297"],
    ),
    "id repeated": (_repeat, "InvalidRouting", ["topk_idx[2, 1] is 4", "once"]),
    "weights too few": (
        _change("topk_weights_TK", lambda w: w[1:]),
        "InvalidArgument",
        ["topk_weights has shape"],
    ),
    "weights of another dtype": (
        _change("topk_weights_TK", torch.Tensor.bfloat16),
        "InvalidArgument",
        ["topk_weights is torch.bfloat16", "torch.float32"],
    ),
    "layout": (_set(layout="token"), "InvalidArgument", ["layout is 'token'", "'expert'", "'rank'"]),
    "alignment 0": (_set(alignment=0), "InvalidArgument", ["alignment is 0", "1"]),
    "alignment no integer": (_set(alignment=2.0), "InvalidArgument", ["alignment is 2.0"]),
    "alignment of the rank layout": (
        _set(alignment=2, layout="rank"),
        "InvalidArgument",
        ["alignment is 2", "1"],
    ),
    "capacity negative": (_set(capacity=-1), "InvalidArgument", ["capacity is -1", "0"]),
    "capacity no integer": (_set(capacity="8"), "InvalidArgument", ["capacity is '8'"]),
}


def _bad_dispatches(rank: int, world_size: int, names: list[str]) -> tuple[list[Caught | None], cases.Arrays]:
    """Makes each bad call on one rank, or on all; after each, the communicator must work."""
    import moecomm

    caught = []
    with moecomm.Communicator(**CASE.communicator) as comm:
        for i, name in enumerate(names):
            arguments = _arguments(rank)
            if i % (world_size + 1) in (rank, world_size):
                BAD_DISPATCH[name][0](arguments)
            caught.append(catch(lambda kept=arguments: comm.dispatch(**kept)))
            out = cases.dispatch(comm, CASE, rank)
            assert len(out.tokens) == len(CASE.expected(rank).origin)
        return caught, cases.play(comm, CASE, rank)


def test_dispatch_arguments(pool: Pools) -> None:
    names = [name for name in BAD_DISPATCH for _ in range(4)]
    results = pool(3)(_bad_dispatches, names)
    cases.verify(CASE, [result for _, result in results])
    for i, name in enumerate(names):
        guilty = range(3) if i % 4 == 3 else [i % 4]
        _, type_name, words = BAD_DISPATCH[name]
        for rank in range(3):
            error = results[rank][0][i]
            assert error is not None, f"{name}: rank {rank} raised nothing"
            assert error.name == type_name and "MoecommError" in error.bases, (
                f"{name}: rank {rank} raised {error}"
            )
            assert all(word in error.text for word in words), f"{name}: {error.text!r} lacks one of {words}"
            if rank not in guilty:
                assert f"rank {guilty[0]}" in error.text, f"{name}: {error.text!r} does not say which rank"


def _layouts_of_memory(rank: int, world_size: int) -> cases.Arrays:
    """Non-contiguous inputs work; so do views and inputs that need a gradient."""
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        found = []
        for spread in (False, True):
            x_TH, ids_TK, weights_TK = _arguments(rank).values()
            if spread:
                x_TH = x_TH.t().contiguous().t()
                ids_TK = torch.stack([ids_TK, ids_TK], 2)[:, :, 0]
                weights_TK = weights_TK.repeat(2, 1)[::2].clone().copy_(weights_TK)
                weights_TK = torch.stack([weights_TK, weights_TK], 2)[:, :, 1]
                assert not (x_TH.is_contiguous() or ids_TK.is_contiguous() or weights_TK.is_contiguous())
            out = comm.dispatch(x_TH, ids_TK, weights_TK)
            rows_PH = torch.from_numpy(CASE.rows(rank, len(out.tokens)))
            weights_P = torch.from_numpy(CASE.row_weights(rank, len(out.tokens)))
            if spread:
                rows_PH = rows_PH.t().contiguous().t()
                weights_P = torch.stack([weights_P, weights_P], 1)[:, 0]
            y_TH = comm.combine(rows_PH, out.handle, weights=weights_P)
            found.append([out.tokens, out.weights, y_TH])
        return {"equal": all(torch.equal(left, right) for left, right in zip(*found, strict=True))}


def test_non_contiguous_input_works(pool: Pools) -> None:
    assert all(result["equal"] for result in pool(3)(_layouts_of_memory))


def _bad_combines(rank: int, world_size: int) -> tuple[dict[str, Caught | None], cases.Arrays]:
    import moecomm

    with (
        moecomm.Communicator(**CASE.communicator) as comm,
        moecomm.Communicator(**CASE.communicator) as other,
    ):
        out = cases.dispatch(comm, CASE, rank)
        foreign = cases.dispatch(other, CASE, rank)
        rows_PH = out.tokens
        bad: dict[str, Callable[[], Any]] = {
            "handle of another communicator": lambda: comm.combine(rows_PH, foreign.handle),
            "handle of nothing": lambda: comm.combine(rows_PH, None),
            "rows too few": lambda: comm.combine(rows_PH[:-1], out.handle),
            "rows too narrow": lambda: comm.combine(rows_PH[:, :4], out.handle),
            "rows of another dtype": lambda: comm.combine(rows_PH.half(), out.handle),
            "rows on another device": lambda: comm.combine(rows_PH.to("meta"), out.handle),
            "weights of two dimensions": lambda: comm.combine(
                rows_PH, out.handle, weights=out.weights.view(-1, 1)
            ),
            "weights of another dtype": lambda: comm.combine(
                rows_PH, out.handle, weights=out.weights.double()
            ),
        }
        caught = {}
        for name, call in bad.items():
            # Rank 1 alone makes the mistake.
            caught[name] = catch(call if rank == 1 else lambda: comm.combine(rows_PH, out.handle))
            comm.combine(rows_PH, out.handle)
        return caught, cases.play(comm, CASE, rank)


COMBINE_WORDS = {
    "handle of another communicator": ["handle", "another communicator"],
    "handle of nothing": ["handle is NoneType"],
    "rows too few": ["rows has shape", "expected ("],
    "rows too narrow": ["rows has shape", "8"],
    "rows of another dtype": ["rows is torch.float16", "torch.float32"],
    "rows on another device": ["rows is on meta", "cpu"],
    "weights of two dimensions": ["weights has shape", "(P,)"],
    "weights of another dtype": ["weights is torch.float64", "torch.float32"],
}


def test_combine_arguments(pool: Pools) -> None:
    results = pool(3)(_bad_combines)
    cases.verify(CASE, [result for _, result in results])
    for name, words in COMBINE_WORDS.items():
        for rank in range(3):
            error = results[rank][0][name]
            assert error is not None and error.name == "InvalidArgument", (
                f"{name}: rank {rank} raised {error}"
            )
            assert all(word in error.text for word in words), f"{name}: {error.text!r} lacks one of {words}"
            assert rank == 1 or "rank 1" in error.text, f"{name}: {error.text!r} does not say which rank"


def _different_calls(rank: int, world_size: int) -> tuple[dict[str, Caught | None], cases.Arrays]:
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        arguments = _arguments(rank)
        out = comm.dispatch(**arguments)
        second = comm.dispatch(**{**arguments, "topk_idx_TK": arguments["topk_idx_TK"].flip(0)})
        odd = rank == 2
        caught = {
            "layout": catch(lambda: comm.dispatch(**arguments, layout="rank" if odd else "expert")),
            "alignment": catch(lambda: comm.dispatch(**arguments, alignment=4 if odd else 1)),
            "capacity": catch(lambda: comm.dispatch(**arguments, capacity=64 if odd else None)),
            "capacity value": catch(lambda: comm.dispatch(**arguments, capacity=64 if odd else 65)),
            "weights": catch(
                lambda: comm.dispatch(**{**arguments, **({"topk_weights_TK": None} if odd else {})})
            ),
            "operation": catch(
                lambda: comm.combine(out.tokens, out.handle) if odd else comm.dispatch(**arguments)
            ),
            "operation, the other way": catch(
                lambda: comm.dispatch(**arguments) if odd else comm.combine(out.tokens, out.handle)
            ),
            "handle": catch(
                lambda: (
                    comm.combine(second.tokens, second.handle)
                    if odd
                    else comm.combine(out.tokens, out.handle)
                )
            ),
        }
        y_TH = comm.combine(out.tokens, out.handle)
        assert y_TH.shape == arguments["x_TH"].shape
        return caught, cases.play(comm, CASE, rank)


def test_calls_that_differ_between_ranks(pool: Pools) -> None:
    results = pool(3)(_different_calls)
    cases.verify(CASE, [result for _, result in results])
    words = {
        "layout": ["layout", "rank 2"],
        "alignment": ["alignment", "1", "4", "rank 2"],
        "capacity": ["capacity", "64", "rank 2"],
        "capacity value": ["capacity", "64", "65", "rank 2"],
        "weights": ["weights", "rank 2"],
        "operation": ["combine", "dispatch", "rank 2"],
        "operation, the other way": ["combine", "dispatch", "rank 2"],
        "handle": ["handle", "rank 2"],
    }
    for caught, _ in results:
        for name, needed in words.items():
            error = caught[name]
            assert error is not None and error.name == "MismatchedArguments", f"{name}: {error}"
            assert all(word in error.text for word in needed), f"{name}: {error.text!r} lacks one of {needed}"


def _closed(rank: int, world_size: int) -> dict[str, Caught | None]:
    import moecomm

    comm = moecomm.Communicator(**CASE.communicator)
    out = cases.dispatch(comm, CASE, rank)
    x_TH = torch.from_numpy(CASE.x(rank)).requires_grad_()
    pending = comm.dispatch(x_TH, torch.from_numpy(CASE.ids(rank)))
    dist.barrier()
    comm.close()
    comm.close()
    return {
        "dispatch": catch(lambda: cases.dispatch(comm, CASE, rank)),
        "combine": catch(lambda: comm.combine(out.tokens, out.handle)),
        "async": catch(lambda: cases.dispatch(comm, CASE, rank, async_op=True)),
        "check": catch(comm.check),
        "stats": catch(comm.stats),
        "empty_input": catch(lambda: comm.empty_input(1)),
        "backward": catch(lambda: pending.tokens.sum().backward()),
    }


def test_use_after_close(pool: Pools) -> None:
    for caught in pool(3)(_closed):
        for name, error in caught.items():
            assert error is not None and error.name == "CommunicatorClosed", f"{name}: {error}"
            assert "closed" in error.text


def _empty_inputs(rank: int, world_size: int) -> dict[str, Caught | None]:
    import moecomm

    with moecomm.Communicator(**CASE.communicator) as comm:
        kept = [comm.empty_input(2), comm.empty_input(3)]
        caught = {
            "too long": catch(lambda: comm.empty_input(MAX_TOKENS + 1)),
            "negative": catch(lambda: comm.empty_input(-1)),
            "a third": catch(lambda: comm.empty_input(1)),
        }
        assert [tuple(each.shape) for each in kept] == [(2, 8), (3, 8)]
        del kept
        comm.empty_input(1)
        return caught


def test_empty_input_arguments(pool: Pools) -> None:
    for caught in pool(3)(_empty_inputs):
        assert caught["too long"].name == "InvalidArgument" and "7" in caught["too long"].text
        assert caught["negative"].name == "InvalidArgument" and "-1" in caught["negative"].text
        assert caught["a third"].name == "OutOfMemory" and "empty_input" in caught["a third"].text


def _overflows(
    rank: int, world_size: int, case: Case
) -> tuple[dict[str, Caught | None], list[int], cases.Arrays]:
    """CapacityExceeded from check(), or from the next dispatch where nobody checked; once, on all ranks."""
    import moecomm

    with moecomm.Communicator(**case.communicator) as comm:
        overflow = [int(cases.dispatch(comm, case, rank).overflow)]
        caught = {"check": catch(comm.check), "check again": catch(comm.check)}
        overflow.append(int(cases.dispatch(comm, case, rank).overflow))
        roomy = replace(case, slack=None)
        caught["next dispatch"] = catch(lambda: cases.dispatch(comm, roomy, rank))
        caught["the one after"] = catch(lambda: cases.dispatch(comm, roomy, rank))
        return caught, overflow, cases.play(comm, roomy, rank)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_too_small_a_capacity(pool: Pools, layout: str, seed: int) -> None:
    case = replace(CASE, slack=-3, layout=layout, seed=seed)
    results = pool(3)(_overflows, case)
    cases.verify(replace(case, slack=None), [result for _, _, result in results])
    needed = case.needed()
    for rank, (caught, overflow, _) in enumerate(results):
        assert overflow == [needed[rank] if needed[rank] > case.capacity else 0] * 2
        for name in ("check", "next dispatch"):
            error = caught[name]
            assert error is not None and error.name == "CapacityExceeded", f"{name}: {error}"
            assert (error.needed, error.capacity) == (max(needed), case.capacity)
            assert str(max(needed)) in error.text and str(case.capacity) in error.text
        assert caught["check again"] is None and caught["the one after"] is None


def _overflow_then_mistake(
    rank: int, world_size: int, case: Case, mistake: str
) -> tuple[Caught | None, cases.Arrays]:
    """An overflow that nobody checked, then a dispatch that is wrong on rank 0 only."""
    import moecomm

    with moecomm.Communicator(**{**case.communicator, "timeout": 5.0}) as comm:
        cases.dispatch(comm, case, rank)
        arguments = _arguments(rank)
        if rank == 0:
            BAD_DISPATCH[mistake][0](arguments)
        caught = catch(lambda: comm.dispatch(**arguments))
        dist.barrier()
        return caught, cases.play(comm, replace(case, slack=None), rank)


@pytest.mark.parametrize("mistake", ["id too large", "x of another dtype", "alignment 0"])
def test_ranks_stay_in_step_when_an_overflow_and_a_mistake_meet(pool: Pools, mistake: str) -> None:
    case = replace(CASE, slack=-3)
    results = pool(3)(_overflow_then_mistake, case, mistake)
    cases.verify(replace(case, slack=None), [result for _, result in results])
    assert all(caught is not None and "MoecommError" in caught.bases for caught, _ in results)
