"""bench/train_perf.py: both variants train the same model, and one that does not is found."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import conftest
from tests.multirank.conftest import Pools, own_pool
from tests.multirank.test_bench import children

from bench.harness import training  # isort: skip  (of the examples, too)
from lm import fitting  # isort: skip
from lm import ranks  # isort: skip
from lm.errors import UsageError  # isort: skip

pool = own_pool()

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--device cpu --dim 32 --layers 2 --heads 4 --experts 8 --ffn 32 --seq 32 --batch 4 "
    "--warmup-steps 1 --timed-steps 2"
)


def _measured(rank: int, world: int, arguments: list[str], spoil: bool) -> list[dict[str, Any]]:
    plan, chosen = training.parse(arguments)
    folding = fitting.check_ranks(chosen, world)
    joined = ranks.Ranks(rank, world, torch.device("cpu"), folding)
    with pytest.MonkeyPatch.context() as patch:
        if spoil:
            from bench.paths import plain_layer

            patch.setattr(plain_layer, "swiglu_experts", lambda rows, *others: 3 * rows)
        return training.measure(plan, chosen, joined)


def test_variants_train_the_same_model(pool: Pools, text_folder: Path) -> None:
    flags = "--activation swiglu_clamped --expert-bias --shared-experts 1 --microbatches 2"
    arguments = [*f"{MODEL} {flags}".split(), "--data", str(text_folder)]
    own, plain = pool(2)(_measured, arguments, False)[0]
    assert (own["path"], plain["path"]) == ("moecomm", "torch")
    assert own["wrong"] == plain["wrong"] == 0
    assert len(own["losses"]) == 4 and own["losses"][-1] < own["losses"][0]
    torch.testing.assert_close(torch.tensor(own["losses"]), torch.tensor(plain["losses"]), rtol=1e-5, atol=0)
    assert own["tokens_per_s"] == 4 * 32 / own["time_s"] and len(own["samples_s"]) == 2
    assert 0 <= own["exposed_share"] <= 1 and "exposed_share" not in plain


def test_a_variant_that_computes_something_else_is_found(pool: Pools, text_folder: Path) -> None:
    arguments = [*MODEL.split(), "--data", str(text_folder)]
    own, plain = pool(2)(_measured, arguments, True)[0]
    assert own["wrong"] == 0 and plain["wrong"] == 1


def _other_text(rank: int, world: int, folder: str) -> str:
    flags = [*MODEL.split(), "--data", f"{folder}/{'a*' if rank == 1 else '*'}"]
    try:
        _measured(rank, world, flags, False)
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_read_different_texts_are_refused(pool: Pools, tmp_path: Path) -> None:
    for name in ("a1", "a2", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} is some text of a rank\n" * 200)
    said = pool(2)(_other_text, str(tmp_path))
    assert said == ["--data: ranks 0 and 1 have read different texts"] * 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--variants moecomm,nccl", "'nccl'"),
        ("--timed-steps 0", "at least 1"),
        ("--resume", "--resume"),
        ("--out there", "--out"),
        ("--steps=7", "--steps"),
        ("--recompute norms,fc1", "--recompute"),
        ("--delay-wgrad --microbatches 2", "--delay-wgrad"),
        ("--wire fp8", "--wire"),
        ("--etp 2", "--etp"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        training.parse(f"{MODEL} {flags}".split())


def _with_torch(processes: set[int]) -> int:
    """Counts those that have loaded torch, which a rank does once it no longer waits for interrupts."""
    return sum("libtorch" in Path(f"/proc/{each}/maps").read_text() for each in processes)


def test_an_interrupted_program_ends_at_once_and_says_nothing(text_folder: Path, tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--ranks", "2", "--timed-steps", "1000000", "-J", tmp_path / "record.json"]
    with subprocess.Popen(
        [sys.executable, ROOT / "bench" / "train_perf.py", *map(str, flags), "--data", str(text_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell starts what runs in its background with interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        try:
            conftest.wait_until(lambda: _with_torch(children(running.pid)) == 2, "the ranks")
            os.killpg(running.pid, signal.SIGINT)
            out, _ = running.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert (running.returncode, out) == (128 + signal.SIGINT, "")
    conftest.wait_until(lambda: conftest.processes_naming(tmp_path) == [], "the ranks' end")
