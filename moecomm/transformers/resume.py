"""Trainer checkpoints with the optimizer's state, to resume training of models spread over ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from moecomm.errors import InvalidArgument

OPTIMIZER, SCHEDULER = "optimizer_by_rank", "scheduler.pt"
"""The folder and the file in a checkpoint that transformers itself does not write."""


class Resumable:
    """Lets a Trainer save and restore the optimizer's state of a model that is spread over ranks.

        class Trainer(moecomm.transformers.Resumable, transformers.Trainer): ...

        model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=parallel)
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=checkpoint)

    Without it, the Trainer of transformers 5.24 refuses to save or restore that state, and requires
    `save_only_model=True`. A checkpoint is the folder that transformers writes, with the optimizer's state in
    the format of torch.distributed.checkpoint. It may be resumed on another number of ranks, with another
    mesh and in one process. The model has to be loaded from the folder; for peft, load the base model from
    its original place, and the Trainer loads the adapters' weights from the folder. List this class before
    the Trainer.

    Without a GPU, TrainingArguments need use_cpu=True. Otherwise the Trainer takes each rank for the only
    rank, and the constructor raises InvalidArgument on all ranks. So it does for load_best_model_at_end=True,
    except with peft: transformers would fail at it after the training.

    `train` raises InvalidArgument on all ranks if the model was loaded from another place, if the folder has
    no optimizer state, or if parameter groups with several learning rates have changed.
    """

    def __init__(self: Any, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        asked = None if args is None else args.save_only_model
        if getattr(model, "is_distributed_loading_by_transformers", False) and asked is False:
            args.save_only_model = True  # the constructor requires it
        try:
            super().__init__(model, args, *rest, **options)  # type: ignore[call-arg]
        finally:
            if asked is not None:
                args.save_only_model = asked
        if asked is not None:
            self.args.save_only_model = asked  # a Trainer may replace its arguments
        spread, known = self.is_distributed_loading_by_transformers, self.args.world_size
        if spread and known < dist.get_world_size():
            raise InvalidArgument(
                f"args: the Trainer knows of {known} of {dist.get_world_size()} ranks, and each would train "
                "on all batches: without a GPU, TrainingArguments need use_cpu=True"
            )
        if spread and self.args.load_best_model_at_end and not hasattr(self.model, "peft_config"):
            raise InvalidArgument(
                "args: load_best_model_at_end is True, and transformers cannot load weights into a model "
                "that is spread over ranks: name metric_for_best_model instead, and load the model from "
                "state.best_model_checkpoint"
            )

    def create_optimizer(self: Any, *arguments: Any, **options: Any) -> Any:
        optimizer = super().create_optimizer(*arguments, **options)  # type: ignore[misc]
        # torch.distributed.checkpoint cannot load groups without parameters. Only adapters make such groups.
        optimizer.param_groups[:] = [each for each in optimizer.param_groups if each["params"]]
        return optimizer

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            return super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        save_optimizer_distributed(self.model, _plain(self.optimizer), f"{output_dir}/{OPTIMIZER}")
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/{SCHEDULER}")
        return None

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        folder = Path(resume_from_checkpoint)
        if not (folder / OPTIMIZER).is_dir() or not (folder / SCHEDULER).is_file():
            raise InvalidArgument(
                f"resume_from_checkpoint is {folder}, which has no {OPTIMIZER} and {SCHEDULER}: it "
                "must be a checkpoint that this Trainer saved with save_only_model=False"
            )
        if hasattr(self.model, "peft_config"):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        loaded_from = self.model.config.name_or_path
        if not os.path.isdir(loaded_from) or not os.path.samefile(loaded_from, folder):
            raise InvalidArgument(
                f"resume_from_checkpoint is {folder}, the model was loaded from {loaded_from}: load it "
                f"by from_pretrained({str(folder)!r}, distributed_config=...)"
            )
        return None

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(f"{checkpoint}/{OPTIMIZER}"):
            return super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        load_optimizer_distributed(self.model, _plain(self.optimizer), f"{checkpoint}/{OPTIMIZER}")
        state = torch.load(f"{checkpoint}/{SCHEDULER}", weights_only=True)
        self.lr_scheduler.load_state_dict(_for_groups(state, len(self.optimizer.param_groups)))
        return None


def _plain(optimizer: Any) -> Any:
    """Returns the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _for_groups(state: dict[str, Any], groups: int) -> dict[str, Any]:
    """Adapts a scheduler's state to an optimizer with `groups` groups (the Trainer makes one for each kind of
    mesh that parameters have). Raises InvalidArgument if groups with different values would change."""
    for name, values in state.items():
        if isinstance(values, list) and len(values) != groups:
            if any(each != values[0] for each in values):
                raise InvalidArgument(
                    f"the checkpoint's scheduler has {name} {values}, and the optimizer {groups} groups of "
                    "parameters: learning rates that differ must be resumed on the mesh of the checkpoint"
                )
            state[name] = values[:1] * groups
    return state
