"""examples/train_lm.py on GPUs: the loss curve of a small model is that of the CPU run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.conftest import SMALL_MODEL, WHOLE_PRODUCTS, run_example, text_folder

__all__ = ["text_folder"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

STEPS, LOG_EVERY = 40, 10
RUN = [
    "--preset=small",
    *SMALL_MODEL,
    "--no-compile",
    f"--steps={STEPS}",
    f"--log-every={LOG_EVERY}",
    "--warmup=5",
    f"--eval-every={STEPS}",
    "--eval-windows=33",
    f"--save-every={STEPS}",
]
# Sums of products are rounded in another order on a GPU; over forty steps of training the curves drift apart
# by less than what one step of learning moves them.
FIRST, LATER = 2e-3, 3e-2
BFLOAT16 = 0.1


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def cpu_losses(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("cpu") / "run"
    done = run_example(
        "train_lm.py", *RUN, "--device", "cpu", "--ranks", "2", "--data", text_folder, "--out", folder
    )
    assert done.code == 0, done.err
    return _losses(folder)


Run = Callable[..., tuple[torch.Tensor, torch.Tensor, str]]


@pytest.fixture
def run(
    require_gpus: Callable[[int], None], cpu_losses: list[float], text_folder: Path, tmp_path: Path
) -> Run:
    """run(ranks, *flags) trains on GPUs: the losses, how far each is from that of the CPU, what was said."""

    def trained(ranks: int, *flags: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
        require_gpus(ranks)
        arguments = [*RUN, *flags, "--device", "cuda", "--ranks", str(ranks), "--data", text_folder]
        done = run_example("train_lm.py", *arguments, "--out", tmp_path / "run", gpus=True, **options)
        assert done.code == 0, done.err
        losses = torch.tensor(_losses(tmp_path / "run"))
        off = (losses - torch.tensor(cpu_losses)).abs()
        print(f"largest difference: first five {off[:5].max():.2e}, all {off.max():.2e}")
        return losses, off, done.out

    return trained


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_loss_curve_is_that_of_the_cpu(run: Run, ranks: int) -> None:
    losses, off, _ = run(ranks, variables=WHOLE_PRODUCTS)
    assert len(losses) == STEPS and off[:5].max() < FIRST and off.max() < LATER
    assert losses[-1] < losses[0] - 0.2, "it learns"


@pytest.mark.parametrize(
    "how", ["", "--graph", "--no-graph", "--microbatches=2 --delay-wgrad", "--compile --microbatches=2"]
)
def test_in_bfloat16(run: Run, how: str) -> None:
    _, off, said = run(2, *how.split(), "--dtype=bfloat16", "--sample=5")
    assert off.max() < BFLOAT16
    replays = STEPS - len({1, *range(LOG_EVERY, STEPS + 1, LOG_EVERY)})  # the others time their transfers
    assert (f"{replays} replayed steps" in said) == (how != "--no-graph"), said


@pytest.mark.parametrize("wires", ["fp8", "mxfp8", "fp8 fp8 fp8"])
def test_rows_in_narrow_formats(run: Run, wires: str) -> None:
    """Rows change their format on one rank, too."""
    wire, sums, gradients = wires.split() if " " in wires else (wires, "dtype", "dtype")
    how = [f"--wire={wire}", f"--combine-wire={sums}", f"--gradient-wire={gradients}", "--dtype=bfloat16"]
    _, off, said = run(1, *how)
    assert f"rows sent as {wire}, their sums as {sums}, gradients as {gradients}" in said
    assert off.max() < BFLOAT16
