"""Additions of conftest.py to pytest: seeds, and the reason shown for a test that this machine cannot run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moecomm.setup import discovery
from tests.programs import run_program

PROGRAM = """
import pytest

def test_fails(seed):
    print("drawn", seed)
    assert not seed

@pytest.mark.gpu
def test_gpu():
    import torch
    assert torch.cuda.is_available()
"""


def _run(tmp_path: Path, *options: str) -> str:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    command = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "-c", "/dev/null"]
    return run_program(*command, "--rootdir", tmp_path, tmp_path / "test_program.py", *options, code=1).out


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one run says."""
    return _run(tmp_path_factory.mktemp("first"))


def test_seeds_are_shown_and_repeat(first: str, tmp_path: Path) -> None:
    (base,) = set(re.findall(r"--seed (\d+)", first))
    assert f"base seed {base}" in first.split("collected")[0], "the header names the base seed"
    (drawn,) = re.findall(r"drawn (\d+)", first)
    assert f"seed={drawn} base={base}" in first, "a failure names its seed"
    again = _run(tmp_path, "--seed", base)
    assert re.findall(r"drawn (\d+)", again) == [drawn]
    assert re.findall(r"drawn (\d+)", _run(tmp_path, "--seed", str(int(base) + 1))) != [drawn]


def test_gpu_tests_say_why_they_are_skipped(first: str) -> None:
    assert re.search(r"SKIPPED \[1\].*needs a GPU: torch ", first)


def test_what_is_left_out_is_said_first_and_last(first: str) -> None:
    head, tail = first.split("collected")
    for line in discovery.left_out():
        assert line in head and line in tail
