"""Records, and the page and pictures made from them; the repository's own records are the example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import run_all
from bench.harness import record
from bench.results import growth, page, plot

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def records() -> dict[str, record.Record]:
    return page.read_all(RESULTS)


def test_the_page_is_made_from_the_records(records: dict[str, record.Record]) -> None:
    assert RESULTS.with_suffix(".md").read_text() == page.page(records)


def test_the_page_shows_every_record(records: dict[str, record.Record]) -> None:
    """The page shows each record by its name, the times of its layer, or the figures of its C++ program."""
    shown = page.page(records)
    for name, content in records.items():
        rows = content["rows"]
        assert content["command"] and content["git"]["commit"] and content["versions"]["torch"] and rows
        if page.is_native(content):
            key, scale, digits = (
                ("messages_per_s", 1, 0) if content["program"] == "fabric_raw" else ("puts_per_s", 1e-6, 3)
            )
            assert all(f"{row[key] * scale:.{digits}f}" in shown for row in rows), name
        elif content["program"] == "moe_layer_perf":
            own = [row for row in rows if row["path"] == "overlapped" and row["phase"] == "step"]
            steps = [row for row in rows if row["phase"] == "whole step"]
            times = [f"{row['time_s'] * 1e3:.3f}" for row in own]
            times += [f"{row['time_s'] * 1e3 / row['microbatches']:.2f}" for row in steps]
            assert times and all(each in shown for each in times), name
        elif content["program"] == "train_perf":
            assert all(f" {row['time_s']:.4f} |" in shown for row in rows), name
        else:
            assert f"| {name.partition('.')[0]} " in shown, name


def test_a_record_is_read_as_it_was_written(tmp_path: Path, records: dict[str, record.Record]) -> None:
    content = records["cuda-dispatch"]
    record.write(tmp_path / "one.json", content)
    assert record.read(tmp_path / "one.json") == content
    (tmp_path / "old.json").write_text(json.dumps({**content, "schema": 1}))
    with pytest.raises(ValueError, match="schema 1"):
        record.read(tmp_path / "old.json")


def test_the_formula_is_fitted_to_the_most_gpus_and_held_against_fewer() -> None:
    assert growth.needing(2, 4, 2) == pytest.approx(5 / 6)  # of the 6 pairs of experts one is wholly here

    def content(gpus: int) -> record.Record:
        """A record in which the formula holds, but that 2 GPUs take a tenth longer."""
        rows = []
        for tokens in (8, 4096):
            sent = growth.needing(gpus, 256, 8) * tokens * 14336
            slower = 1.1 if gpus == 2 else 1.0
            for path, seconds in (("moecomm", slower * (50e-6 + sent / 347e9)), ("sm-push", sent / 347e9)):
                rows.append({
                    "path": path, "tokens": tokens, "experts": 256, "topk": 8, "time_s": seconds,
                    "size_bytes": tokens * 14336, "remote_bytes": gpus * sent,
                })  # fmt: skip
        return {"ranks": gpus, "rows": rows}

    constants, lines = growth.tables({f"cuda-dispatch-on-{gpus}": content(gpus) for gpus in (4, 2)})
    assert constants == ["- dispatch: 50.0 us and 347.0 GB/s, from 4 GPUs"]
    assert [line[-1] for line in lines] == ["1.10", "1.10", "1.00", "1.00"]
    assert all(len(line) == len(growth.TITLES) for line in lines)


def test_a_picture_is_made_from_a_record(tmp_path: Path, records: dict[str, record.Record]) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(str(tmp_path / "one.png"), records["cuda-dispatch-tokens"])
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_run_all_renews_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    for name in ("nodes-proxy", "dispatch-reference"):
        (tmp_path / "results" / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["run_all.py", "--page"])
    assert run_all.main() == 0
    text = (tmp_path / "results.md").read_text()
    assert "## Between nodes" in text and "dispatch-reference" in text and "## GPUs" not in text
