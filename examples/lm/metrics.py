"""Measurements of a step, and the file to which they are written: one JSON object per line.

The first line describes the run ({"step": 0, "unigram": ...}), lines with "loss" are training steps, lines
with "val_loss" validations. "load" holds the tokens of each expert, a list for each layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lm.errors import RunError
from lm.files import write_whole
from moecomm.nn import MoELayer
from moecomm.overlap import Timeline

Record = dict[str, Any]
WARM_UP = 2  # first steps of a run, slower than the rest: libraries are loaded, memory is allocated


class MetricsFile:
    """Appends records; a resumed run first drops those of steps that it will repeat."""

    def __init__(self, path: Path, *, resume_at: int | None) -> None:
        kept = [] if resume_at is None else [r for r in read_metrics(path) if r["step"] <= resume_at]
        self.records: list[Record] = kept
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        # Line buffering, so that readers of the file see whole lines.
        self._stream = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Writes a record. Raises RunError if the disk is full."""
        self.records.append(record)
        try:
            self._stream.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"{self._stream.name}: {error.strerror}") from None

    def close(self) -> None:
        self._stream.close()


def read_metrics(path: Path) -> list[Record]:
    """Returns the records of a file, without lines that a crash has left incomplete."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Measurements of one step over all ranks."""

    loss: float  # mean over all ranks' tokens, in nats
    seconds: float  # of the step, mean over ranks, each measured by its own clock
    comm_seconds: float  # in dispatch and combine, mean over ranks; in measured steps by the layers' clock
    wait_seconds: float  # the part of it in which a rank waited for another
    exposed_seconds: float  # rows travelled while nothing was computed, mean over ranks; NaN: not measured
    load_AE: torch.Tensor  # (layers, E) int64: tokens per expert
    late_R: list[float]  # for each rank, the mean seconds that the others waited for it to begin
    stop: bool  # some rank was asked to stop

    @property
    def balance(self) -> float:
        """Largest expert load divided by the mean, in the layer where it is worst; 1 is perfect."""
        return float((self.load_AE.amax(1) / self.load_AE.double().mean(1)).max())

    @property
    def slowest(self) -> int:
        """The rank for which the others waited longest."""
        return max(range(len(self.late_R)), key=self.late_R.__getitem__)


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def last_load(layers: Sequence[MoELayer]) -> Tensor:
    """Tokens per expert of each layer in the last forward, (A, E)."""
    return torch.stack([layer.last_tokens_per_expert for layer in layers])


def on_host(loss: Tensor, norm: Tensor, load_AE: Tensor) -> tuple[float, float, Tensor]:
    """Returns a step's loss, norm and load in host memory. The host waits for the device once, and before the
    optimizer's step is issued: so that one runs while the host reduces these numbers over the ranks."""
    found = [each.detach().to(norm.device, torch.float64).flatten() for each in (loss, norm, load_AE)]
    numbers = torch.cat(found).cpu()
    return numbers[0].item(), numbers[1].item(), numbers[2:].view(load_AE.shape).long()


def forget_load(layers: Sequence[MoELayer]) -> None:
    """Drops what routers have counted for `update_expert_bias`, in a step that is skipped."""
    for layer in layers:
        if layer.router.load_E is not None:
            layer.router.load_E.zero_()


def measure_layers(layers: Sequence[MoELayer], measure: bool) -> None:
    """Sets whether the layers record the times of their stages, which costs some CUDA events each."""
    for layer in layers:
        layer.overlap = dataclasses.replace(layer.overlap, record=measure)


def travel_seconds(layers: Sequence[MoELayer]) -> tuple[float, float]:
    """Returns the time in which rows travelled, and the part of it in which nothing was computed, in the last
    measured forward and backward of all layers. One clock measures both, so the part is at most the whole."""
    timelines = [timeline for layer in layers for timeline in layer.timelines().values()]
    return (
        sum(_travelling(timeline).exposed_seconds for timeline in timelines),
        sum(timeline.exposed_seconds for timeline in timelines),
    )


def _travelling(timeline: Timeline) -> Timeline:
    return Timeline((span for span in timeline.spans if span.communicates), streams=timeline.streams)


def reduce_step(
    load_AE: Tensor,
    *,
    loss: float,
    seconds: float,
    stats: dict[str, Any],
    members: Sequence[int],
    travelled: tuple[float, float] | None,
    stop: bool,
) -> StepTotals:
    """Sums one rank's numbers over all ranks, in one all-reduce. float64 holds the counts exactly.

    `load_AE`: in host memory. `travelled`: the result of `travel_seconds`, or None if the step was not
    measured. `stats`: those of the communicator, whose ranks are `members` among all ranks.
    """
    comm_seconds, exposed = travelled or (stats["dispatch_seconds"] + stats["combine_seconds"], math.nan)
    numbers = [loss, seconds, comm_seconds, stats["wait_seconds"], exposed, float(stop)]
    world = dist.get_world_size()
    late_R = torch.zeros(world, dtype=torch.float64)
    late_R[list(members)] = torch.tensor(stats["late_seconds"], dtype=torch.float64)
    late_R /= max(1, len(members) - 1)
    sums = torch.cat([torch.tensor(numbers, dtype=torch.float64), late_R, load_AE.flatten().double()])
    dist.all_reduce(sums)
    late_R, load_A = sums[len(numbers) :].split((world, load_AE.numel()))
    return StepTotals(
        loss=sums[0].item() / world,
        seconds=sums[1].item() / world,
        comm_seconds=sums[2].item() / world,
        wait_seconds=sums[3].item() / world,
        exposed_seconds=sums[4].item() / world,
        stop=sums[5].item() > 0,
        load_AE=load_A.view_as(load_AE).long(),
        late_R=late_R.tolist(),
    )


@dataclass
class Totals:
    """Time and tokens of this run's training steps, without validation, checkpoints and first steps. Exposed
    communication covers the steps in which it was measured.

    Shares are relative to the ranks' own times: while one writes metrics, another may already wait for it.
    """

    steps: int = 0
    tokens: int = 0
    wall_seconds: float = 0.0
    measured_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def add(self, step: StepTotals, *, tokens: int, wall_seconds: float) -> None:
        self.steps += 1
        if self.steps == WARM_UP + 1:
            self.tokens, self.wall_seconds, self.measured_seconds, self.exposed_seconds = 0, 0.0, 0.0, 0.0
        self.tokens += tokens
        self.wall_seconds += wall_seconds
        if not math.isnan(step.exposed_seconds):
            self.measured_seconds += step.seconds
            self.exposed_seconds += step.exposed_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall_seconds if self.wall_seconds else math.nan

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.measured_seconds if self.measured_seconds else math.nan
