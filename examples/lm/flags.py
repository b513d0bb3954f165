"""Types of flags, and their parser, which all programs of the examples share."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from lm.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def saved(self, path: Path) -> dict[str, Any]:
        """Returns the options of an earlier run from its file, whose values are checked like those of a
        command line. Raises UsageError."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"--resume: no run in {path.parent} (no {path.name})") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"--resume: {path}: {error}") from None
        if not isinstance(found, dict):
            raise UsageError(f"--resume: {path} does not hold a run's options")
        actions = {action.dest: action for action in self._actions}
        for name, value in found.items():
            if name not in actions:
                raise UsageError(f"--resume: {path}: there is no option {name!r}")
            try:
                fits = (value is None and self.get_default(name) is None) or self._fits(actions[name], value)
            except argparse.ArgumentError as error:
                raise UsageError(f"--resume: {path}: {error}") from None
            if not fits:
                raise UsageError(f"--resume: {path}: {name!r} cannot be {json.dumps(value)}")
        return found

    def _fits(self, action: argparse.Action, value: Any) -> bool:
        """Returns whether a flag gives such a value. Raises ArgumentError if it refuses it."""
        if action.nargs == 0:
            return isinstance(value, bool)
        if action.nargs in ("+", "*"):
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        given = self._get_value(action, text)
        self._check_value(action, given)
        return bool(given == value)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an option's default unless there is none, or the help text says what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        none = action.default is False or action.default in (None, "")
        said = action.help is not None and "(default:" in action.help
        return action.help if none or said else super()._get_help_string(action)


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def count(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of at least 1")
    return value


def whole(text: str) -> int:
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not a number of at least 0")
    return value


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{value} is not a finite number of at least 0")
    return value


def above_zero(text: str) -> float:
    value = amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not a number above 0")
    return value
