"""What goes wrong on one rank before its part of an operation has begun: an error on all ranks, and ranks in
step, so that the rows of a later step are those of that step on every rank."""

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
from torch._subclasses.fake_tensor import FakeTensorMode

from moecomm.errors import InvalidArgument, known_to_all
from tests import ranks
from tests.fabric import needs_fabric
from tests.multirank.catching import Caught, catch, require
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


def _call(name: str, mistake: str, comm: Any, x: Any, ids: torch.Tensor) -> Call:
    """The operation `name`, right or with a mistake."""
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
    if "fake" not in mistake:
        return call

    def within() -> Any:
        with FakeTensorMode(allow_non_fake_inputs=mistake == "real in fake"):
            return call()

    return within


def _rows_of_steps(comm: Any, rank: int, size: int, steps: int = 3) -> list[str]:
    """Each token goes to all ranks; its rows say of which step and rank it is."""
    _, ids = _batch(comm, size)
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


def _batch(comm: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tokens, and the ids by which each goes to all ranks."""
    ids = torch.arange(size, device=comm.device).repeat(2, 1)
    return torch.ones(2, comm.hidden, device=comm.device), ids


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
    FakeTensorMode()  # loads half of torch, while nobody waits
    with _communicator(size) as comm:
        x, ids = _batch(comm, size)
        for name, mistake in CASES[first : first + 6]:
            call = _call(name, mistake if rank == size - 1 else "", comm, x, ids)
            called, checked = told(call, comm)
            require(called or checked)
            assert _rows_of_steps(comm, rank, size) == [], (name, mistake)


def _within_a_call(rank: int, size: int) -> tuple[list[Caught | None], list[str]]:
    """A signal's handler calls operations while one of the same thread waits for the other rank."""
    found: list[Caught | None] = []
    with _communicator(size) as comm:
        x, ids = _batch(comm, size)
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
        require(error, "under way")


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
@on_ranks(2, MOECOMM_FABRIC_PROVIDER="tcp")
def test_texts_that_are_not_ascii(rank: int, size: int, nodes: int, text: str, part: str) -> list[str]:
    changes = {"ranks_per_node": 1} if nodes == 2 else {}
    with _communicator(size, **changes) as comm:
        x, ids = torch.ones(2, HIDDEN, device=comm.device), torch.zeros(2, size, dtype=torch.int64) - 1
        raised = ValueError(text)

        def call() -> None:
            if rank == 1:
                comm.refuse(raised)
            comm.dispatch(x, ids.to(comm.device))

        with pytest.raises((ValueError, InvalidArgument)) as found:
            call()
        if rank == 1:
            assert found.value is raised
        else:
            said = str(found.value).encode(errors="replace").decode()
            assert isinstance(found.value, InvalidArgument), found.value
            assert said.startswith("rank 1: ValueError: ") and part in said, said
        return _rows_of_steps(comm, rank, size)


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
        x, ids = _batch(comm, size)
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
