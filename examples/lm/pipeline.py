"""Pipeline parallelism: a model whose layers are distributed over ranks.

Each stage has consecutive blocks, the first one also the embedding and the last one the head. A schedule of
torch.distributed.pipelining sends microbatches through the stages. With several stages per rank they are
assigned round-robin, or forth and back in a V:

    2 ranks, 4 stages       rank 0    rank 1
    interleaved             0, 2      1, 3
    zbv, dualpipev          0, 3      1, 2

Stages send each other a microbatch's residual stream, (B, S, H) in float32, for the rank's tokens of each
window (`lm.parallel`). The last stage returns the loss of a microbatch, so its head is part of the module
whose backward a schedule may split into two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from lm.data import inputs_and_targets
from lm.errors import UsageError
from lm.fitting import SCHEDULES, V_SCHEDULES
from lm.metrics import last_load, moe_layers
from lm.model import Transformer
from lm.options import Options
from lm.ranks import Ranks


@dataclass(frozen=True)
class Layout:
    """The stages of a model and their ranks.

    Attributes:
        layers: the layers of each stage.
        owners: for each stage, the position in the pipeline of the rank that holds it.
        place: this rank's position.
    """

    layers: tuple[range, ...]
    owners: tuple[int, ...]
    place: int

    @property
    def own(self) -> list[int]:
        """This rank's stages."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.place]

    @property
    def first(self) -> bool:
        """Returns whether this rank has the first stage."""
        return self.owners[0] == self.place

    @property
    def last(self) -> bool:
        return self.owners[-1] == self.place

    def holds(self, part: str) -> bool:
        """Returns whether this rank has a part of the model, such as "embedding" or "blocks.3"."""
        _, _, layer = part.partition("blocks.")
        if layer:
            return any(int(layer) in self.layers[stage] for stage in self.own)
        return self.first if part == "embedding" else self.last


def lay_out(options: Options, place: int) -> Layout:
    """Distributes the layers: all stages have equally many, or the first ones one more. place: this rank's
    position in its pipeline."""
    layers, stages, pp = options.layers, options.stages, options.pp
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + layers // stages + (stage < layers % stages))
    owners = [stage % pp for stage in range(stages)]
    if options.schedule in V_SCHEDULES:
        owners = [min(stage, stages - 1 - stage) for stage in range(stages)]
    return Layout(tuple(map(range, ends, ends[1:])), tuple(owners), place)


def schedule_class(options: Options) -> Any:
    """Returns the class of the schedule. Raises UsageError if this torch version lacks it."""
    name = options.schedule or "1f1b"
    found = getattr(pipelining, SCHEDULES[name], None)
    if found is None:
        raise UsageError(f"--schedule {name}: torch {torch.__version__} has no {SCHEDULES[name]}")
    return found


class Stage(nn.Module):
    """Blocks whose forward is a single operation of the schedule's graph, and whose backward is too: if the
    schedule splits the backward (zero bubble), one half computes all of it. Experts communicate in it, so it
    must be computed neither in parts nor twice."""

    def __init__(self, blocks: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._compute(x)
        own = x.detach().requires_grad_(x.requires_grad)
        source = x if x.requires_grad else x.new_empty(0, dtype=torch.float32).requires_grad_()
        y: Tensor = _Whole.apply((own, self._compute(own)), source)  # type: ignore[no-untyped-call]
        return y

    def _compute(self, x: Tensor) -> Tensor:
        for block in self._blocks:
            x = block(x)
        return x


class _Whole(torch.autograd.Function):
    """A stage's computation, (its input, its result), as one operation."""

    @staticmethod
    def forward(ctx: Any, computed: tuple[Tensor, Tensor], source: Tensor) -> Tensor:
        ctx.computed = computed
        return computed[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x, y), ctx.computed = ctx.computed, None
        # On this thread and outside the caller's autocast, like any backward.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.autocast(grad.device.type, enabled=False),
        ):
            torch.autograd.backward(y, grad)
        return None, x.grad


class Pipeline(nn.Module):
    """The stages of this rank. As a module it is the whole model, on all ranks of the pipeline together:
    forward maps token ids (B, S) and their targets to their mean cross-entropy on the rank with the last
    stage, and to zero elsewhere. It is for evaluation: no gradient passes between stages.

    Attributes:
        targets: the targets (B, S) of the last stage's next forwards, in order.
    """

    def __init__(self, model: Transformer, layout: Layout, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.layout, self._device = model, layout, ranks.device
        self.group = ranks.folding.group("pp")
        self.targets: list[Tensor] = []
        # The list hides them from this module: their parameters belong to the model.
        self.stages = [(number, Stage(self._blocks(number))) for number in layout.own]

    def _as_function(self, block: Any) -> Callable[[Tensor], Tensor]:
        """Returns a block of the model as a function of its input."""
        return lambda x_BSH: block(x_BSH, *self.model.positions(x_BSH.shape[1]))

    def _blocks(self, stage: int) -> list[Any]:
        model, layout = self.model, self.layout
        own = [model.blocks[str(layer)] for layer in layout.layers[stage]]
        blocks: list[Any] = [self._as_function(block) for block in own]
        if stage == 0:
            blocks.insert(0, model.embed)
        if stage == len(layout.layers) - 1:
            blocks.append(lambda x_BSH: model.finish(x_BSH, self.targets.pop(0)))
        return blocks

    def buffer(self, batch: int, length: int) -> Tensor:
        """Returns a tensor of the shape and dtype that stages send each other."""
        return torch.empty(batch, length, self.model.config.dim, device=self._device)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        self.targets = [targets_BS]
        ranks, owners = dist.get_process_group_ranks(self.group), self.layout.owners
        x = tokens_BS
        for number, stage in self.stages:
            if number and owners[number - 1] != self.layout.place:
                x = self.buffer(*tokens_BS.shape)
                dist.recv(x, ranks[owners[number - 1]], group=self.group)
            x = stage(x)
            if number + 1 < len(owners) and owners[number + 1] != self.layout.place:
                dist.send(x.contiguous(), ranks[owners[number + 1]], group=self.group)
        return x if self.layout.last else x.new_zeros(())


class _Stage(pipelining.PipelineStage):
    def _post_metadata_inference_cleanup(self) -> None:
        """Does not reshard weights. torch, as of 2.13, has FSDP2 do so here, before the first microbatch, but
        `lm.sharding` gathers them only once per step."""


class PipelineStep(nn.Module):
    """Forward and backward of a step. Its parameters are the model's, and get the mean loss's gradient.

    Attributes:
        load_AE: after a step: tokens per expert of each layer, with zeros for other ranks' layers.
    """

    load_AE: Tensor

    def __init__(self, pipeline: Pipeline, options: Options, batch: int, places_S: Tensor | None) -> None:
        """batch: windows of a microbatch. places_S: the rank's positions in a window
        (`lm.data.inputs_and_targets`)."""
        super().__init__()
        self.model, self._layout = pipeline.model, pipeline.layout
        self._pipeline, self._places_S = [pipeline], places_S  # in a list, like the stages of a pipeline
        self._dense, self._microbatches = options.dense_layers, options.microbatches
        self._load_shape = (options.layers - options.dense_layers, options.experts)
        length = options.seq if places_S is None else len(places_S)
        example_BSH = pipeline.buffer(batch, length)
        tokens_BS = torch.zeros(batch, length, dtype=torch.int64, device=example_BSH.device)
        stages: list[Any] = [
            _Stage(
                stage,
                number,
                options.stages,
                example_BSH.device,
                input_args=(example_BSH.clone().requires_grad_() if number else tokens_BS,),
                output_args=(
                    example_BSH.new_empty(
                        () if number == options.stages - 1 else example_BSH.shape
                    ).requires_grad_(),
                ),
                group=pipeline.group,
            )
            for number, stage in pipeline.stages
        ]
        for number, stage in pipeline.stages:
            stage.register_forward_hook(self._counter(number))
        made = schedule_class(options)
        single = issubclass(made, pipelining.schedules.PipelineScheduleSingle)
        self._schedule = made(
            stages[0] if single else stages, options.microbatches, self._loss, scale_grads=False
        )

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Adds to the parameters' gradients. Returns the mean loss of the windows (B, S + 1) on the rank with
        the last stage, and 0 elsewhere."""
        inputs_BS, targets_BS = inputs_and_targets(tokens_BS, self._places_S)
        self.load_AE = torch.zeros(self._load_shape, dtype=torch.int64, device=tokens_BS.device)
        losses: list[Tensor] = []
        self._pipeline[0].targets = list(targets_BS.chunk(self._microbatches))
        self._schedule.step(
            *([inputs_BS.contiguous()] if self._layout.first else []),  # torch may compare strides
            target=targets_BS if self._layout.last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).sum() if losses else torch.zeros((), device=tokens_BS.device)

    def _loss(self, output: Tensor, targets_BS: Tensor) -> Tensor:
        """Returns a microbatch's part of the mean loss. The stage's output is its loss already, and in every
        schedule the forwards of a stage come in the order of the microbatches."""
        return output / self._microbatches

    def _counter(self, stage: int) -> Callable[..., None]:
        """Returns a forward hook that adds a microbatch's tokens per expert."""
        layers = [layer for layer in self._layout.layers[stage] if layer >= self._dense]
        blocks = nn.ModuleList(self.model.blocks[str(layer)] for layer in layers)
        counted = moe_layers(blocks)

        def count(*_: Any) -> None:
            if layers and torch.is_grad_enabled():
                first = layers[0] - self._dense
                self.load_AE[first : first + len(layers)] += last_load(counted)

        return count
