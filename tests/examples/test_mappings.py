"""Training gives the same numbers under every layout of the ranks: the curves of loss and gradient norm over 20
steps on 8 ranks are those of a single process.

Every fourth mapping or so runs by default. MOECOMM_TEST_MAPPINGS=all runs them all; with -s it prints the
largest differences, the table of docs/folding.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.errors import InvalidArgument
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)
from tests.multirank.conftest import Pools, cpu_pools

from lm import options, ranks  # isort: skip
from lm.errors import UsageError  # isort: skip
from lm.metrics import read_metrics  # isort: skip
from lm.trainer import train  # isort: skip

WORLD, STEPS = 8, 20
BOUND = 2e-5
"""Largest relative difference of a loss or a gradient norm. Ranks add the same float32 numbers in another
order, which is worth 1e-7 in a step; training makes it grow."""
MODEL = (
    "--device cpu --dim 32 --layers 2 --heads 8 --kv-heads 4 --qk-norm --experts 8 --top-k 2 --ffn 32 --seq 32 "
    f"--batch 8 --steps {STEPS} --warmup 4 --lr 0.002 --aux-coef 0 --eval-every 20 --eval-windows 9 "
    "--save-every 1000"
)
BY_DEFAULT = (
    "--ep 4 --etp 2",
    "--tp 2 --ep 8",
    "--cp 2 --ep 4",
    "--tp 2 --cp 2 --ep 4 --etp 2",
)
MAPPINGS = (
    *BY_DEFAULT,
    "--ep 1",
    "--ep 8",
    "--ep 4",
    "--ep 2 --etp 4",
    "--ep 1 --etp 2",
    "--tp 2 --ep 1",
    "--tp 2 --ep 2",
    "--tp 2 --ep 2 --etp 2",
    "--tp 4 --ep 8",
    "--tp 4 --ep 2 --etp 4",
    "--cp 2 --ep 1",
    "--cp 4 --ep 8",
    "--cp 8 --ep 8",
    "--cp 2 --ep 2 --etp 2",
    "--tp 2 --cp 2 --ep 1",
    "--tp 2 --cp 2 --ep 8",
    "--tp 4 --cp 2 --ep 8",
    "--tp 2 --cp 4 --ep 4 --etp 2",
)
CHOSEN = MAPPINGS if os.environ.get("MOECOMM_TEST_MAPPINGS") == "all" else BY_DEFAULT


@pytest.fixture(scope="module")
def pool() -> Iterator[Pools]:
    yield from cpu_pools()


class Never:
    """Nobody asks the run to stop."""

    def __bool__(self) -> bool:
        return False


def train_on(rank: int, world: int, arguments: list[str]) -> None:
    chosen = options.parse(arguments)
    folding = options.check_ranks(chosen, world)
    train(chosen, ranks.Ranks(rank, world, torch.device("cpu"), folding), Never())  # type: ignore[arg-type]


Curve = dict[str, list[float]]
Run = Callable[..., Curve]


@pytest.fixture(scope="module")
def run(pool: Pools, text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(world, flags, out=None) trains on so many ranks and returns what it recorded; runs of the same
    flags without `out` are made once."""
    kept: dict[tuple[int, str], Curve] = {}

    def made(world: int, flags: str, out: Path | None = None) -> Curve:
        if out is None and (world, flags) in kept:
            return kept[world, flags]
        folder = out or tmp_path_factory.mktemp("mapping")
        arguments = [*f"{MODEL} {flags}".split(), "--data", str(text_folder), "--out", str(folder)]
        pool(world)(train_on, arguments)
        records = read_metrics(folder / "metrics.jsonl")
        curve = {
            name: [record[name] for record in records if name in record]
            for name in ("loss", "grad_norm", "val_loss")
        }
        if out is None:
            shutil.rmtree(folder)
            kept[world, flags] = curve
        return curve

    return made


def difference(found: list[float], wanted: list[float]) -> float:
    """Returns the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def require_same(found: Curve, alone: Curve, what: str) -> None:
    assert len(found["loss"]) == len(found["grad_norm"]) == STEPS and len(found["val_loss"]) == 1
    apart = {name: difference(found[name], alone[name]) for name in alone}
    print(f"\n| {what} | " + " | ".join(f"{value:.1e}" for value in apart.values()) + " |", end="")
    assert max(apart.values()) < BOUND, (what, apart)


@pytest.mark.parametrize("mapping", CHOSEN)
def test_mapping_trains_as_one_process_does(mapping: str, run: Run) -> None:
    alone = run(1, "")
    assert alone["loss"][-1] < alone["loss"][0] - 0.3  # it learns: an optimizer that does nothing is seen
    require_same(run(WORLD, mapping), alone, mapping)
