"""Leaving at a step's end instead of in the middle of it, when Ctrl-C or a termination signal asks for it."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SAME_SECONDS = 2.0
"""Signals that come so soon after the first one are the same request: a batch system tells the ranks and
their launcher, which tells the ranks once more."""


class StopRequest:
    """True once SIGINT or SIGTERM came. A later signal ends the process at once, and so does a SIGTERM before
    the ranks have joined, where there may be nobody to wait for.

    Attributes:
        joined: set when the ranks have joined.
    """

    def __init__(self) -> None:
        self.joined = False
        self._asked = False
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        late = self._asked and time.monotonic() - self._since > SAME_SECONDS
        if late or (number == signal.SIGTERM and not self.joined and not self._asked):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            self._asked, self._since = True, time.monotonic()
