"""The attention of a block, of a published model's sizes: projections around torch's
scaled_dot_product_attention, without positions, biases, and norms of single heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..harness.options import Heads


class Attention(nn.Module):
    """x + attention(norm(x)) for (B, S, H), causal. Weights are drawn from `generator`, on its device."""

    def __init__(self, hidden: int, heads: Heads, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        device = generator.device
        norms = (hidden, *(heads.latent or ()))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6, dtype=dtype, device=device) for width in norms)
        self.maps = nn.ModuleDict()
        for name, (rows, columns) in _shapes(hidden, heads).items():
            self.maps[name] = nn.Linear(rows, columns, bias=False, dtype=dtype, device=device)
            nn.init.normal_(self.maps[name].weight, std=rows**-0.5, generator=generator)  # type: ignore[arg-type]

    @staticmethod
    def weights(hidden: int, heads: Heads) -> int:
        """The number of values in the matrices."""
        return sum(rows * columns for rows, columns in _shapes(hidden, heads).values())

    @staticmethod
    def columns(heads: Heads) -> int:
        """Columns of a token's queries over all heads."""
        return heads.heads * (heads.width + (heads.rope if heads.latent else 0))

    def forward(self, x_BSH: Tensor) -> Tensor:
        h_BSH = self.norms[0](x_BSH)
        q_BNSD, k_BNSD, v_BNSD = self._latent(h_BSH) if self.heads.latent else self._grouped(h_BSH)
        if padding := q_BNSD.shape[-1] - v_BNSD.shape[-1]:  # flash attention wants values as wide as keys
            v_BNSD = functional.pad(v_BNSD, (0, padding))
        grouped = k_BNSD.shape[1] < q_BNSD.shape[1]
        if grouped and q_BNSD.dtype not in (torch.bfloat16, torch.float16):
            # Only the kernels of these types take fewer heads of keys without a matrix of all scores.
            k_BNSD, v_BNSD = (
                each.repeat_interleave(q_BNSD.shape[1] // each.shape[1], dim=1) for each in (k_BNSD, v_BNSD)
            )
            grouped = False
        found_BNSD = functional.scaled_dot_product_attention(
            q_BNSD, k_BNSD, v_BNSD, is_causal=True, enable_gqa=grouped
        )
        found_BSND = found_BNSD[..., : self.heads.width].transpose(1, 2)
        y_BSH: Tensor = x_BSH + self.maps["out"](found_BSND.flatten(2))
        return y_BSH

    def _grouped(self, h_BSH: Tensor) -> tuple[Tensor, ...]:
        heads = self.heads
        counts = (heads.heads, heads.kv_heads, heads.kv_heads)
        qkv_BSND = self.maps["qkv"](h_BSH).unflatten(-1, (-1, heads.width))
        return tuple(each.transpose(1, 2) for each in qkv_BSND.split(counts, dim=2))

    def _latent(self, h_BSH: Tensor) -> tuple[Tensor, ...]:
        heads, maps = self.heads, self.maps
        assert heads.latent is not None
        q_BSR = self.norms[1](maps["q_down"](h_BSH))
        q_BNSD = maps["q_up"](q_BSR).unflatten(-1, (heads.heads, -1)).transpose(1, 2)
        kv_BSR, rope_BSD = maps["kv_down"](h_BSH).split((heads.latent[1], heads.rope), dim=-1)
        kv_BSD = maps["kv_up"](self.norms[2](kv_BSR))
        k_BNSD, v_BNSD = kv_BSD.unflatten(-1, (heads.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        shared_BNSD = rope_BSD.unsqueeze(1).expand(-1, heads.heads, -1, -1)
        return q_BNSD, torch.cat((k_BNSD, shared_BNSD), dim=-1), v_BNSD


def _shapes(hidden: int, heads: Heads) -> dict[str, tuple[int, int]]:
    """Rows in and columns out of each matrix."""
    out = (heads.heads * heads.width, hidden)
    if heads.latent is None:
        return {"qkv": (hidden, (heads.heads + 2 * heads.kv_heads) * heads.width), "out": out}
    queries, keys = heads.latent
    return {
        "q_down": (hidden, queries),
        "q_up": (queries, heads.heads * (heads.width + heads.rope)),
        "kv_down": (hidden, keys + heads.rope),
        "kv_up": (keys, 2 * heads.heads * heads.width),
        "out": out,
    }
