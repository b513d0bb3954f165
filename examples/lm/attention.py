"""Attention of the published models: grouped-query attention with their additions, and multi-head latent
attention (DeepSeek-V3).

Shape letters, in addition to those of moecomm: B sequences, S positions, N query heads, M heads of keys and
values, D width of a head's queries and keys, V width of its values.

Both kinds derive the number of heads from the width of their products' results. So under tensor parallelism,
where `q`, `k`, `v` (`q_up`, `kv_up`) are split by columns and `out` by rows, each rank computes its own
heads. The inputs of keys and values pass through the module `gather_keys`, and the computation between the
products is one call of the module `core`. Both may be replaced, for sequences spread over ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

from lm.errors import RunError
from lm.recompute_outputs import recompute_outputs
from lm.rotary import rotate, yarn_growth

LOGITS_BYTES = 1 << 28
"""Most bytes of a call's logits: on GPUs where torch has no better kernel, and for the CPU's slices of
queries."""

BLOCK = 128
"""Queries and keys per block of flex_attention."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and kind of a model's attention.

    Attributes:
        dim: width of a token.
        heads: query heads (N).
        kv_heads: heads of keys and values (M), a divisor of heads; "latent" has as many as heads.
        head_dim: width of a head's queries, keys and values; for "latent", of the part of queries and keys
            without position.
        kind: "grouped", grouped-query attention (arXiv 2305.13245), or "latent", multi-head latent attention
            (DeepSeek-V2, arXiv 2405.04434, section 2.1).
        rope_base: base of the rotary frequencies.
        rope_factor: above 1, YaRN scales frequencies for windows this many times as long as before.
        rope_positions: for YaRN, the positions of earlier windows.
        rope_truncate: for YaRN: the ramp begins and ends at whole frequencies.
        rope_mscale: for YaRN: 0 multiplies cosines and sines by m = 0.1 ln(rope_factor) + 1, as in gpt-oss;
            other values multiply all logits by m^2, with m = 0.1 rope_mscale ln(rope_factor) + 1, as in
            DeepSeek-V3, whose mscale and mscale_all_dim are equal.
        norm_eps: epsilon of the norms in the attention.
        qk_norm: "grouped": an RMSNorm of each head's queries and keys before their rotation, as Qwen3 has it.
        qkv_bias: "grouped": biases of queries, keys and values, as Qwen2 and gpt-oss have them.
        out_bias: "grouped": a bias of the output, as gpt-oss has it.
        window: "grouped": above zero, the first, third, ... layer sees only this many positions, its own and
            those right before it, as in gpt-oss.
        sinks: "grouped": a trained logit per head, which takes part in its softmax but has no value, as in
            gpt-oss.
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
    rope_factor: float = 1.0
    rope_positions: int = 4096
    rope_truncate: bool = True
    rope_mscale: float = 0.0
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
        """The width of the part of a head's queries that has a position."""
        return self.rope_dim if self.kind == "latent" else self.head_dim

    @property
    def qk_width(self) -> int:
        """D."""
        return self.head_dim + self.rope_dim

    @property
    def value_width(self) -> int:
        """V."""
        return self.value_dim or self.head_dim

    @property
    def logit_scale(self) -> float:
        """The factor of the product of a query and a key: D^-0.5, with rope_mscale times m^2."""
        return self.qk_width**-0.5 * yarn_growth(self.rope_factor, self.rope_mscale) ** 2

    def window_of(self, layer: int) -> int:
        """Returns how many positions a layer sees; 0: all up to its own."""
        return self.window if layer % 2 == 0 else 0


def split_heads(x_BSH: Tensor, width: int) -> Tensor:
    """Returns (B, heads, S, width); the last dimension gives the number of heads."""
    return x_BSH.unflatten(-1, (-1, width)).transpose(1, 2)


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter under tensor parallelism."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class KeepKeys(nn.Module):
    """Returns the inputs of keys and values unchanged, (B, heads, S, width) each, for queries of the same
    positions."""

    def forward(self, k_BMSD: Tensor, v_BMSV: Tensor) -> tuple[Tensor, Tensor]:
        return k_BMSD, v_BMSV


class InnerNorm(nn.RMSNorm):
    """RMSNorm of a product's result, computed in the dtype of the norm's weight: within autocast the result
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
        self.gather_keys: nn.Module = KeepKeys()
        self.core: nn.Module = AttentionCore(config.window_of(layer), config.logit_scale)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q_BNSD, k_BMSD, v_BMSV = (
            split_heads(project(x_BSH), self.head_dim) for project in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSD, k_BMSD = self.q_norm(q_BNSD), self.k_norm(k_BMSD)
        q_BNSD, k_BMSD = rotate(q_BNSD, cos_SD, sin_SD), rotate(k_BMSD, cos_SD, sin_SD)
        # Norms compute in float32, even within autocast.
        q_BNSD, k_BMSD = q_BNSD.to(v_BMSV.dtype), k_BMSD.to(v_BMSV.dtype)
        k_BMSD, v_BMSV = self.gather_keys(k_BMSD, v_BMSV)
        sinks_N = None if self.sinks_N is None else local(self.sinks_N)
        y_BNSV = self.core(q_BNSD, k_BMSD, v_BMSV, sinks_N)
        return self.out(y_BNSV.transpose(1, 2).flatten(-2))


class LatentAttention(nn.Module):
    """Causal attention whose queries, and whose keys and values, are computed from narrow latents. Each key
    also has a part with a position, which all heads share. Under tensor parallelism `share_latents` gathers
    the latents of keys and values, with that part.

    Attributes:
        drops_up: the heads' queries, keys and values are not kept for the backward but recomputed from the
            latents.
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
        self.share_latents: nn.Module = nn.Identity()
        self.gather_keys: nn.Module = KeepKeys()
        self.core: nn.Module = AttentionCore(config.window_of(layer), config.logit_scale)
        self.drops_up = False

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        config = self.config
        q_BSR = self.q_down(x_BSH)
        latent_BSR, k_rope_BSD = self.kv_down(x_BSH).split((config.kv_rank, config.rope_dim), dim=-1)
        # Norms compute in float32, even within autocast.
        normed_BSR = self.kv_norm(latent_BSR).to(latent_BSR.dtype)
        shared_BSR = torch.cat((normed_BSR, k_rope_BSD), dim=-1)
        latent_BSR, k_rope_BSD = self.share_latents(shared_BSR).split(
            (config.kv_rank, config.rope_dim), dim=-1
        )
        k_rope_BSD = rotate(k_rope_BSD, cos_SD, sin_SD)
        # Latents are gathered rather than keys and values, which are wider by the number of heads.
        gathered = self.gather_keys(latent_BSR.unsqueeze(1), k_rope_BSD.unsqueeze(1))

        def up(q_BSR: Tensor, latent_B1SR: Tensor, k_rope_B1SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._make_heads(q_BSR, latent_B1SR, k_rope_B1SD, cos_SD, sin_SD)

        latents = q_BSR, *gathered
        heads = up(*latents)
        with recompute_outputs(up, latents, heads) if self.drops_up else contextlib.nullcontext():
            y_BNSV = self.core(*heads, None)
        return self.out(y_BNSV.transpose(1, 2).flatten(-2))

    def _make_heads(
        self, q_BSR: Tensor, latent_B1SR: Tensor, k_rope_B1SD: Tensor, cos_SD: Tensor, sin_SD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the heads' queries and keys (B, N, S, D), and values (B, N, S, V), from the latents. There
        may be more keys than queries (`gather_keys`)."""
        config = self.config
        nope, rope, value = config.head_dim, config.rope_dim, config.value_dim
        q_BNSD = split_heads(self.q_up(self.q_norm(q_BSR)), nope + rope)
        q_nope_BNSD, q_rope_BNSD = q_BNSD.split((nope, rope), dim=-1)
        q_rope_BNSD = rotate(q_rope_BNSD, cos_SD, sin_SD)
        kv_BNSD = split_heads(F.linear(latent_B1SR.squeeze(1), local(self.kv_up.weight)), nope + value)
        k_nope_BNSD, v_BNSV = kv_BNSD.split((nope, value), dim=-1)
        k_rope_BNSD = k_rope_B1SD.expand(-1, k_nope_BNSD.shape[1], -1, -1)
        return (
            torch.cat((q_nope_BNSD, q_rope_BNSD), dim=-1),
            torch.cat((k_nope_BNSD, k_rope_BNSD), dim=-1),
            v_BNSV,
        )


Attention = GroupedAttention | LatentAttention


def make_attention(config: AttentionConfig, layer: int) -> Attention:
    return (LatentAttention if config.kind == "latent" else GroupedAttention)(config, layer)


class AttentionCore(nn.Module):
    """Causal softmax attention of heads: core(q_BNSD, k_BMSD, v_BMSV, sinks_N) -> (B, N, S, V) of one dtype.

    There may be fewer queries than keys; they are then at the positions of the last keys. The query at i sees
    the keys from max(0, i - window + 1) to i, with window 0 those from 0 to i; logits are multiplied by
    `scale`, None for D^-0.5. A head's sink, if sinks_N is given, is one more logit of the softmax, without a
    value.

    Without window and sinks it uses torch's scaled_dot_product_attention, or for fewer queries than keys two
    calls of cuDNN's kernel (`attend_in_two`). Neither supports windows and sinks, for which GPUs use
    flex_attention, compiled: it skips blocks of keys outside a window, and keeps S numbers per head for its
    backward, not S^2. Its logsumexp suffices for sinks: a softmax with an additional logit s is the softmax
    times sigmoid(logsumexp - s). flex_attention has no backward on the CPU; there all logits of some queries
    at a time are computed, and again in the backward.

    On GPUs it raises RunError where torch only has a kernel that keeps all logits, if these take more than
    LOGITS_BYTES.
    """

    def __init__(self, window: int = 0, scale: float | None = None) -> None:
        super().__init__()
        self.window, self.scale = window, scale

    def forward(self, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, sinks_N: Tensor | None) -> Tensor:
        queries, keys = q_BNSD.shape[2], k_BMSD.shape[2]
        scale = q_BNSD.shape[-1] ** -0.5 if self.scale is None else self.scale
        window = self.window if self.window < keys else 0
        if window:  # blocks of keys that no query sees are left out
            first = max(0, keys - queries - window + 1) // BLOCK * BLOCK
            k_BMSD, v_BMSV = k_BMSD[:, :, first:], v_BMSV[:, :, first:]
        if not q_BNSD.is_cuda and (queries != keys or window or sinks_N is not None):
            return attend_by_slices(q_BNSD, k_BMSD, v_BMSV, window, sinks_N, scale)
        if window == 0 and sinks_N is None:
            if q_BNSD.is_cuda and queries < keys and cudnn_serves(q_BNSD, k_BMSD, v_BMSV):
                return attend_in_two(q_BNSD, k_BMSD, v_BMSV, scale)
            if q_BNSD.is_cuda:
                k_BMSD, v_BMSV = fit_kernel(q_BNSD, k_BMSD, v_BMSV)
            grouped = q_BNSD.shape[1] != k_BMSD.shape[1]
            mask: Any = None if queries == keys else causal_lower_right(queries, keys)
            return F.scaled_dot_product_attention(
                q_BNSD,
                k_BMSD,
                v_BMSV,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=grouped,
            )
        with torch.autocast("cuda", enabled=False):  # all tensors have one dtype already
            flex = _compiled_flex_attention()
            return attend_by_blocks(q_BNSD, k_BMSD, v_BMSV, window, sinks_N, scale, flex)

    def extra_repr(self) -> str:
        return f"window={self.window}" if self.window else ""


def cudnn_serves(q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor) -> bool:
    """Returns whether cuDNN's causal kernel takes keys and values of this kind, as many as queries."""
    queries, grouped = q_BNSD.shape[2], q_BNSD.shape[1] != k_BMSD.shape[1]
    own = k_BMSD[:, :, -queries:], v_BMSV[:, :, -queries:]
    return can_use_cudnn_attention(SDPAParams(q_BNSD, *own, None, 0.0, True, grouped))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_in_two(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, scale: float, kernels: Kernels | None = None
) -> Tensor:
    """AttentionCore for queries of the last keys, without window and sinks, by two calls of a kernel whose
    causal form needs as many queries as keys: one for the keys before the queries, which all queries see, and
    one for the queries' own keys. torch's single kernel for this, FlashAttention 2, predates Hopper.

    The logarithms of their softmaxes' sums merge the parts, as in ring attention (arXiv 2310.01889); the
    backward of each part starts from the merged result.
    """
    y_BNSV: Tensor = _InTwo.apply(q_BNSD, k_BMSD, v_BMSV, scale, kernels or CUDNN)  # type: ignore[no-untyped-call]
    return y_BNSV


class Kernels(NamedTuple):
    """A kernel of attention.

    Attributes:
        forward: (q, k, v, is_causal, scale) -> the result, the logarithms of its softmaxes' sums in float32,
            and further inputs of the backward.
        backward: (gradient, q, k, v, result, logarithms, others, is_causal, scale) -> those of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Any]:
    y, sums, *others, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return y, sums, others


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    others: Any,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    starts_q, starts_k, most_q, most_k, seed, offset = others
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, y, sums, seed, offset, None, starts_q, starts_k, most_q, most_k, 0.0, is_causal,
        scale=scale,
    )  # fmt: skip
    return found


CUDNN = Kernels(_cudnn_forward, _cudnn_backward)


def _parts(queries: int, keys: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """Returns the keys before the queries', and their own, each with whether its attention is causal."""
    first = keys - queries
    return (slice(first), False), (slice(first, None), True)


class _InTwo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, scale: float, kernels: Kernels
    ) -> Tensor:
        parts = [
            kernels.forward(q_BNSD, k_BMSD[:, :, seen], v_BMSV[:, :, seen], is_causal, scale)
            for seen, is_causal in _parts(q_BNSD.shape[2], k_BMSD.shape[2])
        ]
        sums = torch.logaddexp(parts[0][1], parts[1][1])
        shares = [(part - sums).exp().view(*q_BNSD.shape[:3], 1) for _, part, _ in parts]
        y_BNSV = (parts[0][0] * shares[0] + parts[1][0] * shares[1]).to(q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, k_BMSD, v_BMSV, y_BNSV, sums)
        ctx.others, ctx.scale, ctx.kernels = [others for _, _, others in parts], scale, kernels
        return y_BNSV

    @staticmethod
    def backward(ctx: Any, grad_BNSV: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BMSD, v_BMSV, y_BNSV, sums = ctx.saved_tensors
        found = []
        for (seen, is_causal), others in zip(
            _parts(q_BNSD.shape[2], k_BMSD.shape[2]), ctx.others, strict=True
        ):
            keys = k_BMSD[:, :, seen], v_BMSV[:, :, seen]
            whole = y_BNSV, sums, others, is_causal, ctx.scale
            found.append(ctx.kernels.backward(grad_BNSV, q_BNSD, *keys, *whole))
        before, own = found
        grads = before[0] + own[0], *(torch.cat(both, 2) for both in zip(before[1:], own[1:], strict=True))
        return *grads, None, None


def fit_kernel(q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values in a form for which torch has a causal kernel that keeps S numbers per head.

    cuDNN's kernel and FlashAttention need 2-byte numbers. With fewer queries than keys (`causal_lower_right`)
    only FlashAttention works, for keys and values of one width up to 256. All other cases take the
    memory-efficient kernel, with separate keys and values per head. Raises RunError if no kernel fits, and
    all logits in float32 would take more than LOGITS_BYTES.
    """
    square = q_BNSD.shape[2] == k_BMSD.shape[2]
    shared_by = q_BNSD.shape[1] // k_BMSD.shape[1]
    asked = SDPAParams(q_BNSD, k_BMSD, v_BMSV, None, 0.0, square, shared_by > 1)
    if can_use_flash_attention(asked) or (square and can_use_cudnn_attention(asked)):
        return k_BMSD, v_BMSV
    logits = 4 * q_BNSD.shape[:3].numel() * k_BMSD.shape[2]
    k_like, v_like = (x[:, :1].expand(-1, q_BNSD.shape[1], -1, -1) for x in (k_BMSD, v_BMSV))
    asked = SDPAParams(q_BNSD, k_like, v_like, None, 0.0, square, False)
    if logits > LOGITS_BYTES and not can_use_efficient_attention(asked):
        shapes = f"queries {list(q_BNSD.shape)}, keys {list(k_BMSD.shape)} and values {list(v_BMSV.shape)}"
        raise RunError(
            f"attention of {shapes}, {q_BNSD.dtype}: torch has no kernel for it "
            f"but one that keeps all logits, {logits >> 20} MiB here and at most {LOGITS_BYTES >> 20}: "
            "give --dtype bfloat16, --head-dim (latent: --value-dim, too) a multiple of 8, or a shorter --seq"
        )
    return k_BMSD.repeat_interleave(shared_by, 1), v_BMSV.repeat_interleave(shared_by, 1)


def sees(window: int) -> Callable[[Any, Any], Any]:
    """Returns the function (query, key) -> whether the query sees the key, for ints or tensors."""

    def visible(query: Any, key: Any) -> Any:
        causal = query >= key
        return causal & (query - key < window) if window else causal

    return visible


def attend_by_slices(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, window: int, sinks_N: Tensor | None, scale: float
) -> Tensor:
    """AttentionCore that computes all logits of some queries at a time, and again in the backward."""
    batch, heads, queries, _ = q_BNSD.shape
    keys = k_BMSD.shape[2]
    size = max(1, LOGITS_BYTES // (4 * batch * heads * keys))
    if size >= queries:
        return attend_densely(q_BNSD, k_BMSD, v_BMSV, window, sinks_N, scale)
    parts = []
    for start in range(0, queries, size):
        part_BNSD = q_BNSD[:, :, start : start + size]
        end = keys - queries + start + part_BNSD.shape[2]
        seen = slice(max(0, end - part_BNSD.shape[2] - window + 1) if window else 0, end)
        part = (part_BNSD, k_BMSD[:, :, seen], v_BMSV[:, :, seen], window, sinks_N, scale)
        parts.append(checkpoint(attend_densely, *part, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2)


def attend_densely(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, window: int, sinks_N: Tensor | None, scale: float
) -> Tensor:
    """AttentionCore that computes all logits at once."""
    shared_by = q_BNSD.shape[1] // k_BMSD.shape[1]
    k_BNSD, v_BNSV = k_BMSD.repeat_interleave(shared_by, 1), v_BMSV.repeat_interleave(shared_by, 1)
    logits_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2)
    logits_BNSS = logits_BNSS.to(torch.promote_types(logits_BNSS.dtype, torch.float32))
    places_S = torch.arange(k_BMSD.shape[2], device=q_BNSD.device)
    hidden_SS = ~sees(window)(places_S[-q_BNSD.shape[2] :].unsqueeze(1), places_S)
    logits_BNSS = (logits_BNSS * scale).masked_fill(hidden_SS, -torch.inf)
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
    scale: float,
    flex: Callable[..., Any] = flex_attention,
) -> Tensor:
    """AttentionCore by flex_attention, or by its compiled form."""
    mask = make_block_mask(window, q_BNSD.shape[2], k_BMSD.shape[2], q_BNSD.device)
    grouped = q_BNSD.shape[1] != k_BMSD.shape[1]
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": grouped, "scale": scale}
    if sinks_N is None:
        y_BNSV: Tensor = flex(q_BNSD, k_BMSD, v_BMSV, **options)
        return y_BNSV
    y_BNSV, aux = flex(q_BNSD, k_BMSD, v_BMSV, **options, return_aux=AuxRequest(lse=True))
    rest_BNS = (aux.lse - sinks_N.unsqueeze(-1)).sigmoid()
    return y_BNSV * rest_BNS.unsqueeze(-1).to(y_BNSV.dtype)


@functools.lru_cache(maxsize=8)
def make_block_mask(window: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Returns which blocks of keys a block of queries sees partly, and which fully. The ends of a block
    decide that: torch's create_block_mask would examine each pair of a query and a key, 17 GB for 131072 of
    both."""
    visible, first = sees(window), keys - queries
    starts_Q = torch.arange(0, queries, BLOCK, device=device).unsqueeze(1) + first
    starts_K = torch.arange(0, keys, BLOCK, device=device)
    ends_Q, ends_K = starts_Q + BLOCK - 1, starts_K + BLOCK - 1
    whole_QK = visible(starts_Q, ends_K) & visible(ends_Q, starts_K) & (ends_Q < keys)
    some_QK = starts_K <= ends_Q.clamp(max=keys - 1)
    if window:
        some_QK &= starts_Q - ends_K < window

    def listed(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
        order_QK = chosen_QK.int().argsort(dim=-1, descending=True, stable=True)
        return chosen_QK.sum(-1, dtype=torch.int32)[None, None], order_QK.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some_QK & ~whole_QK),
        *listed(whole_QK),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: visible(query + first, key),
        seq_lengths=(queries, keys),
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)
