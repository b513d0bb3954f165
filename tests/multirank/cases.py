"""Whole-job cases: random inputs of every rank, what one rank does, and the check against the reference.

A `Case` travels to the ranks; each makes only its own tensors. The test process makes everybody's, runs the
reference and compares bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests import reference

Arrays = dict[str, Any]


def _extremes(dtype: str) -> list[float]:
    info = torch.finfo(getattr(torch, dtype))
    tiny = info.tiny * info.eps  # the smallest subnormal
    return [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, info.max / 2, info.tiny, tiny, -3 * tiny]


EXTREMES = {dtype: _extremes(dtype) for dtype in reference.DTYPES}


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: tuple[int, ...]
    """Tokens of each rank; its length is the world size."""
    num_experts: int
    hidden: int
    top_k: int
    dtype: str = "float32"
    layout: str = "expert"
    alignment: int = 1
    slack: int | None = None
    """None: dropless. Else the capacity is the largest need of any rank plus this (negative: overflow)."""
    routing: str = "uniform"
    """uniform: distinct random experts; holes: some -1; one-rank: all to the last rank; empty: all -1."""
    weights: bool = True
    wide_ids: bool = False
    input_in_window: bool = False
    num_sms: int | None = None
    device: str = "cpu"
    wire: str | None = None
    seed: int = 0
    extremes: bool = False
    """Mix in infinities, NaN, subnormals and the largest numbers."""
    id_seeds: tuple[int, ...] = ()
    """A seed for the ids of each rank, so that some ranks repeat earlier ids and others do not."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def communicator(self) -> dict[str, Any]:
        """Arguments of a communicator for this case."""
        return {
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "max_tokens": max(*self.tokens, 1),
            "dtype": self.torch_dtype,
            "num_sms": self.num_sms,
            "device": self.device,
            "wire": self.wire,
            "timeout": 30.0,
        }

    @property
    def capacity(self) -> int | None:
        return None if self.slack is None else max(max(self.needed()) + self.slack, 0)

    def needed(self) -> tuple[int, ...]:
        """Rows that each rank needs."""
        return _needed(replace(self, slack=None))

    def x(self, rank: int) -> np.ndarray:
        return self._values(1, rank, (self.tokens[rank], self.hidden))

    def arriving(self, rank: int) -> np.ndarray:
        """The rows of `rank` as they are after the wire."""
        x = self.x(rank)
        return reference.through_fp8(x, self.dtype) if self.wire == "fp8" else x

    def ids(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng([self.id_seeds[rank] if self.id_seeds else self.seed, 2, rank])
        experts = np.arange(self.num_experts)
        if self.routing == "one-rank":
            experts = experts[-(self.num_experts // self.size) :]
        rows = np.full((self.tokens[rank], self.top_k), -1, np.int32)
        for row in rows:
            if self.routing == "empty":
                continue
            count = min(self.top_k, len(experts))
            if self.routing == "holes":
                count = int(rng.integers(0, count + 1))
            places = np.sort(rng.permutation(self.top_k)[:count])
            row[places] = rng.permutation(experts)[:count]
        return rows

    def topk_weights(self, rank: int) -> np.ndarray | None:
        if not self.weights:
            return None
        rng = np.random.default_rng([self.seed, 3, rank])
        return rng.random((self.tokens[rank], self.top_k)).astype(reference.wide(self.dtype))

    def rows(self, rank: int, count: int) -> np.ndarray:
        """What the experts of `rank` answer."""
        return self._values(4, rank, (count, self.hidden))

    def row_weights(self, rank: int, count: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 5, rank]).random(count).astype(reference.wide(self.dtype))

    def grad_y(self, rank: int) -> np.ndarray:
        return self._values(6, rank, (self.tokens[rank], self.hidden))

    def expected(self, rank: int) -> reference.Dispatched:
        ranks = range(self.size)
        return reference.dispatch(
            [self.arriving(r) for r in ranks],
            [self.ids(r) for r in ranks],
            [self.topk_weights(r) for r in ranks] if self.weights else None,
            rank=rank,
            num_experts=self.num_experts,
            layout=self.layout,
            alignment=self.alignment,
            capacity=self.capacity,
        )

    def _values(self, stream: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, stream, rank])
        # Values of very different size, so that another order of summing gives other bits.
        x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
        if self.extremes:
            x = np.where(rng.random(shape) < 0.4, rng.choice(EXTREMES[self.dtype], shape), x)
        return reference.rounded(x.astype(reference.wide(self.dtype)), self.dtype)


@functools.lru_cache(maxsize=1024)
def _needed(case: Case) -> tuple[int, ...]:
    return tuple(len(case.expected(rank).origin) for rank in range(case.size))


def to_numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
    """Narrow floating-point types widen to float32, which is exact."""
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    narrow = tensor.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    return (tensor.float() if narrow else tensor).numpy().copy()


def tensor(
    array: np.ndarray | None, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device, dtype)


def dispatch(comm: Any, case: Case, rank: int, **options: Any) -> Any:
    """The case's dispatch on this rank."""
    x_TH = tensor(case.x(rank), case.torch_dtype, comm.device)
    if case.input_in_window:
        inside = comm.empty_input(case.tokens[rank])
        inside.copy_(x_TH)
        x_TH = inside
    return comm.dispatch(
        x_TH,
        tensor(case.ids(rank), torch.int64 if case.wide_ids else torch.int32, comm.device),
        tensor(case.topk_weights(rank), None, comm.device),
        layout=case.layout,
        alignment=case.alignment,
        capacity=case.capacity,
        **options,
    )


def play(comm: Any, case: Case, rank: int) -> Arrays:
    """Dispatch, then combine without and with weights, of random rows. Runs on a rank."""
    import moecomm

    # torch fills new tensors with NaN in this mode: what the product leaves unwritten shows.
    torch.use_deterministic_algorithms(True, warn_only=comm.device.type != "cpu")
    out = dispatch(comm, case, rank)
    count = out.tokens.shape[0]
    rows_PH = tensor(case.rows(rank, count), case.torch_dtype, comm.device)
    weights_P = tensor(case.row_weights(rank, count), None, comm.device)
    y_TH = comm.combine(rows_PH, out.handle)
    weighted_TH = comm.combine(rows_PH, out.handle, weights=weights_P)
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    try:
        comm.check()
        exceeded = None
    except moecomm.CapacityExceeded as error:
        exceeded = (error.needed, error.capacity)
    assert out.tokens.dtype == y_TH.dtype == weighted_TH.dtype == case.torch_dtype
    assert out.tokens_per_expert.dtype == out.offsets.dtype == out.overflow.dtype == torch.int32
    assert out.overflow.dim() == 0
    return {
        "tokens": to_numpy(out.tokens),
        "weights": to_numpy(out.weights),
        "topk_idx": to_numpy(out.topk_idx),
        "tokens_per_expert": to_numpy(out.tokens_per_expert),
        "offsets": to_numpy(out.offsets),
        "overflow": int(out.overflow),
        "y": to_numpy(y_TH),
        "weighted": to_numpy(weighted_TH),
        "exceeded": exceeded,
    }


def verify(case: Case, results: Sequence[Arrays]) -> None:
    """Compares what all ranks got with the reference."""
    expected = [case.expected(rank) for rank in range(case.size)]
    counts = list(case.tokens)
    rows, weights = [], []
    for rank, (want, got) in enumerate(zip(expected, results, strict=True)):
        text = f"rank {rank} of {case}"
        kept = len(want.origin)
        total = len(got["tokens"])
        assert total == (kept if case.capacity is None else case.capacity), text
        assert_same_bits(got["tokens"][:kept], want.tokens, f"tokens, {text}")
        for name in ("weights", "topk_idx"):
            part, whole = getattr(want, name), got[name]
            assert (part is None) == (whole is None), f"{name}, {text}"
            if part is not None:
                assert_same_bits(whole[:kept], part, f"{name}, {text}")
        assert_same_bits(got["tokens_per_expert"], want.tokens_per_expert, f"tokens_per_expert, {text}")
        assert_same_bits(got["offsets"], want.offsets, f"offsets, {text}")
        assert got["overflow"] == want.overflow, text
        rows.append(case.rows(rank, total))
        weights.append(case.row_weights(rank, total))
    plain = reference.combine(rows, expected, counts, dtype=case.dtype)
    weighted = reference.combine(rows, expected, counts, dtype=case.dtype, weights=weights)
    needed = max(case.needed())
    exceeded = (needed, case.capacity) if case.capacity is not None and needed > case.capacity else None
    for rank, got in enumerate(results):
        assert_same_bits(got["y"], plain[rank], f"combine, rank {rank} of {case}")
        assert_same_bits(got["weighted"], weighted[rank], f"weighted combine, rank {rank} of {case}")
        assert got["exceeded"] == exceeded, f"rank {rank} of {case}"


def assert_same_bits(got: np.ndarray, want: np.ndarray, text: str) -> None:
    """Equal in type, shape and every bit, but for the sign of zero and the payload of a NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{text}: {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    )
    if np.array_equal(got, want, equal_nan=got.dtype.kind == "f"):
        return
    places = np.argwhere((got != want) & ~((got != got) & (want != want)))
    first = tuple(int(i) for i in places[0])
    raise AssertionError(
        f"{text}: {len(places)} of {got.size} differ, first {first}: {got[first]!r}, expected {want[first]!r}"
    )
