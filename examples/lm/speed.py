"""How fast a GPU computes in training: TFLOP/s, and the part of its peak (model FLOPs utilisation, MFU).

Counted are the operations that the model needs for a token, forward and backward (`flops_per_token`), as in
PaLM's report (arXiv 2204.02311, appendix B) but for the half of attention that is not causal. What is
computed again, the choice of experts, and padding are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lm.build import attention_config
from lm.options import Options

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense products in bfloat16, from NVIDIA's data sheets, by a part of the GPU's name; the first that fits
counts."""


def peak_tflops(name: str) -> float | None:
    """Returns the peak of the GPU of this name in bfloat16, None for one that the table does not have."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


@dataclass(frozen=True)
class Speed:
    """Turns tokens a second of `world` GPUs of one kind into what one of them computes."""

    flops_per_token: float
    world: int
    gpu: str
    peak: float | None

    def of(self, tokens_per_s: float) -> dict[str, float]:
        """Returns "tflops" of a GPU and, where its peak is known, "mfu"."""
        tflops = tokens_per_s * self.flops_per_token / self.world / 1e12
        return {"tflops": tflops} if self.peak is None else {"tflops": tflops, "mfu": tflops / self.peak}

    def describe(self) -> str:
        """Returns a line about what is counted, and of which peak MFU is the part."""
        peak = (
            f"MFU is of {self.peak:g} TFLOP/s in bfloat16" if self.peak else "no MFU: its peak is not known"
        )
        return f"speed: {self.flops_per_token / 1e9:.3f} GFLOP a token; {self.gpu}, {peak}"


def measure_speed(
    options: Options, active: int, vocab: int, world: int, device: torch.device
) -> Speed | None:
    """Returns the speed of a run; None on the CPU. active: values of the model that a token meets. Arithmetic
    in float32 has no peak here."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_name(device)
    peak = peak_tflops(gpu) if options.dtype == "bfloat16" else None
    flops = flops_per_token(options, active, vocab)
    return Speed(flops, world, f"{gpu}, {options.dtype}", peak)


def flops_per_token(options: Options, active: int, vocab: int) -> float:
    """Returns the model's operations for a token of a window, forward and backward:

        6 (active - lookup)  +  sum over layers of 6 keys heads (D + V)

    active: values of the model that a token meets (`count_parameters`), lookup: those of the embedding, which
    is no product, or 0 where the embedding is the output's matrix, too. Each value takes a product and a sum
    forward and twice as many backward. The same holds for each of the D values of a head's query and key, and
    the V of its value, for every key that a token sees: on average S / 2 of a window of S tokens, or in a
    layer that sees W of them W - W^2 / 2S.
    """
    heads = attention_config(options)
    seq, lookup = options.seq, 0 if options.tied else vocab * options.dim
    windows = [min(heads.window_of(layer) or seq, seq) for layer in range(options.layers)]
    keys = sum(window - window**2 / (2 * seq) for window in windows)
    return 6.0 * (active - lookup) + 6.0 * keys * heads.heads * (heads.qk_width + heads.value_width)
