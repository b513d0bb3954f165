"""Text to train on, and how the examples are started: by their command line, as a user does, or, which takes
a fraction of the time, as a program of ranks that are forked with all libraries loaded already."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.multirank.harness import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # `lm` is imported from there, as `train_lm.py` does

TIMEOUT_S = 240
SMALL_SIZES = {"dim": 32, "heads": 2, "layers": 2, "experts": 4, "ffn": 32, "seq": 32, "batch": 8}
SMALL_STEPS = {"steps": 60, "warmup": 5, "eval-every": 30, "eval-windows": 33, "save-every": 20}
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
    name: str, *arguments: str | Path, ranks_by_torchrun: int = 0, gpus: bool = False
) -> Finished:
    """Runs one example to its end, alone or under torchrun, and hands back what it said."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks_by_torchrun)]
    command = [sys.executable, *(torchrun if ranks_by_torchrun else ()), EXAMPLES / name, *arguments]
    environment = clean_environment(gpus)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    return Finished(done.returncode, done.stdout, done.stderr)


def run_in_ranks(name: str, *arguments: str | Path, ranks: int = 2, code: int = 0) -> Finished:
    """Runs one example to its end, which is `code`, on ranks in the environment that torchrun gives them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    done = run_ranks(ranks, _as_rank, name, [str(each) for each in arguments], store.port, timeout=TIMEOUT_S)
    codes, out, err = zip(*done, strict=True)
    assert set(codes) == {code}, err
    return Finished(code, "".join(out), "".join(err))


def _as_rank(rank: int, ranks: int, name: str, arguments: list[str], port: int) -> tuple[int, str, str]:
    dist.destroy_process_group()  # the example makes its own
    places = {f"{of}RANK": rank for of in ("", "LOCAL_")} | {
        f"{of}WORLD_SIZE": ranks for of in ("", "LOCAL_")
    }
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    given = {**places, **store, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({key: str(value) for key, value in given.items()})
    sys.argv = [name, *arguments]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), err.getvalue()


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


@pytest.fixture(scope="session")
def base_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """A whole small run on two ranks of its own. Tests look at it and go on from copies of it."""
    folder = tmp_path_factory.mktemp("base") / "run"
    sample = ("--sample", "20", "--prompt", "def ")
    done = run_example("train_lm.py", *SMALL_RUN, "--data", text_folder, *sample, "--out", folder)
    assert done.code == 0, done.err
    return BaseRun(folder, done)


@pytest.fixture(scope="session")
def bfloat16_run(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseRun:
    """The same in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    arguments = ("--dtype", "bfloat16", "--data", text_folder, "--sample", "5", "--out", folder)
    return BaseRun(folder, run_in_ranks("train_lm.py", *SMALL_RUN, *arguments))


@pytest.fixture
def half_run(base_run: BaseRun, tmp_path: Path) -> Path:
    """A copy of the run as it was at step 40: the checkpoint of the last step is taken away."""
    folder = tmp_path / "run"
    shutil.copytree(base_run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000060")
    return folder
