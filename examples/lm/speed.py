"""How fast a GPU computes in training: TFLOP/s, and their part of its peak (model FLOPs utilisation, MFU).

It counts the operations that the model needs for a token, forward and backward (`flops_per_token`), as in
PaLM's report (arXiv 2204.02311, appendix B) but without the half of attention that is not causal. It does not
count recomputation, the choice of experts, and padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lm.build import attention_config
from lm.options import Options

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense products in bfloat16, from NVIDIA's data sheets, by a part of the GPU's name; the first match
counts."""


def peak_tflops(name: str) -> float | None:
    """Returns the bfloat16 peak of the GPU with this name, None if the table does not have it."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


@dataclass(frozen=True)
class Speed:
    """Converts tokens per second of `world` GPUs of one kind to the speed of one of them."""

    flops_per_token: float
    world: int
    gpu: str
    peak: float | None

    def of(self, tokens_per_s: float) -> dict[str, float]:
        """Returns "tflops" per GPU and, where its peak is known, "mfu"."""
        tflops = tokens_per_s * self.flops_per_token / self.world / 1e12
        return {"tflops": tflops} if self.peak is None else {"tflops": tflops, "mfu": tflops / self.peak}

    def describe(self) -> str:
        """Returns a line that says what is counted, and to which peak MFU refers."""
        peak = (
            f"MFU is of {self.peak:g} TFLOP/s in bfloat16" if self.peak else "no MFU: its peak is not known"
        )
        return f"speed: {self.flops_per_token / 1e9:.3f} GFLOP a token; {self.gpu}, {peak}"


def measure_speed(
    options: Options, active: int, vocab: int, world: int, device: torch.device
) -> Speed | None:
    """Returns the speed of a run; None on the CPU. active: parameters that one token uses. Arithmetic in
    float32 has no peak here."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_name(device)
    peak = peak_tflops(gpu) if options.dtype == "bfloat16" else None
    flops = flops_per_token(options, active, vocab)
    return Speed(flops, world, f"{gpu}, {options.dtype}", peak)


def flops_per_token(options: Options, active: int, vocab: int) -> float:
    """Returns the model's operations for a token of a window, forward and backward:

        6 (active - lookup)  +  sum over layers of 6 keys heads (D + V)

    active: parameters that one token uses (`count_parameters`); lookup: those of the embedding, which is not
    a product, or 0 where the embedding is also the output matrix. Each parameter takes a multiplication and
    an addition forward, and twice as many backward. So do each of the D elements of a head's query and key,
    and the V of its value, for every key that a token sees: on average S / 2 of a window of S tokens, or W -
    W^2 / 2S in a layer that sees W of them.
    """
    heads = attention_config(options)
    seq, lookup = options.seq, 0 if options.tied else vocab * options.dim
    windows = [min(heads.window_of(layer) or seq, seq) for layer in range(options.layers)]
    keys = sum(window - window**2 / (2 * seq) for window in windows)
    return 6.0 * (active - lookup) + 6.0 * keys * heads.heads * (heads.qk_width + heads.value_width)
