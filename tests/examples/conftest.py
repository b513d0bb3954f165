"""Text to train on, and how the examples are started: as a user does, by their command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # `lm` is imported from there, as `train_lm.py` does

TIMEOUT_S = 240
SMALL_SIZES = {"dim": 32, "heads": 2, "layers": 2, "experts": 4, "ffn": 32, "seq": 32, "batch": 8}
SMALL_STEPS = {"steps": 60, "warmup": 5, "eval-every": 30, "eval-windows": 33, "save-every": 30}
SMALL_MODEL = [f"--{name}={value}" for name, value in SMALL_SIZES.items()]
SMALL_RUN = [*SMALL_MODEL, *(f"--{name}={value}" for name, value in SMALL_STEPS.items())]
TEXT = (
    "argparse",
    "ast",
    "calendar",
    "cmd",
    "copy",
    "csv",
    "dis",
    "enum",
    "glob",
    "gzip",
    "heapq",
    "inspect",
)


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.strip().splitlines()[-1]


def run_example(
    name: str, *arguments: str | Path, ranks_by_torchrun: int | None = None, gpus: bool = False
) -> Finished:
    """Runs one example to its end, alone or under torchrun, and hands back what it said."""
    torchrun = [] if ranks_by_torchrun is None else ["-m", "torch.distributed.run", "--standalone"]
    if ranks_by_torchrun is not None:
        torchrun += ["--nproc-per-node", str(ranks_by_torchrun)]
    command = [sys.executable, *torchrun, EXAMPLES / name, *arguments]
    environment = clean_environment(gpus)
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


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources of the standard library: real text, the same for every test."""
    folder = tmp_path_factory.mktemp("text")
    for name in TEXT:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", folder)
    return folder


@dataclass(frozen=True)
class BaseRun:
    folder: Path
    finished: Finished


def whole_run(folder: Path, *arguments: str | Path) -> BaseRun:
    """A whole small run on two ranks of its own."""
    done = run_example("train_lm.py", *SMALL_RUN, *arguments, "--out", folder)
    assert done.code == 0, done.err
    return BaseRun(folder, done)


@pytest.fixture(scope="session")
def base_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """Tests look at it and go on from copies of it."""
    sample = ("--sample", "20", "--prompt", "def ")
    return whole_run(tmp_path_factory.mktemp("base") / "run", "--data", text_folder, *sample)


@pytest.fixture(scope="session")
def bfloat16_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """The same in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    return whole_run(folder, "--dtype", "bfloat16", "--data", text_folder, "--sample", "5")


@pytest.fixture
def half_run(base_run: BaseRun, tmp_path: Path) -> Path:
    """A copy of the run as it was at step 30: the checkpoint of the last step is taken away."""
    folder = tmp_path / "run"
    shutil.copytree(base_run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000060")
    return folder
