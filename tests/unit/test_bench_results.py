"""Records, and the page and pictures made from them; the repository's own records are the example."""

import json
from pathlib import Path

import pytest

from bench import run_all
from bench.harness import record
from bench.results import page

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def records() -> dict[str, record.Record]:
    return page.read_all(RESULTS)


def test_the_page_is_made_from_the_records(records: dict[str, record.Record]) -> None:
    assert RESULTS.with_suffix(".md").read_text() == page.page(records)


def test_a_record_is_read_as_it_was_written(tmp_path: Path, records: dict[str, record.Record]) -> None:
    content = records["cuda-dispatch"]
    record.write(tmp_path / "one.json", content)
    assert record.read(tmp_path / "one.json") == content
    (tmp_path / "old.json").write_text(json.dumps({**content, "schema": 1}))
    with pytest.raises(ValueError, match="schema 1"):
        record.read(tmp_path / "old.json")


def test_run_all_renews_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    for name in ("nodes-proxy", "dispatch-reference"):
        (tmp_path / "results" / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["run_all.py", "--page"])
    assert run_all.main() == 0
    text = (tmp_path / "results.md").read_text()
    assert "## Between nodes" in text and "dispatch-reference" in text and "## GPUs" not in text
