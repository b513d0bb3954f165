"""Types of flags, and their parser, which all programs of the examples share."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from lm.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


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
