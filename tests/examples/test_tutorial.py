"""The numbered examples, started alone and by torchrun. Each of them checks its own results."""

import re
import textwrap

import pytest

from tests.examples.conftest import EXAMPLES, run_example
from tests.programs import run_program

SAYS = {
    "01_dispatch_combine.py": ["expert 5: tokens", "combined: token 3 became 12.75"],
    "02_moe_layer.py": ["loss 0.4067 -> 0.1721"],
    "03_gradients_and_checkpointing.py": ["gradients of tokens and scores", "the same bits"],
    "04_fixed_capacity.py": ["CapacityExceeded: a dispatch needed", "every row has its place"],
    "05_train_a_transformer.py": ["before training: loss 2.978", "loaded: loss", "the same next step"],
}


def test_every_numbered_example_is_here() -> None:
    assert sorted(SAYS) == sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str) -> None:
    done = run_program(EXAMPLES / name, torchrun=2)
    for text in SAYS[name]:
        assert text in done.out


def test_the_guide_shows_parts_of_the_example() -> None:
    def without_indentation(text: str) -> str:
        return "\n".join(line.strip() for line in textwrap.dedent(text).splitlines())

    guide = (EXAMPLES.parent / "docs" / "guide.md").read_text()
    program = without_indentation((EXAMPLES / "05_train_a_transformer.py").read_text())
    shown = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(shown) >= 5
    for code in shown:
        assert without_indentation(code) in program, code


def test_dispatch_combine_on_more_ranks() -> None:
    assert run_program(EXAMPLES / "01_dispatch_combine.py", torchrun=6).out.count("received") == 6


def test_an_example_as_a_user_starts_it() -> None:
    done = run_example("02_moe_layer.py")
    assert done.code == 0 and SAYS["02_moe_layer.py"][0] in done.out, done
