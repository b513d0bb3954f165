"""bench/transformers_perf.py on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_program

pytest.importorskip("transformers")

PROGRAM = Path(__file__).parents[2] / "bench" / "transformers_perf.py"


def test_variants_are_timed_in_turns_and_agree(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    arguments = ["--layers", "1", "--tokens", "16", "--rounds", "2", "--steps", "1", "--zipf", "1", "-J"]
    said = run_program(PROGRAM, *arguments, record, torchrun=2).out
    content = json.loads(record.read_text())
    found = {(row["path"], row["phase"]): row for row in content["rows"]}
    assert list(found) == [(how, phase) for how in ("all_to_all", "moecomm") for phase in ("step", "layers")]
    assert content["wrong"] == 0 and content["ranks"] == 2
    for row in found.values():
        assert len(row["samples_s"]) == 2 and row["time_s"] > 0 and row["host_s"] <= row["time_s"]
    assert said.count("| moecomm |") == 2


def test_an_unknown_implementation_is_told() -> None:
    said = run_program(PROGRAM, "--variants", "no_such", torchrun=2, code=2).err
    assert "--variants has 'no_such', must be of auto, all_to_all" in said
