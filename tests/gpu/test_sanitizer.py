"""compute-sanitizer over small cases: no bad access to memory, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
FOUND = 9  # exit code of the sanitizer when it found something


PIPES = [
    "combine_reduce",
    "combine_sum",
    "dispatch_send",
    "dispatch_quantise",
    "dispatch_receive",
    "dispatch_dequantise",
    "dispatch_scale",
]
"""Kernels whose warps hand pieces to each other (csrc/kernels/gpu/combine/sum_pipe.cuh, move_pipe.cuh). A
lane arrives at a barrier for its warp there, and racecheck takes what the other lanes did for unordered. It
found nothing in those of a combine in a build in which every lane arrived."""

TEAMS = ["dispatch_fused"]
"""Kernels in which teams of warps have barriers of their own. Between warps that have passed different
numbers of these, racecheck seems to miss the barriers of the block behind them: in the machine code of all
pairs that it named, `BAR.SYNC 0x0` lies between the store and the load (block_scan, agree and lay_out_rows in
csrc/kernels/gpu/dispatch/plan.cuh). It names none in the first block, which has these functions and no
teams."""


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_the_case_itself(require_gpus: Callable[[int], None]) -> None:
    require_gpus(2)
    done = _run([sys.executable, "-m", "tests.gpu.sanitize_case", "--ranks", "2"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("fused_tokens", ["0", "1024"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean_under(require_gpus: Callable[[int], None], tool: str, fused_tokens: str) -> None:
    require_gpus(2)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    watched = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    watched += ["--kernel-name", "kernel_substring=moecomm"]  # ours, not those of torch
    if tool == "memcheck":
        watched += ["--report-api-errors", "no"]  # torch asks the driver questions that it may refuse
    if tool == "racecheck":
        for name in [*PIPES, *TEAMS]:
            watched += ["--kernel-name-exclude", f"kernel_substring={name}"]
    case = [sys.executable, "-m", "tests.gpu.sanitize_case", "--ranks", "2"]
    done = _run([*watched, *case], MOECOMM_FUSED_TOKENS=fused_tokens)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-8000:]
    assert "ERROR SUMMARY: 0 errors" in text or "0 hazards" in text, text[-4000:]
