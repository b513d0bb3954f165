"""The benchmark programs with real ranks: started by themselves and by torchrun, checked, recorded, ended
cleanly.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import run_all
from bench.harness import native
from bench.harness.node_plan import NativeRun
from tests.fabric import needs_fabric

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "-b",
    "24",
    "--hidden",
    "32",
    "-n",
    "2",
    "-w",
    "1",
    "--flush",
    "0",
    "--timeout",
    "60",
    "--device",
    "cpu",
)
PROGRAMS = ("dispatch", "combine", "alltoall")
PATHS = {
    "dispatch": ["moecomm", "memcpy", "gloo", "gloo-tuned"],
    "combine": ["moecomm", "memcpy", "gloo", "gloo-tuned"],
    "alltoall": ["moecomm", "memcpy", "gloo"],
}


def environment() -> dict[str, str]:
    """This one, without what would make a program believe that torchrun started it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }


def program(name: str, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, f"bench/{name}_perf.py", *TINY, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def table(output: str) -> list[list[str]]:
    """The cells of the main table."""
    rows = [
        line.split() for line in output.split("# wrong values")[0].splitlines() if not line.startswith("#")
    ]
    return [row for row in rows if row]


def record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_starts_its_ranks_and_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    target, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = program(
        name, "-g", "2", "-e", "48", "-c", "2", "--baselines", "-d", "float32,bfloat16",
        "-J", str(target), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    expected = [
        [str(tokens), dtype, path]
        for dtype in ("float32", "bfloat16")
        for tokens in (24, 48)
        for path in PATHS[name]
    ]
    assert [row[1:4] for row in rows] == expected
    assert all(row[-1] == "0" for row in rows)
    assert all(len(row) == 9 and float(row[4]) >= float(row[5]) > 0 for row in rows)
    assert "# wrong values: 0 OK" in done.stdout
    assert "ceiling" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    check_record(record(target), name, rows=len(expected))


def check_record(content: dict[str, Any], name: str, rows: int) -> None:
    """The JSON file's schema."""
    assert content["schema"] == 1
    assert content["program"] == f"{name}_perf"
    assert content["command"].startswith(f"python bench/{name}_perf.py -b 24 ")
    assert content["ranks"] == 2
    assert content["threads"] >= 1
    assert content["wrong"] == 0
    assert isinstance(content["seed"], int)
    assert set(content["git"]) == {"commit", "dirty"}
    assert {"cpu", "cores", "memory_bytes", "architecture", "last_level_cache_bytes"} == set(
        content["hardware"]
    )
    assert {"python", "torch", "numpy", "moecomm"} == set(content["versions"])
    assert content["stats"]["float32"]["dispatch_calls"] > 0
    assert len(content["rows"]) == rows
    for row in content["rows"]:
        assert row["wrong"] == 0
        assert row["size_bytes"] == row["tokens"] * 32 * (4 if row["dtype"] == "float32" else 2)
        assert len(row["samples_s"]) == 2
        assert row["min_s"] == min(row["samples_s"])
        assert row["algbw_GBps"] == pytest.approx(row["useful_bytes"] / 2 / row["time_s"] / 1e9)
        if row["path"] == "memcpy":
            assert row["busbw_GBps"] is None
            assert row["note"] in ("memmove", "torch.Tensor.copy_")
        else:
            assert row["busbw_GBps"] == pytest.approx(row["remote_bytes"] / 2 / row["time_s"] / 1e9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_joins_torchruns_ranks(name: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = program(name, "--baselines", "-J", str(target), launcher=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[3] for row in table(done.stdout)] == PATHS[name]  # printed once, by rank 0
    check_record(record(target), name, rows=len(PATHS[name]))


@pytest.mark.parametrize(
    "flags",
    [
        ("dispatch", "-g", "3", "--experts", "12", "--topk", "5", "--routing", "zipf", "--alignment", "8"),
        ("dispatch", "--layout", "rank", "--routing", "one-hot", "--capacity", "auto", "-d", "float64"),
        (
            "dispatch",
            "--input",
            "window",
            "--alignment",
            "4",
            "--capacity",
            "auto",
            "-c",
            "3",
            "--ids",
            "same",
        ),
        (
            "combine",
            "-g",
            "3",
            "--experts",
            "12",
            "--layout",
            "rank",
            "--routing",
            "balanced",
            "-d",
            "float16",
        ),
        ("combine", "--alignment", "8", "--capacity", "auto", "--routing", "zipf", "-d", "float64"),
        ("alltoall", "-g", "3", "-b", "25"),
    ],
    ids=" ".join,
)
def test_other_layouts_routings_and_types_are_right_on_every_path(flags: tuple[str, ...]) -> None:
    done = program(flags[0], *flags[1:], "--baselines")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# wrong values: 0 OK" in done.stdout


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_the_bare_exchange_of_the_rows_that_cross_is_verified(name: str) -> None:
    done = program(name, "-g", "3", "--experts", "12", "--routing", "zipf", "--baselines", "gloo-rows")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[3] for row in table(done.stdout)] == ["moecomm", "gloo-rows"]
    assert "# wrong values: 0 OK" in done.stdout


@pytest.mark.parametrize("kind", ["plain", "weighted"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_dispatch_along_a_kept_handle_is_verified(kind: str, dtype: str) -> None:
    flags = ("--kept-handle", kind, "-d", dtype, "-c", "2", "--alignment", "4", "--capacity", "auto")
    done = program("dispatch", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    # One value on each of the two ranks, in each of the two rounds.
    assert [row[-1] for row in table(program("dispatch", *flags, "--inject-error").stdout)] == ["4"]


def test_a_sweep_over_experts_and_topk_is_one_run(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program("combine", "--experts", "4,8", "--topk", "1,3", "--baselines", "memcpy", "-J", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = record(target)["rows"]
    assert [(row["experts"], row["topk"]) for row in rows[::2]] == [(4, 1), (4, 3), (8, 1), (8, 3)]
    assert "experts 8 topk 3" in done.stdout


def test_a_baseline_that_cannot_run_is_left_out_with_its_reason(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program("dispatch", "-g", "1", "--baselines", "memcpy,gloo-rows", "-J", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[3] for row in table(done.stdout)] == ["moecomm", "memcpy"]
    assert "gloo-rows: n/a: ValueError: no row crosses between ranks" in done.stdout
    (missing,) = record(target)["missing"]
    assert (missing["path"], missing["tokens"]) == ("gloo-rows", 24)


def test_baselines_run_without_moecomm() -> None:
    done = program("dispatch", "--baselines", "gloo", "--baselines-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[3] for row in table(done.stdout)] == ["gloo"]


def test_a_recorded_trace_is_routed(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(3).random((100, 8)), axis=1)[:, :2].astype(np.int32)
    ids[5, 1] = ids[7, 0] = -1
    np.save(tmp_path / "ids.npy", ids)
    for name in ("dispatch", "combine"):
        done = program(name, "--experts", "8", "--baselines", "--routing", "trace", str(tmp_path / "ids.npy"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "topk 2" in done.stdout
        assert "# wrong values: 0 OK" in done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_corrupted_result_is_reported(name: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program(name, "--baselines", "--inject-error", "-J", str(target))
    assert done.returncode == 1
    # One value on each of the two ranks, of every path alike.
    assert [row[-1] for row in table(done.stdout)] == ["2"] * len(PATHS[name])
    assert "FAILED" in done.stdout
    assert record(target)["wrong"] == 2 * len(PATHS[name])


@needs_fabric
@pytest.mark.parametrize(
    ("name", "ranks", "per_node", "provider"),
    [("dispatch", 2, 1, "tcp"), ("combine", 4, 2, "shm"), ("alltoall", 3, 1, "shm")],
)
def test_nodes_are_counted_and_held_against_the_provider(
    name: str, ranks: int, per_node: int, provider: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    shape = () if name == "alltoall" else ("--experts", str(4 * ranks), "--topk", "3")
    done = program(
        name, "-g", str(ranks), "--ranks-per-node", str(per_node), "--fabric-provider", provider, *shape,
        "--baselines", "fabric,gloo", "-J", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# wrong values: 0 OK" in done.stdout
    rows = table(done.stdout)
    assert [row[3] for row in rows] == ["moecomm", "fabric", "gloo"]
    assert all(len(row) == 12 for row in rows)
    own, fabric, gloo = record(target)["rows"]
    # Each row crosses once a node; a dispatch tells its ids and weights beside, all of them a record.
    assert own["sent_row_bytes"] == own["least_bytes"] > 0
    assert own["sent_bytes"] > own["least_bytes"]
    assert own["sent_puts"] >= own["least_puts"] + ranks * (ranks // per_node - 1)
    assert own["wire_GBps"] == pytest.approx(own["sent_row_bytes"] / ranks / own["time_s"] / 1e9)
    assert gloo["sent_bytes"] is None and fabric["wrong"] is None
    assert len(fabric["samples_s"]) == 2 and "both ways" in fabric["note"]
    if name != "alltoall":
        limited = tmp_path / "limited.json"
        done = program(
            name, "-g", str(ranks), "--ranks-per-node", str(per_node), "--fabric-provider", provider, *shape,
            "--limit-nodes", "1", "-J", str(limited),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (saved,) = record(limited)["rows"]
        assert saved["sent_row_bytes"] == saved["least_bytes"] < own["least_bytes"]


def test_the_proxy_takes_every_command_whoever_pushes_it() -> None:
    lines = native.lines("proxy_rate", ("--producers", "1,3", "--nodes", "3", "--seconds", "0.01"))
    assert [(line["kind"], line["producers"]) for line in lines] == [
        (kind, producers) for kind in ("rows", "chunks", "pieces") for producers in (1, 3)
    ]
    for line in lines:
        assert line["repeats"] == 5 and line["nodes"] == 3
        assert line["commands_per_s_min"] <= line["commands_per_s"] <= line["commands_per_s_max"]
        assert line["puts_per_s"] == pytest.approx(line["commands_per_s"] / line["commands_a_put"], abs=1)
    assert [line["commands_a_put"] for line in lines] == [64, 64, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("proxy_rate", ("--rows", "999"), "a chunk has at most"),
        ("proxy_rate", ("--nodes", "1"), "--nodes: '1' will not do"),
        ("proxy_rate", ("--producers", "0"), "--producers: '0'"),
        ("proxy_rate", ("--fast",), "unknown option --fast"),
        ("proxy_rate", ("--seconds",), "--seconds needs a value"),
    ],
)
def test_a_native_program_says_what_it_cannot_do(name: str, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(says)):
        native.lines(name, flags)


def test_native_programs_are_found_where_they_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = native.program("proxy_rate")
    assert beside is not None
    monkeypatch.setenv("MOECOMM_BENCH_PROGRAMS", str(tmp_path))
    with pytest.raises(RuntimeError, match="proxy_rate is not built"):
        native.lines("proxy_rate", ())
    (tmp_path / "proxy_rate").symlink_to(beside)
    assert native.program("proxy_rate") == tmp_path / "proxy_rate"
    (tmp_path / "fabric_raw").write_text("#!/bin/sh\necho what\n")
    (tmp_path / "fabric_raw").chmod(0o755)
    with pytest.raises(RuntimeError, match="fabric_raw: "):
        native.lines("fabric_raw", ())


@needs_fabric
def test_a_provider_that_no_cache_helps(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program(
        "dispatch", "-g", "2", "--ranks-per-node", "1", "--fabric-provider", "shm",
        "--baselines", "fabric-cold", "-J", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    own, cold = record(target)["rows"]
    assert (own["path"], cold["path"]) == ("moecomm", "fabric-cold") and cold["time_s"] > 0
    assert "in 256 MiB, 1 pair of ranks both ways, 1 endpoint each: " in cold["note"]


@needs_fabric
def test_lanes_are_held_against_as_many_endpoints(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = program(
        "dispatch", "-g", "2", "--ranks-per-node", "1", "--fabric-provider", "tcp", "--fabric-lanes", "2",
        "--baselines", "fabric,fabric-one", "-J", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = record(target)
    own, both, one = found["rows"]
    assert own["path"] == "moecomm" and {each["network_lanes"] for each in found["stats"].values()} == {2}
    assert "2 lanes" in done.stdout and found["options"]["fabric_lanes"] == 2
    assert "2 endpoints each" in both["note"] and "1 endpoint each" in one["note"]


@needs_fabric
def test_the_provider_and_the_proxy_get_records_and_their_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--seconds", "0.01", "--repeats", "1")
    shm = ("--provider", "shm", "--sizes", "4096", "--area", "99", *short)
    runs = [
        NativeRun("nodes-raw-shm", "fabric_raw", shm),
        NativeRun("nodes-raw-none", "fabric_raw", ("--provider", "no-such-provider", *short)),
        NativeRun("nodes-proxy", "proxy_rate", short),
    ]
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run_all, "_plan", lambda given, device: ([], runs))
    words = ["--nodes", "--write", "--label", "box", "--commit", "abc", "--into", str(tmp_path / "kept")]
    monkeypatch.setattr("sys.argv", ["run_all.py", *words])
    assert run_all.main() == 1  # one of them failed, the others were run
    captured = capsys.readouterr()
    assert "nodes-raw-none failed" in captured.err and "no-such-provider" in captured.err
    for folder in ("results", "kept"):
        names = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert names == ["nodes-proxy.box.json", "nodes-raw-shm.box.json"]
    raw = record(tmp_path / "results" / "nodes-raw-shm.box.json")
    assert raw["git"] == {"commit": "abc", "dirty": None}
    assert [(line["provider"], line["bytes"], line["area"]) for line in raw["lines"]] == [("shm", 4096, 8192)]
    assert "address" not in raw["lines"][0]
    page = (tmp_path / "results.md").read_text()
    assert "## Between nodes" in page and "shm (libfabric" in page and "a row each" in page
    monkeypatch.setattr("sys.argv", ["run_all.py", "--nodes", "--page"])
    assert run_all.main() == 0
    assert (tmp_path / "results.md").read_text() == page


def test_unchecked_rows_say_so() -> None:
    done = program("dispatch", "-c", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[-1] for row in table(done.stdout)] == ["N/A"]
    assert "not checked" in done.stdout


def test_an_error_of_the_runtime_is_told_and_ends_all_ranks() -> None:
    done = program("dispatch", "--capacity", "3")
    assert done.returncode == 1
    assert "CapacityExceeded" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_flag_starts_nothing() -> None:
    done = program("combine", "--topk", "99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def children(pid: int) -> set[int]:
    """Live processes whose parent is `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_an_interrupted_program_leaves_no_rank_behind(number: signal.Signals, status: int) -> None:
    command = [
        sys.executable,
        "bench/dispatch_perf.py",
        "--device",
        "cpu",
        "-b",
        "64",
        "--hidden",
        "64",
        "-n",
        "1000000",
        "--flush",
        "0",
    ]
    shared_before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background with interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        try:
            assert running.stdout is not None
            for line in running.stdout:
                if "#wrong" in line:  # the header is out: ranks are up
                    break
            time.sleep(0.5)
            started = children(running.pid)
            assert len(started) >= 2
            running.send_signal(number)
            assert running.wait(timeout=30) == status
        finally:
            running.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    ours = [name for name in set(os.listdir("/dev/shm")) - shared_before if "moecomm" in name]
    assert ours == []


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from bench.run_all import Run, execute
tiny = "-g 2 -b 24 --hidden 32 -n 1 -w 0 --flush 0 --timeout 60 --device cpu".split()
runs = [
    Run("first", "dispatch", (*tiny, "--baselines"), ""),
    Run("bad", "dispatch", (*tiny, "--capacity", "3"), ""),
    Run("last", "combine", (*tiny, "--baselines"), ""),
]
records = execute(runs, Path({str(tmp_path)!r}), 60.0, "abc")
assert list(records) == ["first", "last"], list(records)
assert records["last"]["git"] == {{"commit": "abc", "dirty": None}}
assert execute(runs[:1], Path({str(tmp_path / "none")!r}), -1.0, None) == {{}}
"""
    (tmp_path / "none").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run_all.py: bad failed" in done.stderr
    assert "out of time, not run: first" in done.stdout


def test_the_reference_table_runs_and_writes_nothing_unasked(tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    before = sorted((path, path.stat().st_mtime_ns) for path in results.glob("*")) if results.exists() else []
    done = subprocess.run(
        [sys.executable, "bench/run_all.py", "--device", "cpu", "--only", "dispatch-small", "-n1", "-w0"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "than gloo-tuned" in done.stdout
    after = sorted((path, path.stat().st_mtime_ns) for path in results.glob("*")) if results.exists() else []
    assert after == before
