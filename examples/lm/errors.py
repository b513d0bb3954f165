"""The error that is the user's to mend: shown as one line without a traceback, and the exit code is 2."""

from __future__ import annotations


class UsageError(Exception):
    pass
