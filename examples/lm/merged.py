"""The microbatches of a step, each computed beside the transfers of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lm.data import inputs_and_targets
from lm.metrics import last_load, travel_of
from lm.model import Transformer
from moecomm.nn import MoEBlock, MoELayer
from moecomm.overlap import Stages, run_microbatches


def cut(model: Transformer, block: Any) -> Any:
    """Returns the nodes of a block of the model; one without experts is a single node."""
    if not isinstance(block.ffn, MoELayer):
        return whole(model, block)
    return MoEBlock(lambda x_BSH: block.before(x_BSH, *model.positions(x_BSH.shape[1])), block.ffn)


def whole(model: Transformer, block: Any) -> Callable[[Tensor], Tensor]:
    """Returns a block of the model as a function of its input."""
    return lambda x_BSH: block(x_BSH, *model.positions(x_BSH.shape[1]))


class MergedStep(nn.Module):
    """Forward and backward of a step. Its parameters are the model's, and get the gradient of the mean loss.

    Attributes:
        load_AE: after a step: tokens of each layer's experts.
        travelled: after a measured step: `travel_of` it.
    """

    load_AE: Tensor
    travelled: tuple[float, float]

    def __init__(self, model: Transformer, microbatches: int, places_S: Tensor | None = None) -> None:
        """places_S: the rank's places of a window (`lm.data.inputs_and_targets`)."""
        super().__init__()
        self._places_S = places_S
        self.model, self.microbatches, self.measured = model, microbatches, False
        blocks = (cut(model, block) for block in model.blocks.values())
        self._blocks: list[Any] = [model.embed, *blocks]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Returns the mean loss of the windows (B, S + 1), and adds to the parameters' gradients."""
        parts = [inputs_and_targets(part, self._places_S) for part in tokens_BS.chunk(self.microbatches)]
        loads: list[Tensor] = []

        def loss(x_BSH: Tensor, number: int) -> Tensor:
            loads.append(last_load(self.model))  # forwards end one after another
            _, targets_BS = parts[number]
            return self.model.finish(x_BSH, targets_BS) / len(parts)

        stages = Stages(tokens_BS.device, record=True) if self.measured else None
        losses = run_microbatches(self._blocks, [inputs_BS for inputs_BS, _ in parts], loss, stages=stages)
        self.load_AE = torch.stack(loads).sum(0)
        if stages is not None:
            self.travelled = travel_of([stages.timeline()])
        return torch.stack(losses).sum()
