"""Fixtures that several files of unit tests share."""

from collections.abc import Callable
from typing import Any

import pytest

from bench.harness import command_line
from tests.unit.loopback import loopback

__all__ = ["loopback"]  # a fixture, which pytest finds by its name here


@pytest.fixture
def bench_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of a benchmark mean what they do outside torchrun, and the CPU where they say no device, on a
    machine with GPUs, too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command_line, "find_device", lambda given: "cpu" if given == "auto" else given)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[..., list[Any]]]:
    """pool(1)(body, *arguments) runs body(0, 1, *arguments) in this process on the CPU, where the same test
    in tests/gpu has a rank on a GPU."""
    monkeypatch.setenv("MOECOMM_TEST_DEVICE", "cpu")
    return lambda world_size: lambda body, *arguments: [body(0, world_size, *arguments)]
