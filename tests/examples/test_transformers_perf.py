"""bench/transformers_perf.py on CPU ranks."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import transformers_perf
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)
from tests.programs import run_program

from lm.errors import UsageError  # isort: skip

pytest.importorskip("transformers")

PROGRAM = Path(__file__).parents[2] / "bench" / "transformers_perf.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_variants_are_timed_in_turns_and_agree(tmp_path: Path, ranks: int) -> None:
    """On one rank with adapters, which peft alone does not add to experts that are spread."""
    record, plain = tmp_path / "run.json", "grouped_mm" if ranks == 1 else "all_to_all"
    arguments = ["--layers", "1", "--tokens", "16", "--rounds", "2", "--steps", "1", "--zipf", "1", "-J"]
    adapters = ["--lora", "3"] if ranks == 1 else []
    said = run_program(PROGRAM, *arguments, record, *adapters, torchrun=ranks).out
    content = json.loads(record.read_text())
    found = {(row["path"], row["phase"]): row for row in content["rows"]}
    assert list(found) == [(how, phase) for how in (plain, "moecomm") for phase in ("step", "layers")]
    assert content["wrong"] == 0 and content["ranks"] == ranks
    for row in found.values():
        assert len(row["samples_s"]) == 2 and row["time_s"] > 0 and row["host_s"] <= row["time_s"]
    assert said.count("| moecomm |") == 2


@pytest.mark.parametrize(
    ("arguments", "ranks", "says"),
    [
        ("--variants no_such", 2, "--variants has 'no_such', must be of auto, all_to_all"),
        ("--rounds 0", 2, "--rounds: 0 is not a number of at least 1"),
        ("--zipf nan", 2, "--zipf: nan is not a finite number"),
        ("--graph", 2, "--graph: a step is captured on a GPU only"),
        ("--layers 1", 3, "--model small: 3 ranks cannot share its 8 experts evenly"),
        ("-J nowhere/run.json", 2, "nowhere/run.json is a folder, or in a folder that is not there"),
    ],
)
def test_wrong_options_are_told(
    arguments: str, ranks: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers_perf.py", *arguments.split()])
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(UsageError, match=says):
        transformers_perf.measure(transformers_perf.parse(), torch.device("cpu"))


def test_a_loss_that_is_no_number_is_wrong() -> None:
    losses = (2.0, 2.000001, 2.1, math.nan)
    assert [transformers_perf.is_wrong(loss, 2.0, "cpu") for loss in losses] == [0, 0, 1, 1]
    assert transformers_perf.is_wrong(math.nan, math.nan, "cpu")
