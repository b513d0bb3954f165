"""The modules of the language-model example that need no ranks: data, model, options, metrics, pictures."""

import importlib.util
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import moecomm
from moecomm.nn import MoELayer, backward_weights
from moecomm.overlap import Span, Timeline
from moecomm.parallel import ParallelFolding
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import checkpoint, data, fitting, options, plots, precision, presets, ranks, stop  # isort: skip
from lm.attention import AttentionConfig  # isort: skip
from lm.build import build_graphed_step, build_model, learning_rate, make_communicator  # isort: skip
from lm.corpus import Corpus  # isort: skip
from lm.errors import UsageError  # isort: skip
from lm.metrics import MetricsFile, StepTotals, Totals, moe_layers, read_metrics  # isort: skip
from lm.metrics import travel_seconds  # isort: skip
from lm.model import ModelConfig, Transformer  # isort: skip
from lm.pipeline import lay_out  # isort: skip
from lm.progress import StepProgress  # isort: skip
from lm.speed import measure_speed, peak_tflops  # isort: skip
from lm.tokenizer import ByteTokenizer, make_tokenizer  # isort: skip
import itertools


def parse(folder: Path, flags: str) -> options.Options:
    return options.parse([*flags.split(), "--out", str(folder)])


def communicator(
    experts: int, hidden: int, top_k: int, tokens: int = 8, dtype: torch.dtype = torch.float32
) -> moecomm.Communicator:
    sizes = {"num_experts": experts, "hidden": hidden, "top_k": top_k, "max_tokens": tokens}
    return moecomm.Communicator(**sizes, dtype=dtype, device="cpu")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"file{number:02}.txt").write_text(f"text of file {number}\n" * 5)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.txt").write_text("deep\n")
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("hidden\n")
    return tmp_path


def test_text_shorter_than_a_window(tree: Path, tmp_path: Path) -> None:
    chosen = parse(tmp_path / "run", f"--data {tree} --seq 131072")
    with pytest.raises(UsageError) as caught:
        Corpus(chosen)
    text = "tokens of training text, --seq 131072 needs more: give more text, or a smaller --seq"
    assert text in str(caught.value)


def names_of(*places: Path, out: Path | None = None) -> list[str]:
    """Returns the names of the files found in places to read from, when `out` is written to."""
    return [file.name for file in data.find_files([str(place) for place in places], out)]


def test_folder_gives_its_text_files_in_order(tree: Path) -> None:
    assert names_of(tree) == [*(f"file{number:02}.txt" for number in range(40)), "sub/deep.txt"]
    several = names_of(tree / "file0*.txt", tree / "file03.txt", tree / "**" / "deep.txt")
    assert len(several) == 11, "each counts once"
    brackets = tree / "some[1]"
    brackets.mkdir()
    (brackets / "text.txt").write_text("text\n")
    assert names_of(brackets) == ["text.txt"]


def test_default_is_the_standard_library() -> None:
    names = [file.name for file in data.find_files(None)]
    assert "argparse.py" in names
    assert not any("site-packages" in name or not name.endswith(".py") for name in names)


def test_what_is_no_text_or_one_file_alone_is_refused(tree: Path) -> None:
    for name in ("picture.bin", "empty.txt"):
        with pytest.raises(UsageError, match=rf"--data: .*{name} is not a text file"):
            names_of(tree / name)
    with pytest.raises(UsageError, match="no text file in"):
        names_of(tree / "*.bin")
    assert len(names_of(tree / "*")) == 41  # a glob passes over what is no text
    with pytest.raises(UsageError, match=r"deep.txt is the only text file; one more is needed"):
        data.split_files(data.find_files([str(tree / "sub")]))


def test_split_goes_by_name_alone(tree: Path) -> None:
    files = data.find_files([str(tree)])
    training, held_out = data.split_files(files)
    assert held_out and len(held_out) < len(training)
    assert sorted(f.name for f in training + held_out) == sorted(f.name for f in files)
    # Taking a file away moves no other one to the other side.
    _, fewer = data.split_files([f for f in files if f != training[0]])
    assert fewer == held_out
    assert [len(each) for each in data.split_files(files[:2])] == [1, 1]
    data.split_files([*files, data.TextFile(tree, os.fsdecode(b"caf\xe9.txt"))])  # in Latin-1


def test_batches_are_slices_of_one_global_batch() -> None:
    tokens_N = np.arange(1000, dtype=np.uint16)

    def draw(step: int, part: slice) -> torch.Tensor:
        return data.training_batch(tokens_N, seed=3, step=step, batch=12, seq=8, part=part)

    whole = draw(5, slice(0, 12))
    assert whole.shape == (12, 9) and whole.dtype == torch.int64
    assert torch.equal(whole[:, 1:], whole[:, :-1] + 1)
    for world in (2, 3, 4):
        size = 12 // world
        parts = [draw(5, slice(rank * size, (rank + 1) * size)) for rank in range(world)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(draw(6, slice(0, 12)), whole)


@pytest.mark.parametrize("length", [9, 10, 1000])
def test_validation_windows_stay_inside_and_apart(length: int) -> None:
    starts = data.validation_windows(np.zeros(length), count=20, seq=8)
    assert 1 <= len(starts) <= 20
    assert starts[-1] + 8 + 1 <= length
    assert (np.diff(starts) >= 8).all()


def test_unigram_by_hand() -> None:
    # Counts with one added: 3, 2, 1 of 6 in all. Asked for tokens 0, 0, 2.
    nats = data.unigram_nats(np.array([0, 0, 1]), np.array([0, 0, 2]), vocab=3)
    assert nats == pytest.approx((2 * math.log(6 / 3) + math.log(6 / 1)) / 3)


def test_bytes_come_back() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve → bytes\n"
    ids = tokenizer.encode(text.encode()).tolist()
    assert max(ids) < 256
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text


def test_library_tokenizer_or_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if importlib.util.find_spec("tokenizers") is None:
        with pytest.raises(UsageError, match="pip install tokenizers"):
            make_tokenizer(str(path))
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    with pytest.raises(UsageError, match="no such file"):
        make_tokenizer(str(path))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = Path(__file__).read_text()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.save(str(path))
    tokenizer = make_tokenizer(str(path))
    ids = tokenizer.encode(text.encode())
    assert len(ids) < len(text)
    assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_text]) == text
    Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="b")).save(str(path))
    assert make_tokenizer(str(path)).end_of_text == 8
    path.write_text("not json")
    with pytest.raises(UsageError):
        make_tokenizer(str(path))


def test_graphs_are_of_gpus() -> None:
    refusal = "--graph: a graph is of GPUs, and this run is on the cpu"
    with communicator(4, 16, 2) as comm, pytest.raises(UsageError, match=refusal):
        build_graphed_step(lambda tokens: tokens, small_model(), comm)


def test_a_line_has_the_mean_speed_since_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StepProgress(start=0, steps=4, log_every=2, shown=True)
    for step, seconds in enumerate((4.0, 1.0, 3.0, 1.0), 1):
        speeds = {"tokens_per_s": 12 / seconds, "mfu": 0.12 / seconds}
        shown.step(
            {"step": step, "seconds": seconds, "loss": 1.0, "balance": 1.0, "comm_share": 0.0} | speeds
        )
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"(\d+) tok/s", line) for line in lines] == [["3"], ["12"], ["6"]]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["3.0%", "12.0%", "6.0%"]


NO_GRAPH = ["--no-graph", "--cp 2", "--fsdp", "--dtype float32", "--recompute norms"]


@pytest.mark.parametrize("given", ["", "--graph", "--microbatches 2", *NO_GRAPH])
def test_steps_become_graphs_where_they_can(given: str, tmp_path: Path) -> None:
    chosen = parse(tmp_path, f"--preset small --dtype bfloat16 {given}")
    assert fitting.captures(chosen, "cuda") == (given not in NO_GRAPH)
    assert fitting.captures(chosen, "cpu") == (given == "--graph"), "refused there, if asked for"


@pytest.mark.parametrize(
    ("name", "given"),
    [("wire", "--wire mxfp8 --combine-wire fp8"), ("gradient_wire", "--gradient-wire fp8")],
)
def test_narrow_rows_are_of_gpus(name: str, given: str, tmp_path: Path) -> None:
    chosen = parse(tmp_path, f"{given} --preset small")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=f"^{given}: {name} is .* on the cpu"):
            make_communicator(chosen, ParallelFolding(world_size=1), 8, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def small_model() -> Transformer:
    heads = AttentionConfig(dim=16, heads=2, kv_heads=2, head_dim=8)
    config = ModelConfig(vocab=11, dim=16, layers=2, max_seq=12, attention=heads)
    return Transformer(config, lambda layer: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights_that_are_put_off(dtype: torch.dtype, tmp_path: Path, seed: int) -> None:
    """Those of a step in microbatches, which are rounded otherwise than one after the other; experts may
    compute in a cast of their weights."""
    flags = "--preset small --dim 32 --heads 2 --layers 2 --experts 4 --ffn 32 --no-tied --accumulate 3"
    chosen = parse(tmp_path, flags)
    tokens_BS = torch.randint(11, (6, 13), generator=torch.Generator().manual_seed(seed))
    found = []
    with communicator(4, 32, chosen.top_k, tokens=72, dtype=dtype) as comm:
        for later in (False, True):
            torch.manual_seed(seed)
            model = build_model(replace(chosen, delay_wgrad=later), 11, comm)
            for part_BS in tokens_BS.chunk(3):
                (precision.compute(model, dtype, part_BS[:, :-1], part_BS[:, 1:]) / 3).backward()
            assert any(layer.has_pending_weights for layer in moe_layers(model)) == later
            backward_weights(model)
            found.append(torch.cat([each.grad.flatten().double() for each in model.parameters()]))
    error = ((found[0] - found[1]).norm() / found[0].norm()).item()
    assert error <= {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]


def test_stages_have_the_weights_of_the_whole_model(tmp_path: Path, seed: int) -> None:
    flags = (
        "--preset small --dim 32 --heads 2 --layers 5 --dense-layers 1 --dense-ffn 32 --experts 4 --ffn 32 "
        "--no-tied --pp 2 --microbatches 4 --schedule interleaved --shared-experts 1"
    )
    chosen = parse(tmp_path, flags)

    def weights(holds: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = build_model(chosen, 11, comm, holds=holds)
        assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
        state = model.state_dict()
        return {name: state[name] for name, _ in model.named_parameters()}

    with communicator(4, 32, chosen.top_k) as comm:
        whole = weights(lambda part: True)
        first, second = (weights(lay_out(chosen, place).holds) for place in range(2))
    assert not first.keys() & second.keys() and first.keys() | second.keys() == whole.keys()
    assert "embedding.weight" in first and "blocks.2.attention_norm.weight" in second
    assert all(torch.equal(each, whole[name]) for name, each in (*first.items(), *second.items()))


@pytest.mark.parametrize("preset", ["small", "large", "qwen3-30b-a3b"])
def test_logits_start_with_variance_one(preset: str, tmp_path: Path, seed: int) -> None:
    """The logits are those that routers, and an output matrix of its own, make of inputs of unit size."""
    flags = f"--preset {preset} --dim 64 --heads 2 --kv-heads 2 --layers 2 --experts 32 --ffn 16 --top-k 2"
    chosen = parse(tmp_path, f"{flags} --dtype float32")
    torch.manual_seed(seed)
    with communicator(32, 64, 2) as comm:
        model = build_model(chosen, 257, comm)
    named = dict(model.named_parameters())
    names = [f"blocks.{layer}.ffn.router.weight" for layer in range(2)]
    for name in names if chosen.tied else [*names, "head.output.weight"]:
        assert named[name].square().sum(1).mean().item() == pytest.approx(1.0, rel=0.2), name


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_give_what_no_flag_says(preset: str, tmp_path: Path) -> None:
    chosen = options.parse(["--preset", preset, "--ffn", "48", "--out", str(tmp_path)])
    assert chosen.ffn == 48
    for name, value in presets.PRESETS[preset].items():
        assert name == "ffn" or getattr(chosen, name) == value
    assert presets.PRESETS["small"].keys() == presets.PRESETS["large"].keys()
    said = options.parse([*presets.describe(preset).split(), "--out", str(tmp_path)])
    assert {name: getattr(said, name) for name in presets.PRESETS[preset]} == presets.PRESETS[preset]


def test_the_large_preset_is_for_gpus_and_divides_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defaults(on_gpus: bool, *flags: str) -> options.Options:
        monkeypatch.setattr(presets, "_on_gpus", lambda: on_gpus)
        return options.parse(["--out", str(tmp_path), *flags])

    assert defaults(False).dim == defaults(True, "--device", "cpu").dim == presets.SMALL["dim"]
    large = defaults(True)
    assert (large.dim, large.dtype) == (presets.LARGE["dim"], "bfloat16")
    for world in (1, 2, 3, 4, 6, 8):  # every GPU has experts of its own, and an even share of all batches
        assert fitting.check_ranks(large, world).ep == world
        assert large.eval_windows % large.batch == 0
    monkeypatch.setattr(ranks, "uses_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert ranks.default_ranks("auto", large.batch) == 4


def test_blocks_are_compiled_on_gpus_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*flags: str, on: str = "cuda") -> bool:
        return fitting.compiles(options.parse([*flags, "--out", str(tmp_path)]), on)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert compiles() and not compiles(on="cpu") and compiles("--compile", on="cpu")
    for refused in (["--no-compile"], ["--recompute", "all"], ["--no-tied", "--pp=2", "--microbatches=2"]):
        assert not compiles(*refused)
    monkeypatch.setattr(fitting.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert not compiles() and compiles("--compile")


def test_a_resumed_run_keeps_its_sizes_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = options.parse(["--preset", "small", "--layers", "2", "--out", str(tmp_path)])
    started.save(tmp_path)
    monkeypatch.setattr(presets, "_on_gpus", lambda: True)
    again = options.parse(["--resume", "--steps", "900", "--out", str(tmp_path)])
    assert (again.dim, again.layers, again.dtype, again.steps) == (started.dim, 2, "float32", 900)


def test_first_steps_do_not_count_as_speed() -> None:
    totals = Totals()
    speeds = ((60.0, 100 / 60), (40.0, 200 / 100), (2.0, 50.0), (2.0, 50.0), (3.0, 300 / 7))
    for step, (seconds, speed) in enumerate(speeds):
        found = StepTotals(
            loss=1.0,
            seconds=seconds,
            comm_seconds=seconds / 4,
            wait_seconds=0.0,
            exposed_seconds=math.nan if step == 3 else seconds / 4 if step else 50.0,
            load_AE=torch.ones(1, 1),
            late_R=[0.0],
            stop=False,
        )
        totals.add(found, tokens=100, wall_seconds=seconds)
        assert totals.tokens_per_second == pytest.approx(speed)
    assert totals.measured_seconds == 5 and totals.exposed_share == 0.25


def test_exposed_time_is_a_part_of_the_time_in_which_rows_travel() -> None:
    spans = [
        Span("dispatch", "comm", 0.0, 4.0, communicates=True),
        Span("dispatch", "comm", 3.0, 5.0, communicates=True),
        Span("experts", "main", 1.0, 3.0),
    ]

    class Measured(MoELayer):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def timelines(self) -> dict[str, Timeline]:
            return {"forward": Timeline(spans, streams=("main", "comm"))}

    assert travel_seconds([Measured(), Measured()]) == (10.0, 6.0)


def test_speed_counts_what_a_token_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six operations a value of a matrix, and the causal half of attention's scores and sums."""
    run = options.parse(["--preset", "large", "--out", "/tmp"])
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = measure_speed(run, 10_000_000, 1000, 4, cuda)
    assert found is not None
    scores_and_sums = 2 * 2 * 1024 * 512 / 2  # a layer, forward: half of all positions on average
    assert found.flops_per_token == 6 * (10_000_000 - 1000 * 1024) + 3 * 8 * scores_and_sums
    tflops = 1e6 * found.flops_per_token / 4 / 1e12
    assert found.of(1e6) == {"tflops": pytest.approx(tflops), "mfu": pytest.approx(tflops / 989)}
    assert "MFU is of 989 TFLOP/s" in found.describe()
    assert peak_tflops("NVIDIA H200 NVL") == peak_tflops("NVIDIA H100 NVL") == 835

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    unknown = measure_speed(run, 10_000_000, 1000, 4, cuda)
    assert unknown is not None and set(unknown.of(1e6)) == {"tflops"} and "no MFU" in unknown.describe()
    assert measure_speed(run, 10_000_000, 1000, 4, torch.device("cpu")) is None


def test_what_a_resumed_run_changes_is_recorded(tmp_path: Path) -> None:
    run = ["--preset", "small", "--out", str(tmp_path)]
    assert options.parse([*run, "--lr", "1"]).save(tmp_path) == {}
    again = options.parse([*run, "--resume", "--lr", "0.5", "--sample", "9"])
    assert again.save(tmp_path) == {"lr": 0.5}
    assert options.parse([*run, "--resume"]).lr == 0.5


def test_learning_rate_rises_and_falls() -> None:
    chosen = options.parse(["--steps", "100", "--warmup", "10", "--lr", "1", "--out", "/tmp"])
    rates = [learning_rate(step, chosen) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 == max(rates)
    assert all(left > right for left, right in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)


def test_metrics_file_drops_what_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resume_at=None)
    for step in range(5):
        first.write({"step": step, "loss": 1.0})
    first.close()
    with path.open("a") as stream:
        stream.write('{"step": 5, "lo')  # a line cut off by a crash
    again = MetricsFile(path, resume_at=2)
    again.write({"step": 3, "loss": 2.0})
    again.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_run_that_does_not_begin_puts_checkpoints_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.set_aside(folder) is None
    for step in (1, 2):
        (folder / f"step-{step}").mkdir(parents=True)
        aside = checkpoint.set_aside(folder)
        assert aside and not folder.exists()
        assert [path.name for path in aside.iterdir()] == [f"step-{step}"]
    (folder / "step-3").mkdir(parents=True)
    checkpoint.set_aside(folder)
    checkpoint.put_back(folder)
    found = {path.parent.name: path.name for path in tmp_path.glob("*/*")}
    assert found == {"checkpoints": "step-3", "checkpoints.old": "step-2"}
    checkpoint.set_aside(folder)
    checkpoint.forget_older(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.old"]


def test_lines_of_metrics_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n34}\n{"a":}\n{"stp": 1}\n\xff{"step": 2}\n{"step": 3}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize("experts", [1, 4])
def test_pictures_of_short_runs(tmp_path: Path, experts: int) -> None:
    records = [{"step": 0, "unigram": 3.0}]
    for length in range(3):
        plots.draw_loss(records, tmp_path / "loss.png")
        plots.draw_expert_load(records, tmp_path / "load.png")
        assert (tmp_path / "loss.png").stat().st_size > 1000
        assert (tmp_path / "load.png").exists() == (length > 0)
        records.append({"step": length + 1, "loss": 2.0, "load": [[3] * experts, [0] * (experts - 1) + [9]]})


def test_what_a_run_writes_is_not_its_text(tree: Path) -> None:
    """Files in --out are left out of a folder or glob that has --out in it. Text stays that is named itself,
    or in a folder that is --out or lies in it, but for what the program writes."""
    (tree / "runs").mkdir()
    (tree / "runs" / "metrics.jsonl").write_text("{}\n")
    (tree / "runs" / "notes.txt").write_text("text\n")
    out = tree / "runs"
    assert len(names_of(tree)) == 43
    for place in (tree, tree / "**", tree / "*"):
        assert len(names_of(place, out=out)) == 41, place
    for place in (out, out / "*"):
        assert names_of(place, out=out) == ["notes.txt"], place
    assert len(names_of(out / "metrics.jsonl", out=out)) == 1
    assert len(names_of(tree, out=tree)) == len(names_of(tree, out=tree.parent)) == 43


def test_paths_of_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = options.parse(["--data", "~/src/**/*.md", "--out", str(tmp_path)])
    assert chosen.data == [f"{tmp_path}/src/**/*.md"]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that this process would have sent itself; its handlers are put back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    sent: list[int] = []
    monkeypatch.setattr(stop.os, "kill", lambda pid, number: sent.append(number))
    yield sent
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_termination_before_ranks_have_joined(number: int, killed: list[int]) -> None:
    """There may be nobody to wait for: the process ends at once. Ctrl-C is a request as ever."""
    request = stop.StopRequest()
    signal.raise_signal(number)
    assert request and killed == ([number] if number == signal.SIGTERM else [])


def test_a_second_signal_right_after_the_first_is_the_same_request(
    killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    request = stop.StopRequest()
    request.joined = True
    assert not request
    for seconds in (0.0, 0.1, stop.SAME_SECONDS):
        now[0] = 100.0 + seconds
        signal.raise_signal(signal.SIGTERM)
        assert request and not killed
    now[0] += 0.1
    signal.raise_signal(signal.SIGTERM)
    assert killed == [signal.SIGTERM]
