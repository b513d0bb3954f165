"""Saving and loading the whole state of a run with torch.distributed.checkpoint.

A checkpoint is a folder `step-00000200`. Experts are written as one (E, ...) tensor each, whatever number
of ranks held them, and so load at any other one (`moecomm.nn.sharded_state`). The metadata file is written
last: a folder without it is a save that did not finish, and is not looked at.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from lm.errors import UsageError
from lm.ranks import Ranks
from moecomm.nn import sharded_state

KEPT = 2


@dataclass
class RunState:
    """State of a run beside model and optimizer; a Stateful of torch.distributed.checkpoint.

    Batches depend on (seed, step) alone, so the random state matters only to routers with jitter. All ranks
    draw the same numbers from it, and rank 0's serves all.
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


def save(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState, ranks: Ranks
) -> Path:
    """Writes `folder/step-...`, all ranks together, then removes all but the newest two."""
    path = folder / f"step-{run.step:08d}"
    save_state(_state(model, optimizer, run), checkpoint_id=path)
    if ranks.first:
        for old in _finished(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return path


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState) -> Path:
    """Fills model, optimizer and run from the newest checkpoint; all ranks call it, any number of them."""
    path = newest(folder)
    state = _state(model, optimizer, run)
    split = _read_as_one(state, path)
    load_state(state, checkpoint_id=path)
    split()
    return path


def set_aside(folder: Path) -> Path | None:
    """Makes room for a new run: an earlier one's checkpoints go to `folder`.old, replacing what is there."""
    if not folder.exists():
        return None
    aside = folder.with_name(folder.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def newest(folder: Path) -> Path:
    finished = _finished(folder)
    if not finished:
        raise UsageError(f"--resume: no checkpoint in {folder}")
    return finished[-1]


def _finished(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("step-*/.metadata"))


def _read_as_one(state: dict[str, Any], path: Path) -> Callable[[], None]:
    """Lets queries, keys and values be read from checkpoints that have them in one tensor `qkv`, as older
    ones do. Changes `state`; the function that it returns puts what was read into place."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    parts: list[tuple[Tensor, list[Tensor]]] = []

    def take(tensors: list[Tensor]) -> Tensor:
        first = tensors[0]
        whole = first.clone() if first.dim() == 0 else torch.cat(tensors)  # scalars: the optimizer's steps
        parts.append((whole, tensors))
        return whole

    for name in [name for name in state["model"] if name.endswith(".q.weight")]:
        one = name.removesuffix("q.weight") + "qkv.weight"
        if f"model.{one}" not in saved:
            continue
        three = [name.removesuffix("q.weight") + f"{each}.weight" for each in "qkv"]
        weights, moments = state["model"], state["optimizer"]
        weights[one] = take([weights.pop(each) for each in three])
        taken = [moments.pop(each) for each in three]
        moments[one] = {key: take([each[key] for each in taken]) for key in taken[0]}

    @torch.no_grad()
    def split() -> None:
        for whole, tensors in parts:
            found = [whole] * 3 if whole.dim() == 0 else whole.chunk(3)
            for tensor, value in zip(tensors, found, strict=True):
                tensor.copy_(value)

    return split


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunState) -> dict[str, Any]:
    return {**sharded_state(model, optimizer), "run": run}
