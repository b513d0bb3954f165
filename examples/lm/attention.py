"""Attention of the published models: grouped-query attention with what they add to it, and multi-head latent
attention (DeepSeek-V3).

Shape letters, beside those of moecomm: B sequences, S positions, N query heads, M heads of keys and values,
D width of a head's queries and keys, V width of its values.

Both kinds take the number of heads from the width that their products return. So under tensor parallelism,
where `q`, `k`, `v` (`q_up`, `kv_up`) are split by columns and `out` by rows, each rank computes its own
heads. What lies between the products is one call of the module `core`, which may be replaced by another one
with the same arguments, for sequences that are spread over ranks for example.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from moecomm.nn import recompute_outputs


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and kind of a model's attention.

    Attributes:
        dim: width of a token.
        heads: query heads (N).
        kv_heads: heads of keys and values (M), a divisor of heads; "latent" has as many as heads.
        head_dim: width of a head's queries, keys and values; of "latent" that of the part of queries and keys
            without a position.
        kind: "grouped", grouped-query attention (arXiv 2305.13245), or "latent", multi-head latent attention
            (DeepSeek-V2, arXiv 2405.04434, section 2.1).
        rope_base: base of the rotary frequencies.
        norm_eps: of the norms within.
        qk_norm: "grouped": an RMSNorm of each head's queries and keys before their rotation, as Qwen3 has it.
        qkv_bias: "grouped": biases of queries, keys and values, as Qwen2 and gpt-oss have them.
        out_bias: "grouped": a bias of the output, as gpt-oss has it.
        window: "grouped": above zero, the first, third, ... layer sees only so many positions, its own and
            those right before it, as in gpt-oss.
        sinks: "grouped": a trained logit of each head, which takes part in its softmax and has no value, as
            in gpt-oss.
        q_rank: "latent": width of the queries' latent.
        kv_rank: "latent": width of the latent of keys and values.
        rope_dim: "latent": width of the part of queries and keys that has a position; keys share it.
        value_dim: "latent": width of a head's values.
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: str = "grouped"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    sinks: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    @property
    def rotated_width(self) -> int:
        """The width of a head's queries that has a position."""
        return self.rope_dim if self.kind == "latent" else self.head_dim

    @property
    def qk_width(self) -> int:
        """D."""
        return self.head_dim + self.rope_dim

    @property
    def value_width(self) -> int:
        """V."""
        return self.value_dim or self.head_dim

    def window_of(self, layer: int) -> int:
        """Returns the positions that a layer sees, 0 for all up to its own."""
        return self.window if layer % 2 == 0 else 0


def rope_table(head_dim: int, max_seq: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every (position, frequency), both (S, D/2) float32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_seq, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle, so that dot products see only distances."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return torch.cat((first * cos_SD - second * sin_SD, first * sin_SD + second * cos_SD), dim=-1)


def split_heads(x_BSH: Tensor, width: int) -> Tensor:
    """Returns (B, heads, S, width), with as many heads as the last dimension has."""
    return x_BSH.unflatten(-1, (-1, width)).transpose(1, 2)


class InnerNorm(nn.RMSNorm):
    """RMSNorm of a product's result, computed in the type of the norm's weight: within autocast the result
    has fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class GroupedAttention(nn.Module):
    """Causal attention in which N / M heads share keys and values; with M = N that of arXiv 1706.03762."""

    sinks_N: nn.Parameter | None

    def __init__(self, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.k = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.dim, bias=config.out_bias)
        self.q_norm = InnerNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = InnerNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.register_parameter("sinks_N", nn.Parameter(torch.zeros(config.heads)) if config.sinks else None)
        self.core: nn.Module = AttentionCore(config.window_of(layer))

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q_BNSD, k_BMSD, v_BMSV = (
            split_heads(project(x_BSH), self.head_dim) for project in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSD, k_BMSD = self.q_norm(q_BNSD), self.k_norm(k_BMSD)
        q_BNSD, k_BMSD = rotate(q_BNSD, cos_SD, sin_SD), rotate(k_BMSD, cos_SD, sin_SD)
        sinks_N = self.sinks_N.to_local() if isinstance(self.sinks_N, DTensor) else self.sinks_N
        y_BNSV = self.core(q_BNSD, k_BMSD, v_BMSV, sinks_N)
        return self.out(y_BNSV.transpose(1, 2).flatten(-2))


class LatentAttention(nn.Module):
    """Causal attention whose queries, and whose keys and values, come from narrow latents. Beside them each
    key has a part with a position, the same for all heads. Under tensor parallelism `share_keys` gathers that
    part.

    Attributes:
        drops_up: the heads' queries, keys and values are not kept for the backward, but made again of the
            results of `q_down` and `kv_down`.
    """

    def __init__(self, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        nope, rope, value = config.head_dim, config.rope_dim, config.value_dim
        self.q_down = nn.Linear(config.dim, config.q_rank, bias=False)
        self.q_norm = InnerNorm(config.q_rank, eps=config.norm_eps)
        self.q_up = nn.Linear(config.q_rank, config.heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(config.dim, config.kv_rank + rope, bias=False)
        self.kv_norm = InnerNorm(config.kv_rank, eps=config.norm_eps)
        self.kv_up = nn.Linear(config.kv_rank, config.heads * (nope + value), bias=False)
        self.out = nn.Linear(config.heads * value, config.dim, bias=False)
        self.share_keys: nn.Module = nn.Identity()
        self.core: nn.Module = AttentionCore(config.window_of(layer))
        self.drops_up = False

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        def up(q_BSR: Tensor, kv_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._make_heads(q_BSR, kv_BSR, cos_SD, sin_SD)

        latents = self.q_down(x_BSH), self.kv_down(x_BSH)
        heads = up(*latents)
        with recompute_outputs(up, latents, heads) if self.drops_up else contextlib.nullcontext():
            y_BNSV = self.core(*heads, None)
        return self.out(y_BNSV.transpose(1, 2).flatten(-2))

    def _make_heads(
        self, q_BSR: Tensor, kv_BSR: Tensor, cos_SD: Tensor, sin_SD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the heads' queries and keys (B, N, S, D), and values (B, N, S, V), of the latents."""
        config = self.config
        nope, rope, value = config.head_dim, config.rope_dim, config.value_dim
        q_BNSD = split_heads(self.q_up(self.q_norm(q_BSR)), nope + rope)
        latent_BSR, k_rope_BSD = kv_BSR.split((config.kv_rank, rope), dim=-1)
        k_rope_BSD = self.share_keys(k_rope_BSD)
        kv_BNSD = split_heads(self.kv_up(self.kv_norm(latent_BSR)), nope + value)
        k_nope_BNSD, v_BNSV = kv_BNSD.split((nope, value), dim=-1)
        q_nope_BNSD, q_rope_BNSD = q_BNSD.split((nope, rope), dim=-1)
        k_rope_BNSD = rotate(k_rope_BSD.unsqueeze(1), cos_SD, sin_SD).expand(-1, k_nope_BNSD.shape[1], -1, -1)
        q_BNSD = torch.cat((q_nope_BNSD, rotate(q_rope_BNSD, cos_SD, sin_SD)), dim=-1)
        return q_BNSD, torch.cat((k_nope_BNSD, k_rope_BNSD), dim=-1), v_BNSV


Attention = GroupedAttention | LatentAttention


def make_attention(config: AttentionConfig, layer: int) -> Attention:
    return (LatentAttention if config.kind == "latent" else GroupedAttention)(config, layer)


class AttentionCore(nn.Module):
    """Causal softmax attention of heads: core(q_BNSD, k_BMSD, v_BMSV, sinks_N) -> (B, N, S, V) of v's dtype.

    There may be fewer queries than keys; they are those of the last keys' positions. The query at i sees the
    keys from max(0, i - window + 1) to i, with window 0 those from 0 to i; logits are multiplied by D^-0.5. A
    head's sink, if sinks_N is not None, is one logit more in the softmax, without a value.

    Without window and sinks it is torch's scaled_dot_product_attention. That has no kernel for them, so with
    one of them it is flex_attention on GPUs, compiled: it skips the blocks of keys outside a window, and
    keeps S numbers a head for its backward, not S^2. (The mask of blocks is computed once a length, which for
    a moment takes S^2 bytes.) Of the sinks its logsumexp is enough: a softmax with one logit s more is the
    softmax times sigmoid(logsumexp - s). flex_attention has no backward on the CPU; there all S^2 logits are
    computed.
    """

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window

    def forward(self, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, sinks_N: Tensor | None) -> Tensor:
        # Norms and rotations compute in float32, also within autocast.
        q_BNSD, k_BMSD = q_BNSD.to(v_BMSV.dtype), k_BMSD.to(v_BMSV.dtype)
        queries, keys = q_BNSD.shape[2], k_BMSD.shape[2]
        window = self.window if self.window < keys else 0
        if window == 0 and sinks_N is None:
            grouped = q_BNSD.shape[1] != k_BMSD.shape[1]
            mask: Any = None if queries == keys else causal_lower_right(queries, keys)
            return F.scaled_dot_product_attention(
                q_BNSD, k_BMSD, v_BMSV, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        if q_BNSD.is_cuda:
            with torch.autocast("cuda", enabled=False):  # all are of one type already
                return attend_by_blocks(q_BNSD, k_BMSD, v_BMSV, window, sinks_N, _compiled_flex_attention())
        return attend_densely(q_BNSD, k_BMSD, v_BMSV, window, sinks_N)

    def extra_repr(self) -> str:
        return f"window={self.window}" if self.window else ""


def sees(window: int) -> Callable[[Any, Any], Any]:
    """Returns the function (query, key) -> whether the query sees the key, of ints or of tensors."""

    def visible(query: Any, key: Any) -> Any:
        causal = query >= key
        return causal & (query - key < window) if window else causal

    return visible


def attend_densely(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, window: int, sinks_N: Tensor | None
) -> Tensor:
    """AttentionCore by all S^2 logits."""
    shared_by = q_BNSD.shape[1] // k_BMSD.shape[1]
    k_BNSD, v_BNSV = k_BMSD.repeat_interleave(shared_by, 1), v_BMSV.repeat_interleave(shared_by, 1)
    logits_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2)
    logits_BNSS = logits_BNSS.to(torch.promote_types(logits_BNSS.dtype, torch.float32))
    places_S = torch.arange(k_BMSD.shape[2], device=q_BNSD.device)
    hidden_SS = ~sees(window)(places_S[-q_BNSD.shape[2] :].unsqueeze(1), places_S)
    logits_BNSS = (logits_BNSS * q_BNSD.shape[-1] ** -0.5).masked_fill(hidden_SS, -torch.inf)
    if sinks_N is not None:
        column_BNS1 = sinks_N.to(logits_BNSS.dtype).view(1, -1, 1, 1).expand(*logits_BNSS.shape[:-1], 1)
        logits_BNSS = torch.cat((logits_BNSS, column_BNS1), dim=-1)
    shares_BNSS = logits_BNSS.softmax(dim=-1)[..., : k_BMSD.shape[2]]
    return shares_BNSS.to(v_BNSV.dtype) @ v_BNSV


def attend_by_blocks(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    v_BMSV: Tensor,
    window: int,
    sinks_N: Tensor | None,
    flex: Callable[..., Any] = flex_attention,
) -> Tensor:
    """AttentionCore by flex_attention, or what is compiled of it."""
    mask = _block_mask(window, q_BNSD.shape[2], k_BMSD.shape[2], q_BNSD.device)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": q_BNSD.shape[1] != k_BMSD.shape[1]}
    if sinks_N is None:
        y_BNSV: Tensor = flex(q_BNSD, k_BMSD, v_BMSV, **options)
        return y_BNSV
    y_BNSV, aux = flex(q_BNSD, k_BMSD, v_BMSV, **options, return_aux=AuxRequest(lse=True))
    rest_BNS = (aux.lse - sinks_N.unsqueeze(-1)).sigmoid()
    return y_BNSV * rest_BNS.unsqueeze(-1).to(y_BNSV.dtype)


@functools.lru_cache(maxsize=8)
def _block_mask(window: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    visible, first = sees(window), keys - queries
    return create_block_mask(
        lambda batch, head, query, key: visible(query + first, key),
        None,
        None,
        queries,
        keys,
        device=str(device),
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)
