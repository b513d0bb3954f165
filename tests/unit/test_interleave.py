"""Programs in turns: their order, what they find around them, errors, and interrupts."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import moecomm
from moecomm.overlap import Executor, Schedule, Stage, interleave, pause


def _program(log: list[str], name: str, steps: int) -> Callable[[], str]:
    def run() -> str:
        for step in range(steps):
            log.append(f"{name}{step}")
            pause()
        return name

    return run


def test_turns_are_taken_in_order() -> None:
    log: list[str] = []
    assert interleave(_program(log, "a", 3), _program(log, "b", 1), _program(log, "c", 2)) == ("a", "b", "c")
    assert log == ["a0", "b0", "c0", "a1", "c1", "a2"]
    log.clear()
    assert interleave(_program(log, "a", 2)) == ("a",) and log == ["a0", "a1"]
    assert interleave() == ()


def test_outside_a_pause_is_nothing() -> None:
    pause()


def test_only_one_runs_at_a_time() -> None:
    running: list[int] = []

    def program() -> None:
        for _ in range(50):
            running.append(1)
            assert len(running) == 1
            threading.Event().wait(0.0001)
            running.pop()
            pause()

    interleave(*[program] * 4)


def test_stages_that_yield() -> None:
    log: list[str] = []
    schedule = Schedule(
        [
            Stage(name="send", stream="comm", yields=True),
            Stage(name="compute", stream="main", after=("send",)),
            Stage(name="return", stream="comm", after=("compute",), yields=True),
        ],
        streams=("main", "comm"),
    )

    def program(name: str) -> Callable[[], None]:
        def run() -> None:
            work = {
                stage.name: (lambda _, stage=stage: log.append(f"{name} {stage.name}"))
                for stage in schedule.stages
            }
            for _ in range(2):
                Executor(torch.device("cpu")).run(schedule, work)

        return run

    interleave(program("a"), program("b"))
    once = ["a send", "b send", "a compute", "a return", "b compute", "b return"]
    assert log == once * 2


def test_forward_of_one_and_backward_of_another() -> None:
    """Autograd's own thread is not held up by a program that waits for its turn."""
    log: list[str] = []

    class Pausing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            log.append(f"forward {name}")
            pause()
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            log.append(f"backward {ctx.name}")
            pause()
            return grad * 2, None

    def net(x: torch.Tensor, name: str) -> torch.Tensor:
        y: torch.Tensor = Pausing.apply(Pausing.apply(x, f"{name}0"), f"{name}1")
        return y

    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    y, other = net(x, "x"), net(torch.ones(3, requires_grad=True), "o")
    log.clear()
    results = interleave(lambda: net(z, "z"), lambda: y.sum().backward(), lambda: other.sum().backward())
    assert torch.equal(results[0], torch.full((3,), 4.0)) and results[0].requires_grad
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    assert log == ["forward z0", "backward x1", "backward o1", "forward z1", "backward x0", "backward o0"]


VARIABLE: ContextVar[str] = ContextVar("variable", default="")


def test_programs_find_the_callers_surroundings() -> None:
    def look() -> tuple[bool, bool, torch.dtype, bool, str]:
        pause()
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_inference_mode_enabled(),
            VARIABLE.get(),
        )

    token = VARIABLE.set("mine")
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert interleave(look, look) == (look(),) * 2 == ((False, True, torch.float16, False, "mine"),) * 2
    with torch.inference_mode():
        assert interleave(look) == (look(),)
    assert interleave(look) == (look(),)
    VARIABLE.reset(token)


def test_an_error_lets_the_others_end_and_is_raised() -> None:
    log: list[str] = []

    def fails(text: str) -> Callable[[], None]:
        def run() -> None:
            pause()
            raise ValueError(text)

        return run

    with pytest.raises(ValueError, match=r"^first$"):
        interleave(_program(log, "a", 4), fails("first"), fails("second"))
    assert log == ["a0", "a1", "a2", "a3"]

    # Its threads are free again: the next calls need no others.
    def threads() -> set[int | None]:
        return {each.ident for each in threading.enumerate() if each.name.startswith("moecomm program")}

    before = threads()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^again$"):
            interleave(fails("again"), _program(log, "c", 1), _program(log, "d", 1))
    assert threads() == before and before
    assert interleave(_program(log, "b", 1)) == ("b",)


def test_the_next_call_has_the_same_threads() -> None:
    """A program runs in the same thread in the next call, so that what libraries keep by thread is there."""

    def ident() -> int:
        pause()
        return threading.get_ident()

    first = interleave(ident, ident)
    assert len({*first, threading.get_ident()}) == 3
    assert interleave(ident, ident) == first and interleave(ident) == first[:1]
    assert interleave(ident, ident, ident)[:2] == first

    # Two callers at a time do not share any.
    found: list[tuple[int, ...]] = []
    meet = threading.Barrier(2)

    def together() -> int:
        meet.wait(10)
        return threading.get_ident()

    callers = [threading.Thread(target=lambda: found.append(interleave(together))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(found)) == 2


def test_a_forked_child_has_threads_of_its_own() -> None:
    interleave(pause)
    child = os.fork()
    if child == 0:
        os._exit(interleave(lambda: 7)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_interrupt_ends_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []

    def forever() -> None:
        try:
            while True:
                threading.Event().wait(0.001)
                pause()
        except BaseException as error:
            ended.append(error)
            raise

    wait, calls = concurrent.futures.wait, [0]

    def interrupted(played: list[Any]) -> None:
        calls[0] += 1
        if calls[0] == 1:
            threading.Event().wait(0.05)
            raise KeyboardInterrupt
        wait(played)

    monkeypatch.setattr(sys.modules[interleave.__module__], "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interleave(forever, forever)
    assert len(ended) == 2 and all(type(error).__name__ == "_Ended" for error in ended)


def test_refused() -> None:
    with pytest.raises(moecomm.InvalidArgument, match="program is int, expected something to call"):
        interleave(print, 3)  # type: ignore[arg-type]

    def inside() -> None:
        interleave(print)

    with pytest.raises(moecomm.InvalidArgument, match="within a program of another one"):
        interleave(inside)
