"""A callback that watches a run: load of experts, times of stages, memory, and requests to stop."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from lm.metrics import MetricsFile
from lm.stop import StopRequest
from torch import Tensor, nn
from transformers import TrainerCallback

from moecomm.overlap import Stages

REPLAYED = "forward and backward"
STAGES = (REPLAYED, "attention", "experts", "rest of forward", "backward", "optimizer", "between steps")
"""The stages of a step. With --graph, REPLAYED stands for those of the forward and the backward."""


class Watch(TrainerCallback):  # type: ignore[misc]
    """Adds to the Trainer's logs: tokens per second, the most loaded expert and rank, and seconds per stage
    of a step. Writes a line of metrics.jsonl per log, and ends the run after a step if a signal asked."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        experts: int,
        ep: int,
        tokens_per_step: int,
        graph: bool,
        stop: StopRequest,
        metrics: MetricsFile | None,
    ) -> None:
        self._device, self._stop, self._metrics = device, stop, metrics
        self._ep, self._tokens_per_step, self._graph = ep, tokens_per_step, graph
        self._stages, self._open = Stages(device, record=True), dict[str, Any]()
        self._since, self._steps = time.perf_counter(), 0
        layers = [
            module
            for name, module in model.named_modules()
            if name.endswith(".experts") and isinstance(getattr(module, "num_experts", None), int)
        ]
        # One column more for ids that mean no expert of this rank: the host waits for no count.
        self._chosen_LE = torch.zeros(len(layers), experts + 1, dtype=torch.int64, device=device)
        # A buffer, so that GraphedStep counts no step twice.
        model.register_buffer("watched_LE", self._chosen_LE, persistent=False)
        for layer, module in enumerate(layers):
            module.register_forward_pre_hook(self._counts(layer))
        if graph:  # replays run no hooks
            return
        for module in layers:
            self._time(module, "experts")
        for name, module in model.named_modules():
            if name.endswith(("self_attn", "attention")):
                self._time(module, "attention")
        self._time(model, "forward")

    # ---- called by hooks of modules ----

    def _counts(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if _in_forward():
                ids, last = arguments[1].flatten().long(), self._chosen_LE.shape[1] - 1
                ids = torch.where((ids >= 0) & (ids < last), ids, last)
                self._chosen_LE[layer].scatter_add_(0, ids, torch.ones_like(ids))

        return hook

    def _time(self, module: nn.Module, stage: str) -> None:
        def before(*_: Any) -> None:
            if _in_forward():
                self._begin(stage)

        def after(*_: Any) -> None:
            if self._end(stage) and stage == "forward":
                self._begin("backward")

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _begin(self, stage: str) -> None:
        self._open[stage] = self._stages(stage)
        self._open[stage].__enter__()

    def _end(self, stage: str) -> bool:
        """Ends a stage; returns False if it had not begun."""
        begun = self._open.pop(stage, None)
        if begun is not None:
            begun.__exit__(None, None, None)
        return begun is not None

    # ---- called by the Trainer ----

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._end("between steps")
        if self._graph:
            self._begin(REPLAYED)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._end("backward")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._end(REPLAYED if self._graph else "backward")
        self._begin("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._end("optimizer")

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps += 1
        self._begin("between steps")
        asked = torch.tensor(float(bool(self._stop)), device=self._device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # all ranks stop after the same step
        if asked.item():
            control.should_training_stop = control.should_save = True
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True  # the last step, also if a run has fewer than the Trainer logs

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        record: dict[str, Any] = {"step": state.global_step}
        if "eval_loss" in logs:
            record["val_loss"] = logs["eval_loss"]
            self._since, self._steps = time.perf_counter(), 0
        elif "loss" in logs and self._steps:
            record |= {"loss": logs["loss"], "lr": logs["learning_rate"], **self._measure()}
            logs.update({k: v for k, v in record.items() if k not in ("step", "lr", "load", "stages")})
        else:
            return
        if self._metrics is not None:
            self._metrics.write(record)

    def _measure(self) -> dict[str, Any]:
        """Returns measurements since the last log. All ranks call it together."""
        load_LE = self._chosen_LE[:, :-1].clone()
        self._chosen_LE.zero_()
        dist.all_reduce(load_LE)
        seconds = (time.perf_counter() - self._since) / self._steps
        spans = self._take_stages()
        if not self._graph:
            spans["rest of forward"] = spans["forward"] - spans["attention"] - spans["experts"]
        memory = torch.tensor([peak_memory(self._device)], device=self._device, dtype=torch.int64)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        load = load_LE.double()
        by_rank = load.view(len(load), self._ep, -1).sum(2)
        found = {
            "seconds": seconds,
            "tokens_per_s": self._tokens_per_step / seconds,
            "hot_expert": _worst(load),
            "hot_rank": _worst(by_rank),
            "memory_gib": memory.item() / 2**30,
            "load": load_LE.tolist(),
            "stages": {stage: spans[stage] / self._steps for stage in STAGES if stage in spans},
        }
        self._since, self._steps = time.perf_counter(), 0
        return found

    def _take_stages(self) -> dict[str, float]:
        """Returns the seconds of each stage since the last call. Called between two steps."""
        self._end("between steps")
        found: dict[str, float] = defaultdict(float)
        for span in self._stages.timeline().spans:
            found[span.name] += span.end - span.begin
        self._stages = Stages(self._device, record=True)
        self._begin("between steps")
        return found


def _in_forward() -> bool:
    """Returns False in evaluations, and for layers that the backward computes again."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _worst(load_LN: Tensor) -> float:
    """Returns the largest load relative to the mean, in the layer where that is worst."""
    return float((load_LN.max(1).values / load_LN.mean(1).clamp(min=1e-9)).max())


def peak_memory(device: torch.device) -> int:
    """Returns this rank's peak memory in bytes: of its GPU, or of the host if it computes there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
