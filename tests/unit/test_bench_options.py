"""The benchmark programs' command lines, without ranks: options, sizes, and the plans of run_all.py."""

import pytest

from bench import run_all
from bench.harness import command_line, plan

pytestmark = pytest.mark.usefixtures("bench_on_cpu")


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


OF_DISPATCH = {
    "--nonsense": "--nonsense",
    "-g 3 --experts 32": "--experts 32",
    "-b 64 -e 32": "-e",
    "-b 12Q": "12Q",
    "-b 0": "at least 1",
    "-d int8": "int8",
    "--topk 33": "--topk",
    "--hidden 3": "16",
    "--layout rank --alignment 8": "--alignment",
    "--kept-handle weighted --layout rank": "--kept-handle weighted",
    "--routing trace": "trace",
    "--routing zipf --zipf 1,y": "--zipf",
    "--baselines nccl": "nccl",
    "--graph --capacity auto": "--graph",
    "--device cuda -g 2 --graph": "--capacity",
    "--device cuda -g 2 --graph 20 --capacity auto --kept-handle": "--kept-handle",
    "-J /nowhere/x.json": "nowhere",
    "-c 0 --inject-error": "-c 0",
    "-g 4 --ranks-per-node 3": "--ranks-per-node 3",
    "--fabric-provider tcp": "--ranks-per-node",
    "--baselines fabric": "--ranks-per-node",
    "-g 4 --ranks-per-node 1 --limit-nodes 5": "--limit-nodes",
    "-g 4 --ranks-per-node 1 --limit-nodes 2 --routing one-hot": "one-hot",
    "-g 4 --ranks-per-node 1 --limit-nodes 1 --experts 16 --topk 8": "--topk 8",
    "--combine-wire fp8": "",
    "--ways layer": "",
}
OF_LAYERS = (
    *("--baselines", "--presets gpt-5", "--variants turbo", "--keep some", "--ffn 20", "--products fax"),
    *("-d float32,bfloat16", "--routing one-hot", "--ways sideways", "--products torch,quack"),
    *("--microbatches 0", "--activation gelu"),
)
BAD = [
    *(("dispatch", flags, says) for flags, says in OF_DISPATCH.items()),
    *(("moe_layer", flags, "") for flags in OF_LAYERS),
    *(("alltoall", flags, "") for flags in ("--routing uniform", "--baselines gloo-tuned")),
    ("combine", "--combine-wire fp8", ""),
]


@pytest.mark.parametrize(("program", "flags", "says"), BAD)
def test_a_bad_flag_is_one_line_and_status_2(
    program: str, flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parse(program, flags.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"{program}_perf.py: error: ") and says in err


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
