"""The documentation says what is so: its numbers are the program's, the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import moecomm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_memory_page_has_the_numbers_of_the_plan() -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    plan = moecomm.Communicator.memory_plan(ranks=4, num_experts=64, hidden=7168, top_k=8, max_tokens=4096)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Paths of this repository in backticks, down to single files."""
    made_by_runs = ("runs/",)
    roots = "moecomm|csrc|bench|tests|examples|docs"
    for target in re.findall(rf"`((?:{roots})/[\w./-]*)`", page.read_text()):
        if not target.startswith(made_by_runs):
            assert (ROOT / target).exists(), f"{page.name} names {target}, which is not there"
