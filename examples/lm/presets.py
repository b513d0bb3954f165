"""Sizes that suit a machine: the defaults of the command line, each of which a flag of its own overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
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
    "steps": 320,
    "lr": 4e-3,
    "warmup": 20,
    "eval_every": 40,
    "eval_windows": 256,
    "save_every": 100,
    "log_every": 10,
}
"""Minutes on two cores."""

LARGE: dict[str, Any] = {
    "dim": 1024,
    "layers": 8,
    "heads": 16,
    "tied": False,
    "experts": 48,  # as the batch a multiple of 1, 2, 3, 4, 6 and 8 ranks
    "top_k": 4,
    "ffn": 512,
    "activation": "swiglu_interleaved",  # quack's products have it in them
    "dtype": "bfloat16",
    "seq": 512,
    "batch": 96,
    "steps": 400,  # 20 million tokens: the default text has 10 to 30 million, which so is read once or twice
    "lr": 8e-4,
    "warmup": 40,
    "eval_every": 100,
    "eval_windows": 480,
    "save_every": 400,  # a checkpoint has 7.7 GB
    "log_every": 20,
}
"""Minutes on one to eight GPUs of a data centre."""

PRESETS = {"small": SMALL, "large": LARGE}


def choose(preset: str, device: str) -> dict[str, Any]:
    """The defaults that `--preset` and `--device` lead to."""
    if preset == "auto":
        preset = "large" if device != "cpu" and _on_gpus() else "small"
    return PRESETS[preset]


def _on_gpus() -> bool:
    if not Path("/dev/nvidiactl").exists():  # spares loading torch where there can't be a GPU
        return False
    from lm.ranks import uses_cuda

    return uses_cuda("auto")


def describe(preset: str) -> str:
    """The flags that a preset stands for."""
    flags = []
    for name, value in PRESETS[preset].items():
        flag = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
    return " ".join(flags)
