"""Saving and loading the whole state of a run with torch.distributed.checkpoint.

A checkpoint is a folder `step-00000200`. Experts are written as one (E, ...) tensor each, whatever number
of ranks held them, and so load at any other one (`moecomm.nn.sharded_state`).

A copy of the state is written while training goes on. Each rank writes its own files and, when they are on
the disk, a list of them with sizes and checksums, `rank-0.json` and so on. A folder without a list is an
unfinished save, and one whose files differ from their list is damaged: neither is ever loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save

from lm.errors import RunError, UsageError
from lm.ranks import TIMEOUT, Ranks
from moecomm.nn import sharded_state

KEPT = 2  # good checkpoints to keep; there may be a newer one, whose weights were not trained further yet
_CHUNK = 1 << 24  # bytes read at a time


@dataclass
class RunState:
    """State of a run apart from model and optimizer; a Stateful of torch.distributed.checkpoint.

    Batches depend on (seed, step) alone, so the random state matters only to routers with jitter. All ranks
    draw the same numbers from it, so rank 0's is saved for all.
    """

    step: int
    data_fingerprint: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "data_fingerprint": self.data_fingerprint, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data_fingerprint"] != self.data_fingerprint:
            raise UsageError("--resume: the text is not the one this run was trained on")
        self.step = state["step"]
        torch.set_rng_state(state["random"])


class Saver:
    """Writes a run's checkpoints, one at a time, while training goes on. All ranks make the same calls."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self._ranks = folder, ranks
        # A group of its own, since the saving thread communicates while training goes on.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._path: Path | None = None
        self._written: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """True if this rank failed to write; `finish` says why, on all ranks."""
        return self._written is not None and self._written.done() and self._written.exception() is not None

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState) -> None:
        """Waits for the previous save, copies the state and begins to write it to `folder/step-...`. Raises
        as `finish`.

        Call it after a successful step: then the weights of every earlier checkpoint are known to be good.
        The newest two of these are kept."""
        self.finish()
        if self._ranks.first:
            for old in [*finished(self.folder)[:-KEPT], *self.folder.glob("suspect-*")]:
                shutil.rmtree(old, ignore_errors=True)
        self._path = path = self.folder / f"step-{run.step:08d}"
        if self._ranks.first:
            shutil.rmtree(path, ignore_errors=True)  # an unfinished save of an earlier run
        dist.barrier(self._group)
        written = self._written = Future()
        try:
            saved = async_save(_state(model, optimizer, run), checkpoint_id=path, process_group=self._group)
        except OSError as error:
            written.set_exception(error)
            return
        assert isinstance(saved, Future)
        saved.add_done_callback(lambda done: self._seal(path, done, written))

    def _seal(self, path: Path, saved: Future[Any], written: Future[None]) -> None:
        """Writes the list of this rank's files, in the thread that has saved them."""
        try:
            saved.result()
            rank = self._ranks.rank
            names = sorted(each.name for each in path.glob(f"__{rank}_*"))
            names += [".metadata"] if self._ranks.first else []
            files = {name: [(path / name).stat().st_size, _checksum(path / name)] for name in names}
            unfinished = path / f".rank-{rank}.json"
            with unfinished.open("w") as file:
                json.dump({"ranks": self._ranks.world, "files": files}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path / f"rank-{rank}.json")
        except BaseException as error:  # the training has to know of any error
            written.set_exception(error)
        else:
            written.set_result(None)

    def finish(self) -> None:
        """Waits for a running save, if there is one.

        Raises RunError on all ranks if one of them failed to write; the folder is then removed, and earlier
        checkpoints stay.
        """
        written, path = self._written, self._path
        if written is None or path is None:
            return
        self._written = self._path = None
        error = written.exception()
        said = None if error is None else in_one_line(error, self._ranks.rank)
        errors: list[str | None] = [None] * self._ranks.world
        dist.all_gather_object(errors, said, group=self._group)
        problems = [each for each in errors if each is not None]
        if problems and self._ranks.first:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier(self._group)
        if problems:
            raise RunError(f"the checkpoint {path} could not be written: {problems[0]}")

    def put_aside(self, step: int) -> Path | None:
        """Renames the checkpoint of a step, so that no run resumes from it, after a running save has ended.
        Returns its new path; None if there is none. Raises as `finish`."""
        self.finish()
        path, aside = self.folder / f"step-{step:08d}", self.folder / f"suspect-{step:08d}"
        found = path.is_dir()
        dist.barrier(self._group)  # all ranks have checked
        if found and self._ranks.first:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        dist.barrier(self._group)
        return aside if found else None


def load(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState, ranks: Ranks
) -> Path:
    """Fills model, optimizer and run from the newest undamaged checkpoint; all ranks call it, however many.
    Reports damaged newer ones. Raises UsageError if none is undamaged or of this model."""
    for path in reversed(finished(folder)):
        if (damage := _damage(path, ranks)) is not None:
            if ranks.first:
                print(f"{path} is damaged ({damage}), so it is not used", flush=True)
            continue
        state = _state(model, optimizer, run)
        del state["param_groups"]  # a resumed run gets these from its options, or sets them in each step
        _require_same_model(path, state, ranks)
        load_state(state, checkpoint_id=path)
        return path
    raise UsageError(f"--resume: no whole checkpoint in {folder}")


def set_aside(folder: Path) -> Path | None:
    """Makes room for a new run: moves an earlier run's checkpoints to `folder`.old. Those that were there
    move to `folder`.older until the new run has begun (`forget_older`)."""
    if not folder.exists():
        return None
    aside, older = _aside(folder)
    if aside.exists():
        shutil.rmtree(older, ignore_errors=True)
        aside.rename(older)
    return folder.rename(aside)


def put_back(folder: Path) -> None:
    """Undoes `set_aside`, for a run that has not begun."""
    aside, older = _aside(folder)
    aside.rename(folder)
    if older.exists():
        older.rename(aside)


def forget_older(folder: Path) -> None:
    """Removes the checkpoints of the run that preceded the one set aside."""
    shutil.rmtree(_aside(folder)[1], ignore_errors=True)


def _aside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(folder.name + ".old"), folder.with_name(folder.name + ".older")


def newest(folder: Path) -> Path:
    """Returns the newest finished checkpoint. Raises UsageError if there is none."""
    found = finished(folder)
    if not found:
        raise UsageError(f"--resume: no checkpoint in {folder}")
    return found[-1]


def finished(folder: Path) -> list[Path]:
    """Returns the checkpoints that every rank has finished, the oldest first."""
    return [path for path in sorted(folder.glob("step-*")) if _lists(path) is not None]


def _lists(path: Path) -> list[dict[str, Any]] | None:
    """Returns each rank's list of files; None if one is missing, or cannot be read."""
    try:
        first = json.loads((path / "rank-0.json").read_text())
        others = [json.loads((path / f"rank-{n}.json").read_text()) for n in range(1, first["ranks"])]
        return [first, *others]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _damage(path: Path, ranks: Ranks) -> str | None:
    """Returns the damage of a finished checkpoint, the same on all ranks, which share the check of its files;
    None if there is none."""
    found: list[str | None] = [None] * ranks.world
    dist.all_gather_object(found, next(_damaged_files(path, ranks), None))
    return next((each for each in found if each is not None), None)


def _damaged_files(path: Path, ranks: Ranks) -> Iterator[str]:
    lists = _lists(path)
    if lists is None:  # removed meanwhile
        yield "a rank's list is missing"
        return
    try:
        files = [(name, *facts) for each in lists for name, facts in each["files"].items()]
        own = [(name, size, checksum) for name, size, checksum in files[ranks.rank :: ranks.world]]
    except (KeyError, TypeError, ValueError, AttributeError):
        yield "a rank's list is none"
        return
    for name, size, checksum in own:
        file = path / name
        try:
            if not file.is_file():
                yield f"{name} is missing"
            elif file.stat().st_size != size:
                yield f"{name} has {file.stat().st_size} bytes instead of {size}"
            elif _checksum(file) != checksum:
                yield f"the contents of {name} have changed"
        except OSError as error:
            yield f"{name}: {error.strerror}"


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _require_same_model(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Raises UsageError on all ranks unless the checkpoint has the tensors of this model and optimizer."""
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    there = {
        name: tuple(value.size)
        for name, value in known.items()
        if isinstance(value, TensorStorageMetadata) and name.startswith(("model.", "optimizer."))
    }
    wanted = {f"model.{name}": tuple(each.shape) for name, each in state["model"].items()}
    for name, tensors in state["optimizer"].items():
        wanted |= {f"optimizer.{name}.{key}": tuple(each.shape) for key, each in tensors.items()}
    of_all: list[dict[str, tuple[int, ...]]] = [{}] * ranks.world
    dist.all_gather_object(of_all, wanted)
    wanted = {name: shape for each in of_all for name, shape in each.items()}
    for name in sorted(wanted.keys() | there.keys()):
        ours, theirs = wanted.get(name), there.get(name)
        if ours != theirs:
            raise UsageError(
                f"--resume: {path} is of another model: {name} is {_described(theirs)} there and "
                f"{_described(ours)} here"
            )


def _described(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def in_one_line(error: BaseException, rank: int) -> str:
    """Returns an error of a rank with its number, or the first of the errors that
    torch.distributed.checkpoint has collected from all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank = min(failures)
        error, _ = failures[rank]
    return f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}"


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState) -> dict[str, Any]:
    return {**sharded_state(model, optimizer), "run": run}
