"""Attention of the language-model example against plain loops over heads and positions, in float64."""

from __future__ import annotations

import cmath
import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm.attention import (  # isort: skip
    AttentionConfig,
    AttentionCore,
    attend_by_blocks,
    attend_densely,
    make_attention,
    rope_table,
)

SEQ, BATCH = 7, 2
ROUNDING = 1e-5  # the model's cosines and sines are float32
GROUPED = AttentionConfig(dim=12, heads=4, kv_heads=2, head_dim=6, rope_base=100.0, norm_eps=1e-3)
LATENT = AttentionConfig(
    dim=12, heads=4, kv_heads=4, head_dim=6, kind="latent", rope_base=100.0, norm_eps=1e-3,
    q_rank=10, kv_rank=8, rope_dim=4, value_dim=5,
)  # fmt: skip
CASES = {
    "as many heads of keys": dataclasses.replace(GROUPED, kv_heads=4),
    "grouped": GROUPED,
    "one head of keys": dataclasses.replace(GROUPED, kv_heads=1, head_dim=4),
    "norms as in qwen3": dataclasses.replace(GROUPED, qk_norm=True),
    "biases as in qwen2": dataclasses.replace(GROUPED, qkv_bias=True),
    "window": dataclasses.replace(GROUPED, window=3),
    "window of one": dataclasses.replace(GROUPED, window=1),
    "window as long as the sequence": dataclasses.replace(GROUPED, window=SEQ),
    "sinks": dataclasses.replace(GROUPED, sinks=True),
    "as in gpt-oss": dataclasses.replace(GROUPED, qkv_bias=True, out_bias=True, window=3, sinks=True),
    "latent": LATENT,
}


def make(config: AttentionConfig, layer: int, seed: int) -> nn.Module:
    """An attention whose parameters, also biases, norms and sinks, are random numbers."""
    torch.manual_seed(seed)
    attention = make_attention(config, layer).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def run(attention: nn.Module, config: AttentionConfig, x_BSH: Tensor) -> Tensor:
    cos_SD, sin_SD = rope_table(config.rotated_width, SEQ, config.rope_base)
    return attention(x_BSH, cos_SD.double(), sin_SD.double())


# -- the reference: one sequence, one head, one query at a time --------------------------------------------


def turned(x_D: Tensor, position: int, base: float) -> Tensor:
    """Pair (i, i + D/2) as a complex number, turned by position * base^(-2i / D)."""
    half = len(x_D) // 2
    turns = [cmath.exp(1j * position * base ** (-i / half)) for i in range(half)]
    pairs = [torch.complex(x_D[i], x_D[half + i]) * turns[i] for i in range(half)]
    return torch.stack([pair.real for pair in pairs] + [pair.imag for pair in pairs])


def normed(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_D / (x_D.square().mean() + eps).sqrt() * weight_D


def attended(
    q_SD: list[Tensor], k_SD: list[Tensor], v_SV: list[Tensor], window: int, sink: Tensor | None
) -> list[Tensor]:
    found = []
    for query in range(len(q_SD)):
        seen = [key for key in range(query + 1) if window == 0 or query - key < window]
        weights = [((q_SD[query] * k_SD[key]).sum() / math.sqrt(len(q_SD[query]))).exp() for key in seen]
        total = sum(weights) + (0.0 if sink is None else sink.exp())
        found.append(sum(weight * v_SV[key] for weight, key in zip(weights, seen, strict=True)) / total)
    return found


def part(w: dict[str, Tensor], name: str, head: int, width: int, x: Tensor) -> Tensor:
    rows = slice(head * width, (head + 1) * width)
    y = w[f"{name}.weight"][rows] @ x
    return y + w[f"{name}.bias"][rows] if f"{name}.bias" in w else y


def grouped_heads(w: dict[str, Tensor], c: AttentionConfig, x_SH: Tensor, head: int, window: int):
    own, places = head // (c.heads // c.kv_heads), range(SEQ)
    q = [part(w, "q", head, c.head_dim, x) for x in x_SH]
    k, v = ([part(w, name, own, c.head_dim, x) for x in x_SH] for name in "kv")
    if c.qk_norm:
        q = [normed(each, w["q_norm.weight"], c.norm_eps) for each in q]
        k = [normed(each, w["k_norm.weight"], c.norm_eps) for each in k]
    q, k = ([turned(each[i], i, c.rope_base) for i in places] for each in (q, k))
    return attended(q, k, v, window, w["sinks_N"][head] if c.sinks else None)


def latent_heads(w: dict[str, Tensor], c: AttentionConfig, x_SH: Tensor, head: int, window: int):
    q, k, v = [], [], []
    for i, x in enumerate(x_SH):
        q_latent = normed(w["q_down.weight"] @ x, w["q_norm.weight"], c.norm_eps)
        query = part(w, "q_up", head, c.head_dim + c.rope_dim, q_latent)
        q.append(torch.cat([query[: c.head_dim], turned(query[c.head_dim :], i, c.rope_base)]))
        down = w["kv_down.weight"] @ x
        latent = normed(down[: c.kv_rank], w["kv_norm.weight"], c.norm_eps)
        both = part(w, "kv_up", head, c.head_dim + c.value_dim, latent)
        k.append(torch.cat([both[: c.head_dim], turned(down[c.kv_rank :], i, c.rope_base)]))
        v.append(both[c.head_dim :])
    return attended(q, k, v, window, None)


def reference(w: dict[str, Tensor], c: AttentionConfig, x_BSH: Tensor, layer: int) -> Tensor:
    heads_of = latent_heads if c.kind == "latent" else grouped_heads
    window, results = (c.window if layer in (0, 2, 4) else 0), []
    for x_SH in x_BSH:
        heads = [heads_of(w, c, x_SH, head, window) for head in range(c.heads)]
        rows = [torch.cat([head[i] for head in heads]) for i in range(SEQ)]
        results.append(torch.stack([w["out.weight"] @ row + w.get("out.bias", 0.0) for row in rows]))
    return torch.stack(results)


# -- tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer"), [*((name, 0) for name in CASES), ("window", 1), ("as in gpt-oss", 3)]
)
def test_equals_loops(name: str, layer: int, seed: int) -> None:
    """Forward, and the gradients of x and of all parameters. Of windows, the odd layers have none."""
    config = CASES[name]
    attention = make(config, layer, seed)
    x_BSH, factor_BSH = torch.randn(2, BATCH, SEQ, config.dim, dtype=torch.float64)
    found = []
    weights = dict(attention.named_parameters())
    for compute in (run, None):
        x = x_BSH.clone().requires_grad_()
        y = run(attention, config, x) if compute else reference(weights, config, x, layer)
        attention.zero_grad()
        (y * factor_BSH).sum().backward()
        found.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in weights.items()}})
    for value in ("y", "x", *weights):
        assert found[0][value] is not None and found[1][value] is not None
        bound = ROUNDING * max(float(found[1][value].abs().max()), 1e-3)
        assert_close(found[0][value], found[1][value], rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["grouped", "as in gpt-oss", "latent"])
def test_heads_are_as_many_as_the_products_return(name: str, seed: int) -> None:
    """Halves of the heads by themselves, as ranks of tensor parallelism have them, sum up to the whole."""
    config = dataclasses.replace(CASES[name], out_bias=False)
    attention = make(config, 0, seed)
    x_BSH = torch.randn(BATCH, SEQ, config.dim, dtype=torch.float64)
    want, total = run(attention, config, x_BSH), torch.zeros_like(x_BSH)
    for half in range(2):
        own = make(config, 0, seed)
        for part_name in ("q", "k", "v", "q_up", "kv_up"):
            if (linear := getattr(own, part_name, None)) is not None:
                linear.weight = nn.Parameter(linear.weight.chunk(2)[half])
                if linear.bias is not None:
                    linear.bias = nn.Parameter(linear.bias.chunk(2)[half])
        own.out.weight = nn.Parameter(own.out.weight.chunk(2, dim=1)[half])
        if config.sinks:
            own.sinks_N = nn.Parameter(own.sinks_N.chunk(2)[half])
        total = total + run(own, config, x_BSH)
    assert_close(total, want)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("length", [5, 200])
def test_blocks_equal_all_logits(length: int, window: int, sinks: bool, seed: int) -> None:
    """The way of GPUs, as far as the CPU computes it: the forward."""
    torch.manual_seed(seed)
    q_BNSD, k_BMSD, v_BMSD = (torch.randn(2, heads, length, 16) for heads in (6, 2, 2))
    sinks_N = torch.randn(6) if sinks else None
    with torch.no_grad():
        found = attend_by_blocks(q_BNSD, k_BMSD, v_BMSD, window, sinks_N)
        want = attend_densely(q_BNSD, k_BMSD, v_BMSD, window, sinks_N)
    assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (5, False), (5, True), (0, True)])
def test_fewer_queries_are_those_of_the_last_keys(window: int, sinks: bool, seed: int) -> None:
    """As a chunk of context parallelism has them, in all ways to compute it."""
    torch.manual_seed(seed)
    q_BNSD, k_BMSD, v_BMSD = (torch.randn(2, heads, 24, 16) for heads in (6, 2, 2))
    sinks_N = torch.randn(6) if sinks else None
    want = attend_densely(q_BNSD, k_BMSD, v_BMSD, window, sinks_N)[:, :, -8:]
    last_BNSD = q_BNSD[:, :, -8:]
    with torch.no_grad():
        for found in (
            AttentionCore(window)(last_BNSD, k_BMSD, v_BMSD, sinks_N),
            attend_densely(last_BNSD, k_BMSD, v_BMSD, window, sinks_N),
            attend_by_blocks(last_BNSD, k_BMSD, v_BMSD, window, sinks_N),
        ):
            assert_close(found, want, rtol=1e-4, atol=1e-5)
