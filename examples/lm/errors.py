"""Errors that are shown as one line without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


class UsageError(Exception):
    """The user's to mend, before anything was computed: the exit code is 2."""


class RunError(Exception):
    """What ends a run that had begun well, a full disk for example: the exit code is 1."""


def first_to_say() -> bool:
    """Returns True in the first rank of this host that asks, so that an error which several ranks have is
    said once, and one that a single rank has is said as well. Ranks that torchrun has started share a folder
    for their errors; without one it is rank 0 that speaks."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of this attempt>/<local rank>/error.json
    try:
        if errors:
            (Path(errors).parents[1] / "said").touch(exist_ok=False)
            return True
    except FileExistsError:
        return False
    except OSError:
        pass  # the folder is gone, or has no room
    return os.environ.get("RANK", "0") == "0"


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Returns what `run` returns as the exit code for the shell, or that of its error, which is told."""
    try:
        return run()
    except (UsageError, RunError) as error:
        if first_to_say():
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
