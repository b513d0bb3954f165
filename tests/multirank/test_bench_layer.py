"""The layer benchmark with real ranks: every way verified, timed, recorded; a wrong one caught."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness import layer_options
from bench.harness.layer_reference import BOUNDS
from tests.multirank.test_bench import ROOT, environment

TINY = (
    "--device", "cpu", "--scale", "64", "-b", "24", "--graph-tokens", "8", "-n", "2", "-w", "1",
    "--records", "2", "--flush", "0", "--timeout", "60", "--dense", "64x64x64",
)  # fmt: skip
GRAPH_WAYS = ["compute only", "overlapped", "fixed"]  # graphs are of GPUs
SCRIPT = """
import sys
from bench.harness import entry, layer_ways

def with_a_wrong_way(options, rank, ranks):
    make = layer_ways.layer_way

    def layer_way(name, comm, case, **given):
        way = make(name, comm, case, **given)
        if name != "overlapped":
            return way
        step = way.step

        def forgets_a_token():
            results = step()
            if rank == 1:
                results["dx"][3] = 0
            return results

        object.__setattr__(way, "step", forgets_a_token)
        return way

    layer_ways.layer_way = layer_way
    return entry.rank_main(options, rank, ranks)

if __name__ == "__main__":
    from bench.harness import launch
    raise SystemExit(launch.run(with_a_wrong_way, entry.parse("moe_layer", sys.argv[1:])))
"""


def program(
    *flags: str, launcher: tuple[str, ...] = (), script: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, script or "bench/moe_layer_perf.py", *TINY, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )


def record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def check_rows(content: dict[str, Any], dtype: str) -> None:
    """Plausible numbers: times that hold together, work that is the shape's, values that were checked."""
    ranks = content["ranks"]
    for row in content["rows"]:
        assert row["wrong"] == 0 and row["dtype"] == dtype
        # Rows that are only moved may well come out to the bit.
        assert row["worst"] > 0 or row["way"] == "communication only"
        assert row["worst"] <= BOUNDS[dtype]
        for part in ("forward", "step"):
            samples = row[f"{part}_samples_s"]
            assert len(samples) == 2 and row[f"{part}_min_s"] == min(samples)
            assert min(samples) <= row[f"{part}_s"] <= max(samples)
        assert row["step_s"] > 0 and row["dense_tflops"] > 0
        assert row["rows"] == ranks * row["tokens"] * row["topk"]
        assert row["rows"] / ranks <= row["most_rows"] <= row["rows"]
        if row["way"] == "communication only":
            assert row["step_tflops"] is None and row["forward_flops"] is None
        else:
            flops = 6 * row["hidden"] * row["ffn"] * row["rows"] / ranks
            assert (row["forward_flops"], row["step_flops"]) == (flops, 3 * flops)
            assert row["step_tflops"] == pytest.approx(3 * flops / row["step_s"] / 1e12)
            assert row["step_share"] == pytest.approx(row["step_tflops"] / row["dense_tflops"])
        recorded = row["way"].split(",")[0] in ("overlapped", "fixed")
        assert (row["exposed"] is not None) == recorded
        if recorded:
            assert 0 < row["exposed"]["step_share"] < 1 and 0 < row["exposed"]["forward_share"] < 1
            stages = [span[0] for span in row["exposed"]["forward_spans"]]
            assert stages[:2] == ["publish", "dispatch"] and stages[-1] == "combine"
            assert "gradient rows" in [span[0] for span in row["exposed"]["backward_spans"]]
        assert row["memory_bytes"] is None and row["host_s"] is None  # of GPUs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_is_verified_and_recorded(dtype: str, tmp_path: Path) -> None:
    target, traces = tmp_path / "out.json", tmp_path / "traces"
    done = program(
        "-g", "2", "--presets", "qwen3-30b,mixtral-8x22b", "--routing", "uniform,zipf", "-d", dtype,
        "--keep", "all,rows,nothing", "-c", "2", "-J", str(target), "--trace", str(traces),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# wrong values: 0 OK" in done.stdout
    assert "times as fast as baseline" in done.stdout
    assert "other bits" not in done.stdout  # overlapped and serial have the same
    content = record(target)
    ways = [
        *layer_options.WAYS[:5],
        "overlapped, keep rows",
        "overlapped, keep nothing",
        *layer_options.WAYS[5:],
    ]
    expected = [
        (preset, routing, tokens, way)
        for preset in ("qwen3-30b", "mixtral-8x22b")
        for routing in ("uniform", "zipf")
        for tokens, names in ((24, ways), (8, GRAPH_WAYS))
        for way in names
    ]
    rows = content["rows"]
    assert [(row["preset"], row["routing"], row["tokens"], row["way"]) for row in rows] == expected
    check_rows(content, dtype)
    for row in rows:
        if row["way"] == "compute only":
            assert row["forward_ratio"] == row["step_ratio"] == 1
        assert row["same_bits"] is (True if row["way"] == "overlapped" and row["tokens"] == 24 else None)
    assert {(each["way"], each["failed"]) for each in content["missing"]} == {
        ("graph replay", False),
        ("graphed step", False),
    }
    assert content["stats"]["qwen3-30b"]["dispatch_calls"] > 0
    assert content["command"].startswith("python bench/moe_layer_perf.py --device cpu")
    assert {"python", "torch", "numpy", "moecomm"} == set(content["versions"])
    names = sorted(path.name for path in traces.iterdir())
    assert "qwen3-30b-uniform-24-overlapped-forward.json" in names
    trace = json.loads((traces / "qwen3-30b-zipf_1-24-overlapped-backward.json").read_text())
    assert {"gradient rows", "up weights"} <= {event["name"] for event in trace["traceEvents"]}
    picture = traces / "mixtral-8x22b-uniform-24-overlapped-forward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_torchruns_ranks_and_a_preset_that_they_cannot_share(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = program(
        "--presets", "mixtral-8x22b,kimi-k2", "--scale", "256", "--graph-tokens", "0", "-J", str(target),
        launcher=torchrun,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mixtral-8x22b all: n/a: 8 experts cannot be shared evenly by 3 ranks" in done.stdout
    content = record(target)
    assert [row["way"] for row in content["rows"]] == list(layer_options.WAYS)
    assert {row["preset"] for row in content["rows"]} == {"kimi-k2"}
    check_rows(content, "bfloat16")


def test_corrupted_results_are_reported_for_every_way(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program("-g", "2", "--presets", "mixtral-8x22b", "--inject-error", "-J", str(target))
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    # One value on each of the two ranks.
    assert [row["wrong"] for row in record(target)["rows"]] == [2] * (
        len(layer_options.WAYS) + len(GRAPH_WAYS)
    )


def test_a_way_that_is_wrong_is_caught_and_no_other(tmp_path: Path) -> None:
    script, target = tmp_path / "wrong.py", tmp_path / "out.json"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    done = program(
        "-g", "2", "--presets", "mixtral-8x22b", "--graph-tokens", "0", "-J", str(target), script=str(script)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = {row["way"]: row["wrong"] for row in record(target)["rows"]}
    hidden = record(target)["rows"][0]["hidden"]
    assert hidden // 2 < wrong.pop("overlapped") <= hidden
    assert set(wrong.values()) == {0}


def test_products_in_fp8(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program(
        "-g", "2", "--presets", "mixtral-8x22b", "--ways", "compute only,fp8 compute only,fp8 overlapped",
        "--graph-tokens", "0", "-J", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["way"]: row for row in record(target)["rows"]}
    assert list(rows) == ["compute only", "fp8 compute only", "fp8 overlapped"]
    assert all(row["wrong"] == 0 for row in rows.values())
    worst = {name: row["worst"] for name, row in rows.items()}
    assert worst["fp8 overlapped"] > 4 * worst["compute only"], "as exact as bfloat16: was it fp8?"


def test_unchecked_ways_say_so(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program(
        "-g", "1", "--presets", "mixtral-8x22b", "-c", "0", "--ways", "overlapped,baseline",
        "--graph-tokens", "0", "-J", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not checked" in done.stdout and "N/A" in done.stdout
    content = record(target)
    assert content["wrong"] is None
    assert [(row["way"], row["step_ratio"]) for row in content["rows"]] == [
        ("overlapped", None),
        ("baseline", None),
    ]


def test_the_layers_are_a_plan_of_the_reference_tables(tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    before = sorted((path, path.stat().st_mtime_ns) for path in results.glob("*"))
    done = subprocess.run(
        [
            sys.executable, "bench/run_all.py", "--layers", "--device", "cpu", "--only", "mixtral",
            "-n1", "-w0", "--into", str(tmp_path),
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faster than baseline" in done.stdout and "graph than eager" in done.stdout
    assert "- layers-mixtral-8x22b: mixtral-8x22b, 32 tokens, graph replay: CUDA graphs" in done.stdout
    kept = record(tmp_path / "layers-mixtral-8x22b.json")
    assert kept["command"].startswith("python bench/moe_layer_perf.py --presets mixtral-8x22b --scale 16 ")
    assert sorted((path, path.stat().st_mtime_ns) for path in results.glob("*")) == before
