"""Errors that are shown as one line without a traceback."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lm.stop import Output


class UsageError(Exception):
    """An error that the user can fix, found before anything was computed: the exit code is 2."""


class RunError(Exception):
    """An error that ends a run after it had begun well, for example a full disk: the exit code is 1."""


def first_to_say() -> bool:
    """Returns True in the first rank of this host that asks, so that an error of one or several ranks is
    printed once. Ranks that torchrun has started share a folder for their errors; without it rank 0
    prints."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this attempt>/<local rank>/error.json
    try:
        if errors:
            (Path(errors).parents[1] / "said").touch(exist_ok=False)
            return True
    except FileExistsError:
        return False
    except OSError:
        pass  # the folder is gone, or the disk is full
    return os.environ.get("RANK", "0") == "0"


def _is_unread() -> bool:
    """Returns whether the program that read the output has ended, as `head` does. Then nothing is said."""
    output = select.poll()
    output.register(1, 0)
    return any(found & select.POLLERR for _, found in output.poll(0))


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Returns the result of `run` as the exit code for the shell; prints an error and returns its code."""
    try:
        return run()
    except Exception as error:
        if _is_unread() and not isinstance(sys.stdout, Output):
            os._exit(128 + signal.SIGPIPE)
        if not isinstance(error, (UsageError, RunError)):
            raise
        if first_to_say():
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
