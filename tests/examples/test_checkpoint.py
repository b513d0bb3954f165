"""Checkpoints of the training example: whole or not there, whatever happens while they are written."""

import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moecomm
from moecomm.nn import MoEConfig, MoELayer, sync_gradients
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)
from tests.multirank.conftest import Pools, own_pool
from tests.multirank.on_ranks import on_ranks

from lm import checkpoint  # isort: skip
from lm.errors import RunError, UsageError  # isort: skip
from lm.ranks import Ranks  # isort: skip

pool = own_pool()

SEED = 5  # of the weights
SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 16, "top_k": 2, "dtype": torch.float32}


class Run:
    """A small model with its optimizer, after a step, and what saves it."""

    def __init__(self, rank: int, world_size: int, folder: Path, seed: int, width: int = 16) -> None:
        self.ranks = Ranks(rank, world_size, torch.device("cpu"), None)  # type: ignore[arg-type]
        self.comm = moecomm.Communicator(**SIZES, max_tokens=8)
        torch.manual_seed(seed)
        config = MoEConfig(**SIZES, ffn_hidden=8, bias_update_rate=0.01)
        self.model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16), MoELayer(config, self.comm))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = checkpoint.RunState(step=0, data_fingerprint=7)
        self.saver = checkpoint.Saver(folder, self.ranks)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.state.step)
        self.model(torch.randn(8, 16, generator=generator)).square().sum().backward()
        sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step += 1

    def save(self) -> None:
        self.saver.begin(self.model, self.optimizer, self.state)

    def load(self) -> Path:
        return checkpoint.load(self.saver.folder, self.model, self.optimizer, self.state, self.ranks)

    def values(self) -> list[torch.Tensor]:
        """Copies of all that a run has to find again, of this rank."""
        of_optimizer = [each for state in self.optimizer.state.values() for each in state.values()]
        tensors = [*self.model.state_dict().values(), *of_optimizer]
        return [each.detach().clone() for each in tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def said(call: Callable[[], Any]) -> str:
    """The name and the text of the error that a call ends with; "" for none."""
    try:
        call()
    except Exception as error:  # any kind is compared
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks(2)
def test_a_checkpoint_is_written_beside_the_training(
    rank: int, world_size: int, tmp_path: Path, seed: int
) -> list[str]:
    """A checkpoint has the state of the moment when it was begun, although the training goes on."""
    folder = tmp_path / "c"
    run = Run(rank, world_size, folder, seed)
    problems = []
    run.step()
    then = run.values()
    run.save()
    for _ in range(3):
        run.step()
    run.saver.finish()
    problems += ["training changed nothing"] * same(then, run.values())
    first = Run(rank, world_size, folder, seed + 1)
    first.load()
    problems += ["a later state"] * (not same(then, first.values()) or first.state.step != 1)
    first.comm.close()
    for step in (2, 3, 4, 5):
        run.state.step = step
        run.save()
    # The save of step 5 says that step 4 is good. Whether step 5 is, nothing says yet: it is none of the two.
    run.saver.finish()
    kept = [path.name for path in checkpoint.finished(folder)]
    problems += [f"kept {kept}"] * (kept != ["step-00000003", "step-00000004", "step-00000005"])
    problems += ["nothing put aside"] * (run.saver.put_aside(5) != folder / "suspect-00000005")
    problems += ["put aside what is not there"] * (run.saver.put_aside(7) is not None)
    other = Run(rank, world_size, folder, seed + 1)
    run.state.step = 9
    run.comm.close()
    other.optimizer.param_groups[0]["weight_decay"] = 0.5  # what a resumed run was given
    path = other.load()
    problems += ["another weight decay"] * (other.optimizer.param_groups[0]["weight_decay"] != 0.5)
    problems += [f"loaded {path}, step {other.state.step}"] * (other.state.step != 4)
    problems += ["another state"] * (not same(run.values(), other.values()))
    other.comm.close()
    return problems


@pytest.fixture(scope="module")
def saved(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two steps of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool(2)(two_saves, folder, SEED)
    return folder


def two_saves(rank: int, world_size: int, folder: Path, seed: int) -> None:
    run = Run(rank, world_size, folder, seed)
    for _ in range(2):
        run.step()
        run.save()
    run.saver.finish()
    run.comm.close()


def loaded_step(rank: int, world_size: int, folder: Path, seed: int, width: int = 16) -> int | str:
    """The step that a new run begins with, or the error."""
    run = Run(rank, world_size, folder, seed + 1, width)
    try:
        run.load()
        return run.state.step
    except UsageError as error:
        return str(error)
    finally:
        run.comm.close()


def cut(folder: Path) -> None:
    file = max(folder.glob("__1_*"))
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = max(folder.glob("__0_*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank has not finished": (lambda folder: (folder / "rank-1.json").unlink(), ""),
    "the first has not": (lambda folder: (folder / "rank-0.json").unlink(), ""),
    "a list is torn": (lambda folder: (folder / "rank-1.json").write_text("{"), ""),
    "a file is short": (cut, "bytes instead of"),
    "a bit has changed": (flip, "have changed"),
    "a file is gone": (lambda folder: max(folder.glob("__1_*")).unlink(), "is missing"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_torn_or_damaged_one_is_not_taken(pool: Pools, name: str, saved: Path, tmp_path: Path) -> None:
    damage, _ = DAMAGES[name]
    folder = shutil.copytree(saved, tmp_path / "c")
    damage(folder / "step-00000002")
    assert pool(2)(loaded_step, folder, SEED) == [1, 1]
    assert pool(1)(loaded_step, folder, SEED) == [1]  # on another number of ranks


def test_without_a_whole_one_there_is_none(pool: Pools, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "c")
    assert pool(2)(loaded_step, folder, SEED) == [2, 2]
    for each in folder.iterdir():
        flip(each)
    assert all("no whole checkpoint" in str(each) for each in pool(2)(loaded_step, folder, SEED))


def test_what_is_wrong_with_one_is_said(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copytree(saved / "step-00000002", tmp_path / "c")
    alone = Ranks(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]

    def gather(into: list[Any], value: Any, group: Any = None) -> None:
        into[0] = value

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert checkpoint._damage(path, alone) is None
    for damage, words in DAMAGES.values():
        if words:
            before = {each: each.read_bytes() for each in path.iterdir()}
            damage(path)
            assert words in str(checkpoint._damage(path, alone))
            for each, data in before.items():
                each.write_bytes(data)


def test_another_model_is_refused(pool: Pools, saved: Path) -> None:
    for each in pool(2)(loaded_step, saved, SEED, 24):
        assert "of another model: model.0.bias is [16] there and [24] here" in str(each)


@contextmanager
def small_files(bytes: int) -> Iterator[None]:
    """Files can grow no further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN) if in_main_thread() else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if handler is not None:
            signal.signal(signal.SIGXFSZ, handler)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("on", [[1], [0, 1]], ids=["one rank", "all ranks"])
@on_ranks(2)
def test_a_full_disk_leaves_the_one_before(
    rank: int, world_size: int, on: list[int], tmp_path: Path, seed: int
) -> list[str]:
    folder = tmp_path / "c"
    run = Run(rank, world_size, folder, seed)
    run.step()
    run.save()
    run.saver.finish()
    run.step()
    problems = []
    with small_files(1000 if rank in on else 1 << 30):
        run.save()
        error = said(run.saver.finish)
    if not error.startswith("RunError: the checkpoint ") or f"rank {on[0]}" not in error:
        problems.append(f"said {error!r}")
    dist.barrier()
    problems += ["what was begun is still there"] * (folder / "step-00000002").exists()
    names = [each.name for each in checkpoint.finished(folder)]
    problems += [f"finished are {names}"] * (names != ["step-00000001"])
    run.save()  # there is room again
    run.saver.finish()
    problems += ["the next one is not there"] * (checkpoint.newest(folder).name != "step-00000002")
    run.comm.close()
    return problems


@on_ranks(2)
def test_a_failure_is_seen_by_all_ranks(rank: int, world_size: int, tmp_path: Path, seed: int) -> list[str]:
    """The training hears of a failure without waiting for it."""
    folder = tmp_path / "c"
    run = Run(rank, world_size, folder, seed)
    with small_files(1000 if rank == 1 else 1 << 30):
        run.save()
        deadline = time.monotonic() + 30
        while not run.saver.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = run.saver.failed
        error = said(run.saver.finish)
    run.comm.close()
    return [] if seen and error.startswith(RunError.__name__) else [f"{seen}, {error}"]
