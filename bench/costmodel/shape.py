"""The shape of an exchange: nodes, ranks, tokens, rows, routing, and the pieces in which rows travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from moecomm import InvalidArgument

_RECORD_BYTES = 64 + 512
_SCALE_COLUMNS = 128
# Puts of the runtime's GPU ranks (csrc/layout/window.cpp): a rank's rows make so many, within these sizes;
# the rest goes in pieces.
_PUTS_OF_ROWS, _LEAST_PUT, _MOST_PUT = 16, 512 << 10, 1 << 20
_PIECE_BYTES = 1 << 20


class Experts(TypedDict):
    """The part of a Shape that a model decides."""

    hidden: int
    top_k: int
    experts: int
    num_groups: int | None
    topk_groups: int | None


# Sizes of the published models, from the configurations that came with their weights. DeepSeek-V3's routing
# has 8 groups, 4 of them a token (arXiv 2412.19437); the others' is not limited.
MODELS: dict[str, Experts] = {
    "deepseek-v3": {"hidden": 7168, "top_k": 8, "experts": 256, "num_groups": 8, "topk_groups": 4},
    "kimi-k2": {"hidden": 7168, "top_k": 8, "experts": 384, "num_groups": None, "topk_groups": None},
    "qwen3-235b": {"hidden": 4096, "top_k": 8, "experts": 128, "num_groups": None, "topk_groups": None},
    "gpt-oss-120b": {"hidden": 2880, "top_k": 4, "experts": 128, "num_groups": None, "topk_groups": None},
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One exchange with equal tokens on all ranks. Raises InvalidArgument for values that no job can have."""

    nodes: int  # N
    ranks_per_node: int  # L: ranks that share load/store memory, each with a rail of its own
    tokens: int  # T: tokens of a rank
    hidden: int  # H
    top_k: int  # K
    experts: int  # E, a multiple of the ranks
    num_groups: int | None = None
    """Group-limited routing: experts form this many groups in order of their ids ..."""
    topk_groups: int | None = None  # ... of which a token uses this many
    wire: str | None = None
    """None: rows of a dispatch travel as they are. "fp8": a byte a value and a scale for 128 of them."""
    put_bytes: int | None = None
    """The most that one put carries: a chunk is as many rows as fit, and at least one. None: as the runtime
    has it on GPUs for max_tokens=tokens, a sixteenth of a rank's rows, but no fewer than make 512 KiB and no
    more than make 1 MiB outside of a wire format (CPU ranks: 4); and ids and weights in pieces of 1 MiB."""
    rows_per_command: int | None = None
    """Rows that one command to the proxy covers. None: as the runtime has it, those of a put."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "hidden", "top_k", "experts"):
            _require(_is_count(getattr(self, name)), name, getattr(self, name), "an int of at least 1")
        for name in ("put_bytes", "rows_per_command"):
            value = getattr(self, name)
            _require(value is None or _is_count(value), name, value, "None or an int of at least 1")
        _require(_is_count(self.tokens + 1), "tokens", self.tokens, "an int of at least 0")
        _require(
            self.experts % self.ranks == 0, "experts", self.experts, f"a multiple of the {self.ranks} ranks"
        )
        _require(self.top_k <= self.experts, "top_k", self.top_k, f"at most experts={self.experts}")
        _require(self.wire in (None, "fp8"), "wire", self.wire, 'None or "fp8"')
        groups, chosen = self.num_groups, self.topk_groups
        if groups is None or chosen is None:
            _require(groups is chosen, "topk_groups", chosen, "given together with num_groups")
            return
        divides = _is_count(groups) and self.experts % groups == 0
        _require(divides, "num_groups", groups, f"a divisor of experts={self.experts}")
        _require(_is_count(chosen) and chosen <= groups, "topk_groups", chosen, f"in 1..num_groups={groups}")
        reachable = chosen * (self.experts // groups)
        _require(self.top_k <= reachable, "top_k", self.top_k, f"at most {reachable}, those of the groups")

    @property
    def ranks(self) -> int:
        """R."""
        return self.nodes * self.ranks_per_node

    @property
    def row_bytes(self) -> int:
        """A row of a combine, or of a dispatch without a wire format, in bfloat16."""
        return 2 * self.hidden

    @property
    def wire_row_bytes(self) -> int:
        """A row of a dispatch on its way; fp8 as docs/data_formats.md has it."""
        if self.wire is None:
            return self.row_bytes
        packed = self.hidden + 4 * -(-self.hidden // _SCALE_COLUMNS)
        lines = _round_up(packed, 128)
        return lines if lines <= self.row_bytes else _round_up(packed, 16)

    @property
    def ids_bytes(self) -> int:
        """The expert ids of one rank."""
        return 4 * self.tokens * self.top_k

    @property
    def metadata_bytes(self) -> int:
        """Bytes that a rank sends to each other node before the rows: its record, ids and weights."""
        return _RECORD_BYTES + 2 * self.ids_bytes

    @property
    def metadata_puts(self) -> int:
        """Puts of that to each other node."""
        most = _PIECE_BYTES if self.put_bytes is None else self.put_bytes
        return 1 + 2 * -(-self.ids_bytes // most)

    @property
    def record_bytes(self) -> int:
        """Bytes that a rank sends to each other node before a combine: its record."""
        return _RECORD_BYTES

    def chunk_rows(self, row_bytes: int) -> int:
        """Rows that one put carries, where a row on its way has `row_bytes`."""
        if self.put_bytes is not None:
            return max(1, self.put_bytes // row_bytes)
        wanted = min(max(self.tokens * self.row_bytes // _PUTS_OF_ROWS, _LEAST_PUT), _MOST_PUT)
        return max(1, min(-(-wanted // self.row_bytes), self.tokens))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(condition: bool, name: str, value: object, bound: str) -> None:
    if not condition:
        raise InvalidArgument(f"Shape.{name} is {value!r}, must be {bound}")
