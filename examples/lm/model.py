"""A decoder-only transformer whose feed-forward layers are made by the caller.

Shape letters, in addition to those of moecomm: B sequences, S positions, D width of one head, V vocabulary.
The pieces are the common ones: pre-norm blocks with RMSNorm (arXiv 1910.07467), rotary positions (arXiv
2104.09864), attention (`lm.attention`), and, if `tied`, one embedding matrix shared by the input and the
output.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import AttentionConfig, make_attention
from lm.head import Head
from lm.recompute_outputs import recompute_outputs
from lm.rotary import rope_table

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab: int
    dim: int
    layers: int
    max_seq: int
    attention: AttentionConfig
    tied: bool = True
    norm_eps: float = 1e-6


class FeedForward(nn.Module):
    """A dense feed-forward layer, silu(x W_gate) * (x W_up) times W_down (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))


class PreNorm(nn.RMSNorm):
    """RMSNorm before a part of a block. Within autocast the result is cast once, to the dtype in which the
    part's products compute, and not once by each of them."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        h_BSH, device = super().forward(x_BSH), x_BSH.device.type
        return h_BSH.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h_BSH


Run = Callable[..., Tensor]


def run_plainly(function: Run, *tensors: Tensor) -> Tensor:
    return function(*tensors)


class Block(nn.Module):
    """A pre-norm block. What it keeps for its backward is set by `lm.recompute.save_memory`.

    Attributes:
        runs: functions run(function, *tensors) that compute a part: "attention" and "moe", each with the norm
            before it, and "all", the block.
        drops_attention_norm: the norm's result is not kept but recomputed.
        drops_ffn_norm: the same for the other norm.
        before_ffn: the compiled form of `_attend_and_norm`, or None.
    """

    def __init__(self, config: ModelConfig, layer: int, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = PreNorm(config.dim, eps=config.norm_eps)
        self.attention = make_attention(config.attention, layer)
        self.ffn_norm = PreNorm(config.dim, eps=config.norm_eps)
        self.ffn = ffn
        self.runs: dict[str, Run] = dict.fromkeys(("all", "attention", "moe"), run_plainly)
        self.drops_attention_norm = self.drops_ffn_norm = False
        self.before_ffn: Callable[..., tuple[Tensor, Tensor]] | None = None

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        return self.runs["all"](self._compute, x_BSH, cos_SD, sin_SD)

    def _compute(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        if self.before_ffn is not None:
            x_BSH, h_BSH = self.before_ffn(x_BSH, cos_SD, sin_SD)
            return x_BSH + self.ffn(h_BSH)
        x_BSH = x_BSH + self.runs["attention"](self._attend, x_BSH, cos_SD, sin_SD)
        return x_BSH + self.runs["moe"](self._feed, x_BSH)

    def compile_before_ffn(self) -> None:
        """Compiles all that comes before the feed-forward layer: a few kernels then make norms, rotations,
        casts and the sum. The second norm is left out if it is recomputed with the feed-forward layer."""
        if self.runs["moe"] is run_plainly:
            self.before_ffn = torch.compile(self._attend_and_norm)
        else:
            self._attend = torch.compile(self._attend)  # type: ignore[method-assign]

    def _attend_and_norm(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> tuple[Tensor, Tensor]:
        x_BSH = x_BSH + self._attend(x_BSH, cos_SD, sin_SD)
        return x_BSH, self.ffn_norm(x_BSH)

    def _attend(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        h_BSH = self.attention_norm(x_BSH)
        with dropped(h_BSH, self.attention_norm, x_BSH, self.drops_attention_norm):
            return self.attention(h_BSH, cos_SD, sin_SD)

    def _feed(self, x_BSH: Tensor) -> Tensor:
        h_BSH = self.ffn_norm(x_BSH)
        with dropped(h_BSH, self.ffn_norm, x_BSH, self.drops_ffn_norm):
            return self.ffn(h_BSH)


def dropped(
    h_BSH: Tensor, norm: nn.Module, x_BSH: Tensor, drops: bool
) -> contextlib.AbstractContextManager[Any]:
    """Returns the context for uses of a norm's result h; if `drops`, h is recomputed for the backward."""
    return recompute_outputs(norm, (x_BSH,), h_BSH) if drops else contextlib.nullcontext()


class Transformer(nn.Module):
    """`make_ffn(layer)` returns a module that maps (B, S, H) to (B, S, H), for the layers 0, 1, ... in order.

    A pipeline rank holds some of the parts "embedding", "blocks.0", "blocks.1", ... and "head". All are made,
    one after another; those of other ranks then move to the meta device, until `drop_meta` removes them.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(
        self,
        config: ModelConfig,
        make_ffn: Callable[[int], nn.Module],
        holds: Callable[[str], bool] = lambda part: True,
    ) -> None:
        """holds: returns whether this rank holds a part."""
        super().__init__()

        def placed(part: str, module: Part) -> Part:
            return module if holds(part) else module.to("meta")

        self.config = config
        self.embedding = placed("embedding", nn.Embedding(config.vocab, config.dim))
        self.blocks = nn.ModuleDict(
            {
                str(layer): placed(f"blocks.{layer}", Block(config, layer, make_ffn(layer)))
                for layer in range(config.layers)
            }
        )
        self.head = placed("head", Head(config.dim, config.vocab, config.norm_eps, config.tied))
        self.gathered = 1  # attention sees this many times the positions of an input (lm.parallel)
        cos_SD, sin_SD = rope_table(config.attention, config.max_seq)
        self.register_buffer("cos_SD", cos_SD, persistent=False)
        self.register_buffer("sin_SD", sin_SD, persistent=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Returns the next-token logits (B, S, V) of int64 token ids (B, S), S at most `max_seq`; with
        targets, the tokens that follow, their mean cross-entropy."""
        x_BSH = self.embed(tokens_BS)
        positions = self.positions(tokens_BS.shape[1])
        for block in self.blocks.values():
            x_BSH = block(x_BSH, *positions)
        return self.finish(x_BSH, targets_BS)

    def drop_meta(self) -> None:
        """Removes the parts that are on the meta device; the others keep their names."""
        for parent in (self, self.blocks):
            for name, part in list(parent.named_children()):
                if part is not self.blocks and any(each.is_meta for each in part.parameters()):
                    delattr(parent, name)

    def own_blocks(self) -> list[Any]:
        """Returns the Blocks that this rank holds, in the order of the layers."""
        return list(self.blocks.values())

    def compile_blocks(self) -> None:
        """Compiles the blocks but for their feed-forward layers; blocks of one kind share the code."""
        for block in self.own_blocks():
            block.compile_before_ffn()

    def positions(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of the positions that attention sees for an input, both (S, D/2)."""
        length *= self.gathered
        return self.cos_SD[:length], self.sin_SD[:length]

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Returns the first block's input (B, S, H), float32."""
        # The embedding may also be the output matrix and is small for that; here it is scaled back to unit
        # size.
        return self.embedding(tokens_BS).float() * math.sqrt(self.config.dim)

    def finish(self, x_BSH: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Returns the result of `Head` for the last block's result."""
        return self.head(x_BSH, targets_BS, self.embedding.weight if self.config.tied else None)
