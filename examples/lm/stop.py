"""Leaving at a step's end instead of in the middle of it, when Ctrl-C or a termination signal asks for it."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """True once SIGINT or SIGTERM came. A second signal ends the process at once."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked = True
