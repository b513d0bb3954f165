"""Errors that are shown as one line without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """The user's to mend, before anything was computed: the exit code is 2."""


class RunError(Exception):
    """What ends a run that had begun well, a full disk for example: the exit code is 1."""
