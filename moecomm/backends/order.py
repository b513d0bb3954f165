"""Lets the operations of one communicator run one after the other, in the order of the calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class ProcessLock:
    """A re-entrant lock. A forked child, which does not have the thread that may hold it, begins with a free
    one."""

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._owner:
            self._owner, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class InOrder:
    """Orders operations: `run` works in the caller's thread unless operations of `submit` are under way; then
    it queues up behind them."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._gate = threading.Lock()  # held while a call takes its place
        self._running = threading.Lock()  # held while an operation runs
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    def _in_child(self) -> None:
        """Starts afresh in a forked child, which has neither the thread nor the holders of the locks:
        operations under way are not its own. (Its operations are refused further down.)"""
        if os.getpid() != self._owner:
            self._begin()

    def run(self, operation: Callable[[], Result]) -> Result:
        """Runs `operation` after everything before it and returns its result."""
        self._in_child()
        with self._gate:
            if self._last is not None and not self._last.done():
                future = self._enqueue(operation)
            else:
                future = None
                self._running.acquire()
        if future is not None:
            return future.result()
        try:
            return operation()
        finally:
            self._running.release()

    def submit(self, operation: Callable[[], Result]) -> Future[Result]:
        """Starts `operation` in the communicator's own thread, after everything before it."""
        self._in_child()
        with self._gate:
            return self._enqueue(operation)

    def _enqueue(self, operation: Callable[[], Result]) -> Future[Result]:
        def locked() -> Result:
            with self._running:
                return operation()

        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moecomm")
        future = self._pool.submit(locked)
        self._last = future  # type: ignore[assignment]
        return future

    def finish(self) -> None:
        """Waits for the submitted operations; nothing may be submitted afterwards."""
        self._in_child()
        with self._gate:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
