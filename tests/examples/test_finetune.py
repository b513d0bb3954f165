"""examples/finetune_hf.py: its sizes, its options, and runs on CPU ranks."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.conftest import EXAMPLES
from tests.multirank.hf_models import save_model
from tests.programs import run_program

for package in ("transformers", "accelerate", "peft", "tensorboard"):
    pytest.importorskip(package)

from finetune import demo, options, run, sizes  # noqa: E402  isort: skip
from lm.errors import RunError, UsageError  # noqa: E402  isort: skip
from lm.files import only_run  # noqa: E402  isort: skip


# ---- sizes ----

BIG = sizes.Model(
    kind="qwen3_moe",
    tells_logits=True,
    parameters=30_532_122_624,
    layer_parameters=620_000_000,
    adapter_parameters=39_300_000,
    layers=48,
    hidden=2048,
    expert_width=2304,
    vocabulary=151_936,
    experts=128,
    top_k=8,
    positions=40_960,
)  # a Qwen3-30B-A3B


def test_a_model_is_measured_by_its_config(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = sizes.Model.of(str(model))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert found.parameters == sum(each.numel() for each in loaded.parameters())
    assert found.layer_parameters == sum(each.numel() for each in loaded.model.layers[0].parameters())
    weights = [each for each in loaded.parameters() if each.dim() == 3]
    assert found.expert_width == 3 * demo.HIDDEN
    assert found.adapter_parameters == sum(len(each) * sum(each.shape[1:]) for each in weights) > 0
    assert (found.experts, found.top_k, found.layers) == (demo.EXPERTS, 2, demo.LAYERS)
    assert not found.note(4096) and "4097 is more than the 4096 positions" in found.note(4097)


def test_what_does_not_fit_is_told_with_what_would() -> None:
    plan = sizes.Plan(ranks=2, tokens=4096, lora=False, recompute=True, gpu=True)
    gpu = 80 * sizes.GiB
    with pytest.raises(
        UsageError, match=r"does not fit: it needs 2\d\d\.\d GiB a rank .*What fits: --lora, or 8"
    ):
        sizes.check_fits(BIG, plan, gpu, "a GPU")
    fits = sizes.Plan(ranks=8, tokens=4096, lora=False, recompute=True, gpu=True)
    assert "GiB a rank" in sizes.check_fits(BIG, fits, gpu, "a GPU")
    with pytest.raises(UsageError, match="nothing of"):
        sizes.check_fits(BIG, plan, sizes.GiB, "a GPU")
    one = sizes.Plan(ranks=1, tokens=4096, lora=True, recompute=True, expert_columns=16, gpu=True)
    assert "experts' adapters 4.7" in sizes.check_fits(BIG, one, 140 * sizes.GiB, "a GPU")
    kept = dataclasses.replace(one, recompute=False)
    assert one.fits(BIG, gpu) and not kept.fits(BIG, gpu) and kept.fits(BIG, 140 * sizes.GiB)


def test_cached_files_leave_memory_available() -> None:
    psutil = pytest.importorskip("psutil")
    assert sizes.available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_experts_go_to_as_many_ranks_as_divide_them() -> None:
    assert [sizes.experts_ranks(BIG, ranks, None) for ranks in (1, 2, 3, 6, 8)] == [1, 2, 1, 2, 8]
    with pytest.raises(UsageError, match="--ep 3 must divide 6 ranks and 128 experts: one of 1, 2"):
        sizes.experts_ranks(BIG, 6, 3)


@pytest.mark.parametrize("kind", ["none", "dense"])
def test_a_model_without_experts_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "dense":
        config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    says = {"none": "MODEL_FOLDER", "dense": "LlamaForCausalLM has no experts"}
    with pytest.raises(UsageError, match=says[kind]):
        sizes.Model.of(str(tmp_path))


# ---- options ----


def test_a_resumed_run_takes_over_its_options(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    first = options.parse(["model", "a.txt", "--lora", "--steps", "7", *out])
    assert first.lr == 1e-4
    first.save()
    again = options.parse(["--resume", "--steps", "9", *out])
    assert (again.model, again.text, again.lora, again.steps, again.lr) == ("model", ["a.txt"], True, 9, 1e-4)
    for wrong in (["other", "a.txt"], ["--seq", "12"]):
        with pytest.raises(UsageError, match="--resume"):
            options.parse([*wrong, "--resume", *out])
    for out, content, says in (
        (tmp_path, '{"text": "a.txt"}', """options.json: 'text' cannot be "a.txt"$"""),
        (tmp_path, '{"warmup": 5}', "options.json: argument --warmup: 5 is not between"),
        (tmp_path / "none", "{}", "no run in .*none .no options.json"),
    ):
        (tmp_path / options.FILE_NAME).write_text(content)
        with pytest.raises(UsageError, match=says):
            options.parse(["--resume", "--out", str(out)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model"], "nothing to train on"),
        (["--steps", "0"], "at least 1"),
        (["--lr", "-1"], "--lr: -1.0 is not a finite number of at least 0"),
        (["--seed", "-1"], "--seed: -1 is not a number from 0"),
        (["--warmup", "5"], "--warmup: 5 is not between 0 and 1"),
        (["--x"], "--x"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        options.parse(arguments)


# ---- balance ----


def test_each_layer_is_balanced_by_itself(tmp_path: Path, model: Path) -> None:
    from finetune.run import BalancingTrainer
    from transformers import AutoModelForCausalLM, TrainingArguments

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.router_aux_loss_coef = 0.0  # transformers' loss of all layers comes with the logits
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], gradient_accumulation_steps=2)
    trainer = BalancingTrainer(model=loaded, args=arguments)
    trainer.top_k = 2
    tokens = torch.arange(3, 67).view(2, 32)
    wanted = 0.0
    for logits_TE in loaded(tokens, output_router_logits=True).router_logits:
        probs_TE = logits_TE.detach().softmax(-1)
        share_E = torch.bincount(probs_TE.topk(2).indices.flatten(), minlength=demo.EXPERTS) / 128
        wanted += float(demo.EXPERTS * (share_E * probs_TE.mean(0)).sum() / demo.LAYERS)
    losses = {}
    for trainer.balance in (0.0, 10.0):
        for training in (False, True):
            batch = {"input_ids": tokens, "labels": tokens}
            losses[trainer.balance, training] = trainer.compute_loss(loaded.train(training), batch).item()
    assert losses[10.0, False] == losses[0.0, False]
    assert losses[10.0, True] - losses[0.0, True] == pytest.approx(10.0 * wanted / 2, rel=1e-4)
    # held out, a loss is the mean of the rank's own targets, whatever number all ranks have
    share = trainer.compute_loss(loaded.eval(), batch, num_items_in_batch=torch.tensor(93))
    assert share.item() == losses[0.0, False]
    (tmp_path / "checkpoint-0").touch()
    with pytest.raises(RunError, match="checkpoint of step 0 could not be written: rank 0: FileExistsError"):
        trainer._save_checkpoint(loaded, None)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_document_sees_another_one(tmp_path: Path, family: str) -> None:
    from finetune.run import keep_apart
    from transformers import AutoModelForCausalLM

    save_model(family, tmp_path, seed=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    keep_apart(loaded)
    tokens, positions = torch.arange(3, 67).view(2, 32), (torch.arange(32) % 16).repeat(2, 1)
    both = loaded(tokens, position_ids=positions, use_cache=False, output_router_logits=True)
    alone = loaded(tokens[:, 16:]).logits
    assert torch.allclose(both.logits[:, 16:], alone, rtol=1e-5, atol=1e-5) and both.aux_loss > 0


# ---- runs ----

SMALL = "--seq 32 --batch 2 --log-every 1 --eval-every 2 --save-every 2 --sample 4"


def _run(*arguments: object, ranks: int = 2, code: int = 0) -> str:
    done = run_program(EXAMPLES / "finetune_hf.py", *map(str, arguments), torchrun=ranks, code=code)
    assert "FutureWarning" not in done.err
    return done.out if code == 0 else done.err


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path, model: Path) -> None:
    """Two steps on two ranks, two more on four, with their experts on four ranks, and one on one rank."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    said = _run(model, model.parent / "text", "--out", out, *f"--steps 2 {SMALL}".split())
    assert "8 experts on 2 of 2 ranks" in said and "result: loss" in said and "recompute" not in said
    assert "has done 2 steps: name more" in _run("--resume", "--out", out, code=2)
    broken = Path(shutil.copytree(out, tmp_path / "broken"))
    (broken / "checkpoint-2" / "rng_state_1.pth").write_bytes(b"PK")
    said = _run("--resume", "--out", broken, "--steps", 4, code=2)
    assert said.count("hf.py: error: ") == 1 and "checkpoint-2 cannot be loaded (rank 1: " in said
    (out / "checkpoint-3").mkdir()  # as of a run that was killed while it saved
    (out / "checkpoint-3" / "trainer_state.json").write_text('{"global_')
    said = _run("--resume", "--out", out, "--recompute", "--steps", 4, "--lr", 2e-5, ranks=4)
    assert "8 experts on 4 of 4 ranks" in said and "GiB a rank with --recompute" in said
    assert "4 steps" in said.splitlines()[-1]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4]
    assert [record["lr"] for record in trained[2:]] == pytest.approx([1e-5, 1e-5 * (1 - 0.5**0.5)])
    for record, ranks in zip(trained, (2, 2, 4, 4), strict=True):
        tokens = 2 * 2 * 32 * ranks  # top-2, two windows
        assert [sum(layer) for layer in record["load"]] == [tokens] * demo.LAYERS
        assert all(seconds >= 0 for seconds in record["stages"].values()) and record["stages"]["backward"] > 0
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "rank 3" in page and "A sample" in page
    assert list((out / "tensorboard").iterdir())
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    window = torch.arange(3, 35).unsqueeze(0)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(window).logits
    assert not torch.equal(loaded(window).logits, before)
    said = _run("--resume", "--out", out, "--steps", 5, ranks=1)
    assert "8 experts on 1 of 1 ranks" in said and "5 steps" in said.splitlines()[-1]
    taken = {each.parent.name: each.read_text() for each in out.glob("checkpoint-*/windows_taken")}
    # Two of each rank in a step, on two ranks, then on four, then on one.
    assert taken == {"checkpoint-4": str(2 * 4 + 2 * 8), "checkpoint-5": str(2 * 4 + 2 * 8 + 2)}


LEAVE = """
import os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import torch
from lm.ranks import process_group
from torch.distributed.fsdp import fully_shard

with process_group("cpu"):
    model = fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    del model
names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
print("left:", [each for each in names if "gloo" in each])
"""


def test_groups_of_fsdp_end_with_the_process_group(tmp_path: Path) -> None:
    """Threads of gloo that run on may crash a process as it ends, and torchrun would report a failure."""
    program = tmp_path / "leave.py"
    program.write_text(LEAVE)
    done = run_program(program, torchrun=1, environment={"EXAMPLES": str(EXAMPLES)})
    assert done.last_line == "left: []" and "Warning" not in done.err


BAD_GRADIENTS = """
import os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import finetune_hf
from finetune.run import BalancingTrainer

clip = BalancingTrainer._clip_grad_norm

def clip_bad(self, model):
    if str(self.state.global_step + 1) in os.environ["BAD_STEPS"].split() and os.environ["RANK"] == "1":
        next(p for p in model.parameters() if p.grad is not None).grad.to_local().view(-1)[0] = float("nan")
    return clip(self, model)

loss = BalancingTrainer.compute_loss

def loss_bad(self, model, inputs, return_outputs=False, **options):
    found, outputs = loss(self, model, inputs, True, **options)
    if not model.training and "held-out" in os.environ["BAD_STEPS"]:
        found = found + float("nan")
    return (found, outputs) if return_outputs else found

BalancingTrainer._clip_grad_norm, BalancingTrainer.compute_loss = clip_bad, loss_bad
sys.exit(finetune_hf.main())
"""


def test_steps_without_a_finite_norm_are_left_out(tmp_path: Path, model: Path) -> None:
    from safetensors.torch import load_file

    program, out = tmp_path / "bad.py", tmp_path / "run"
    program.write_text(BAD_GRADIENTS)

    def train(bad: str, *arguments: object, code: int = 0) -> str:
        given = {"EXAMPLES": str(EXAMPLES), "BAD_STEPS": bad}
        done = run_program(
            program, *map(str, arguments), "--out", out, torchrun=2, code=code, environment=given
        )
        return done.err if code else done.out

    flags = f"--steps 4 {SMALL} --save-every 1".split()
    said = train("2 3", model, model.parent / "text", *flags)
    left = [line for line in said.splitlines() if "left out" in line]
    assert left == [f"step {step} is left out: the norm of the gradient is nan" for step in (2, 3)]
    assert "4 steps" in said.splitlines()[-1]
    assert all(value.isfinite().all() for value in load_file(out / "model/model.safetensors").values())
    said = train("5 6", "--resume", "--steps", 9, "--max-skipped", 2, code=1)
    assert "step 6: the norm of the gradient is nan; 2 steps in a row were left out; the ch" in said
    assert f"is now {out / 'suspect-4'}; go on from a checkpoint with --resume" in said
    assert sorted(each.name for each in out.glob("*-[0-9]")) == ["checkpoint-1", "suspect-4"]
    said = train("held-out", "--resume", "--steps", 2, code=1)
    assert "step 2: the held-out loss is nan; the ch" in said and "suspect-2; go on from" in said


@pytest.mark.parametrize("kind", ["--lora", "--lora-experts"])
def test_adapters_alone_are_trained(tmp_path: Path, model: Path, kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    chats = tmp_path / "chats.jsonl"
    said = ("user", "Count."), ("assistant", "one two three four five")
    chat = [{"role": role, "content": each} for role, each in said]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(60)))
    # The log has the first losses, and the last.
    flags = f"{kind} --recompute --lr 1e-2 --balance 0.01 --steps 4 {SMALL} --log-every 3".split()
    said = _run(model, chats, "--out", tmp_path / "run", *flags)
    first, last = (float(each) for each in said.splitlines()[-1].split()[2:5:2] for each in [each.strip(",")])
    assert last < first and "step     4/4  loss" in said
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    changed = [name for name, each in adapted.named_parameters() if "lora_B" in name and each.abs().sum() > 0]
    assert changed and any(".experts." in name for name in changed) == (kind == "--lora-experts")
    if kind == "--lora-experts":
        said = _run("--resume", "--out", tmp_path / "run", "--steps", 5, ranks=1)
        assert (
            "5 steps" in said.splitlines()[-1] and float(said.splitlines()[-1].split()[4].strip(",")) < first
        )


def test_errors_are_one_line_before_anything_is_trained(tmp_path: Path, model: Path) -> None:
    place, silent, wordless = model.parent / "text", tmp_path / "silent", tmp_path / "wordless"
    shutil.copytree(model, wordless / "empty", ignore=shutil.ignore_patterns("*token*"))
    cut = Path(shutil.copytree(model, tmp_path / "cut")) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    save_model("deepseek_v3", silent, seed=1)
    shutil.copytree(silent, wordless / "none")
    for file in model.glob("*token*"):
        shutil.copy(file, silent)
    for ranks, arguments, says in (
        (0, [tmp_path, place], "has no config.json"),
        (0, [model, tmp_path / "none"], "there is no"),
        (
            2,
            [model, place, "--lora-experts", "--implementation", "all_to_all"],
            "needs --implementation moecomm",
        ),
        (1, [model, place, "--implementation", "nccl"], "--implementation nccl is none of "),
        (2, [model, place, "--ep", 3], "--ep 3 must divide 2 ranks and 8 experts"),
        (2, [silent, place, "--balance", 1], "do not tell their routers' logits"),
        (2, [silent, place], ", the model 96 of them"),
        (2, [cut.parent, place], f"cannot load {cut.parent} on 2 ranks"),
        (2, [wordless / "empty", place], "has no tokenizer that transformers can load"),
        (2, [wordless / "none", place], "has no tokenizer that transformers can load"),
    ):
        said = _run(*arguments, "--out", tmp_path / "run", ranks=ranks, code=2)
        lines = [line for line in said.splitlines() if "error:" in line]
        assert len(lines) == 1 and says in lines[0], said
    with only_run(tmp_path / "run"):
        assert "another run writes there" in _run(model, place, "--out", tmp_path / "run", ranks=1, code=2)
    left = [each.name for each in (tmp_path / "run").iterdir()]
    assert left == [".lock"]  # also no options, with which --resume would go on


REPLAYED = """
import os, sys
sys.path[:0] = [os.environ["EXAMPLES"], os.environ["REPOSITORY"]]
import finetune_hf
from finetune.run import GraphedTrainer
from tests.played import Played

class Told(Played):
    def record(self, run):
        print("captured")
        return super().record(run)

GraphedTrainer.recorder = Told()
sys.exit(finetune_hf.main())
"""


def test_replayed_passes_train_as_others_do(tmp_path: Path, model: Path) -> None:
    """A recorder that runs each pass again, in place of CUDA graphs, gives the losses and loads of a run
    without graphs."""
    program = tmp_path / "replayed.py"
    program.write_text(REPLAYED)
    environment = {"EXAMPLES": str(EXAMPLES), "REPOSITORY": str(EXAMPLES.parent)}
    records = []
    steps = f"--steps 3 {SMALL} --eval-every 3 --save-every 3".split()
    for flags in ("--no-graph", "--graph --recompute"):
        out = tmp_path / flags
        given = [model, model.parent / "text", "--out", out, *flags.split(), *steps]
        done = run_program(program, *map(str, given), torchrun=2, environment=environment)
        assert ("captured" in done.out) == (flags != "--no-graph")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        records.append([each for each in map(json.loads, lines) if "loss" in each])
        assert (out / "report.html").is_file()
    for plain, replayed in zip(*records, strict=True):
        assert replayed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert replayed["load"] == plain["load"]
        assert replayed["stages"]["forward and backward"] > 0


@pytest.mark.parametrize(
    ("flags", "changes", "replays"),
    [
        ("", {}, True),
        ("", {"gpu": False}, False),
        ("", {"ranks": 2}, False),
        ("", {"recompute": True}, False),
        ("--implementation all_to_all", {}, False),
        ("--graph", {"ranks": 2, "recompute": True}, True),
        ("--no-graph", {}, False),
    ],
)
def test_one_gpu_replays_by_default(flags: str, changes: dict[str, Any], replays: bool) -> None:
    given = options.parse(["model", "text", *flags.split()])
    plan = sizes.Plan(**{"ranks": 1, "tokens": 64, "lora": False, "recompute": False, "gpu": True, **changes})
    assert run._replays(given, BIG, plan) == replays
    if not flags:
        assert not run._replays(given, dataclasses.replace(BIG, kind="another"), plan)


def test_graphs_are_refused_before_a_run(tmp_path: Path, model: Path) -> None:
    given = [model, model.parent / "text", "--out", tmp_path / "run", "--graph"]
    assert "--graph: a CPU has no CUDA graphs" in _run(*given, code=2)
    assert not (tmp_path / "run" / "options.json").exists()
