"""bench/train_perf.py: both variants train the same model, one that does not is found, and the time of a step
is counted by kinds of kernels."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import profile
from bench.results import page
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


@pytest.mark.parametrize(
    "flags",
    [
        "--activation swiglu_interleaved --aux-coef 0 --tp 2",
        "--activation swiglu_clamped --expert-bias --shared-experts 1 --microbatches 2",
        "--no-tied",
    ],
)
def test_variants_train_the_same_model(pool: Pools, text_folder: Path, flags: str) -> None:
    arguments = [*f"{MODEL} {flags}".split(), "--data", str(text_folder)]
    own, plain = pool(2)(_measured, arguments, False)[0]
    assert (own["path"], plain["path"]) == ("moecomm", "torch")
    assert own["wrong"] == plain["wrong"] == 0
    assert len(own["losses"]) == 4 and own["losses"][-1] < own["losses"][0]
    torch.testing.assert_close(torch.tensor(own["losses"]), torch.tensor(plain["losses"]), rtol=1e-5, atol=0)
    assert own["tokens_per_s"] == 4 * 32 / own["time_s"] and len(own["samples_s"]) == 2
    assert 0 <= own["exposed_share"] <= 1 and "exposed_share" not in plain


@pytest.mark.parametrize("flags", ["", "--no-tied"])
def test_a_variant_that_computes_something_else_is_found(pool: Pools, text_folder: Path, flags: str) -> None:
    arguments = [*f"{MODEL} {flags}".split(), "--data", str(text_folder)]
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


def test_the_kinds_of_kernels() -> None:
    names = {
        "void moecomm::gpu::(anonymous namespace)::dispatch_send_kernel<float>": "dispatch and combine",
        "void moecomm::experts::(anonymous namespace)::forward_kernel<1>": "experts' activation",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "collectives",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object": "experts' products",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "dense products",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": profile.REST,
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<4>": profile.REST,
    }
    assert {name: profile.kind_of(name) for name in names} == names


def test_the_time_of_a_step_by_kinds() -> None:
    kernels = [
        ("nvjet_a", (0.0, 1000.0)),
        ("moecomm::gpu::x", (500.0, 1500.0)),  # beside the product before it
        ("moecomm::gpu::y", (1200.0, 1400.0)),  # within
        ("nvjet_b", (3000.0, 4000.0)),
    ]
    assert profile.shares(kernels) == {
        "step": 4.0,
        "idle": 1.5,
        "dispatch and combine": 1.0,
        "dense products": 2.0,
    }
    assert profile.shares([]) == {}


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


def test_the_tables() -> None:
    row = {
        "path": "moecomm", "model": "small", "layers": 2, "tokens": 128, "seq": 32, "time_s": 0.5,
        "tokens_per_s": 256.0, "tflops": 400.0, "mfu": 0.404, "losses": [3.0, 2.5], "wrong": 0,
        "profile": {"step": 500.0, "idle": 20.0},
    }  # fmt: skip
    content = {"program": "train_perf", "folding": "2 = tp 1", "rows": [row]}
    cells = [each.strip() for each in page.train_table({"one": content}).splitlines()[-1].split("|")]
    assert cells[1:4] == ["one", "small", "2"] and "40.4" in cells and "2.5000" in cells
    assert page.profile_table({"one": content}).splitlines()[-1].endswith("| moecomm | 500.0 | 20.0 |")
    assert page.section_of(content) == "training"
