"""Attention of the language-model example against plain loops over heads and positions, in float64."""

import cmath
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import attention as lm_attention  # isort: skip
from lm.attention import (  # isort: skip
    AttentionConfig,
    AttentionCore,
    Kernels,
    attend_by_blocks,
    attend_by_slices,
    attend_densely,
    attend_in_two,
    fit_kernel,
    make_attention,
    make_block_mask,
    sees,
)
from lm.errors import RunError  # isort: skip
from lm.rotary import rope_frequencies, rope_table  # isort: skip

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
    "yarn": dataclasses.replace(
        GROUPED, head_dim=12, rope_factor=8.0, rope_positions=400, rope_truncate=False
    ),
    "yarn of latents": dataclasses.replace(
        LATENT, rope_dim=12, rope_factor=8.0, rope_positions=400, rope_mscale=0.7
    ),
}


def make(config: AttentionConfig, layer: int, seed: int) -> nn.Module:
    """An attention whose parameters, also biases, norms and sinks, are random numbers."""
    torch.manual_seed(seed)
    attention = make_attention(config, layer).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def run(attention: nn.Module, config: AttentionConfig, x_BSH: Tensor) -> Tensor:
    cos_SD, sin_SD = rope_table(config, SEQ)
    return attention(x_BSH, cos_SD.double(), sin_SD.double())


# -- the reference: one sequence, one head, one query at a time --------------------------------------------
def frequency(c: AttentionConfig, i: int, half: int) -> float:
    """The angle base^(-2i / D), or as YaRN has it: that of a window as long as before, of one so many times
    as long, or in between. A pair that turns n times within a window as before has the place
    (D / 2) log_base(positions / 2 pi n)."""
    plain = c.rope_base ** (-i / half)
    if c.rope_factor == 1:
        return plain
    low, high = (half * math.log(c.rope_positions / (2 * math.pi * n), c.rope_base) for n in (32, 1))
    if c.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    share = min(max((i - max(low, 0)) / (high - max(low, 0)), 0.0), 1.0)
    return (1 - share) * plain + share * plain / c.rope_factor


def turned(x_D: Tensor, position: int, c: AttentionConfig) -> Tensor:
    """Pair (i, i + D/2) as a complex number, turned by the position's angle, and grown as YaRN has it."""
    half = len(x_D) // 2
    growth = 1.0 if c.rope_factor == 1 or c.rope_mscale else 1 + math.log(c.rope_factor) / 10
    turns = [growth * cmath.exp(1j * position * frequency(c, i, half)) for i in range(half)]
    pairs = [torch.complex(x_D[i], x_D[half + i]) * turns[i] for i in range(half)]
    return torch.stack([pair.real for pair in pairs] + [pair.imag for pair in pairs])


def normed(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_D / (x_D.square().mean() + eps).sqrt() * weight_D


def attended(
    q_SD: list[Tensor],
    k_SD: list[Tensor],
    v_SV: list[Tensor],
    window: int,
    sink: Tensor | None,
    growth: float = 1.0,
) -> list[Tensor]:
    found, scale = [], growth / math.sqrt(len(q_SD[0]))
    for query in range(len(q_SD)):
        seen = [key for key in range(query + 1) if window == 0 or query - key < window]
        weights = [((q_SD[query] * k_SD[key]).sum() * scale).exp() for key in seen]
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
    q, k = ([turned(each[i], i, c) for i in places] for each in (q, k))
    return attended(q, k, v, window, w["sinks_N"][head] if c.sinks else None)


def latent_heads(w: dict[str, Tensor], c: AttentionConfig, x_SH: Tensor, head: int, window: int):
    q, k, v = [], [], []
    for i, x in enumerate(x_SH):
        q_latent = normed(w["q_down.weight"] @ x, w["q_norm.weight"], c.norm_eps)
        query = part(w, "q_up", head, c.head_dim + c.rope_dim, q_latent)
        q.append(torch.cat([query[: c.head_dim], turned(query[c.head_dim :], i, c)]))
        down = w["kv_down.weight"] @ x
        latent = normed(down[: c.kv_rank], w["kv_norm.weight"], c.norm_eps)
        both = part(w, "kv_up", head, c.head_dim + c.value_dim, latent)
        k.append(torch.cat([both[: c.head_dim], turned(down[c.kv_rank :], i, c)]))
        v.append(both[c.head_dim :])
    growth = (1 + c.rope_mscale * math.log(c.rope_factor) / 10) ** 2
    return attended(q, k, v, window, None, growth)


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


GPT_OSS = AttentionConfig(
    dim=8, heads=1, kv_heads=1, head_dim=64, rope_base=150_000.0, rope_factor=32.0, rope_truncate=False
)
DEEPSEEK = AttentionConfig(
    dim=8, heads=1, kv_heads=1, head_dim=128, kind="latent", rope_dim=64, value_dim=128,
    rope_factor=40.0, rope_mscale=1.0,
)  # fmt: skip


def test_yarn_of_published_models_by_hand() -> None:
    """Within 4096 positions pair i of 32 turns 4096 base^(-i / 32) / 2 pi times: of gpt-oss 32 times at
    i = 8.093 and once at 17.398, of DeepSeek-V3 at 10.47 and 22.51, which are rounded to 10 and 23."""
    gpt_oss, deepseek = rope_frequencies(GPT_OSS), rope_frequencies(DEEPSEEK)
    plain = [base ** (-i / 32) for base in (150_000.0, 10_000.0) for i in range(32)]
    for found, start, low, high, factor in (
        (gpt_oss, 0, 8.092779, 17.398025, 32),
        (deepseek, 32, 10, 23, 40),
    ):
        for i in range(32):
            share = min(max((i - low) / (high - low), 0), 1)
            want = plain[start + i] * (1 - share * (1 - 1 / factor))
            assert float(found[i]) == pytest.approx(want, rel=1e-5), i
    assert float(gpt_oss[8]) == plain[8] and float(gpt_oss[18]) == pytest.approx(plain[18] / 32)
    cos_SD, sin_SD = rope_table(GPT_OSS, 131_072)
    assert_close(cos_SD.square() + sin_SD.square(), torch.full((131_072, 32), 1.3465736**2))  # 1 + ln 32 / 10
    assert GPT_OSS.logit_scale == 1 / 8
    cos_SD, sin_SD = rope_table(DEEPSEEK, 100)
    assert_close(cos_SD.square() + sin_SD.square(), torch.ones(100, 32))
    assert DEEPSEEK.logit_scale == pytest.approx(1.8738537 / math.sqrt(192))  # (1 + ln 40 / 10)^2


def test_angles_of_far_positions() -> None:
    """At position 131071 the fast pairs of qwen3-30b-a3b have turned 20 861 times and less."""
    config = dataclasses.replace(GPT_OSS, head_dim=128, rope_base=1e6, rope_factor=1.0)
    cos_SD, sin_SD = rope_table(config, 131_072)
    for i in range(64):
        want = cmath.exp(131_071j * 1e6 ** (-i / 64))
        assert abs(complex(float(cos_SD[-1, i]), float(sin_SD[-1, i])) - want) < 1e-7


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (200, 200), (8, 24)])
def test_all_ways_to_attend_are_one(queries: int, keys: int, window: int, sinks: bool, seed: int) -> None:
    """Fewer queries are those of the last keys, as a chunk of context parallelism has them. The way of GPUs
    as far as the CPU computes it: the forward."""
    torch.manual_seed(seed)
    q_BNSD, k_BMSD, v_BMSD = (torch.randn(2, heads, keys, 16) for heads in (6, 2, 2))
    sinks_N = torch.randn(6) if sinks else None
    want = attend_densely(q_BNSD, k_BMSD, v_BMSD, window, sinks_N, 0.25)[:, :, -queries:]
    last_BNSD = q_BNSD[:, :, -queries:]
    with torch.no_grad():
        for found in (
            AttentionCore(window)(last_BNSD, k_BMSD, v_BMSD, sinks_N),
            attend_densely(last_BNSD, k_BMSD, v_BMSD, window, sinks_N, 0.25),
            attend_by_blocks(last_BNSD, k_BMSD, v_BMSD, window, sinks_N, 0.25),
        ):
            assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 100, 128, 300])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (512, 512), (500, 500), (128, 640), (100, 333)])
def test_blocks_are_those_of_all_pairs(queries: int, keys: int, window: int) -> None:
    """As torch's create_block_mask finds them, of each pair of a query and a key."""
    first, visible = keys - queries, sees(window)
    found = make_block_mask(window, queries, keys, torch.device("cpu"))
    want = create_block_mask(
        lambda b, h, query, key: visible(query + first, key), None, None, queries, keys, device="cpu"
    )
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks"):
        one, other = getattr(found, name), getattr(want, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert found.seq_lengths == want.seq_lengths and found.BLOCK_SIZE == want.BLOCK_SIZE


def test_blocks_of_a_long_window_take_little() -> None:
    """131072 keys and 65536 queries: 512 x 1024 blocks. All pairs would take 8.6 GB."""
    mask = make_block_mask(0, 65_536, 131_072, torch.device("cpu"))
    assert int(mask.kv_num_blocks.sum()) == 512  # on the diagonal
    assert int(mask.full_kv_num_blocks.sum()) == sum(range(512, 1024))


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (5, False), (5, True), (0, True)])
def test_slices_of_queries_equal_all_logits(
    window: int, sinks: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Seven slices of three queries and one of two, forward and gradients, of the sinks too."""
    torch.manual_seed(seed)
    shapes = [(2, 6, 23, 4), (2, 2, 40, 4), (2, 2, 40, 4), (6,)]
    q, k, v, sink = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    monkeypatch.setattr(lm_attention, "LOGITS_BYTES", 3 * 4 * 2 * 6 * 40)
    found, parts = [], (q, k, v, sink) if sinks else (q, k, v)
    for attend in (attend_by_slices, attend_densely):
        y = attend(q, k, v, window, sink if sinks else None, 0.3)
        found.append([y, *torch.autograd.grad((y * y).sum(), parts)])
    assert_close(*found)


def test_all_logits_of_long_windows_are_refused() -> None:
    """No kernel of GPUs takes a tensor of the CPU, which stands for what none of them takes."""
    q, k = torch.empty(1).expand(1, 32, 32_768, 128), torch.empty(1).expand(1, 4, 131_072, 128)
    with pytest.raises(RunError) as caught:
        fit_kernel(q, k, k)
    assert (
        "queries [1, 32, 32768, 128], keys [1, 4, 131072, 128] and values [1, 4, 131072, 128], torch.float32"
        ": torch has no kernel for it but one that keeps all logits, 524288 MiB here and at most 256: give "
    ) in str(caught.value)
    k_BNSD, v_BNSV = fit_kernel(q[:, :, :100], k[:, :, :200], k[:, :, :200])
    assert k_BNSD.shape == v_BNSV.shape == (1, 32, 200, 128)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return y, sums, None


def _cpu_backward(*tensors: Any) -> tuple[Tensor, ...]:
    *given, _, is_causal, scale = tensors
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, ...] = backward(*given, 0.0, is_causal, scale=scale)
    return found


@pytest.mark.parametrize("queries", [1, 8, 23])
def test_two_calls_of_a_kernel_equal_all_logits(queries: int, seed: int) -> None:
    """Forward and gradients, in float64, by the CPU's kernels in the place of a GPU's."""
    torch.manual_seed(seed)
    shapes = [(2, 3, queries, 16), (2, 3, 24, 16), (2, 3, 24, 16), (2, 3, queries, 16)]
    *parts, factor = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    found = []
    for attend in (
        lambda q, k, v: attend_in_two(q, k, v, 0.3, Kernels(_cpu_forward, _cpu_backward)),
        lambda q, k, v: attend_densely(q, k, v, 0, None, 0.3),
    ):
        own = [each.clone().requires_grad_() for each in parts]
        y = attend(*own)
        found.append([y.detach(), *torch.autograd.grad((y * factor).sum(), own)])
    assert_close(*found)
