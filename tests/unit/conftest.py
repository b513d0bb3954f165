"""Fixtures that several files of unit tests share."""

from __future__ import annotations

import pytest

from bench.harness import command_line


@pytest.fixture
def bench_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of a benchmark mean what they do outside torchrun, and the CPU where they say no device, on a
    machine with GPUs, too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command_line, "find_device", lambda given: "cpu" if given == "auto" else given)
