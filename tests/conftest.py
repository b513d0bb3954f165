"""Markers, seeds and the reason shown for a test that this machine cannot run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecomm.setup import discovery
from tests import seeds

HERE = Path(__file__).parent
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank that compiles starts processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="base of all random seeds (default: a random one, printed)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "multirank: starts ranks as processes on this host")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds on two cores")
    given = config.getoption("--seed")
    if given is not None:
        seeds.set_base(given)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"moecomm: base seed {seeds.base()} (repeat with --seed {seeds.base()})", *discovery.left_out()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = list(discovery.left_out())
    if lines:
        terminalreporter.section("left out on this machine")
        for line in lines:
            terminalreporter.line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _why_no_gpu()
    for item in items:
        if HERE / "multirank" in item.path.parents:
            item.add_marker(pytest.mark.multirank)
        if HERE / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if missing and not _played_on_cpu() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own: the same for the same base seed and test name. Shown when the test fails."""
    return zlib.crc32(f"{seeds.base()}:{request.node.nodeid}".encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and report.when == "call":
        own = getattr(item, "funcargs", {}).get("seed")
        report.sections.append(
            ("seeds", f"seed={own} base={seeds.base()} (repeat with --seed {seeds.base()})")
        )
    return report


def _played_on_cpu() -> bool:
    """The bodies of tests/gpu on the CPU backend (tests/gpu/harness.py)."""
    return os.environ.get("MOECOMM_TEST_DEVICE") == "cpu"


def _why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    built = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    return f"needs a GPU: {built}"
