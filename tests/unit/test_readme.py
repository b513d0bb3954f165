"""The README's code and commands: every Python block is one that a test runs, every make target exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_python_block_is_marked_for_the_test_that_runs_it() -> None:
    """tests/docs runs the block below `<!-- example: N ranks -->`; there is one. The lines for a model of
    Hugging Face name one of 30 billion parameters; tests/multirank/test_transformers.py loads small ones.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert ["moecomm.transformers" in each for each in blocks] == [True, False]
    assert re.search(r"^<!-- example: \d+ ranks -->\n```python$", README, re.MULTILINE)


def test_it_is_short_and_names_the_alternatives() -> None:
    assert len(README.splitlines()) <= 150
    for name in ("HybridEP", "DeepEP V1", "DeepEP V2", "NCCL", "LigerCute"):
        assert name in README, name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"[`\n]\s*make ([a-z][a-z0-9-]*)", README))
    assert {"train", "test"} <= named, f"the README's commands are {sorted(named)}"
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"
