"""The benchmark programs' command lines, without ranks: options, sizes, and the plans of run_all.py."""

from __future__ import annotations

import pytest

from bench import run_all
from bench.harness import command_line, options, plan

pytestmark = pytest.mark.usefixtures("bench_on_cpu")


def test_sweeps_multiply_and_include_the_last_size() -> None:
    assert command_line.sweep(8, 64) == (8, 16, 32, 64)
    assert command_line.sweep(8, 65, factor=4.0) == (8, 32)
    assert command_line.sweep(1, 4, factor=1.1) == (1, 2, 3, 4)  # never stands still


def test_flags_arrive() -> None:
    flags = (
        "-g 4 -b 64 -e 256 -f 2 -n 3 -w 1 -c 2 -d float16,bfloat16 --hidden 512 --experts 16,8 --topk 2 "
        "--layout rank --capacity 99 --routing zipf --zipf 1.5 --baselines memcpy,gloo --seed 7 --flush 0"
    )
    given = command_line.parse("dispatch", flags.split())
    assert (given.sizes, given.dtypes) == ((64, 128, 256), ("float16", "bfloat16"))
    assert (given.ranks, given.iters, given.warmup, given.checks, given.capacity) == (4, 3, 1, 2, 99)
    assert (
        given.routings == (("zipf", 1.5),)
        and given.baselines == ("memcpy", "gloo")
        and given.flush_bytes == 0
    )
    points = list(given.points())
    assert [(p.experts, p.dtype, p.tokens) for p in points] == [
        (experts, dtype, tokens)
        for experts in (16, 8)
        for dtype in ("float16", "bfloat16")
        for tokens in (64, 128, 256)
    ]
    assert len({point.setup for point in points}) == 4 and points[0].row_bytes == 1024
    assert command_line.parse("combine", ["--baselines"]).baselines == ("memcpy", "gloo", "gloo-tuned")
    assert command_line.parse("dispatch", ["--kept-handle"]).kept_handle == "plain"
    (shape,) = command_line.parse("alltoall", ["-g", "3"]).shapes
    assert (shape.hidden, shape.experts, shape.topk) == (4096, 3, 1)


def test_flags_of_layers_arrive() -> None:
    given = command_line.parse(
        "moe_layer", ["--presets", "gpt-oss-120b,qwen3-30b", "--hidden", "32", "--topk", "2"]
    )
    assert [(each.hidden, each.ffn, each.experts, each.topk) for each in given.shapes] == [
        (32, 2880, 128, 2), (32, 768, 128, 2),
    ]  # fmt: skip
    assert (given.sizes, given.dtypes, given.graph_tokens) == ((4096,), ("bfloat16",), 512)
    assert given.variants == options.VARIANTS
    assert [(point.tokens, point.graphs) for point in given.points()][:2] == [(4096, False), (512, True)]
    keep = command_line.parse("moe_layer", ["--keep", "all,rows", "--variants", "serial,overlapped"])
    assert keep.variants == ("serial", "overlapped", "overlapped, keep rows")


def test_ways_are_points_of_their_own() -> None:
    flags = "--presets qwen3-30b --ways all --microbatches 3 --graph-tokens 8"
    given = command_line.parse("moe_layer", flags.split())
    assert [(each.tokens, each.graphs, each.microbatches) for each in given.points()] == [
        (4096, False, 0), (8, True, 0), (4096, False, 3),
    ]  # fmt: skip
    flags = "--presets qwen3-30b --ways microbatches --products torch,quack"
    given = command_line.parse("moe_layer", flags.split())
    assert given.products == ("torch", "quack")
    assert command_line.parse("moe_layer", []).products == (None,)


def test_wide_presets_have_four_experts_a_rank_with_8192_rows_each() -> None:
    for ranks in (1, 2, 8):
        flags = ["--presets", "deepseek-v3-wide,qwen3-235b-wide", "-g", str(ranks)]
        given = command_line.parse("moe_layer", flags)
        assert [(each.hidden, each.ffn, each.experts) for each in given.shapes] == [
            (7168, 2048, 4 * ranks), (4096, 1536, 4 * ranks),
        ]  # fmt: skip
        for shape in given.shapes:
            assert given.sizes[0] * ranks * shape.topk == 8192 * shape.experts
    assert command_line.parse("moe_layer", ["--presets", "qwen3-30b,qwen3-235b-wide"]).sizes == (4096,)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nonsense", "--nonsense"),
        ("-g 3 --experts 32", "--experts 32"),
        ("-b 64 -e 32", "-e"),
        ("-b 12Q", "12Q"),
        ("-b 0", "at least 1"),
        ("-d int8", "int8"),
        ("--topk 33", "--topk"),
        ("--hidden 3", "16"),
        ("--layout rank --alignment 8", "--alignment"),
        ("--kept-handle weighted --layout rank", "--kept-handle weighted"),
        ("--routing trace", "trace"),
        ("--routing zipf --zipf 1,y", "--zipf"),
        ("--baselines nccl", "nccl"),
        ("--graph --capacity auto", "--graph"),
        ("--device cuda -g 2 --graph", "--capacity"),
        ("--device cuda -g 2 --graph 20 --capacity auto --kept-handle", "--kept-handle"),
        ("-J /nowhere/x.json", "nowhere"),
        ("-c 0 --inject-error", "-c 0"),
        ("-g 4 --ranks-per-node 3", "--ranks-per-node 3"),
        ("--fabric-provider tcp", "--ranks-per-node"),
        ("--baselines fabric", "--ranks-per-node"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 5", "--limit-nodes"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 2 --routing one-hot", "one-hot"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 1 --experts 16 --topk 8", "--topk 8"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parse("dispatch", flags.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("dispatch_perf.py: error: ") and says in err


@pytest.mark.parametrize(
    "line",
    [
        "alltoall --routing uniform",
        "alltoall --baselines gloo-tuned",
        "combine --combine-wire fp8",
        "dispatch --combine-wire fp8",
        "moe_layer --baselines",
        "moe_layer --presets gpt-5",
        "moe_layer --variants turbo",
        "moe_layer --keep some",
        "moe_layer --ffn 20",
        "moe_layer -d float32,bfloat16",
        "moe_layer --routing one-hot",
        "moe_layer --ways sideways",
        "moe_layer --products torch,quack",
        "moe_layer --products fax",
        "moe_layer --microbatches 0",
        "moe_layer --activation gelu",
        "dispatch --ways layer",
    ],
)
def test_other_programs_refuse_what_is_not_theirs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *flags = line.split()
    with pytest.raises(SystemExit) as ended:
        command_line.parse(program, flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"{program}_perf.py: error: ")


def test_under_torchrun_its_world_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    given = command_line.parse("dispatch", [])
    assert (given.ranks, given.nodes) == (8, 2)
    with pytest.raises(SystemExit):
        command_line.parse("dispatch", ["-g", "2"])
    assert capsys.readouterr().err == ""  # rank 0 says it for all


def test_several_nodes_have_a_ceiling_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["-g", "4", "--ranks-per-node", "2", "--limit-nodes", "1", "--baselines"]
    given = command_line.parse("combine", [*flags, "all", "--fabric-provider", "shm"])
    assert (given.nodes, given.fabric_provider, given.limit_nodes) == (2, "shm", 1)
    assert given.baselines == ("fabric", "fabric-cold", "memcpy", "gloo", "gloo-tuned")
    for name, value in (("RANKS_PER_NODE", "2"), ("FABRIC_PROVIDER", "tcp"), ("FABRIC_INTERFACE", "lo")):
        monkeypatch.setenv(f"MOECOMM_{name}", value)
    given = command_line.parse("dispatch", ["-g", "6", "--experts", "12"])
    assert (given.nodes, given.fabric_provider, given.fabric_interface) == (3, "tcp", "lo")


@pytest.mark.parametrize(
    "runs",
    [
        plan.operations_cpu(2, 3, 1),
        *(plan.operations_cuda(ranks, 3, 1) for ranks in (1, 2, 3, 4, 8)),
        plan.layers_cuda(4, 3, 1),
        *(plan.training_cuda(ranks, 3, 1) for ranks in (2, 4)),
        plan.nodes_cpu(3, 1),
        *(plan.nodes_cuda(gpus, 3, 1) for gpus in (2, 4, 6)),
    ],
)
def test_a_plan_names_each_run_once_with_flags_that_parse(runs: list[plan.Run]) -> None:
    names = {run.name: run for run in runs}
    assert len(names) == len(runs)
    for name, run in names.items():
        if run.program in plan.NATIVE:
            continue
        given = command_line.parse(run.program, run.flags)
        assert given.iters == 3
        if name.endswith("-limit"):  # held against a run that differs in nothing else
            plain = command_line.parse(run.program, names[name.removesuffix("-limit")].flags)
            assert given.limit_nodes and plain.limit_nodes is None
            assert (given.sizes, given.shapes, given.ranks) == (plain.sizes, plain.shapes, plain.ranks)
        if "-on-" in name:
            assert given.ranks == int(name[-1]) and given.sizes == (8, 4096)


def test_the_reference_cases_have_all_baselines() -> None:
    cpu = command_line.parse("dispatch", plan.operations_cpu(2, 3, 1)[0].flags)
    assert (cpu.shapes[0].hidden, cpu.shapes[0].experts, cpu.sizes) == (4096, 32, (2048,))
    cuda = command_line.parse("dispatch", plan.operations_cuda(4, 3, 1)[0].flags)
    assert (cuda.shapes[0].hidden, cuda.shapes[0].experts, cuda.sizes) == (7168, 256, (4096,))
    assert {"sm-push", "copy-engine", "memcpy", "nccl", "nccl-tuned"} <= set(cuda.baselines)
    assert "torch-symm" not in cuda.baselines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--layers --device cpu", "GPUs"),
        ("--nodes --device cuda -g 3", "-g"),
        ("--nodes --label a/b", "--label"),
        ("--nodes --only no-such-run", "nodes-proxy"),
    ],
)
def test_what_run_all_cannot_do_is_one_line(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "find_device", lambda given: given)
    monkeypatch.setattr("sys.argv", ["run_all.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        run_all.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
