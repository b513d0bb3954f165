"""The documentation says what is so: the example runs, numbers are the program's, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moecomm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def readme_example() -> tuple[int, str]:
    """(ranks, program) of the README's marked example."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example: (\d+) ranks -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, "README.md has no marked example"
    return int(found[1]), found[2]


def test_readme_example_runs(tmp_path: Path) -> None:
    ranks, program = readme_example()
    assert len(program.splitlines()) <= 20
    path = tmp_path / "example.py"
    path.write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*torchrun, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Ranks share one output; two lines may come as one, so the text is searched and not split.
    said = re.findall(r"rank (\d+): 64 tokens, (\d+) rows", done.stdout)
    assert sorted(int(rank) for rank, _ in said) == list(range(ranks)), done.stdout
    assert sum(int(rows) for _, rows in said) == ranks * 64 * 2


def test_memory_page_has_the_numbers_of_the_plan() -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    plan = moecomm.Communicator.memory_plan(
        ranks=4, num_experts=64, hidden=7168, top_k=8, max_tokens=4096, device="cpu"
    )
    for number in (plan.committed_bytes, plan.total_bytes):
        assert f"**{number:,}**".replace(",", " ") in page
    for name, _, _ in plan.sections:
        assert f"| {name} |" in page


def test_routing_page_has_the_rows_of_a_dispatch() -> None:
    """The worked example on one rank that has all experts: the rows of the page's two ranks, joined."""
    page = (ROOT / "docs" / "routing.md").read_text()
    rows = [re.search(rf"\| rank {rank} \|((?: [a-e-] \|)+)", page) for rank in range(2)]
    shown = [cell for row in rows if row for cell in re.findall(r"[a-e-]", row[1])]
    tokens = re.findall(r"\| ([a-e]) \| rank \d, token \d \| (\d), (\d) \|", page)
    ids_TK = torch.tensor([[int(first), int(second)] for _, first, second in tokens])
    x_TH = torch.arange(1.0, len(tokens) + 1).unsqueeze(1).expand(-1, 4).contiguous()
    with moecomm.Communicator(
        num_experts=4, hidden=4, top_k=2, max_tokens=8, dtype=torch.float32, device="cpu"
    ) as comm:
        out = comm.dispatch(x_TH, ids_TK, alignment=4)
    assert ["-abcde"[int(value)] for value in out.tokens[:, 0]] == shown


def test_readme_speed_table_is_from_the_results_page() -> None:
    def rows(text: str) -> list[list[str]]:
        lines = (line.strip() for line in text.splitlines())
        return [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]

    found = re.search(
        r"<!-- results -->\n(.*?)<!-- /results -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert found, "README.md has no marked table of results"
    shown, measured = rows(found[1]), rows((ROOT / "docs" / "results.md").read_text())
    assert len(shown) >= 3, "a title, dispatch and combine"
    for row in shown:
        assert row in measured, f"docs/results.md has no line {row}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Paths of this repository in backticks, down to single files."""
    made_by_runs = ("runs/",)
    roots = "moecomm|csrc|bench|tests|examples|docs"
    for target in re.findall(rf"`((?:{roots})/[\w./-]*)`", page.read_text()):
        if not target.startswith(made_by_runs):
            assert (ROOT / target).exists(), f"{page.name} names {target}, which is not there"


def test_every_environment_variable_is_documented() -> None:
    named = set(re.findall(r"MOECOMM_[A-Z_]+", (ROOT / "moecomm" / "env.py").read_text()))
    documented = set(re.findall(r"MOECOMM_[A-Z_]+", (ROOT / "docs" / "architecture.md").read_text()))
    assert named and named == documented
