"""The main example as a user runs it: a small model on real text, on ranks of its own or torchrun's."""

import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.examples.conftest import (
    EXAMPLES,
    SMALL_MODEL,
    BaseRun,
    processes_naming,
    wait_until,
)
from tests.multirank.harness import no_shared_memory_left, run_ranks
from tests.programs import TIMEOUT_S, Finished, run_program

import train_lm  # isort: skip
from lm.metrics import read_metrics  # isort: skip

pytestmark = pytest.mark.slow

RESULT = re.compile(
    r"result: val_loss=(?P<val>\d+\.\d+) unigram=(?P<unigram>\d+\.\d+) "
    r"tokens_per_s=(?P<speed>\d+) exposed_comm=(?P<comm>\d\.\d+)"
)
# Float32 rounding, and what it grows to: sums run in another order when tokens or experts are spread anew.
OTHER_SPREAD = 1e-4
# Eight bits in the arithmetic of every layer, over sixty steps of training.
BFLOAT16 = 0.1


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs the example in this process: for what it refuses before there are ranks."""

    def run(*arguments: str | Path) -> Finished:
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *map(str, arguments)])
        code = train_lm.main()
        said = capsys.readouterr()
        return Finished(code, said.out, said.err)

    return run


def train(*arguments: str | Path, ranks: int = 2, code: int = 0) -> Finished:
    return run_program(EXAMPLES / "train_lm.py", *arguments, torchrun=ranks, code=code)


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r}


def test_learns_more_than_token_frequencies(base_run: BaseRun) -> None:
    result = RESULT.fullmatch(base_run.finished.last_line)
    assert result, base_run.finished.out
    assert float(result["val"]) < float(result["unigram"])
    assert int(result["speed"]) > 0
    assert 0 < float(result["comm"]) < 1


def test_metrics_cover_every_step(base_run: BaseRun) -> None:
    records = read_metrics(base_run.folder / "metrics.jsonl")
    assert list(losses(base_run.folder)) == list(range(1, 61))
    assert [r["step"] for r in records if "val_loss" in r] == [30, 60]
    assert records[0]["unigram"] > 0
    for record in records:
        if "load" in record:  # (layers, experts); each of the 8 * 32 tokens went to two experts in each layer
            assert [sum(layer) for layer in record["load"]] == [8 * 32 * 2] * 2
        if "loss" in record:
            assert math.isfinite(record["loss"]) and record["balance"] >= 1
            assert 0 <= record["wait_share"] <= record["comm_share"] < 1
            assert ("exposed_share" in record) == (record["step"] == 1 or record["step"] % 10 == 0)
            assert 0 < record.get("exposed_share", record["comm_share"]) <= record["comm_share"] < 1


def test_output_files(base_run: BaseRun) -> None:
    for name in ("loss.png", "expert_load.png"):
        assert (base_run.folder / name).read_bytes().startswith(b"\x89PNG")
    checkpoints = sorted(path.name for path in (base_run.folder / "checkpoints").iterdir())
    assert checkpoints == ["step-00000020", "step-00000040", "step-00000060"]
    assert "estimate: " in base_run.finished.out


def test_sample_goes_on_from_the_prompt(base_run: BaseRun) -> None:
    text = (base_run.folder / "sample.txt").read_text()
    assert text.startswith("def ") and len(text) > 4
    assert "sample:\ndef " in base_run.finished.out


def test_resume_repeats_the_same_losses(base_run: BaseRun, half_run: Path) -> None:
    (half_run / "loss.png").unlink()
    (half_run / "loss.png").mkdir()
    done = train("--resume", "--out", half_run, "--note", "left out: nothing")
    assert "resumed at step 40" in done.out and "Is a directory" in done.out
    said = done.out.splitlines()
    assert said[0] == said[-2] == "left out: nothing"
    assert losses(half_run) == losses(base_run.folder)
    assert RESULT.fullmatch(done.last_line)


def test_bfloat16_learns_as_float32_does(base_run: BaseRun, bfloat16_run: BaseRun, tmp_path: Path) -> None:
    """Training in bfloat16 keeps float32 weights and optimizer, so its checkpoint can go on in float32. With
    more steps than before the resumed run says how its rate jumps."""
    assert ", bfloat16" in bfloat16_run.finished.out
    folder = tmp_path / "run"
    shutil.copytree(bfloat16_run.folder, folder)
    assert losses(folder) == pytest.approx(losses(base_run.folder), abs=BFLOAT16)
    assert losses(folder) != pytest.approx(losses(base_run.folder), abs=OTHER_SPREAD)
    done = train("--resume", "--out", folder, "--dtype", "float32", "--steps", "62")
    assert losses(folder)[62] == pytest.approx(losses(folder)[60], abs=0.5)
    rates = {r["step"]: r["lr"] for r in read_metrics(folder / "metrics.jsonl") if "lr" in r}
    said = re.search(r"learning rate: (\S+) at step 60, (\S+) at step 61, as", done.out)
    assert said is not None, done.out
    assert [float(each) for each in said.groups()] == pytest.approx([rates[60], rates[61]], rel=1e-2)


def test_first_steps_do_not_send_all_tokens_to_the_same_experts(text_folder: Path, tmp_path: Path) -> None:
    """The default for GPUs, narrower by eight and with a rate as much higher. Where hidden states of all
    tokens become alike, one in twelve experts gets everything: `balance` is 12."""
    model = "--preset large --device cpu --dim 128 --layers 2 --heads 4 --ffn 32 --dtype float32 --lr 6.4e-3"
    run = "--seq 64 --batch 16 --steps 20 --eval-windows 8"
    train(*model.split(), *run.split(), "--data", text_folder, "--out", tmp_path, ranks=1)
    balance = [r["balance"] for r in read_metrics(tmp_path / "metrics.jsonl") if "balance" in r]
    assert len(balance) == 20 and max(balance) < 11
    assert sum(balance[12:]) / 8 < 8


def test_resume_of_a_finished_run_only_validates(base_run: BaseRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(base_run.folder, folder)
    done = train("--resume", "--out", folder, "--sample", "5")
    before, after = (re.search(r"val_loss=(\S+)", each.last_line) for each in (base_run.finished, done))
    assert before and after and before[1] == after[1]
    assert done.last_line.endswith("(no step was left to run)")
    said = train("--resume", "--out", folder, "--steps", "10", code=2).err
    assert len(said.splitlines()) == 1 and "is at step 60 already, beyond --steps 10" in said


BAD_GRADIENTS = """
import math, os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import torch, train_lm
import lm.trainer
from torch.distributed.tensor import DTensor

sync, validate, steps = lm.trainer.sync_gradients, lm.trainer.Trainer._validate, 0

def sync_gradients(model, **given):
    global steps
    steps += 1
    if str(steps) in os.environ["BAD_STEPS"].split() and os.environ["RANK"] == "1":
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        next(g for g in local if g.numel()).view(-1)[0] = float(os.environ["BAD"])
    sync(model, **given)

lm.trainer.sync_gradients = sync_gradients
if os.environ.get("BAD_LOSS"):
    lm.trainer.Trainer._validate = lambda self, progress: validate(self, progress) * math.nan
sys.exit(train_lm.main())
"""
ONE_LAYER = [*SMALL_MODEL, "--layers=1", "--warmup=5", "--eval-windows=2", "--save-every=1"]


def train_badly(folder: Path, *arguments: str | Path, code: int = 0, **bad: str) -> Finished:
    """Two ranks, of which rank 1 has one number of its gradient replaced in the steps of `bad`."""
    program = folder.with_suffix(".py")
    program.write_text(BAD_GRADIENTS)
    given = {"EXAMPLES": str(EXAMPLES), "BAD_STEPS": "", "BAD": "nan", **bad}
    return run_program(program, *arguments, "--out", folder, torchrun=2, code=code, environment=given)


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, without those of the run itself."""
    known = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in known.items()
        if isinstance(each, TensorStorageMetadata) and not name.startswith("run.")
    }
    load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


PIPED = ["--layers=2", "--no-tied", "--pp=2", "--microbatches=2"]


@pytest.mark.parametrize(
    ("bad", "flags"), [("nan", ["--bias-rate=0.01"]), ("inf", PIPED), ("nan", ["--fsdp"])], ids=str
)
def test_a_step_of_one_rank_that_is_no_number_is_left_out(
    bad: str, flags: list[str], text_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*ONE_LAYER, *flags, "--data", text_folder, "--steps=4"]
    done = train_badly(run, *arguments, BAD_STEPS="2 3", BAD=bad)
    assert done.last_line.startswith("result: val_loss="), done
    assert [line for line in done.out.splitlines() if "left out" in line] == [
        f"step {step} is left out: the norm of the gradient is {bad}" for step in (2, 3)
    ]
    norms = [r["grad_norm"] for r in read_metrics(run / "metrics.jsonl") if "grad_norm" in r]
    assert list(map(math.isfinite, norms)) == [True, False, False, True]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000004"]
    # One more after the first is the second update: of the steps in between nothing is left.
    last = state_of(run / "checkpoints" / names[-1])
    assert all(each == 2 for name, each in last.items() if name.endswith(".step"))
    assert all(each.isfinite().all() for each in last.values())


def test_steps_that_are_no_number_end_a_run_and_leave_its_good_checkpoints(
    text_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    train_badly(run, *ONE_LAYER, "--data", text_folder, "--steps=3")
    good = {path.name: state_of(path) for path in checkpoints.iterdir() if path.name != "step-00000001"}
    again = ["--resume", "--steps=9", "--max-skipped=3"]

    def ends(*arguments: str, **bad: str) -> str:
        done = train_badly(run, *again, *arguments, code=1, **bad)
        assert "result:" not in done.out and len(done.err.splitlines()) == 1, done
        for name, state in good.items():
            now = state_of(checkpoints / name)
            assert all(torch.equal(each, now[key]) for key, each in state.items()), name
        return done.err

    # The first step is applied, with a rate that makes the weights useless.
    error = ends("--lr=1e30")
    assert "step 7: the norm of the gradient is nan; 3 steps in a row were left out" in error
    assert f"is now {checkpoints / 'suspect-00000004'}; go on from step-00000003 with --resume" in error
    # A run that has no more steps than those has no result.
    assert "step 5: the norm of the gradient is nan; 1 steps" in ends("--steps=5", "--lr=1e30")
    # A loss on held-out text that is none.
    assert "step 4: the validation loss is nan" in ends("--steps=4", "--lr=1e-3", BAD_LOSS="1")
    assert "suspect-00000004" in {path.name for path in checkpoints.iterdir()}
    done = train_badly(run, *again, "--steps=4", "--lr=1e-3")
    assert "resumed at step 3 of 4" in done.out and RESULT.fullmatch(done.last_line)


UNREAD = """
import os, sys, threading
sys.path.insert(0, os.environ["EXAMPLES"])
import train_lm

reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader)), daemon=True).start()
sys.exit(train_lm.main())
"""


def test_a_run_that_nobody_reads_ends_with_a_checkpoint(text_folder: Path, tmp_path: Path) -> None:
    """The reader has gone after the first words."""
    program = tmp_path / "unread.py"
    program.write_text(UNREAD)
    options = [*ONE_LAYER, "--save-every=999", "--steps=999", "--log-every=1", "--data", text_folder]
    options += ["--out", tmp_path]
    done = run_program(program, *options, torchrun=2, environment={"EXAMPLES": str(EXAMPLES)})
    assert done.err.count("nobody reads the output any more") == 1, done.err
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name != "step-00000999"


def _started(rank: int, world_size: int, number: int, folder: Path, arguments: list[str]) -> None:
    """Starts ranks as `python train_lm.py` does, in a process that gets a signal after three steps."""
    dist.destroy_process_group()
    before = len(losses(folder))

    def signal_later() -> None:
        wait_until(lambda: len(losses(folder)) >= before + 3, "three steps")
        os.kill(os.getpid(), number)

    for stream, suffix in enumerate((".out", ".err"), 1):
        os.dup2(os.open(folder.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=signal_later, daemon=True).start()
    sys.argv = [str(EXAMPLES / "train_lm.py"), *arguments, f"--out={folder}"]
    os._exit(train_lm.main())


def ended_by(number: int, folder: Path, *arguments: str) -> Finished:
    """Starts or resumes an endless run, and hands back what it said until a signal ended it."""
    (died,) = run_ranks(1, _started, number, folder, list(arguments), may_die=[0], timeout=TIMEOUT_S)
    out, err = (folder.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
    return Finished(died.exitcode, out, err)


def test_interrupt_leaves_a_checkpoint_and_a_killed_launcher_no_ranks(
    text_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    steps = [f"--{name}=1000000" for name in ("steps", "eval-every", "save-every")]
    with no_shared_memory_left(patience=20):
        done = ended_by(signal.SIGINT, folder, *SMALL_MODEL, *steps, f"--data={text_folder}")
        assert (done.code, done.err) == (128 + signal.SIGINT, ""), done
        last = max(losses(folder))
        assert f"stopped at step {last}" in done.last_line
        assert (folder / "checkpoints" / f"step-{last:08d}" / ".metadata").is_file()
        assert processes_naming(folder) == []

    done = ended_by(signal.SIGKILL, folder, "--resume", "--ranks=1", "--ep=1")
    assert done.code == -signal.SIGKILL and f"resumed at step {last} of 1000000" in done.out
    wait_until(lambda: processes_naming(folder) == [], "the ranks' end")


LOST = ["--layers=2", "--ep=2", "--pp=2", "--microbatches=2", "--no-tied", "--save-every=6", "--steps=18"]


def _until_it_is_lost(folder: Path) -> None:
    """Ends this process by SIGKILL when there are steps after the first checkpoint; keeps what is logged."""
    sealed = folder / "checkpoints" / "step-00000006" / "rank-1.json"
    while not (sealed.exists() and max(losses(folder)) > 7):
        time.sleep(0.01)
    shutil.copy(folder / "metrics.jsonl", folder / "before.jsonl")
    os.kill(os.getpid(), signal.SIGKILL)


def _one_of_torchruns(arguments: list[str], folder: Path) -> int:
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        threading.Thread(target=_until_it_is_lost, args=(folder,), daemon=True).start()
    sys.argv = ["train_lm.py", *arguments]
    return train_lm.main()


def _as_torchrun_does(
    rank: int, world_size: int, arguments: list[str], folder: Path, logs: Path
) -> dict[int, int]:
    """torchrun --nproc-per-node=4 --max-restarts=1, with ranks of the fork server.

    A rank forked from this process, which has threads, could inherit a lock that one of them held.
    """
    dist.destroy_process_group()
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    config = LaunchConfig(
        1,
        1,
        4,
        run_id="lost",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    return elastic_launch(config, _one_of_torchruns)(arguments, folder)


def test_a_lost_rank_is_made_good_by_a_restart(text_folder: Path, tmp_path: Path) -> None:
    """A rank that shares experts with one other and is a stage of a pipeline before a third is lost: torchrun
    starts all again, which go on from the newest checkpoint as if nothing had been."""
    folder = tmp_path / "run"
    arguments = [*ONE_LAYER, *LOST, f"--data={text_folder}", f"--out={folder}"]
    logs = tmp_path / "logs"
    try:
        done = run_ranks(1, _as_torchrun_does, arguments, folder, logs, timeout=TIMEOUT_S)
    finally:
        for log in sorted(logs.glob("**/std*.log")):
            print(f"--- {log.relative_to(logs)}\n{log.read_text()}")
    assert done == [dict.fromkeys(range(4), 0)]
    (log,) = logs.glob("**/attempt_1/0/stdout.log")
    resumed = re.search(r"resumed at step (\d+) of 18", log.read_text())
    assert resumed and 6 <= int(resumed[1]) < 18
    before, after = (
        {r["step"]: r["loss"] for r in read_metrics(folder / name) if "loss" in r}
        for name in ("before.jsonl", "metrics.jsonl")
    )
    assert sorted(after) == list(range(1, 19))
    assert any(step > int(resumed[1]) for step in before)
    assert all(before[step] == after[step] for step in before), "other losses after the restart"


FAILS = """
import os, sys, time
sys.path.insert(0, os.environ["EXAMPLES"])
import train_lm
from lm.errors import UsageError

def run_rank(options, stop):
    if os.environ["RANK"] in os.environ["WHO"]:
        raise UsageError("this is not there")
    while not stop:  # as a rank that goes on
        time.sleep(0.1)

train_lm.run_rank = run_rank
sys.exit(train_lm.main())
"""


@pytest.mark.parametrize("who", ["1", "01"])
def test_an_error_of_one_rank_or_all_gives_one_line(who: str, text_folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    arguments = ["--ranks", "2", "--preset", "small", "--data", text_folder, "--out", tmp_path / "run"]
    environment = {"WHO": who, "EXAMPLES": str(EXAMPLES)}
    done = run_program(program, *arguments, code=2, environment=environment)
    assert done.err.splitlines() == ["train_lm.py: error: this is not there"], done


WRONG_BEFORE_THERE_ARE_RANKS = {
    f"--data {EXAMPLES / 'train_lm.py'}": "is the only text file",
    f"--data {sys.executable}": "is not a text file",
    f"--out {EXAMPLES / 'train_lm.py'}": "is a file, not a folder",
    "--data /no/such/file": "no such file or folder: /no/such/file",
    "--ranks 2 --ep 2 --experts 3": "--ep 2 does not divide --experts 3",
    "--tokenizer /no/such.json": "--tokenizer",
    **({"--device tpu": "--device"} if torch.cuda.is_available() else {"--device cuda": "--device cuda"}),
    "--top-k 9": "--top-k 9 is more than --experts 8",
    "--dim 33": "--dim 33 must be an even multiple of --heads 5",
    "--resume": "--resume: no run in",
    "--steps 0": "0 is not a number of at least 1",
    "--lr -1": "-1.0 is not a finite number",
    "--delay-wgrad": "give --microbatches 2 or more",
    "--delay-wgrad --microbatches 2 --fsdp": "hooks by which FSDP shards",
    "--colour red": "--colour",
}


@pytest.mark.parametrize("flags", WRONG_BEFORE_THERE_ARE_RANKS)
def test_bad_options_give_one_line(flags: str, tmp_path: Path, run_here: Callable[..., Finished]) -> None:
    # Where there are GPUs, too, the messages are about the small sizes.
    done = run_here("--preset", "small", "--out", tmp_path / "run", *flags.split())
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 1, done
    assert done.err.startswith("train_lm.py: error: ") and WRONG_BEFORE_THERE_ARE_RANKS[flags] in done.err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--dim", "64", "this run has --dim 32, which cannot become 64"),
        ("--data", "/", "which cannot become"),
    ],
)
def test_resume_refuses_another_run(
    half_run: Path, name: str, value: str, message: str, run_here: Callable[..., Finished]
) -> None:
    done = run_here("--resume", "--out", half_run, name, value)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1, done.err


def test_resume_notices_changed_text(half_run: Path, tmp_path: Path, text_folder: Path) -> None:
    name = min(text_folder.iterdir())
    before = name.read_text()
    try:
        name.write_text(before + "# changed\n")
        done = train("--resume", "--out", half_run, code=2)
    finally:
        name.write_text(before)
    lines = done.err.splitlines()  # of two ranks
    assert len(lines) == 1 and "the text is not the one" in lines[0], done.err
