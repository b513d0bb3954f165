"""Several programs on one stream, in turns: where one has sent its rows on their way, another computes.

    _, fresh = interleave(lambda: y.backward(grad), lambda: block(x_next))

Each program is ordinary code, such as the forward of one microbatch or the backward of another, in a thread
of its own, of which only one runs at a time. Turns change at fixed points: after stages that say so
(`Stage.yields`), and where a program calls `pause`. So the order in which work reaches the stream, and the
communicator, is that of the programs, the same in every run and on every rank that has the same programs.
(Megatron-Core merges the forward of one microbatch with the backward of another to this end.)
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from moecomm.errors import InvalidArgument

Result = TypeVar("Result")


class _Ended(BaseException):
    """Raised in a program whose turn will not come, since the caller was interrupted."""


class _Turns:
    """The turns of the programs, which are numbered; the lowest begins."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._alive = [True] * count
        self._paused = [False] * count
        self._turn = 0
        self._told = [0] * count  # SMs of each program's transfer that no product has left yet
        self._ended = False

    def wait(self, number: int) -> None:
        """Waits until it is the turn of a program; raises _Ended if it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._turn == number)
            if self._ended:
                raise _Ended

    def pass_on(self, number: int, sms: int) -> None:
        """Passes the turn on, if there is another program; returns when it comes back. `sms`: SMs of the
        transfer that this program has issued; 0: no new transfer."""
        with self._changed:
            self._paused[number] = True
            self._told[number] = sms or self._told[number]
            self._next(number)
        self.wait(number)

    def others_go_on(self, number: int) -> bool:
        """Returns True if there is another program that has had a turn and is not over."""
        with self._changed:
            each = zip(self._paused, self._alive, strict=True)
            return any(paused and alive and other != number for other, (paused, alive) in enumerate(each))

    def take(self, number: int) -> int:
        """Returns and clears the largest SM count that another program has announced. The announcement of
        this program is cleared too: its product comes after its transfer."""
        with self._changed:
            self._told[number] = 0
            sms, self._told = max(self._told), [0] * len(self._told)
        return sms

    def leave(self, number: int) -> None:
        """Ends a program and passes its turn on."""
        with self._changed:
            self._alive[number], self._told[number] = False, 0
            self._next(number)

    def end(self) -> None:
        """Ends the turns of all programs."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _next(self, number: int) -> None:
        count = len(self._alive)
        others = ((number + step) % count for step in range(1, count + 1))
        self._turn = next((other for other in others if self._alive[other]), -1)
        self._changed.notify_all()


_place: contextvars.ContextVar[tuple[_Turns, int] | None] = contextvars.ContextVar(
    "moecomm turn", default=None
)


def pause(sms: int = 0) -> None:
    """Passes the turn to the next program of `interleave`; outside a program it does nothing.

    sms: SMs of the GPU that this program's transfer holds, where it was given few: the next product of
    another program (`Stage.leaves_sms`) leaves them.
    """
    place = _place.get()
    if place is not None:
        turns, number = place
        turns.pass_on(number, sms)


def others_go_on() -> bool:
    """Returns True within a program if another one has begun and continues when this one pauses."""
    place = _place.get()
    return place is not None and place[0].others_go_on(place[1])


def sms_to_leave() -> int:
    """Returns the SMs that other programs have announced in `pause` and no product has left yet, and clears
    them; a program calls it before a product. Outside a program it returns 0."""
    place = _place.get()
    return 0 if place is None else place[0].take(place[1])


def in_turns() -> bool:
    """Returns True within a program of `interleave`."""
    return _place.get() is not None


def interleave(*programs: Callable[[], Any]) -> tuple[Any, ...]:
    """Runs the programs in turns, the first one first, and returns their results in their order.

    A program finds the caller's device, stream, grad mode and autocast; a backward runs in the program's own
    thread. Programs must not wait for each other, and their operations of one communicator come in the order
    of the turns.

    An exception in one program lets the others come to their end, since other ranks may have a part in what
    they do; then the first one in the order of the programs is raised. A keyboard interrupt ends them at
    their next turn.

    Raises InvalidArgument for something that cannot be called, and within a program of another interleave.
    """
    for program in programs:
        if not callable(program):
            raise InvalidArgument(f"program is {type(program).__name__}, expected something to call")
    if in_turns():
        raise InvalidArgument("interleave within a program of another one, expected outside")
    turns = _Turns(len(programs))
    results: list[Any] = [None] * len(programs)
    errors: list[BaseException | None] = [None] * len(programs)
    surroundings = _surroundings()

    def play(number: int) -> None:
        _place.set((turns, number))
        try:
            turns.wait(number)
            with surroundings():
                results[number] = programs[number]()
        except BaseException as error:  # every kind belongs to the caller
            errors[number] = error
        finally:
            turns.leave(number)

    with _crew(len(programs)) as threads:
        played = [
            thread.submit(contextvars.copy_context().run, play, number)
            for number, thread in enumerate(threads)
        ]
        try:
            wait(played)
        except BaseException:
            turns.end()
            wait(played)
            raise
    for error in errors:
        if error is not None:
            raise error
    return tuple(results)


_idle_crews: list[list[ThreadPoolExecutor]] = []
os.register_at_fork(after_in_child=_idle_crews.clear)


@contextlib.contextmanager
def _crew(count: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Gives each program a thread, the same one in the next call: libraries keep state by thread that takes
    long to make, such as cuDNN's plans of attention."""
    crew = _idle_crews.pop() if _idle_crews else []
    for number in range(len(crew), count):
        crew.append(ThreadPoolExecutor(1, thread_name_prefix=f"moecomm program {number}"))
    try:
        yield crew[:count]
    finally:
        _idle_crews.append(crew)


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns a context that gives another thread this thread's torch state: stream, grad mode, inference
    mode, autocast."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = ["cpu"]
    stream = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append("cuda")
        stream = torch.cuda.current_stream()
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}

    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (enabled, dtype) in casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            # A backward that waits for its turn must not hold up the device's own thread, which all share.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return enter
