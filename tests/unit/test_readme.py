"""The README's Python blocks run as they stand, and its commands exist.

A block that is preceded by the comment `<!-- example: N ranks -->` runs under torchrun on N ranks. Every
Python block has to carry that comment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- example: (\d+) ranks? -->\n)?```python\n(.*?)```", re.DOTALL)
EXAMPLES = [(int(ranks or 0), text) for ranks, text in BLOCK.findall(README)]


def test_every_python_block_is_marked() -> None:
    assert EXAMPLES
    assert all(ranks > 0 for ranks, _ in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_example_runs(number: int, tmp_path: Path) -> None:
    ranks, text = EXAMPLES[number]
    program = tmp_path / "example.py"
    program.write_text(text)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(program),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    if "print(" in text:
        assert done.stdout.strip(), "the example prints nothing"


def test_the_example_is_short() -> None:
    assert all(len(text.strip().split("\n")) <= 25 for _, text in EXAMPLES)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"[`\n]\s*make ([a-z][a-z-]*)", README))
    assert {"train", "test"} <= named, f"the README's commands are {sorted(named)}"
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"


def test_links_into_the_repository_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"
