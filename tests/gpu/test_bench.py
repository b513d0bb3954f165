"""The benchmark of training steps on GPUs: every variant verified, clocks and power recorded."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness import record

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]
SMALL = "--device cuda -g 2 -b 256 -n 3 -w 1 --hidden 512 --ffn 256 --experts 8 --topk 2"


@pytest.mark.parametrize("preset", ["qwen3-30b", "deepseek-v3"])
def test_training_steps_are_verified_and_watched(
    preset: str, require_gpus: Callable[[int], None], tmp_path: Path
) -> None:
    require_gpus(2)
    target = tmp_path / "out.json"
    flags = f"--presets {preset} --ways microbatches --activation swiglu_interleaved"
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    done = subprocess.run(
        [sys.executable, "bench/moe_layer_perf.py", *SMALL.split(), *flags.split(), "-J", str(target)],
        cwd=Path(__file__).resolve().parents[2],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = record.read(target)
    assert content["wrong"] == 0
    rows = {(row["path"], row["phase"]): row for row in content["rows"]}
    whole = rows["one after the other", "whole step"]
    assert whole["memory_bytes"] > 0 and whole["host_s"] > 0
    assert rows["torch products", "in a row"]["ratio"] == 1
    # A call may be too short for a sample; not all of a path are.
    watched = [row for row in content["rows"] if row["path"] == "one after the other"]
    assert any(row["sm_mhz"] for row in watched) and any(row["power_W"] for row in watched)
