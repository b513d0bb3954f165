"""`python -m moecomm`: the report alone, and tried out between the ranks of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

import moecomm


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_the_report_names_versions_host_gpus_network_and_transports() -> None:
    done = _run("-m", "moecomm", "-g", "3")
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["moecomm", moecomm.__version__] in lines
    for title in ("versions", "host", "GPUs", "network", "transports"):
        assert any(words[0] == title for words in lines), done.stdout
    assert any(words[0] == "cuda-bindings" for words in lines), done.stdout
    assert "transports of 3 ranks on this host" in done.stdout
    assert "rank 0 (itself)" in done.stdout
    for peer in (1, 2):
        assert any(line.split()[:2] == ["rank", str(peer)] for line in done.stdout.splitlines())
    assert done.stdout.count("shared memory (POSIX, /dev/shm)") == 2


def test_ranks_of_torchrun_try_their_transport() -> None:
    done = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moecomm")
    assert done.returncode == 0, done.stderr
    assert "transports of 2 ranks (tried: works)" in done.stdout
    assert done.stdout.count("versions\n") == 1


def test_a_bad_number_of_ranks_is_one_line() -> None:
    done = _run("-m", "moecomm", "-g", "0")
    assert done.returncode == 2
    assert "--ranks is 0, expected at least 1" in done.stderr
