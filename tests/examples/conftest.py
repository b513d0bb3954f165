"""Text to train on, runs that tests share, and how an example is started as a user does."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.multirank.harness import preload
from tests.programs import TIMEOUT_S, Finished, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # `lm` is imported from there, as `train_lm.py` does
preload(__name__, "lm.trainer")

SMALL_SIZES = {"dim": 32, "heads": 2, "layers": 2, "experts": 4, "ffn": 32, "seq": 32, "batch": 8}
SMALL_STEPS = {"steps": 60, "warmup": 5, "eval-every": 30, "eval-windows": 33, "save-every": 20}
SMALL_MODEL = [f"--{name}={value}" for name, value in SMALL_SIZES.items()]
SMALL_RUN = [*SMALL_MODEL, *(f"--{name}={value}" for name, value in SMALL_STEPS.items())]


PARTS = ["re", "co", "ta", "line", "en", "der", "pa", "th", "in", "val", "ue", "set", "for", "mat", "no"]
"""The syllables that names in the generated text to train on are made of."""


class _Author:
    """Writes text like sources of Python. Of random.Random it uses random() alone, whose numbers are the same
    in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._names = ["".join(self._pick(PARTS) for _ in range(1 + self._below(3))) for _ in range(160)]

    def _below(self, most: int) -> int:
        return int(self._random() * most)

    def _pick(self, some: Sequence[str]) -> str:
        """The first ones far more often than the last, as words are in any text."""
        return some[int(len(some) * self._random() ** 3)]

    def _name(self) -> str:
        return self._pick(self._names)

    def _statement(self) -> str:
        forms = (
            "{} = {}({}, {})",
            "return self.{}",
            "if {} is None: {} = {}",
            "self.{} = {}",
            "for {} in {}: {}.append({})",
            "raise ValueError('{} {}')",
            "# {} {} the {} of {}",
        )
        form = self._pick(forms)
        return form.format(*(self._name() for _ in range(form.count("{}"))))

    def source(self, size: int) -> str:
        lines: list[str] = []
        while sum(map(len, lines)) < size:
            lines += ["", f"def {self._name()}({self._name()}, {self._name()}=None):"]
            lines += [f"    {self._statement()}" for _ in range(2 + self._below(6))]
        return "\n".join(lines)


WHOLE_PRODUCTS = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment of a program on GPUs without which float32 matrices have ten bits in a product."""


def run_example(
    name: str, *arguments: str | Path, gpus: bool = False, variables: Mapping[str, str] = MappingProxyType({})
) -> Finished:
    """Runs one example to its end in an interpreter of its own, and hands back what it said.
    `variables`: more of its environment."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    environment = {**clean_environment(gpus), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    return Finished(done.returncode, done.stdout, done.stderr)


def clean_environment(gpus: bool = False) -> dict[str, str]:
    """Returns this environment without the variables that a surrounding torchrun may have set and, unless
    `gpus`, without GPUs: these tests are about the CPU everywhere."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept if gpus else {**kept, "CUDA_VISIBLE_DEVICES": ""}


def processes_naming(text: Path) -> list[str]:
    """Command lines of the living processes that mention `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(text) in line:
            found.append(line)
    return found


def wait_until(condition: object, what: str, seconds: float = TIMEOUT_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)


class Never:
    """Nobody asks the run to stop."""

    def __bool__(self) -> bool:
        return False


def train_on(rank: int, world: int, arguments: list[str]) -> None:
    """A run of train_lm.py on ranks that are there."""
    from lm import fitting, options, ranks
    from lm.trainer import train

    chosen = options.parse(arguments)
    folding = fitting.check_ranks(chosen, world)
    train(chosen, ranks.Ranks(rank, world, torch.device("cpu"), folding), Never())  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text, the same for every test, with every version of Python."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"text{number:02}.py").write_text(_Author(300 + number).source(42_000))
    return folder


@dataclass(frozen=True)
class BaseRun:
    folder: Path
    finished: Finished


@pytest.fixture(scope="session")
def base_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """A whole small run on two ranks. Tests look at it and go on from copies of it."""
    folder = tmp_path_factory.mktemp("base") / "run"
    arguments = ("--sample", "20", "--prompt", "def ", "--data", text_folder, "--out", folder)
    return BaseRun(folder, run_program(EXAMPLES / "train_lm.py", *SMALL_RUN, *arguments, torchrun=2))


@pytest.fixture(scope="session")
def bfloat16_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """The same in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    arguments = ("--dtype", "bfloat16", "--data", text_folder, "--sample", "5", "--out", folder)
    return BaseRun(folder, run_program(EXAMPLES / "train_lm.py", *SMALL_RUN, *arguments, torchrun=2))


@pytest.fixture
def half_run(base_run: BaseRun, tmp_path: Path) -> Path:
    """A copy of the run as it was at step 40: the checkpoint of the last step is taken away."""
    folder = tmp_path / "run"
    shutil.copytree(base_run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000060")
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with a tokenizer, beside a tenth of the text of that tokenizer."""
    pytest.importorskip("tokenizers")
    from finetune import demo

    folder = tmp_path_factory.mktemp("demo")
    demo.write_text(folder / "text")
    demo.write_model(folder / "model", folder / "text", seed=1)
    config = folder / "model" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"pad_token"', '"no_pad_token"'))  # as many published ones
    for number, file in enumerate(sorted((folder / "text").iterdir())):
        if number % 10:
            file.unlink()
    return folder / "model"


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
