"""examples/train_lm.py on two GPUs: under every layout of two ranks the curves of loss and gradient norm are
those of one process on one GPU.

With -s pytest shows the largest differences, of which docs/folding.md has the largest.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import WHOLE_PRODUCTS, run_example, text_folder

from lm.metrics import read_metrics  # isort: skip  # conftest puts examples/ on the path

__all__ = ["text_folder"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

STEPS = 12
MODEL = (
    "--preset small --dtype float32 --dim 64 --layers 4 --heads 8 --kv-heads 4 --qk-norm --experts 8 "
    f"--top-k 2 --ffn 64 --seq 64 --batch 8 --no-tied --steps {STEPS} --warmup 4 --lr 0.002 --aux-coef 0 "
    f"--eval-every {STEPS} --eval-windows 9 --save-every 1000 --device cuda --no-compile"
)
ATTENTION = ("", "--tp 2", "--cp 2")
EXPERTS = ("--ep 1", "--ep 2", "--ep 1 --etp 2")
STAGES = (
    "--microbatches 2",
    "--microbatches 2 --schedule interleaved",
    "--microbatches 2 --schedule zero-bubble",
    "--microbatches 4 --schedule zbv",
    "--microbatches 4 --schedule dualpipev",
)
MAPPINGS = (
    *(" ".join(filter(None, both)) for both in itertools.product(ATTENTION, EXPERTS)),
    *(f"--pp 2 {schedule}" for schedule in STAGES),
    "--fsdp --ep 1",
    "--fsdp --ep 2",
    "--fsdp --tp 2 --ep 2",
    "--fsdp --ep 2 --compile",
    "--ep 2 --microbatches 2",
    "--ep 2 --microbatches 4 --delay-wgrad",
)
AT_ONCE = 4
"""Programs that share the GPUs: what takes long is that a program starts."""
FIRST, LATER = 2e-5, 2e-3
"""Largest relative differences of a loss or a gradient norm in the first three steps, and of all: sums are
rounded in another order, and kernels of torch are others for other shapes."""

Curves = tuple[torch.Tensor, torch.Tensor]
Train = Callable[[int, str], "Future[Curves]"]


@pytest.fixture(scope="module")
def train(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train(ranks, flags) begins a run, unless it has begun, and returns its curves of loss and of gradient
    norm."""
    begun: dict[tuple[int, str], Future[Curves]] = {}
    programs = ThreadPoolExecutor(AT_ONCE)

    def run(ranks: int, flags: str) -> Curves:
        folder = tmp_path_factory.mktemp("run") / "run"
        arguments = [
            *MODEL.split(),
            *flags.split(),
            "--ranks",
            str(ranks),
            "--data",
            text_folder,
            "--out",
            folder,
        ]
        # Given to each program, not to a test: some programs begin while no test runs.
        done = run_example("train_lm.py", *arguments, gpus=True, variables=WHOLE_PRODUCTS)
        assert done.code == 0, f"{flags}: {done.err}"
        steps = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
        assert len(steps) == STEPS
        loss, norm = (torch.tensor([record[name] for record in steps]) for name in ("loss", "grad_norm"))
        return loss, norm

    def begin(ranks: int, flags: str) -> Future[Curves]:
        if (ranks, flags) not in begun:
            begun[ranks, flags] = programs.submit(run, ranks, flags)
        return begun[ranks, flags]

    return begin


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mapping_trains_as_one_process_does(
    train: Train, require_gpus: Callable[[int], None], mapping: str
) -> None:
    require_gpus(2)
    alone = train(1, "")
    first = MAPPINGS.index(mapping)
    for each in MAPPINGS[first : first + AT_ONCE]:
        train(2, each)
    found, want = train(2, mapping).result(), alone.result()
    off = torch.stack([(curve - other).abs() / other.abs() for curve, other in zip(found, want, strict=True)])
    print(f"{mapping or 'dp 2'}: first three steps {off[:, :3].max():.1e}, all {off.max():.1e}")
    assert off[:, :3].max() <= FIRST and off.max() <= LATER
    assert found[0][-1] < found[0][0] - 0.2, "it learns"
