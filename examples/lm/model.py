"""A decoder-only transformer whose feed-forward layers are made by the caller.

Shape letters, beside those of moecomm: B sequences, S positions, N heads, D width of one head, V vocabulary.
The pieces are the common ones: pre-norm blocks with RMSNorm (arXiv 1910.07467), rotary positions (arXiv
2104.09864), causal scaled-dot-product attention, and, if `tied`, one embedding matrix shared by the input and
the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab: int
    dim: int
    layers: int
    heads: int
    max_seq: int
    tied: bool = True
    rope_base: float = 10_000.0


def rope_table(head_dim: int, max_seq: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every (position, frequency), both (S, D/2) float32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_seq, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle, so that dot products see only distances."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return torch.cat((first * cos_SD - second * sin_SD, first * sin_SD + second * cos_SD), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BSH).chunk(3, dim=-1)
        )
        q_BNSD, k_BNSD = rotate(q_BNSD, cos_SD, sin_SD), rotate(k_BNSD, cos_SD, sin_SD)
        y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.ffn = ffn

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH, h_BSH = self.before(x_BSH, cos_SD, sin_SD)
        return x_BSH + self.ffn(h_BSH)

    def before(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual after the attention, and the input of the feed-forward layer."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        return x_BSH, self.ffn_norm(x_BSH)


class Transformer(nn.Module):
    """`make_ffn()` returns a module that maps (B, S, H) to (B, S, H); it is called once a layer."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, config: ModelConfig, make_ffn: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, make_ffn()) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.output = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        cos_SD, sin_SD = rope_table(config.dim // config.heads, config.max_seq, config.rope_base)
        self.register_buffer("cos_SD", cos_SD, persistent=False)
        self.register_buffer("sin_SD", sin_SD, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Next-token logits (B, S, V) of int64 token ids (B, S), S at most `max_seq`."""
        x_BSH = self.embed(tokens_BS)
        positions = self.positions(tokens_BS.shape[1])
        for block in self.blocks:
            x_BSH = block(x_BSH, *positions)
        return self.head(x_BSH)

    def positions(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, both (S, D/2)."""
        return self.cos_SD[:length], self.sin_SD[:length]

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The first block's input (B, S, H)."""
        # The embedding may serve as output matrix too and is small for that; here it is scaled back to unit
        # size.
        return self.embedding(tokens_BS) * math.sqrt(self.config.dim)

    def head(self, x_BSH: Tensor) -> Tensor:
        """Logits (B, S, V) of the last block's result."""
        output = self.embedding if self.output is None else self.output
        return F.linear(self.norm(x_BSH), output.weight)
