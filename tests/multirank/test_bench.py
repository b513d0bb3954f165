"""The benchmark programs with real ranks: paths verified and recorded, a wrong one caught, ranks ended."""

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import run_all
from bench.harness import command_line, launch, native, options, plan, program, record
from bench.paths import between_nodes, layer_variants, training
from bench.results import page
from tests.examples.conftest import clean_environment, wait_until
from tests.fabric import needs_fabric
from tests.multirank.harness import no_shared_memory_left
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
TINY = "--device cpu -b 24 -n 2 -w 1 --flush 0 --timeout 60 --threads 1"
OPERATION = f"{TINY} --hidden 32".split()
LAYER = (f"{TINY} --presets qwen3-30b --hidden 64 --ffn 16 --experts 12 --topk 3 --graph-tokens 8").split()
PATHS = {
    "dispatch": ["moecomm", "memcpy", "gloo", "gloo-tuned"],
    "combine": ["moecomm", "memcpy", "gloo", "gloo-tuned"],
    "alltoall": ["moecomm", "memcpy", "gloo"],
}
Ran = tuple[int, str, record.Record]


def _on_rank(rank: int, world_size: int, given: options.Options, spoil: bool = False) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(between_nodes, "_COLD_BYTES", 32 << 20)
        if spoil:
            _forget(patch, rank)
        status = program.benchmark(given, rank)
    return status, said.getvalue()


def _forget(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Has the layer lose the gradient of one token on rank 1, and the steps of a training loop the gradients
    of the first expert there that the second microbatch adds."""
    in_order = training.SCHEDULES["one after the other"]

    def forgetful(layer: Any, cases: Any) -> Any:
        results = in_order(layer, cases[:1])
        experts = layer.experts
        before = experts.w_in.grad[0].clone()
        results += in_order(layer, cases[1:])
        if rank == 1:
            experts.w_in.grad[0] = before
        return results

    patch.setitem(training.SCHEDULES, "one after the other", forgetful)
    backward = layer_variants._Variants._backward

    def wrong(self: Any, y_TH: Any) -> Any:
        results = backward(self, y_TH)
        if rank == 1:
            results["dx"][3] = 0
        return results

    patch.setattr(layer_variants._Variants, "_backward", wrong)


@pytest.fixture
def run(pool: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a program on the pool's ranks: its status, what rank 0 printed, and the record."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(name: str, *flags: str, ranks: int = 2, spoil: bool = False) -> Ran:
        target = tmp_path / "out.json"
        shape = LAYER if name == options.LAYER else OPERATION
        given = command_line.parse(name, [*shape, "-g", str(ranks), *flags, "-J", str(target)])
        results = pool(ranks)(_on_rank, given, spoil)
        assert len({status for status, _ in results}) == 1 and not any(said for _, said in results[1:])
        return *results[0], record.read(target)

    return start


@pytest.mark.parametrize("name", options.OPERATIONS)
def test_an_operation_is_verified_and_recorded(name: str, run: Callable[..., Ran]) -> None:
    status, said, content = run(name, "-e", "48", "-c", "2", "--baselines", "-d", "float32,bfloat16")
    assert status == 0 and "# wrong values: 0 OK" in said and "of the ceiling memcpy" in said
    rows = content["rows"]
    assert [(row["dtype"], row["tokens"], row["path"]) for row in rows] == [
        (dtype, tokens, path)
        for dtype in ("float32", "bfloat16")
        for tokens in (24, 48)
        for path in PATHS[name]
    ]
    assert content["program"] == f"{name}_perf" and content["command"].startswith(
        f"python bench/{name}_perf.py "
    )
    assert set(content["git"]) == {"commit", "dirty"} and content["gpus"] is None
    assert content["hardware"]["cores"] > 0 and content["versions"]["moecomm"]
    assert all(stats["dispatch_calls"] > 0 for stats in content["stats"].values())
    for row in rows:
        assert row["wrong"] == 0 and row["phase"] == "call" and row["hidden"] == 32
        assert row["size_bytes"] == row["tokens"] * 32 * (4 if row["dtype"] == "float32" else 2)
        assert len(row["samples_s"]) == 2 and row["min_s"] == min(row["samples_s"])
        assert row["algbw_GBps"] == pytest.approx(row["useful_bytes"] / 2 / row["time_s"] / 1e9)
        if row["path"] == "memcpy":
            assert row["busbw_GBps"] is None and row["note"] in ("memmove", "torch.Tensor.copy_")
        else:
            assert row["busbw_GBps"] == pytest.approx(row["remote_bytes"] / 2 / row["time_s"] / 1e9)


@pytest.mark.parametrize(
    "flags",
    [
        "dispatch --experts 12 --topk 5 --routing zipf --alignment 8 --baselines gloo,gloo-tuned,gloo-rows",
        "dispatch --layout rank --routing zipf --capacity auto -d float64 -c 3",
        "dispatch --kept-handle plain --alignment 4 --capacity auto",
        "dispatch --kept-handle weighted -d bfloat16 --experts 12",
        "dispatch --api deep_ep --layout rank --experts 12",
        "combine --api deep_ep -d bfloat16",
        "combine --experts 12 --layout rank --routing balanced -d float16",
        "combine --alignment 8 --capacity auto --routing zipf -d float64 --baselines gloo,gloo-tuned",
    ],
)
def test_an_error_in_any_form_is_caught(flags: str, run: Callable[..., Ran]) -> None:
    """Right results pass with a corrupted value counted on each rank, and nothing else is."""
    name, *others = flags.split()
    ranks = 3 if "--experts" in others else 2
    status, _, content = run(name, *others, "--inject-error", ranks=ranks)
    rounds = content["options"]["checks"]
    assert status == 1 and content["missing"] == []
    wrong = [row["wrong"] for row in content["rows"]]
    assert wrong == [ranks * rounds] * len(content["rows"])


def test_a_path_that_cannot_run_is_recorded_with_its_reason(run: Callable[..., Ran]) -> None:
    status, said, content = run("dispatch", "--baselines", "gloo,gloo-rows", ranks=1)
    assert status == 0 and [row["path"] for row in content["rows"]] == ["moecomm", "gloo"]
    (missing,) = content["missing"]
    assert missing["path"] == "gloo-rows" and "no row crosses between ranks" in missing["reason"]
    assert "24 float32 gloo-rows: n/a: ValueError" in said
    status, said, content = run("dispatch", "--capacity", "3", "--baselines", "memcpy")
    assert status == 1 and "moecomm: FAILED: CapacityExceeded" in said
    assert [(row["path"], row["wrong"]) for row in content["rows"]] == [("memcpy", 0)]


@pytest.mark.parametrize("shared", [0, 1])
def test_every_variant_of_a_layer_is_verified_and_recorded(shared: int, run: Callable[..., Ran]) -> None:
    preset, variants = "qwen3-30b", "all"
    if shared:
        preset, variants = "deepseek-v3-shared", ",".join((*options.VARIANTS, options.LIGER))
    flags = ("--keep", "all,nothing", "--routing", "zipf", "--presets", preset, "--variants", variants)
    status, said, content = run("moe_layer", *flags)
    assert status == 0, said
    rows = content["rows"]
    eager = ["dense product", "compute only", "communication only", "serial", "overlapped",
             "overlapped, keep nothing", "baseline"]  # fmt: skip
    assert [row["path"] for row in rows if row["phase"] == "step" and not row["graphs"]] == eager
    few = ["dense product", "compute only", "overlapped", "fixed"]
    assert [row["path"] for row in rows if row["phase"] == "step" and row["graphs"]] == few
    assert [(each["path"], each["failed"]) for each in content["missing"]] == [
        *[("LigerCute", False)] * shared, ("graph replay", False), ("graphed step", False),
    ]  # fmt: skip
    for row in rows:
        assert row["wrong"] == 0 and len(row["samples_s"]) == 2 and row["preset"] == preset
        if row["path"] == "overlapped":
            assert 0 <= row["exposed_share"] <= 1 and row["ratio"] > 0 and 0 < row["worst"] < 2.0**-4
            rows_here = row["rows"] / 2 + shared * row["tokens"]
            flops = 6 * 64 * 16 * rows_here * (3 if row["phase"] == "step" else 1)
            assert row["flops"] == flops and row["tflops"] == pytest.approx(flops / row["time_s"] / 1e12)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_interleaved"])
def test_microbatches_are_verified_and_recorded(activation: str, run: Callable[..., Ran]) -> None:
    flags = ("--ways", "microbatches", "--microbatches", "3", "--products", "torch")
    preset = "deepseek-v3-shared" if activation == "swiglu" else "qwen3-30b"
    flags = (*flags, "--activation", activation, "--presets", preset)
    status, said, content = run("moe_layer", *flags, ranks=3)
    assert status == 0 and f"shape of {preset}" in said and "microbatches 3" in said, said
    rows = {(row["path"], row["phase"]): row for row in content["rows"]}
    assert list(rows) == [
        ("dense product", "step"),
        *(("torch products", phase) for phase in ("step", "in a row")),
        *(
            (f"{schedule}, torch", phase)
            for schedule in training.SCHEDULES
            for phase in ("step", "in a row", "whole step")
        ),
    ]
    assert [(each["path"], each["failed"]) for each in content["missing"]] == [("quack products", False)]
    alone = rows["torch products", "in a row"]
    for (path, phase), row in rows.items():
        assert row["wrong"] == 0 and row["microbatches"] == 3
        assert row.get("sm_mhz") is None  # there is no GPU
        if path != "dense product":
            assert row["note"] == "products by torch" and 0 < row["worst"] < 2.0**-4
        if phase == "whole step":
            assert row["ratio"] == pytest.approx(row["time_s"] / alone["time_s"])
    assert 0 < rows["one after the other, torch", "step"]["exposed_share"] <= 1
    in_a_row = rows["one after the other, torch", "in a row"]
    shown = page.summary({"steps": content})
    assert f" {in_a_row['time_s'] / 3 * 1e3:.2f} ({in_a_row['ratio']:.2f}) |" in shown
    # Microbatches have routings of their own; the rows of all ranks are as many.
    assert alone["flops"] == pytest.approx(3 * rows["torch products", "step"]["flops"])


@pytest.mark.parametrize(
    ("flags", "right", "spoilt", "least"),
    [
        # Most values of an expert's gradients; most values of a token's row.
        (["--ways=microbatches", "--microbatches=2"], "torch products", "one after the other", 64 * 32 / 2),
        (["--variants=compute only,overlapped", "--graph-tokens=0"], "compute only", "overlapped", 32),
    ],
)
def test_a_wrong_gradient_is_caught(
    flags: list[str], right: str, spoilt: str, least: float, run: Callable[..., Ran]
) -> None:
    status, said, content = run("moe_layer", *flags, spoil=True)
    assert status == 1 and "FAILED" in said
    wrong = {row["path"]: row["wrong"] for row in content["rows"]}
    assert wrong[right] == 0 and wrong[spoilt] > least
    assert run("moe_layer", *flags, "--inject-error")[2]["wrong"] > 0


def test_experts_that_ranks_cannot_share_are_left_out(run: Callable[..., Ran]) -> None:
    status, _, content = run("moe_layer", "--experts", "9")
    assert status == 0 and content["rows"] == [] and "9 experts cannot" in content["missing"][0]["reason"]


@needs_fabric
def test_nodes_are_counted_and_held_against_the_provider(run: Callable[..., Ran]) -> None:
    flags = "--experts 12 --topk 3 --ranks-per-node 1 --fabric-provider tcp --baselines fabric-cold"
    status, _, content = run("dispatch", *flags.split())
    assert status == 0
    own, ceiling = content["rows"]
    # Each row crosses once a node; a dispatch tells its ids and weights beside, all of them a record.
    assert own["sent_row_bytes"] == own["least_bytes"] > 0 and own["sent_bytes"] > own["least_bytes"]
    assert own["sent_puts"] >= own["least_puts"] + 2
    assert own["wire_GBps"] == pytest.approx(own["sent_row_bytes"] / 2 / own["time_s"] / 1e9)
    assert ceiling["wrong"] is None and len(ceiling["samples_s"]) == 2
    assert "in 32 MiB" in ceiling["note"] and "both ways" in ceiling["note"]
    flags = "--experts 12 --topk 3 --ranks-per-node 1 --fabric-provider shm"
    rows = [
        run("combine", *flags.split(), *limit, ranks=3)[2]["rows"][0]
        for limit in ((), ("--limit-nodes", "1"))
    ]
    assert rows[1]["sent_row_bytes"] == rows[1]["least_bytes"] < rows[0]["least_bytes"]


def test_a_plan_runs_and_writes_nothing_unasked(
    pool: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ROOT / "docs" / "results"
    before = sorted((path, path.stat().st_mtime_ns) for path in results.glob("*"))

    def on_the_pool(given_all: list[options.Options]) -> int:
        batches.append(len(given_all))
        return max(status for given in given_all for status, _ in pool(2)(_on_rank, given))

    def tiny(ranks: int, iters: int, warmup: int) -> list[plan.Run]:
        runs = [
            plan.Run(f"{name}-small", name, ("-g", str(ranks), *OPERATION))
            for name in ("dispatch", "combine")
        ]
        return [*runs, plan.Run("nodes-proxy", "proxy_rate", ("0.01",)), plan.Run("other", "dispatch", ())]

    batches: list[int] = []
    monkeypatch.setattr(launch, "run", on_the_pool)
    monkeypatch.setattr(plan, "operations_cpu", tiny)
    flags = "--device cpu --only small,proxy --label box --commit abc"
    unlabelled = tmp_path / "nodes-proxy.json"
    unlabelled.write_text("of another machine")
    monkeypatch.setattr("sys.argv", ["run_all.py", *flags.split(), "--into", str(tmp_path)])
    assert run_all.main() == 0 and batches == [2]  # one set of ranks did both
    assert record.read(tmp_path / "nodes-proxy.box.json")["program"] == "proxy_rate"
    assert unlabelled.read_text() == "of another machine"
    content = record.read(tmp_path / "dispatch-small.box.json")
    assert content["command"].startswith("python bench/dispatch_perf.py -g 2 --device cpu ")
    assert content["git"] == {"commit": "abc", "dirty": None}
    assert sorted((path, path.stat().st_mtime_ns) for path in results.glob("*")) == before


# -- programs as a user starts them --------------------------------------------------------------------------
def test_a_program_joins_torchruns_ranks(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    file = ROOT / "bench" / "alltoall_perf.py"
    done = run_program(file, *OPERATION, "--baselines", "-J", target, torchrun=2)
    assert done.out.count("# wrong values: 0 OK") == 1  # printed once, by rank 0
    assert [row["path"] for row in record.read(target)["rows"]] == PATHS["alltoall"]


def children(pid: int) -> set[int]:
    """Live processes whose parent is `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize(("number", "status", "ranks"), [(signal.SIGINT, 130, 2), (signal.SIGKILL, -9, 1)])
def test_an_interrupted_program_leaves_no_rank_behind(
    number: signal.Signals, status: int, ranks: int
) -> None:
    with no_shared_memory_left():
        with subprocess.Popen(
            [sys.executable, "bench/dispatch_perf.py", *OPERATION, "-g", str(ranks), "-n", "1000000"],
            cwd=ROOT,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts what runs in its background with interrupts ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as running:
            try:
                assert running.stdout is not None
                next(line for line in running.stdout if "#wrong" in line)  # the titles are out: ranks are up
                started = children(running.pid)
                assert len(started) >= ranks
                running.send_signal(number)
                assert running.wait(timeout=30) == status
            finally:
                running.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "the ranks' end", 10)


def test_a_program_whose_output_nobody_reads_any_more_ends_without_words() -> None:
    """A reader like `head` closes its end of the pipe. The program then ends."""
    command = [sys.executable, "bench/dispatch_perf.py", *OPERATION, "-n", "1000000"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), **pipes) as running:
        try:
            running.stdout.readline()
            running.stdout.close()
            assert running.wait(timeout=60) == 141
            # torch stops ranks that do not end in time, and says so.
            assert all("Terminating process" in line for line in running.stderr.read().splitlines())
        finally:
            running.kill()


# -- the programs in C++ -------------------------------------------------------------------------------------
def test_the_proxy_takes_every_command_whoever_pushes_it() -> None:
    content = native.document("proxy_rate", ("0.01",), "abc")
    assert content["command"] == "proxy_rate 0.01"
    assert [(row["kind"], row["producers"]) for row in content["rows"]] == [
        (kind, producers) for kind in ("rows", "chunks", "pieces") for producers in (1, 2)
    ]
    for row in content["rows"]:
        assert row["commands_per_s_min"] <= row["commands_per_s"] <= row["commands_per_s_max"]
        assert row["puts_per_s"] == pytest.approx(row["commands_per_s"] / row["commands_a_put"], abs=1)
    with pytest.raises(RuntimeError, match="proxy_rate: one argument at most"):
        native.lines("proxy_rate", ["--fast"])


def test_a_program_that_was_not_built_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECOMM_BENCH_PROGRAMS", str(tmp_path))
    for name in plan.NATIVE:
        with pytest.raises(RuntimeError, match=f"{name} is not built"):
            native.lines(name, ())
