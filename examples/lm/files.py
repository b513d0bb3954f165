"""Files of a run that are replaced as a whole, and its folder, which no other run may use."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from lm.errors import RunError, UsageError


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by this text; the earlier file stays if the process ends before."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Raises UsageError if another run writes into `out`. The lock ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise RunError(f"--out {out}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--out {out}: another run writes there") from None
        except OSError:
            pass  # the file system has no locks
        yield
