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


def program(name: str) -> Path:
    """A program as it was built. Raises RuntimeError with what to do where it was not."""
    folder = os.environ.get("MOECOMM_BENCH_PROGRAMS")
    extension = importlib.util.find_spec("moecomm._C")
    beside = Path(extension.origin).parent if extension is not None and extension.origin else Path()
    found = (Path(folder) if folder else beside) / name
    if not os.access(found, os.X_OK):
        first = "install libfabric-dev and build" if name == "fabric_raw" else "build"
        raise RuntimeError(
            f"{name} is not built: {first} again, or set MOECOMM_BENCH_PROGRAMS to where it is"
        )
    return found


def lines(name: str, flags: Sequence[str], most_s: float = 300.0) -> list[dict[str, Any]]:
    """Runs a program in C++ and returns the records that it prints, one a line. Raises RuntimeError with the
    reason if it prints none, or takes more than `most_s` seconds.
    """
    command = [str(program(name)), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=most_s, check=False)
        if done.returncode != 0:
            raise RuntimeError(" ".join(done.stderr.split()) or f"{name} ended with status {done.returncode}")
        return [json.loads(line) for line in done.stdout.splitlines()]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {most_s:g} s") from None
    except (OSError, ValueError) as problem:
        raise RuntimeError(f"{name}: {problem}") from None


def document(name: str, flags: Sequence[str], commit: str | None) -> record.Record:
    """The record of a run, whose rows are what the program says. Raises RuntimeError as lines()."""
    said = lines(name, flags)
    for line in said:
        line.pop("address", None)  # of this host: nobody else's concern
    return {**record.heading(name, shlex.join((name, *flags)), commit, "cpu"), "wrong": None, "rows": said}
