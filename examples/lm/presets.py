"""Sizes that suit a machine, and sizes of published models: the defaults of the command line. Each has a flag
that overrides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAIN: dict[str, Any] = {
    "vocab": 0,
    "attention": "grouped",
    "kv_heads": 0,
    "head_dim": 0,
    "q_rank": 0,
    "kv_rank": 0,
    "rope_dim": 0,
    "value_dim": 0,
    "qk_norm": False,
    "qkv_bias": False,
    "out_bias": False,
    "window": 0,
    "sinks": False,
    "rope_base": 10_000.0,
    "rope_factor": 1.0,
    "rope_positions": 4096,
    "rope_truncate": True,
    "rope_mscale": 0.0,
    "norm_eps": 1e-6,
    "dense_layers": 0,
    "dense_ffn": 0,
    "shared_experts": 0,
    "shared_gate": False,
    "expert_bias": False,
    "router_bias": False,
    "score_function": "sigmoid",
    "pre_softmax": False,
    "normalize_topk": True,
    "scaling_factor": 1.0,
    "num_groups": 0,
    "topk_groups": 0,
    "bias_rate": 0.01,
    "aux_loss": "sequence",
    "aux_coef": 0.01,
}
"""Defaults of options that a preset leaves out, also for runs that are older than the option."""

SMALL: dict[str, Any] = {
    **PLAIN,
    "dim": 160,
    "layers": 4,
    "heads": 5,
    "tied": True,
    "experts": 8,
    "top_k": 2,
    "ffn": 320,
    "activation": "swiglu",
    "dtype": "float32",
    "seq": 128,
    "batch": 32,
    "steps": 240,
    "lr": 4e-3,
    "warmup": 20,
    "eval_every": 40,
    "eval_windows": 256,
    "save_every": 100,
    "log_every": 10,
}
"""Takes minutes on two cores."""

LARGE: dict[str, Any] = {
    **PLAIN,
    "dim": 1024,
    "layers": 8,
    "heads": 16,
    "tied": False,
    "experts": 48,  # like the batch, a multiple of 1, 2, 3, 4, 6 and 8 ranks
    "top_k": 4,
    "ffn": 512,
    "activation": "swiglu_interleaved",  # quack's products include this activation
    "dtype": "bfloat16",
    "seq": 512,
    "batch": 96,
    "steps": 400,  # 20 million tokens: the default text has 10 to 30 million, so it is read once or twice
    "lr": 8e-4,
    "warmup": 40,
    "aux_coef": 0.03,  # with 0.01 the experts' loads stay less even (docs/history.md)
    "eval_every": 100,
    "eval_windows": 480,
    "save_every": 400,  # a checkpoint takes 7.7 GB
    "log_every": 20,
}
"""Takes minutes on one to eight data-centre GPUs."""

# -- published models ----------------------------------------------------------------------------------------
# Each has the numbers of the config.json of the named model on Hugging Face; docs/models.md says what is left
# out. The training's settings are this program's own.

_PUBLISHED: dict[str, Any] = {
    **PLAIN,
    "tied": False,
    "activation": "swiglu_interleaved",
    "dtype": "bfloat16",
    "bias_rate": 0.0,
    "aux_loss": "batch",
    "seq": 4096,
    "batch": 8,
    "steps": 100,
    "lr": 3e-4,
    "warmup": 10,
    "eval_every": 100,
    "eval_windows": 8,
    "save_every": 100,
    "log_every": 10,
}

MIXTRAL_8X7B: dict[str, Any] = {  # mistralai/Mixtral-8x7B-v0.1
    **_PUBLISHED,
    "vocab": 32_000,
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_base": 1e6,
    "norm_eps": 1e-5,
    "experts": 8,
    "top_k": 2,
    "ffn": 14_336,
    "score_function": "softmax",
    "aux_coef": 0.02,
}

MIXTRAL_8X22B: dict[str, Any] = {  # mistralai/Mixtral-8x22B-v0.1
    **MIXTRAL_8X7B,
    "dim": 6144,
    "layers": 56,
    "heads": 48,
    "ffn": 16_384,
    "aux_coef": 0.001,
}

QWEN2_57B_A14B: dict[str, Any] = {  # Qwen/Qwen2-57B-A14B
    **_PUBLISHED,
    "vocab": 151_936,
    "dim": 3584,
    "layers": 28,
    "heads": 28,
    "kv_heads": 4,
    "head_dim": 128,
    "qkv_bias": True,
    "rope_base": 1e6,
    "experts": 64,
    "top_k": 8,
    "ffn": 2560,
    "shared_experts": 8,  # of 2560 columns each: shared_expert_intermediate_size 20480
    "shared_gate": True,
    "score_function": "softmax",
    "pre_softmax": True,
    "normalize_topk": False,
    "aux_coef": 0.001,
}

QWEN3_30B_A3B: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B
    **_PUBLISHED,
    "vocab": 151_936,
    "dim": 2048,
    "layers": 48,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "qk_norm": True,
    "rope_base": 1e6,
    "experts": 128,
    "top_k": 8,
    "ffn": 768,
    "score_function": "softmax",
    "pre_softmax": True,
    "aux_coef": 0.001,
}

DEEPSEEK_V3: dict[str, Any] = {  # deepseek-ai/DeepSeek-V3; balancing: arXiv 2412.19437, section 4.2
    **_PUBLISHED,
    "vocab": 129_280,
    "dim": 7168,
    "layers": 61,
    "attention": "latent",
    "heads": 128,
    "head_dim": 128,
    "q_rank": 1536,
    "kv_rank": 512,
    "rope_dim": 64,
    "value_dim": 128,
    "rope_factor": 40.0,
    "rope_mscale": 1.0,
    "dense_layers": 3,
    "dense_ffn": 18_432,
    "experts": 256,
    "top_k": 8,
    "ffn": 2048,
    "shared_experts": 1,
    "scaling_factor": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "bias_rate": 0.001,
    "aux_loss": "sequence",
    "aux_coef": 0.0001,
}

GPT_OSS_20B: dict[str, Any] = {  # openai/gpt-oss-20b
    **_PUBLISHED,
    "vocab": 201_088,
    "dim": 2880,
    "layers": 24,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "qkv_bias": True,
    "out_bias": True,
    "window": 128,
    "sinks": True,
    "rope_base": 150_000.0,
    "rope_factor": 32.0,
    "rope_truncate": False,
    "norm_eps": 1e-5,
    "experts": 32,
    "top_k": 4,
    "ffn": 2880,
    "activation": "swiglu_clamped",
    "expert_bias": True,
    "router_bias": True,
    "score_function": "softmax",
    "normalize_topk": False,  # a softmax after the choice already sums to one
    "aux_coef": 0.01,
}

PUBLISHED = {
    "mixtral-8x7b": MIXTRAL_8X7B,
    "mixtral-8x22b": MIXTRAL_8X22B,
    "qwen2-57b-a14b": QWEN2_57B_A14B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss-20b": GPT_OSS_20B,
}
PRESETS = {"small": SMALL, "large": LARGE, **PUBLISHED}


def choose(preset: str, device: str) -> dict[str, Any]:
    """Returns the defaults for `--preset` and `--device`."""
    return PRESETS[name_of(preset, device)]


def name_of(preset: str, device: str) -> str:
    """Returns `preset`, or the preset that "auto" means on this machine."""
    if preset == "auto":
        return "large" if device != "cpu" and _on_gpus() else "small"
    return preset


def _on_gpus() -> bool:
    if not Path("/dev/nvidiactl").exists():  # avoids loading torch where there can't be a GPU
        return False
    from lm.ranks import uses_cuda

    return uses_cuda("auto")


def describe(preset: str) -> str:
    """Returns the flags that a preset stands for, except those that small and large share."""
    flags = []
    for name, value in PRESETS[preset].items():
        flag = name.replace("_", "-")
        if name not in PLAIN or value != PLAIN[name]:
            flags.append(
                f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}"
            )
    return " ".join(flags)
