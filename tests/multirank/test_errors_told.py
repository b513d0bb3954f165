"""What goes wrong on one rank before its part of an operation has begun: an error on all ranks, and ranks in
step, so that the rows of a later step are those of that step on every rank."""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm.errors import known_to_all
from tests import ranks
from tests.fabric import needs_fabric
from tests.multirank.catching import Caught, catch
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_bad_input import told
from tests.oracle import settled_error

HIDDEN = 16
Call = Callable[[], Any]


class _Raises(torch.Tensor):
    """A tensor that allows nothing."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("not with me")


class _Array:
    def __dlpack__(self, **_: Any) -> Any:
        raise KeyError("no capsule")


def _within(mode: Any, call: Call) -> Call:
    def run() -> Any:
        with mode:
            return call()

    return run


def _call(name: str, mistake: str, comm: Any, x: Any, ids: torch.Tensor) -> Call:
    """The operation `name`, right or with a mistake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    out = comm.dispatch(x, ids)
    rows, handle = out.tokens.clone(), out.handle
    leaf = rows.clone().requires_grad_()
    given = rows if name in ("combine", "dispatch backward") else x
    if mistake == "nested":
        given = torch.nested.nested_tensor([torch.zeros(1, HIDDEN)] * 2, device=x.device)
    elif mistake == "raises":
        given = given.as_subclass(_Raises)
    elif mistake == "array":
        given = _Array()
    calls: dict[str, Call] = {
        "dispatch": lambda: comm.dispatch(given, ids),
        "halves": lambda: comm.begin_dispatch(given, ids)(),
        "redispatch": lambda: comm.redispatch(given, handle),
        "combine": lambda: comm.combine(given, handle),
        "dispatch backward": lambda: comm.dispatch_backward(given, handle),
        "async": lambda: comm.dispatch(given, ids, async_op=True).wait(),
    }
    if name == "backward of combine":
        y, gradient = comm.combine(leaf, handle), torch.ones_like(x)
        calls[name] = lambda: y.backward(gradient)
    call = calls[name]
    if mistake == "fake":
        call = _within(FakeTensorMode(), call)
    elif mistake == "real in fake":
        call = _within(FakeTensorMode(allow_non_fake_inputs=True), call)
    return call


def _rows_of_steps(comm: Any, rank: int, size: int, steps: int = 3) -> list[str]:
    """Each token goes to all ranks; its rows say of which step and rank it is."""
    ids = torch.arange(size, device=comm.device).repeat(2, 1)
    problems = []
    for step in range(1, steps + 1):
        x = torch.full((2, comm.hidden), 10.0 * step + rank, device=comm.device)
        out = comm.dispatch(x, ids)
        got, want = set(out.tokens[:, 0].tolist()), {10.0 * step + each for each in range(size)}
        if got != want:
            problems.append(f"step {step}: rows {sorted(got)}, expected {sorted(want)}")
        y = comm.combine(out.tokens, out.handle)
        if not torch.equal(y, size * x):
            problems.append(f"step {step}: sums {y[:, 0].tolist()}, expected {size * x[0, 0].item()}")
    return problems


def _communicator(size: int, **changes: Any) -> Any:
    sizes = {"num_experts": size, "hidden": HIDDEN, "top_k": size, "max_tokens": 8}
    return ranks.communicator(**{**sizes, "dtype": torch.float32, **changes})


OPERATIONS = ["dispatch", "halves", "redispatch", "combine", "dispatch backward"]
CASES = [
    *(
        (name, mistake)
        for name in OPERATIONS
        for mistake in ("nested", "raises", "array", "fake", "real in fake")
    ),
    ("async", "nested"),
    ("async", "raises"),
    ("backward of combine", "real in fake"),
]


@pytest.mark.parametrize("first", range(0, len(CASES), 6))
@on_ranks(2)
def test_what_torch_raises_of_one_rank_is_told(rank: int, size: int, first: int) -> None:
    cases = CASES[first : first + 6]
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode()  # loads half of torch, while nobody waits
    found = []
    with _communicator(size) as comm:
        x = torch.ones(2, HIDDEN, device=comm.device)
        ids = torch.arange(size, device=comm.device).repeat(2, 1)
        for name, mistake in cases:
            call = _call(name, mistake if rank == size - 1 else "", comm, x, ids)
            called, checked = told(call, comm)
            found.append((called or checked, _rows_of_steps(comm, rank, size)))
    for case, (error, problems) in zip(cases, found, strict=True):
        assert problems == [], (case, problems)
        assert error is not None and error.name == "InvalidArgument", (case, error)


def _within_a_call(rank: int, size: int) -> tuple[list[Caught | None], list[str]]:
    """A signal's handler calls operations while one of the same thread waits for the other rank."""
    found: list[Caught | None] = []
    with _communicator(size) as comm:
        x = torch.ones(2, HIDDEN, device=comm.device)
        ids = torch.arange(size, device=comm.device).repeat(2, 1)
        out = comm.dispatch(x, ids)
        dist.barrier()
        if rank == 0:

            def handler(*_: Any) -> None:
                found.append(catch(lambda: comm.dispatch(x, ids)))
                found.append(catch(lambda: comm.combine(out.tokens, out.handle)))

            before = signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            comm.dispatch(x, ids)
            signal.signal(signal.SIGALRM, before)
        else:
            time.sleep(1.0)
            comm.dispatch(x, ids)
        return found, _rows_of_steps(comm, rank, size)


def test_a_call_within_a_call_is_refused(fresh_ranks: Callable[..., list[Any]]) -> None:
    (found, problems), (_, others) = fresh_ranks(2, _within_a_call, timeout=30.0)
    assert problems == others == []
    assert len(found) == 2, found
    for error in found:
        assert error is not None and error.name == "InvalidArgument" and "under way" in error.text, error


def _texts(rank: int, size: int, text: str, changes: dict[str, Any]) -> tuple[str, str, list[str]]:
    with _communicator(size, **changes) as comm:
        raised = ValueError(text)
        x, ids = torch.ones(2, HIDDEN, device=comm.device), torch.zeros(2, size, dtype=torch.int64) - 1

        def call() -> Any:
            if rank == 1:
                comm.refuse(raised)
            return comm.dispatch(x, ids.to(comm.device))

        try:
            call()
            kind, said = "no error", ""
        except Exception as error:
            kind, said = type(error).__name__, str(error).encode(errors="replace").decode()
            if rank == 1 and error is not raised:
                kind = "another " + kind
        return kind, said, _rows_of_steps(comm, rank, size)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=needs_fabric)])
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("专" * 200, "专" * 150),
        ("é" * 400, "é" * 200),
        ("no file caf\udce9.txt", "no file caf"),
        ("\0", ""),
    ],
    ids=["three bytes", "two bytes", "surrogate", "zero"],
)
def test_texts_that_are_not_ascii(pool: Pools, nodes: int, text: str, part: str) -> None:
    environment = {"MOECOMM_FABRIC_PROVIDER": "tcp"} if nodes == 2 else {}
    changes = {"ranks_per_node": 2 // nodes} if nodes == 2 else {}
    for rank, (kind, said, problems) in enumerate(pool(2, **environment)(_texts, text, changes)):
        assert problems == []
        assert kind == ("ValueError" if rank == 1 else "InvalidArgument"), (kind, said)
        if rank == 0:
            assert said.startswith("rank 1: ValueError: ") and part in said, said


@contextlib.contextmanager
def _little_memory(here: bool) -> Iterator[None]:
    """Leaves this process 20 MiB more than it has, within the block."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if here:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (20 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _kind(call: Call, here: bool) -> tuple[str, bool]:
    """The error of a call with little memory on rank 1, and whether it is known to all ranks."""
    gc.collect()
    with _little_memory(here):
        try:
            call()
            return "nothing", True
        except Exception as error:
            return type(error).__name__, known_to_all(error)


def _short_of_memory(rank: int, size: int) -> tuple[list[str], dict[str, str], tuple[str, bool]]:
    """Rank 1 has no memory for an output, for the copy of rows that are not contiguous, and at last for the
    rows that arrive, of which it alone knows."""
    tokens, hidden = 16384, 1024
    with _communicator(size, hidden=hidden, max_tokens=tokens, top_k=1) as comm:
        big, one = torch.zeros(tokens, hidden), torch.full((tokens, 1), 1 - rank)
        strided = torch.zeros(hidden, tokens).t()
        out = comm.dispatch(big, one)
        loss = comm.combine(out.tokens.clone().requires_grad_(), out.handle)
        calls: dict[str, Call] = {
            "combine": lambda: comm.combine(out.tokens, out.handle),
            "redispatch": lambda: comm.redispatch(big, out.handle),
            "dispatch backward": lambda: comm.dispatch_backward(out.tokens, out.handle),
            "backward of combine": lambda: loss.backward(big),
            "copy": lambda: comm.dispatch(strided, one),
            "copy, async": lambda: comm.dispatch(strided, one, async_op=True).wait(),
            "copy, combine": lambda: comm.combine(strided, out.handle),
        }
        kinds, problems = {}, []
        for name, call in calls.items():
            kinds[name] = _kind(call, rank == 1)[0]
            for step in range(1, 4):
                x, home = torch.full((2, hidden), 10.0 * step + rank), torch.full((2, 1), 1 - rank)
                got = set(comm.dispatch(x, home).tokens[:, 0].tolist())
                if got != {10.0 * step + 1 - rank}:
                    problems.append(f"{name}, step {step}: {got}")
            dist.barrier()
        return problems, kinds, _kind(lambda: comm.dispatch(big, one), rank == 1)


def test_no_memory_on_one_rank(fresh_ranks: Callable[..., list[Any]]) -> None:
    """All are told of it, but of rows that one rank has no room for: a layer tells the others of those."""
    results = fresh_ranks(2, _short_of_memory)
    for problems, kinds, _ in results:
        assert problems == [] and kinds == dict.fromkeys(kinds, "OutOfMemory"), kinds
    assert [rows for *_, rows in results] == [("nothing", True), ("OutOfMemory", False)]


def _first_cause(rank: int, size: int, then: str) -> tuple[Caught | None, Caught | None, list[str]]:
    """An overflow that rank 0 raises by `check()`, and so leaves the step that the others go on with."""
    with _communicator(size, timeout=10.0) as comm:
        x, ids = (
            torch.ones(2, HIDDEN, device=comm.device),
            torch.arange(size, device=comm.device).repeat(2, 1),
        )
        out = comm.dispatch(x, ids, capacity=1)
        dist.barrier()
        checked = settled_error(comm) if rank == 0 else None
        if rank == 0 and then == "leaves":
            comm.close()
            return checked, None, []
        step = (
            (lambda: comm.dispatch(x, ids)) if rank == 0 else (lambda: comm.combine(out.tokens, out.handle))
        )
        if then == "leaves":
            return checked, catch(step) or settled_error(comm), []
        called, later = told(step, comm)
        return checked, called or later, _rows_of_steps(comm, rank, size)


@pytest.mark.parametrize(("then", "name"), [("goes on", "MismatchedArguments"), ("leaves", "PeerLost")])
def test_the_first_cause_is_told_where_one_rank_alone_checks(
    fresh_ranks: Callable[..., list[Any]], then: str, name: str
) -> None:
    """A rank that has not called `check()` meets another error later, which follows from the first."""
    (checked, own, problems), *others = fresh_ranks(3, _first_cause, then)
    assert problems == [] and checked is not None and checked.name == "CapacityExceeded", checked
    for _, error, problems in others:
        assert problems == [] and error is not None and error.name == name, error
        assert checked.text in error.text, error.text
    assert then == "leaves" or (own is not None and checked.text in own.text), own
