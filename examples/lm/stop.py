"""Ends a run after the current step, not within it, when Ctrl-C or a termination signal asks for it, or the
program that reads its output has ended, as `head` does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SAME_SECONDS = 2.0
"""Signals within this time after the first one are the same request: a batch system signals the ranks and
their launcher, which signals the ranks again."""


class StopRequest:
    """True after SIGINT or SIGTERM. A later signal ends the process at once. So does a SIGTERM before the
    ranks have joined, since no other rank may be there to wait for.

    Attributes:
        joined: set when the ranks have joined.
    """

    def __init__(self) -> None:
        self.joined = False
        self._asked = False
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def watch_output(self) -> None:
        """Replaces sys.stdout: when nobody reads it any more, the run is asked to stop, too."""
        sys.stdout = Output(self)

    def ask(self) -> None:
        """Requests the stop."""
        if not self._asked:
            self._asked, self._since = True, time.monotonic()

    def __bool__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        late = self._asked and time.monotonic() - self._since > SAME_SECONDS
        if late or (number == signal.SIGTERM and not self.joined and not self._asked):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.ask()


class Output:
    """The standard output. When nobody reads it any more, it requests the stop and leads nowhere."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._stream = stop, sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return int(self._try(self._stream.write, text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stop.ask()
            said = "nobody reads the output any more: the run ends after this step, with a checkpoint"
            with contextlib.suppress(OSError):
                print(said, file=sys.stderr, flush=True)
            return call(*arguments)
