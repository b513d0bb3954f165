"""Ends a run after the current step, not within it, when Ctrl-C or a termination signal asks for it."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

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

    def __bool__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        late = self._asked and time.monotonic() - self._since > SAME_SECONDS
        if late or (number == signal.SIGTERM and not self.joined and not self._asked):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            self._asked, self._since = True, time.monotonic()
