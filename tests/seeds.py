"""The base of all random seeds of one test run."""

import os

_base: int | None = None


def base() -> int:
    """The base seed: `--seed`, else MOECOMM_TEST_SEED of the environment, else one drawn for this run."""
    global _base
    if _base is None:
        given = os.environ.get("MOECOMM_TEST_SEED")
        _base = int(given) if given else int.from_bytes(os.urandom(3), "little")
    return _base


def set_base(value: int) -> None:
    """Fixes the base seed; called once, before any test is collected."""
    global _base
    _base = value
