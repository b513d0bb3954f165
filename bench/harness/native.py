"""The C++ programs of bench/: where they are, and what they say.

They are built with the extension and lie beside it. MOECOMM_BENCH_PROGRAMS names another folder, of a build
by CMake alone (bench/README.md).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import record

_MOST_S = 300.0
_LIBFABRIC = ("fabric_raw",)


def program(name: str) -> Path | None:
    """A program as it was built; None where it was not."""
    folder = os.environ.get("MOECOMM_BENCH_PROGRAMS")
    if folder:
        found = Path(folder) / name
    else:
        extension = importlib.util.find_spec("moecomm._C")
        if extension is None or extension.origin is None:
            return None
        found = Path(extension.origin).with_name(name)
    return found if os.access(found, os.X_OK) else None


def missing(name: str) -> str:
    """Why a program is not there, and what to do."""
    first = "install libfabric-dev and build" if name in _LIBFABRIC else "build"
    return f"{name} is not built: {first} again, or set MOECOMM_BENCH_PROGRAMS to where it is"


def lines(name: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Runs a program in C++ and returns the records that it prints, one a line. Raises RuntimeError with the
    reason if it prints none.
    """
    binary = program(name)
    if binary is None:
        raise RuntimeError(missing(name))
    try:
        done = subprocess.run(
            [str(binary), *flags], capture_output=True, text=True, timeout=_MOST_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(" ".join(done.stderr.split()) or f"{name} ended with status {done.returncode}")
        return [json.loads(line) for line in done.stdout.splitlines()]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {_MOST_S:g} s") from None
    except (OSError, ValueError) as problem:
        raise RuntimeError(f"{name}: {problem}") from None


def document(name: str, flags: Sequence[str], commit: str | None) -> record.Record:
    """The record of a run, whose rows are what the program says. Raises RuntimeError as lines()."""
    said = lines(name, flags)
    for line in said:
        line.pop("address", None)  # of this host: nobody else's concern
    return {**record.heading(name, shlex.join((name, *flags)), commit, "cpu"), "wrong": None, "rows": said}
