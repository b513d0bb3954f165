"""Evaluation of a trained model: its loss on held-out text, and sample text that it writes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lm import data, precision
from lm.model import Transformer
from lm.pipeline import Pipeline
from lm.ranks import Ranks

TEMPERATURE = 0.8


@torch.no_grad()
def validation_loss(
    model: Transformer | Pipeline,
    tokens_N: np.ndarray,
    *,
    windows: int,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    ranks: Ranks,
    places_S: Tensor | None = None,
) -> float:
    """Returns the mean nats per token, over the same windows of held-out text for any number of ranks.

    A data-parallel rank takes `batch` windows at a time. Every rank makes the same number of calls, because
    experts serve all ranks of their group. At the end of the text some ranks may have fewer windows, or none;
    they repeat the first one without counting it, since GPU attention kernels refuse an empty batch. In a
    pipeline only the last stage has a loss, and counts. places_S: the rank's positions in a window
    (`lm.data.inputs_and_targets`).
    """
    model.eval()
    starts_B = data.validation_windows(tokens_N, count=windows, seq=seq)
    nats, first = torch.zeros((), dtype=torch.float64), ranks.place.dp * batch
    for begin in range(0, len(starts_B), batch * ranks.folding.dp):
        mine_B = starts_B[begin + first :][:batch]
        brought_B = mine_B if len(mine_B) else starts_B[:1]
        tokens_BS = data.windows(tokens_N, brought_B, seq).to(ranks.device)
        inputs_BS, targets_BS = data.inputs_and_targets(tokens_BS, places_S)
        loss = precision.compute(model, dtype, inputs_BS, targets_BS)
        if len(mine_B):
            nats += targets_BS.numel() * loss.double().cpu()
    dist.all_reduce(nats)
    model.train()
    return nats.item() / (len(starts_B) * seq)


@torch.no_grad()
def sample(
    model: Transformer,
    prompt: list[int],
    *,
    count: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[int]:
    """Returns `prompt` and `count` tokens after it. All ranks call it, since each has some of the experts."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        context_BS = torch.tensor([tokens[-model.config.max_seq :]], device=device)
        logits_V = precision.compute(model, dtype, context_BS)[0, -1].float().cpu()
        probabilities_V = (logits_V / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    model.train()
    return tokens
