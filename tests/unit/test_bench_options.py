"""The benchmark programs' command lines, without ranks: options, sizes, the plan of the reference tables."""

from __future__ import annotations

import pytest

from bench import run_all
from bench.harness import node_plan, options, sizes

pytestmark = pytest.mark.usefixtures("bench_on_cpu")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2048", 2048),
        ("16K", 1),
        ("32M", 2048),
        ("32MB", 2048),
        ("32MiB", 2048),
        ("1G", 65536),
        ("100B", 1),
        ("0.5m", 32),
    ],
)
def test_a_bare_size_is_tokens_and_a_suffix_makes_it_bytes(text: str, tokens: int) -> None:
    assert sizes.parse_size(text, row_bytes=16384) == tokens


@pytest.mark.parametrize("text", ["", "x", "12Q", "-4", "0", "1.5", "nanK", "infM", "K"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        sizes.parse_size(text, row_bytes=16)


def test_sweeps_add_or_multiply_and_include_the_last_size() -> None:
    assert sizes.sweep(8, 64) == (8, 16, 32, 64)
    assert sizes.sweep(8, 65, factor=4.0) == (8, 32)
    assert sizes.sweep(5, 20, step=5) == (5, 10, 15, 20)
    assert sizes.sweep(7, 7) == (7,)
    assert sizes.sweep(1, 4, factor=1.1) == (1, 2, 3, 4)  # never stands still


def test_flags_arrive() -> None:
    flags = (
        "-g 4 -b 64 -e 256 -f 2 -n 3 -w 1 -c 2 -d half,bf16 --hidden 512 --experts 16 --topk 2 --layout rank "
        "--capacity 99 --routing zipf --zipf 1.5 --baselines memcpy,gloo --seed 7 --flush 0"
    )
    given = options.parse("dispatch", flags.split())
    assert given.sizes == (64, 128, 256)
    assert given.dtypes == ("float16", "bfloat16")
    assert (given.ranks, given.iters, given.warmup, given.checks) == (4, 3, 1, 2)
    assert (given.experts, given.topk, given.layout, given.capacity) == (16, 2, "rank", 99)
    assert (given.routing, given.zipf, given.baselines, given.flush_bytes) == (
        "zipf",
        1.5,
        ("memcpy", "gloo"),
        0,
    )
    assert options.parse("combine", ["--baselines"]).baselines == ("memcpy", "gloo", "gloo-tuned")
    assert options.parse("dispatch", ["-d", "all"]).dtypes == tuple(options.DTYPES)


def test_alltoall_is_balanced_top_1_with_an_expert_a_rank() -> None:
    given = options.parse("alltoall", ["-g", "3"])
    assert (given.experts, given.topk, given.routing) == (3, 1, "balanced")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nonsense", "--nonsense"),
        ("-g 0", "-g"),
        ("-g 3 --experts 32", "--experts 32"),
        ("-b 64 -e 32", "-e"),
        ("-b 8 -e 64 -i 8 -f 2", "-i or -f"),
        ("-e 4096 -f 1", "-f"),
        ("-b 12Q", "12Q"),
        ("-n 0", "-n"),
        ("-n x", "-n"),
        ("-c -1", "-c"),
        ("-d int8", "int8"),
        ("--topk 33", "--topk"),
        ("--hidden 3", "16"),
        ("--layout diagonal", "diagonal"),
        ("--layout rank --alignment 8", "--alignment"),
        ("--alignment 0", "--alignment"),
        ("--capacity none", "--capacity"),
        ("--kept-handle loose", "loose"),
        ("--kept-handle weighted --layout rank", "--kept-handle weighted"),
        ("--routing round", "round"),
        ("--routing trace", "trace"),
        ("--routing uniform x", "uniform"),
        ("--routing trace /nowhere/ids.npy", "ids.npy"),
        ("--routing zipf --zipf -1", "--zipf"),
        ("--device cpu --baselines nccl", "nccl"),
        ("--device tpu", "--device"),
        ("--device cpu --num-sms 8", "--num-sms"),
        ("--device cpu --graph --capacity auto", "--graph"),
        ("--device cpu --wire fp8", "--wire"),
        ("--device cuda -g 2 --graph", "--capacity"),
        ("--device cuda -g 2 --num-sms 0", "--num-sms"),
        ("--device cuda -g 2 --no-dequantize", "--no-dequantize"),
        ("--device cuda -g 2 --baselines gloo", "gloo"),
        ("--baselines-only", "--baselines"),
        ("--experts 8,x", "--experts"),
        ("--experts 4,32 --topk 8", "--topk"),
        ("--routing zipf --zipf 1,y", "--zipf"),
        ("-J /nowhere/x.json", "nowhere"),
        ("--plot x.txt", ".png"),
        ("--timeout 0", "--timeout"),
        ("--threads 0", "--threads"),
        ("-c 0 --inject-error", "-c 0"),
        ("-g 4 --ranks-per-node 3", "--ranks-per-node 3"),
        ("--ranks-per-node 0", "--ranks-per-node"),
        ("--fabric-provider tcp", "--ranks-per-node"),
        ("--ranks-per-node 2 --fabric-provider tcp", "--ranks-per-node"),
        ("--baselines fabric", "--ranks-per-node"),
        ("--limit-nodes 2", "--limit-nodes"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 0", "--limit-nodes"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 5", "--limit-nodes"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 2 --routing one-hot", "one-hot"),
        ("-g 4 --ranks-per-node 1 --limit-nodes 1 --experts 16 --topk 8", "--topk 8"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse("dispatch", flags.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("dispatch_perf.py: error: ")
    assert says in err


@pytest.mark.parametrize("flags", ["--routing uniform", "--experts 4", "--baselines gloo-tuned"])
def test_alltoall_refuses_what_would_make_it_something_else(flags: str) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse("alltoall", flags.split())
    assert ended.value.code == 2


def test_under_torchrun_its_world_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert options.parse("dispatch", []).ranks == 4
    with pytest.raises(SystemExit) as ended:
        options.parse("dispatch", ["-g", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""  # rank 0 says it for all


def test_several_nodes_have_a_ceiling_of_their_own() -> None:
    given = options.parse(
        "combine",
        ["-g", "4", "--ranks-per-node", "2", "--fabric-provider", "shm", "--limit-nodes", "1", "--baselines"],
    )
    assert (given.nodes, given.ranks_per_node, given.fabric_provider, given.limit_nodes) == (2, 2, "shm", 1)
    assert given.baselines == ("fabric", "fabric-cold", "memcpy", "gloo", "gloo-tuned")
    one = options.parse("combine", ["-g", "4", "--ranks-per-node", "4", "--baselines"])
    assert one.nodes == 1 and not {"fabric", "fabric-cold"} & set(one.baselines)


def test_nodes_come_from_the_environment_where_no_flag_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANKS_PER_NODE", "2"), ("FABRIC_PROVIDER", "tcp"), ("FABRIC_INTERFACE", "lo")):
        monkeypatch.setenv(f"MOECOMM_{name}", value)
    six = ["-g", "6", "--experts", "12"]
    given = options.parse("dispatch", six)
    assert (given.nodes, given.fabric_provider, given.fabric_interface) == (3, "tcp", "lo")
    assert options.parse("dispatch", [*six, "--ranks-per-node", "1"]).nodes == 6
    one = options.parse("dispatch", ["-g", "2"])
    assert (one.nodes, one.fabric_provider, one.fabric_interface) == (1, None, None)
    monkeypatch.delenv("MOECOMM_RANKS_PER_NODE")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert options.parse("dispatch", []).nodes == 2  # torchrun on two hosts


@pytest.mark.parametrize("operation", ["dispatch", "combine", "alltoall"])
def test_help_defines_the_columns(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(operation, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("algbw", "busbw", "#wrong", "tokens per rank", "-J", "--plot"))


def test_ranks_share_the_cores() -> None:
    assert [options.threads_for(ranks, 8) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    "plan",
    [
        run_all.cpu_plan(2, 3, 1),
        *(run_all.cuda_plan(ranks, 3, 1) for ranks in (1, 2, 3, 4, 8)),
        node_plan.nodes_cpu_plan(("tcp", "shm"), 3, 1),
        *(node_plan.nodes_cuda_plan(gpus, ("tcp", "shm"), 3, 1) for gpus in (2, 4, 6)),
    ],
)
def test_the_plan_names_each_run_once_with_flags_that_parse(plan: list[run_all.Run]) -> None:
    assert len({run.name for run in plan}) == len(plan)
    assert any(run.quick for run in plan)
    for run in plan:
        assert options.parse(run.program, run.flags).iters == 3


def test_the_plan_has_fewer_gpus_than_there_are_with_experts_that_they_share() -> None:
    plan = {run.name: run for run in run_all.cuda_plan(4, 20, 5)}
    for gpus, experts in ((2, 256), (3, 255), (4, 256)):
        for operation in ("dispatch", "combine"):
            run = plan[f"cuda-{operation}-on-{gpus}"]
            given = options.parse(run.program, run.flags)
            assert (given.operation, given.ranks, given.experts) == (operation, gpus, experts)
            assert given.sizes == (8, 4096) and "sm-push" in given.baselines
            assert ("cannot share" in run.about) == (gpus == 3)
    assert not any("-on-" in run.name for run in run_all.cuda_plan(1, 20, 5))


def test_runs_of_as_many_ranks_share_them() -> None:
    plan = {run.name: run for run in run_all.cuda_plan(4, 20, 5)}
    first = plan["cuda-dispatch"]
    assert run_all._same_ranks(first, plan["cuda-combine"])
    assert not run_all._same_ranks(first, plan["cuda-dispatch-on-2"])
    assert not run_all._same_ranks(first, plan["cuda-dispatch-symm"])


def test_both_kept_handles_are_in_the_plan_and_points_of_sweeps_have_fewer_iterations() -> None:
    found = {run.name: options.parse(run.program, run.flags) for run in run_all.cuda_plan(4, 20, 5)}
    assert found["cuda-backward"].kept_handle == "plain"
    assert found["cuda-backward-weighted"].kept_handle == "weighted"
    assert options.parse("dispatch", ["--kept-handle"]).kept_handle == "plain"
    assert (found["cuda-dispatch"].iters, found["cuda-dispatch-sms"].iters) == (20, 10)


@pytest.mark.parametrize(
    "plan",
    [
        node_plan.nodes_cpu_plan(("tcp", "efa-direct"), 15, 3),
        node_plan.nodes_cuda_plan(4, ("tcp", "efa-direct"), 20, 5),
    ],
)
def test_the_plan_between_nodes_says_in_its_names_what_is_run(plan: list[run_all.Run]) -> None:
    found = {run.name: options.parse(run.program, run.flags) for run in plan}
    for name, given in found.items():
        local = given.ranks_per_node
        assert local and given.nodes > 1
        place = f"nodes-{given.operation}-{given.nodes}x{local}-{given.fabric_provider}"
        assert name.removeprefix("cuda-").startswith(place)
        assert given.baselines[0] == "fabric"
        if name.endswith("-limit"):
            # Held against a run that differs in nothing else.
            plain = found[name.removesuffix("-limit")]
            assert (given.limit_nodes, plain.limit_nodes) == (given.nodes // 2, None)
            for field in ("sizes", "hidden", "experts", "topk", "dtypes", "routing", "iters"):
                assert getattr(given, field) == getattr(plain, field), field
    assert {given.fabric_provider for given in found.values()} == {"tcp", "efa-direct"}
    assert any(name.endswith("-limit") for name in found)


def test_the_cases_that_are_held_to_a_share_of_the_ceiling() -> None:
    cpu = options.parse("dispatch", node_plan.nodes_cpu_plan(("tcp",), 15, 3)[0].flags)
    assert (cpu.nodes, cpu.ranks, cpu.hidden, cpu.sizes) == (2, 2, 2048, (1024,))
    assert {"fabric", "gloo", "gloo-tuned", "gloo-rows"} <= set(cpu.baselines)
    cuda = options.parse("dispatch", node_plan.nodes_cuda_plan(4, ("tcp",), 20, 5)[0].flags)
    assert (cuda.nodes, cuda.ranks, cuda.hidden, cuda.sizes) == (2, 4, 7168, (4096,))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nodes --providers ,", "--providers"),
        ("--nodes --device cuda -g 3", "-g"),
        ("--nodes --label a/b", "--label"),
        ("--label box", "--nodes or --layers"),
        ("--layers --label a/b", "--label"),
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


def test_the_reference_cases() -> None:
    first = run_all.cpu_plan(2, 3, 1)[0]
    cpu = options.parse(first.program, first.flags)
    assert (cpu.hidden, cpu.experts, cpu.topk, cpu.sizes) == (4096, 32, 4, (2048,))
    first = run_all.cuda_plan(4, 3, 1)[0]
    cuda = options.parse(first.program, first.flags)
    assert (cuda.hidden, cuda.experts, cuda.topk, cuda.sizes) == (7168, 256, 8, (4096,))
    assert {"sm-push", "copy-engine", "memcpy", "nccl"} <= set(cuda.baselines)
    assert "torch-symm" not in cuda.baselines
