"""examples/train_megatron.py on two CPU ranks, and what it says of wrong options."""

import re
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.multirank.harness import preload
from tests.programs import run_program

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

import train_megatron
from lm.errors import UsageError

preload("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer", "megatron.core.distributed")
SMALL = ("--steps", "8", "--hidden", "32", "--lr", "1e-2")


def _run(*arguments: object) -> tuple[float, float]:
    """The first and the last loss of eight steps."""
    done = run_program(EXAMPLES / "train_megatron.py", *SMALL, *map(str, arguments), torchrun=2)
    dispatcher = arguments[-1] if "--dispatcher" in arguments else "moecomm"
    assert done.last_line.endswith(f"8 experts on 2 of 2 ranks, {dispatcher}")
    found = re.search(r"result: loss ([\d.]+) -> ([\d.]+), 8 steps, [\d,]+ tokens/s", done.last_line)
    assert found is not None, done.last_line
    return float(found[1]), float(found[2])


def test_it_learns_as_with_the_own_dispatcher() -> None:
    """The same losses to six digits, also with a capacity and layers computed twice."""
    plain = _run()
    assert plain[1] < plain[0] - 1
    assert plain == pytest.approx(_run("--dispatcher", "alltoall"), rel=1e-5)
    fewer = _run("--capacity", 0.5, "--recompute", "full")
    assert fewer != plain
    assert fewer == pytest.approx(_run("--capacity", 0.5, "--dispatcher", "allgather"), rel=1e-5)


def test_overlapped_microbatches_on_a_text_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be, that is the question. " * 40)
    options = (file, "--dtype", "bfloat16")
    overlapped = _run(*options, "--overlap")
    assert overlapped[1] < overlapped[0] - 1
    assert overlapped == pytest.approx(_run(*options), rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps: 0 is not a number of at least 1"),
        (["--capacity", "inf"], "--capacity: inf is not a finite number"),
        (["--lr", "nan"], "--lr: nan is not a finite number of at least 0"),
        (["--overlap"], "overlap_moe_expert_parallel_comm is only supported with bf16"),
        (["--hidden", "30"], "--hidden 30: must be a multiple of 8"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_megatron.py", *arguments])
    with pytest.raises(UsageError, match=says):
        train_megatron.configure(train_megatron.parse(), 2)


def test_an_error_of_all_ranks_is_one_line() -> None:
    done = run_program(EXAMPLES / "train_megatron.py", "nowhere.txt", torchrun=2, code=2)
    lines = [line for line in done.err.splitlines() if "error:" in line]
    assert lines == ["train_megatron.py: error: nowhere.txt: No such file or directory"], done.err


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_megatron.py"])
    monkeypatch.setattr(train_megatron, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install megatron-core"):
        train_megatron.start()
