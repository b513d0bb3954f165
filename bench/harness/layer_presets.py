"""The layers of published models that moe_layer_perf.py runs, and their arithmetic. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

MULTIPLE = 16  # of elements: rows and products of every type are aligned then
_PASSES = 3  # a backward makes two products for each of the forward: of the rows, and of the weights


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One layer. Experts are SwiGLU networks of `hidden` x 2 `ffn` and `ffn` x `hidden`."""

    name: str
    hidden: int
    ffn: int
    experts: int  # over all ranks
    topk: int

    def forward_flops(self, rows: float) -> float:
        """Of both products for `rows` rows: 2 x H x 2F + 2 x F x H a row; the activation is not counted.

        Example: hidden 4, ffn 2, one row: 2 x 4 x 4 + 2 x 2 x 4 = 48.
        """
        return 6.0 * self.hidden * self.ffn * rows

    def step_flops(self, rows: float) -> float:
        """Of forward and backward."""
        return _PASSES * self.forward_flops(rows)

    def __str__(self) -> str:
        return f"{self.name} ({self.hidden}, {self.ffn}, top-{self.topk} of {self.experts})"


PRESETS = {
    each.name: each
    for each in (
        Preset(name="deepseek-v3", hidden=7168, ffn=2048, experts=256, topk=8),
        Preset(name="kimi-k2", hidden=7168, ffn=2048, experts=384, topk=8),
        Preset(name="qwen3-235b", hidden=4096, ffn=1536, experts=128, topk=8),
        Preset(name="qwen3-30b", hidden=2048, ffn=768, experts=128, topk=8),
        Preset(name="mixtral-8x22b", hidden=6144, ffn=16384, experts=8, topk=2),
        Preset(name="gpt-oss-120b", hidden=2880, ffn=2880, experts=128, topk=4),
    )
}


def scaled(preset: Preset, divisor: int) -> Preset:
    """The layer with hidden and ffn divided, to multiples of MULTIPLE, at least one; for machines on which
    the whole would take too long.

    Example: gpt-oss-120b by 16 has hidden and ffn 176.
    """

    def down(width: int) -> int:
        return max(MULTIPLE, width // divisor // MULTIPLE * MULTIPLE)

    return preset if divisor == 1 else replace(preset, hidden=down(preset.hidden), ffn=down(preset.ffn))


def why_left_out(preset: Preset, ranks: int) -> str:
    """Why these ranks cannot run the layer; "" if they can."""
    if preset.experts % ranks:
        return f"{preset.experts} experts cannot be shared evenly by {ranks} ranks"
    return ""
