"""Row data: random, never zero, and known to every rank from (seed, round, rank) alone.

Made on the device that is measured, by torch's generator there: ranks on equal devices agree without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_ROWS_STREAM, _WEIGHTS_STREAM, _BYTES_STREAM, _EXPERTS_STREAM = 2, 3, 6, 7
SCALE_BLOCK = 128  # columns that share a scale in the fp8 wire format
_E4M3_MAX = 448.0
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class DataKey:
    """Names one set of inputs: another `round` is other data of the same shape."""

    seed: int
    round: int
    tokens: int
    hidden: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def _generator(device: torch.device, *words: int) -> torch.Generator:
    # 63 bits: a seed that every generator takes.
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1
    return torch.Generator(device).manual_seed(state)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that values of `dtype` are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows(key: DataKey, rank: int, device: torch.device) -> torch.Tensor:
    """The (T, H) rows that `rank` puts in: signed, magnitudes in [0.25, 1.25), so that no value is zero."""
    generator = _generator(device, key.seed, _ROWS_STREAM, key.round, key.tokens, rank)
    shape, dtype = (key.tokens, key.hidden), wide(key.torch_dtype)
    values = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    values.sub_(0.5).mul_(2.0)
    values += torch.copysign(torch.full((), 0.25, dtype=dtype, device=device), values)
    return values.to(key.torch_dtype)


def weights(key: DataKey, rank: int, topk: int, device: torch.device) -> torch.Tensor:
    """The (T, K) float32 weights of `rank`'s tokens: positive, each row sums to 1."""
    generator = _generator(device, key.seed, _WEIGHTS_STREAM, key.round, key.tokens, rank)
    values = torch.rand(key.tokens, topk, generator=generator, device=device).add_(0.25)
    return values.div_(values.sum(1, keepdim=True))


def expert(
    seed: int, number: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of expert `number` of all ranks': (H, 2F), gate first, and (F, H), so that rows keep their
    magnitude.
    """
    generator = _generator(device, seed, _EXPERTS_STREAM, number)
    made = []
    for shape in ((hidden, 2 * ffn), (ffn, hidden)):
        values = torch.randn(shape, generator=generator, device=device, dtype=wide(dtype))
        made.append(values.mul_(shape[0] ** -0.5).to(dtype))
    return made[0], made[1]


def payload(
    seed: int, round: int, source: int, target: int, num_bytes: int, device: torch.device
) -> torch.Tensor:
    """Random bytes, none of them zero, that `source` sends to `target` in a bare exchange."""
    generator = _generator(device, seed, _BYTES_STREAM, round, source, target)
    return torch.randint(1, 256, (num_bytes,), generator=generator, device=device, dtype=torch.uint8)


def answer(rows_NH: torch.Tensor, key_N: torch.Tensor) -> torch.Tensor:
    """What "expert" (or rank) `key` answers to a row: the row times 1 + (key mod 7) / 8, rounded to its type.

    Stands in for the expert's network in the combine benchmark: cheap, and different for neighbouring
    experts.
    """
    dtype = wide(rows_NH.dtype)
    scale = 1.0 + torch.remainder(key_N, 7).to(dtype) / 8.0
    return (rows_NH.to(dtype) * scale[:, None]).to(rows_NH.dtype)


def quantised(rows_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in the fp8 wire format: (N, H) float8_e4m3fn and (N, ceil(H / 128)) float32 scales.

    For each block of 128 columns scale = max(amax / 448, 2^-126), data = x * (1 / scale), to nearest even and
    at most 448 in magnitude. Divisions are of tensors by tensors: by a number, torch would multiply with its
    inverse, which rounds otherwise.
    """
    count, hidden = rows_NH.shape
    blocks = -(-hidden // SCALE_BLOCK)
    padded = torch.zeros(count, blocks * SCALE_BLOCK, dtype=torch.float32, device=rows_NH.device)
    padded[:, :hidden] = rows_NH
    grouped = padded.view(count, blocks, SCALE_BLOCK)
    amax = grouped.abs().amax(2)
    scales = torch.div(amax, torch.full_like(amax, _E4M3_MAX)).clamp_min(_SMALLEST_SCALE)
    inverse = torch.div(torch.ones_like(scales), scales)
    scaled = (grouped * inverse[:, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scaled.view(count, -1)[:, :hidden].to(torch.float8_e4m3fn), scales


def dequantised(data_NH: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N, H) rows of `dtype` from the fp8 wire format."""
    spread = scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, : data_NH.shape[1]]
    return (data_NH.to(torch.float32) * spread).to(dtype)
