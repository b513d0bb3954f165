"""Bad input: a typed error on all ranks, memory untouched, and then work as usual.

What the host can see raises from the call on the rank that made the mistake; what the device finds (ids,
ranks that disagree, a peer's mistake) raises from a dropless dispatch, which waits anyway, and else from
check() once the work is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import harness, oracle
from tests.gpu.conftest import Pools
from tests.gpu.harness import GpuPool, settled_error
from tests.gpu.oracle import Job, Oracle
from tests.multirank.catching import Caught, catch

HIDDEN, TOP_K, MAX_TOKENS = 64, 2, 6
Arguments = dict[str, Any]


def _job(size: int, seed: int) -> Job:
    return Job(
        tokens=(5, 4, 6, 6)[-size:],
        num_experts=2 * size,
        hidden=HIDDEN,
        top_k=TOP_K,
        dtype="float32",
        seed=seed,
    )


def _communicator(job: Job) -> Any:
    return harness.communicator(**{**job.communicator, "max_tokens": MAX_TOKENS})


def _arguments(known: Oracle) -> Arguments:
    own = known.own
    return {
        "x_TH": own.x_TH.clone(),
        "topk_idx_TK": own.ids_TK.clone(),
        "topk_weights_TK": own.weights_TK.clone(),
    }


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
    device = arguments["x_TH"].device
    arguments["x_TH"] = torch.zeros(MAX_TOKENS + 1, HIDDEN, device=device)
    arguments["topk_idx_TK"] = torch.full((MAX_TOKENS + 1, TOP_K), -1, device=device)
    arguments["topk_weights_TK"] = torch.zeros(MAX_TOKENS + 1, TOP_K, device=device)


# What is wrong: how the arguments become bad, the type of the error, words that the guilty rank's text has.
HOST: dict[str, tuple[Callable[[Arguments], None], str, list[str]]] = {
    "x of one dimension": (_change("x_TH", lambda x: x[0]), "InvalidArgument", ["x has shape (64,)"]),
    "x too wide": (
        _change("x_TH", lambda x: torch.cat([x, x], 1)),
        "InvalidArgument",
        ["x has shape", "128", "hidden = 64"],
    ),
    "x of another dtype": (_change("x_TH", torch.Tensor.double), "InvalidArgument", ["x is torch.float64"]),
    "x no tensor": (_set(x_TH=[[1.0]]), "InvalidArgument", ["x is list"]),
    "x on meta": (_change("x_TH", lambda x: x.to("meta")), "InvalidArgument", ["x is on meta"]),
    "x too long": (_long, "InvalidArgument", ["7 tokens", "max_tokens = 6"]),
    "ids too few": (_change("topk_idx_TK", lambda i: i[:-1]), "InvalidArgument", ["topk_idx has shape"]),
    "ids of floats": (_change("topk_idx_TK", torch.Tensor.float), "InvalidRouting", ["topk_idx", "float32"]),
    "weights too few": (_change("topk_weights_TK", lambda w: w[1:]), "InvalidArgument", ["topk_weights has"]),
    "weights of another dtype": (
        _change("topk_weights_TK", torch.Tensor.bfloat16),
        "InvalidArgument",
        ["topk_weights is torch.bfloat16"],
    ),
    "layout": (_set(layout="token"), "InvalidArgument", ["layout is 'token'"]),
    "alignment": (_set(alignment=0), "InvalidArgument", ["alignment is 0"]),
    "capacity": (_set(capacity=-1), "InvalidArgument", ["capacity is -1"]),
}
CPU_TENSORS: dict[str, tuple[Callable[[Arguments], None], str, list[str]]] = {
    "x on the CPU": (_change("x_TH", torch.Tensor.cpu), "InvalidArgument", ["x is on cpu", "cuda"]),
    "ids on the CPU": (_change("topk_idx_TK", torch.Tensor.cpu), "InvalidArgument", ["topk_idx is on cpu"]),
    "weights on the CPU": (
        _change("topk_weights_TK", torch.Tensor.cpu),
        "InvalidArgument",
        ["topk_weights is on cpu"],
    ),
}
DEVICE: dict[str, tuple[Callable[[Arguments], None], str, list[str]]] = {
    "id too large": (_id(99), "InvalidRouting", ["topk_idx[1, 1] is 99"]),
    "id too small": (_id(-2), "InvalidRouting", ["topk_idx[1, 1] is -2"]),
    "wide id": (_id(2**32 + 1, torch.int64), "InvalidRouting", ["topk_idx[1, 1] is 4294967297"]),
    "huge id": (_id(2**62, torch.int64), "InvalidRouting", ["topk_idx[1, 1] is"]),
    "id repeated": (_change("topk_idx_TK", lambda i: i * 0 + 1), "InvalidRouting", ["topk_idx[", "is 1"]),
}
Played = list[tuple[str, "Caught | None", "Caught | None"]]


def _bad_dispatches(
    rank: int, world_size: int, job: Job, names: list[str], fixed: bool
) -> tuple[Played, list[str]]:
    """Each bad call comes from one rank, or from all; after each, the communicator must work, bit for bit."""
    table = {**HOST, **CPU_TENSORS, **DEVICE}
    played, problems = [], []
    with _communicator(job) as comm:
        known = Oracle(replace(job, slack=3) if fixed else job, rank, comm.device)
        for i, name in enumerate(names):
            arguments: Arguments = {**_arguments(known), "capacity": known.capacity}
            if i % (world_size + 1) in (rank, world_size):
                table[name][0](arguments)
            called = catch(lambda kept=arguments: comm.dispatch(**kept))
            dist.barrier()
            played.append((name, called, settled_error(comm)))
            problems += oracle.play(comm, known.job, rank)
    return played, problems


def _check_bad(pool: GpuPool, size: int, job: Job, some: dict[str, Any], fixed: bool) -> None:
    names = [name for name in some for _ in range(size + 1)]
    results = pool(_bad_dispatches, job, names, fixed)
    harness.assert_none([problems for _, problems in results])
    for i, name in enumerate(names):
        guilty = range(size) if i % (size + 1) == size else [i % (size + 1)]
        _, type_name, words = some[name]
        for rank, (played, _) in enumerate(results):
            _, called, later = played[i]
            text = f"{name} on ranks {list(guilty)}: rank {rank} raised {called}, then {later}"
            error = called or later
            assert error is not None, text
            assert error.name == type_name and "MoecommError" in error.bases, text
            if not fixed or (rank in guilty and name not in DEVICE):
                assert called is not None, f"expected from the call: {text}"
            if rank in guilty:
                assert all(word in error.text for word in words), text
            elif name not in DEVICE:
                assert f"rank {guilty[0]}" in error.text, f"which rank? {text}"


@pytest.mark.parametrize("fixed", [False, True], ids=["dropless", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_the_host_sees(pool: Pools, size: int, fixed: bool, seed: int) -> None:
    some = {name: case for name, case in HOST.items() if not (fixed and name == "capacity")}
    _check_bad(pool(size), size, _job(size, seed), some, fixed)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("cuda_only")
def test_tensors_on_the_cpu(pool: Pools, size: int, seed: int) -> None:
    _check_bad(pool(size), size, _job(size, seed), CPU_TENSORS, fixed=False)


@pytest.mark.parametrize("fixed", [False, True], ids=["dropless", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ids_are_checked_on_the_device(pool: Pools, size: int, fixed: bool, seed: int) -> None:
    _check_bad(pool(size), size, _job(size, seed), DEVICE, fixed)


def _wild_ids(rank: int, world_size: int, job: Job) -> list[str]:
    """Ids of all bit patterns, many times: no memory but the output's own may change."""
    problems = []
    with _communicator(job) as comm:
        known = Oracle(job, rank, comm.device)
        gen = oracle.generator(comm.device, job.seed, 21, rank)
        guards = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device=comm.device) for _ in range(64)]
        for step in range(20):
            arguments = _arguments(known)
            shape = arguments["topk_idx_TK"].shape
            wild = torch.randint(-(2**62), 2**62, shape, generator=gen, device=comm.device)
            arguments["topk_idx_TK"] = wild if step % 2 else wild.int()
            capacity = None if step % 4 < 2 else 7
            error = catch(lambda kept=arguments, rows=capacity: comm.dispatch(**kept, capacity=rows))
            dist.barrier()
            error = error or settled_error(comm)
            if error is None or error.name != "InvalidRouting":
                problems.append(f"rank {rank}, step {step}: {error}")
        problems += [f"rank {rank}: a guard changed" for guard in guards if not bool((guard == 0x5A).all())]
        problems += oracle.play(comm, job, rank)
    return problems


@pytest.mark.parametrize("size", [1, 2, 4])
def test_wild_ids_change_no_memory(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_wild_ids, _job(size, seed)))


def _valid_after_an_error(rank: int, world_size: int, job: Job) -> list[bool]:
    """The output of a fixed dispatch with bad ids is valid memory that says: no rows."""
    with _communicator(job) as comm:
        known = Oracle(replace(job, slack=3), rank, comm.device)
        arguments = {**_arguments(known), "capacity": known.capacity}
        arguments["topk_idx_TK"][0, 0] = 1000
        out = comm.dispatch(**arguments)
        y_TH = comm.combine(torch.zeros_like(out.tokens), out.handle)
        harness.synchronize()
        found = [int(out.offsets.max()) == 0, int(out.tokens_per_expert.max()) == 0]
        found += [len(out.tokens) == known.capacity, y_TH.shape == known.own.x_TH.shape]
        dist.barrier()
        error = settled_error(comm)
        return [*found, error is not None and error.name == "InvalidRouting", settled_error(comm) is None]


@pytest.mark.usefixtures("cuda_only")
def test_an_error_leaves_valid_memory(pool: Pools, most_ranks: int, seed: int) -> None:
    for found in pool(most_ranks)(_valid_after_an_error, _job(most_ranks, seed)):
        assert found == [True] * 6, "offsets, counts, rows, y, InvalidRouting from check(), once"


# -- ranks that disagree -------------------------------------------------------------------------------------


def _different_calls(rank: int, world_size: int, job: Job) -> tuple[dict[str, Caught | None], list[str]]:
    with _communicator(job) as comm:
        known = Oracle(job, rank, comm.device)
        odd = rank == world_size - 1
        plain = _arguments(known)
        out = comm.dispatch(**plain)
        bare = {**plain, "topk_weights_TK": None}
        calls: dict[str, Callable[[], Any]] = {
            "layout": lambda: comm.dispatch(**plain, layout="rank" if odd else "expert"),
            "alignment": lambda: comm.dispatch(**plain, alignment=4 if odd else 1),
            "capacity": lambda: comm.dispatch(**plain, capacity=64 if odd else None),
            "capacity value": lambda: comm.dispatch(**plain, capacity=64 if odd else 65),
            "weights": lambda: comm.dispatch(**(bare if odd else plain)),
            "operation": lambda: comm.combine(out.tokens, out.handle) if odd else comm.dispatch(**plain),
            "operation, the other way": lambda: (
                comm.dispatch(**plain) if odd else comm.combine(out.tokens, out.handle)
            ),
            "weights of combine": lambda: comm.combine(
                out.tokens, out.handle, weights=out.weights if odd else None
            ),
        }
        caught, problems = {}, []
        for name, call in calls.items():
            error = catch(call)
            dist.barrier()
            later = settled_error(comm)
            caught[name] = error or later
            problems += oracle.play(comm, job, rank)
        return caught, problems


@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_differ_between_ranks(pool: Pools, size: int, seed: int) -> None:
    results = pool(size)(_different_calls, _job(size, seed))
    harness.assert_none([problems for _, problems in results])
    words = {
        "layout": ["layout"],
        "alignment": ["alignment", "1", "4"],
        "capacity": ["capacity", "64"],
        "capacity value": ["capacity", "64", "65"],
        "weights": ["weights"],
        "operation": ["combine", "dispatch"],
        "operation, the other way": ["combine", "dispatch"],
    }
    for caught, _ in results:
        for name, needed in words.items():
            error = caught[name]
            assert error is not None and error.name == "MismatchedArguments", f"{name}: {error}"
            assert all(word in error.text for word in [*needed, "rank"]), f"{name}: {error.text!r}"
        # Weights are an owner's own affair: each rank may use them or not.
        assert caught["weights of combine"] is None


# -- combine -------------------------------------------------------------------------------------------------


def _bad_combines(rank: int, world_size: int, job: Job) -> tuple[dict[str, Any], list[str]]:
    with _communicator(job) as comm, _communicator(job) as other:
        known = Oracle(job, rank, comm.device)
        out, foreign = known.dispatch(comm), known.dispatch(other)
        rows_PH, weights_P = out.tokens, out.weights
        bad: dict[str, Callable[[], Any]] = {
            "handle of another communicator": lambda: comm.combine(rows_PH, foreign.handle),
            "handle of nothing": lambda: comm.combine(rows_PH, None),
            "rows too many": lambda: comm.combine(torch.cat([rows_PH, rows_PH[:1]]), out.handle),
            "rows too narrow": lambda: comm.combine(rows_PH[:, :4], out.handle),
            "rows of another dtype": lambda: comm.combine(rows_PH.half(), out.handle),
            "rows on meta": lambda: comm.combine(rows_PH.to("meta"), out.handle),
            "weights of two dimensions": lambda: comm.combine(
                rows_PH, out.handle, weights=weights_P.view(-1, 1)
            ),
            "weights of another dtype": lambda: comm.combine(rows_PH, out.handle, weights=weights_P.double()),
        }
        caught, problems = {}, []
        for name, call in bad.items():
            guilty = rank == world_size - 1
            called = catch(call if guilty else lambda: comm.combine(rows_PH, out.handle))
            dist.barrier()
            caught[name] = (called, settled_error(comm))
            problems += oracle.play(comm, job, rank)
        return caught, problems


@pytest.mark.parametrize("size", [1, 2, 3])
def test_combine_arguments(pool: Pools, size: int, seed: int) -> None:
    """The guilty rank hears of it from the call, the others from check()."""
    results = pool(size)(_bad_combines, _job(size, seed))
    harness.assert_none([problems for _, problems in results])
    words = {
        "handle of another communicator": ["handle", "another communicator"],
        "handle of nothing": ["handle is NoneType"],
        "rows too many": ["rows has shape"],
        "rows too narrow": ["rows has shape", "64"],
        "rows of another dtype": ["rows is torch.float16"],
        "rows on meta": ["rows is on meta"],
        "weights of two dimensions": ["weights has shape"],
        "weights of another dtype": ["weights is torch.float64"],
    }
    for name, needed in words.items():
        for rank, (caught, _) in enumerate(results):
            called, later = caught[name]
            text = f"{name}: rank {rank} raised {called}, then {later}"
            error = called or later
            assert error is not None and error.name == "InvalidArgument", text
            if rank == size - 1:
                assert called is not None and all(word in called.text for word in needed), text
            else:
                assert f"rank {size - 1}" in error.text, text


# -- too small a capacity ------------------------------------------------------------------------------------


def _overflows(rank: int, world_size: int, job: Job) -> tuple[list[Any], list[str]]:
    with _communicator(job) as comm:
        known = Oracle(job, rank, comm.device)
        first = known.dispatch(comm)
        known.check_dispatch(first)
        dist.barrier()
        found: list[Any] = [settled_error(comm), settled_error(comm)]
        # Nobody checks: fixed dispatches go on, the next dropless one says it.
        for _ in range(3):
            known.check_dispatch(known.dispatch(comm))
        roomy = Oracle(replace(job, slack=None), rank, comm.device)
        found.append(catch(lambda: roomy.dispatch(comm)))
        found.append(catch(lambda: roomy.dispatch(comm)))
        problems = oracle.play(comm, roomy.job, rank)
        return found, known.problems + problems


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.usefixtures("cuda_only")
def test_too_small_a_capacity(pool: Pools, size: int, layout: str, seed: int) -> None:
    job = replace(_job(size, seed), slack=-3, layout=layout)
    results = pool(size)(_overflows, job)
    harness.assert_none([problems for _, problems in results])
    needed_there = {found[0].needed for found, _ in results if found[0] is not None}
    assert len(needed_there) == 1, f"all ranks learn the same number: {needed_there}"
    for found, _ in results:
        check, again, dropless, after = found
        for error in (check, dropless):
            assert error is not None and error.name == "CapacityExceeded", error
            assert error.needed == error.capacity + 3, error
            assert str(error.needed) in error.text and str(error.capacity) in error.text
        assert again is None and after is None
