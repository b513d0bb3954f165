"""A model whose layers are shared out over ranks: pipeline parallelism.

The blocks are parted into stages of consecutive ones, the first of which has the embedding and the last the
head. A schedule of torch.distributed.pipelining sends microbatches through them. With several
stages a rank they go round the ranks, or there and back, in a V:

    2 ranks, 4 stages       rank 0    rank 1
    interleaved             0, 2      1, 3
    zbv, dualpipev          0, 3      1, 2

What stages send each other is a microbatch's residual stream, (B, S, H) in float32, of the tokens that the
rank has of each window (`lm.parallel`). The last stage returns the loss of a microbatch: so its head is part
of the module whose backward a schedule may ask for in two halves.
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
from lm.metrics import last_load
from lm.model import Transformer
from lm.options import Options
from lm.ranks import Ranks


@dataclass(frozen=True)
class Layout:
    """Where the layers of a model are.

    Attributes:
        layers: of each stage.
        owners: the place in the pipeline of the rank that holds a stage.
        place: this rank's.
    """

    layers: tuple[range, ...]
    owners: tuple[int, ...]
    place: int

    @property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.place]

    @property
    def first(self) -> bool:
        """Has this rank the first stage?"""
        return self.owners[0] == self.place

    @property
    def last(self) -> bool:
        return self.owners[-1] == self.place

    def holds(self, part: str) -> bool:
        """Has this rank a part of the model, such as "embedding" or "blocks.3"?"""
        _, _, layer = part.partition("blocks.")
        if layer:
            return any(int(layer) in self.layers[stage] for stage in self.own)
        return self.first if part == "embedding" else self.last


def lay_out(options: Options, place: int) -> Layout:
    """Shares the layers out: stages have equally many, or the first ones one more. place: this rank's in its
    pipeline."""
    layers, stages, pp = options.layers, options.stages, options.pp
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + layers // stages + (stage < layers % stages))
    owners = [stage % pp for stage in range(stages)]
    if options.schedule in V_SCHEDULES:
        owners = [min(stage, stages - 1 - stage) for stage in range(stages)]
    return Layout(tuple(map(range, ends, ends[1:])), tuple(owners), place)


def schedule_class(options: Options) -> Any:
    """Returns the class of the schedule. Raises UsageError if this torch has none."""
    name = options.schedule or "1f1b"
    found = getattr(pipelining, SCHEDULES[name], None)
    if found is None:
        raise UsageError(f"--schedule {name}: torch {torch.__version__} has no {SCHEDULES[name]}")
    return found


class Stage(nn.Module):
    """Blocks whose forward is one operation of the graph that a schedule makes, and so is their backward: of
    one that the schedule splits (zero bubble) one part computes all of it. Experts communicate in it, so it
    must not be computed in parts, nor twice."""

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
    """What has been computed, (its input, its result), as one operation."""

    @staticmethod
    def forward(ctx: Any, computed: tuple[Tensor, Tensor], source: Tensor) -> Tensor:
        ctx.computed = computed
        return computed[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x, y), ctx.computed = ctx.computed, None
        # On this thread, and outside the caller's autocast, as any backward.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.autocast(grad.device.type, enabled=False),
        ):
            torch.autograd.backward(y, grad)
        return None, x.grad


class Pipeline(nn.Module):
    """The stages of this rank. As a module it is the whole model, on all ranks of the pipeline together:
    forward maps token ids (B, S), and those that follow them, to their mean cross-entropy where the last
    stage is, and to zero elsewhere. It is for evaluation: no gradient goes from stage to stage.

    Attributes:
        targets: the targets (B, S) of the next forwards of the last stage, in their order.
    """

    def __init__(self, model: Transformer, layout: Layout, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.layout, self._device = model, layout, ranks.device
        self.group = ranks.folding.group("pp")
        self.targets: list[Tensor] = []
        # A list, which hides them from this module: their parameters are the model's.
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
        """Returns a tensor like those that stages send each other."""
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
        """Leaves weights as they are. torch, as of 2.13, has FSDP2 take them back here, before the first
        microbatch, and `lm.sharding` gathers them but once a step."""


class PipelineStep(nn.Module):
    """Forward and backward of a step. Its parameters are the model's, and get the gradient of the mean loss.

    Attributes:
        load_AE: after a step: tokens of each layer's experts, and zeros of the layers of other ranks.
    """

    load_AE: Tensor

    def __init__(self, pipeline: Pipeline, options: Options, batch: int, places_S: Tensor | None) -> None:
        """batch: windows of a microbatch. places_S: the rank's places of a window
        (`lm.data.inputs_and_targets`)."""
        super().__init__()
        self.model, self._layout = pipeline.model, pipeline.layout
        self._pipeline, self._places_S = [pipeline], places_S  # in a list, as the stages of a pipeline are
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
        """Returns the mean loss of the windows (B, S + 1) where the last stage is, and 0 elsewhere, and adds
        to the parameters' gradients."""
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
        """Returns a microbatch's part of the mean loss. Its output is its loss already: a stage's forwards
        come in the order of the microbatches, in every schedule."""
        return output / self._microbatches

    def _counter(self, stage: int) -> Callable[..., None]:
        """Returns a hook that adds the tokens of a microbatch's experts, after its forward."""
        layers = [layer for layer in self._layout.layers[stage] if layer >= self._dense]
        blocks = nn.ModuleList(self.model.blocks[str(layer)] for layer in layers)

        def count(*_: Any) -> None:
            if layers and torch.is_grad_enabled():
                first = layers[0] - self._dense
                self.load_AE[first : first + len(layers)] += last_load(blocks)

        return count
