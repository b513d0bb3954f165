"""Lets the operations of one communicator run one after the other, in the order of the calls."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.thread import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from moecomm.errors import CommunicatorClosed, InvalidArgument

Result = TypeVar("Result")

_PATIENCE = 1.0  # seconds that `finish` waits before the running operation gives up


class ProcessLock:
    """A re-entrant lock. In a forked child it is free: a thread that held it is in the parent alone."""

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._owner:
            self._owner, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def within_another() -> InvalidArgument:
    """Returns the error of an operation that is called within another one of the same thread."""
    return InvalidArgument(
        "an operation is called while another one of the communicator is under way in this thread (by a "
        "signal's handler), expected a call after that one has returned"
    )


class InOrder:
    """Orders operations. `run` executes an operation in the caller's thread or, while operations of `submit`
    are pending, after these in their thread."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """`give_up` ends the wait of the running operation, and all later waits, with an error."""
        self._give_up = give_up
        self._builder = os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._gate = threading.RLock()  # held while a call is put into the order
        self._running = threading.Lock()  # held while an operation runs
        self._here = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._last: Callable[[], Future[Any] | None] = lambda: None  # weak: a future keeps its result

    def _in_child(self) -> None:
        """Resets the state in a forked child: running operations, their threads and the holders of locks are
        in the parent alone. (The runtime refuses operations of a child.)"""
        if os.getpid() != self._owner:
            self._begin()

    def run(self, operation: Callable[..., Result], *arguments: Any) -> Result:
        """Runs `operation` after all earlier ones and returns its result. Raises InvalidArgument in a signal
        handler that has interrupted an operation of this thread."""
        self._in_child()
        here = self._here
        if getattr(here, "inside", False):
            raise within_another()
        future = None
        try:
            here.inside = True
            with self._gate:
                last = self._last()
                if last is not None and not last.done():
                    future = self._enqueue(operation, *arguments)
                elif threading.current_thread().daemon:
                    _to_finish.add(self)
                del last
            if future is not None:
                return self.result(future)
            with self._running:  # not acquire(), after which Ctrl-C could come before a `try`
                return operation(*arguments)
        finally:
            del future  # as in `result`
            here.inside = False

    def submit(self, operation: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Starts `operation` in the communicator's own thread, after all earlier ones."""
        self._in_child()
        with self._gate:
            return self._enqueue(operation, *arguments)

    def result(self, future: Future[Result]) -> Result:
        """Returns the result of a submitted operation, or raises its error. If this wait is interrupted (for
        example by Ctrl-C), the operation gives up. Raises CommunicatorClosed in a forked child if the
        operation was under way: its thread is in the parent alone."""
        try:
            if os.getpid() != self._builder and not future.done():
                raise CommunicatorClosed(
                    f"the operation is one of process {self._builder}, which this process was forked from "
                    "while it was under way; a forked child has to build its own communicator"
                )
            return future.result()
        except BaseException:
            if not future.done():
                self._give_up()
            raise
        finally:
            del future  # holds the error, whose traceback holds this frame and the operation's tensors

    def _enqueue(self, operation: Callable[..., Result], *arguments: Any) -> Future[Result]:
        def locked() -> Result:
            with self._running:
                return operation(*arguments)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moecomm")
            _to_finish.add(self)
        future = self._pool.submit(locked)  # the pool holds it until it is done
        self._last = weakref.ref(future)
        return future

    def finish(self, then: Callable[[], Result]) -> Result:
        """Waits for the operations of all threads, then returns `then()`. An operation that still waits for
        other ranks after a second gives up, as they may never come. Submit nothing after this."""
        self._in_child()
        with self._held(self._gate):
            pool, self._pool = self._pool, None
        if pool is not None:
            last = self._last()
            if last is not None and not wait([last], _PATIENCE).done:
                self._give_up()
            pool.shutdown(wait=True)
        if getattr(self._here, "inside", False):  # a signal's handler called this within an operation
            self._give_up()
            return then()
        with self._held(self._running):
            return then()

    @contextmanager
    def _held(self, lock: Any) -> Iterator[None]:
        """Holds a lock. If it is not free within a second, the running operation gives up."""
        if not lock.acquire(timeout=_PATIENCE):
            self._give_up()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


_to_finish: weakref.WeakSet[InOrder] = weakref.WeakSet()
"""What has run in threads for which the end of the interpreter does not wait by itself. A daemon thread that
takes the GIL after that end, as a wait does now and then, ends the process by SIGABRT."""


def ends_by_error() -> bool:
    """Returns whether the interpreter is about to end after an uncaught exception."""
    return _ending and getattr(sys, "last_value", None) is not None


_ending = False


def _finish_all() -> None:
    global _ending
    _ending = True
    for each in list(_to_finish):
        each.finish(bool)


# The interpreter waits for the threads of pools before it runs `atexit` functions. concurrent.futures,
# imported above, has registered that wait by this function too; what is registered later runs earlier.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
