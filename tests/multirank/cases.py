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
from tests.sizes import Sizes

Arrays = dict[str, Any]


def _extremes(dtype: str) -> list[float]:
    info = torch.finfo(getattr(torch, dtype))
    tiny = info.tiny * info.eps  # the smallest subnormal
    return [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, info.max / 2, info.tiny, tiny, -3 * tiny]


HIDDEN = {"float32": 20, "bfloat16": 40, "float16": 24, "float64": 6}
"""Of small rows: multiples of 16 bytes that fill no vector register."""

EXTREMES = {dtype: _extremes(dtype) for dtype in reference.DTYPES}


@dataclass(frozen=True, kw_only=True)
class Case(Sizes):
    dtype: str = "float32"
    routing: str = "uniform"
    """uniform: distinct random experts; holes: some -1; one-rank: all to the last rank; empty: all -1."""
    input_in_window: bool = False
    extremes: bool = False
    """Mix in infinities, NaN, subnormals and the largest numbers."""
    ranks_per_node: int | None = None
    id_seeds: tuple[int, ...] = ()
    """A seed for the ids of each rank, so that some ranks repeat earlier ids and others do not."""

    @property
    def communicator(self) -> dict[str, Any]:
        return {
            **super().communicator,
            "ranks_per_node": self.ranks_per_node,
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
        """Returns the rows that the experts of `rank` answer with."""
        return self._values(4, rank, (count, self.hidden))

    def row_weights(self, rank: int, count: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 5, rank]).random(count).astype(reference.wide(self.dtype))

    def grad_y(self, rank: int) -> np.ndarray:
        return self._values(6, rank, (self.tokens[rank], self.hidden))

    def expected(self, rank: int) -> reference.Dispatched:
        """Shared by all that ask: to be read only."""
        return _expected(self, rank)

    def _values(self, stream: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, stream, rank])
        # Values of very different size, so that another order of summing gives other bits.
        x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
        if self.extremes:
            x = np.where(rng.random(shape) < 0.4, rng.choice(EXTREMES[self.dtype], shape), x)
        return reference.rounded(x.astype(reference.wide(self.dtype)), self.dtype)


def unequal_tokens(size: int, most: int, seed: int) -> tuple[int, ...]:
    """Unequal counts with a zero among them, where there is more than one rank."""
    counts = np.random.default_rng(seed).integers(1, most + 1, size)
    if size > 1:
        counts[seed % size] = 0
    return tuple(int(count) for count in counts)


def layouts_alignments_and_capacities(size: int, dtype: str, seed: int) -> list[Case]:
    base = Case(
        tokens=unequal_tokens(size, 13, seed),
        num_experts=4 * size,
        hidden=HIDDEN[dtype],
        top_k=4,
        dtype=dtype,
        seed=seed,
    )
    shapes = [
        ("expert", 1, None, "uniform"),
        ("expert", 8, None, "holes"),
        ("expert", 5, 0, "uniform"),
        ("expert", 16, 7, "holes"),
        ("expert", 4, -5, "uniform"),
        ("expert", 128, None, "uniform"),
        ("rank", 1, None, "uniform"),
        ("rank", 1, None, "holes"),
        ("rank", 1, 3, "uniform"),
        ("rank", 1, -2, "holes"),
    ]
    return [
        replace(
            base,
            seed=seed + i,
            layout=layout,
            alignment=alignment,
            slack=slack,
            routing=routing,
            weights=i % 3 > 0,
            wide_ids=i % 2 > 0,
        )
        for i, (layout, alignment, slack, routing) in enumerate(shapes)
    ]


def all_tokens_to_one_rank(size: int, seed: int) -> list[Case]:
    base = Case(tokens=(11,) * size, num_experts=3 * size, hidden=12, top_k=3, routing="one-rank", seed=seed)
    return [base, replace(base, layout="rank"), replace(base, slack=-1), replace(base, alignment=64)]


def nothing_to_do(size: int, seed: int) -> list[Case]:
    base = Case(tokens=(0,) * size, num_experts=2 * size, hidden=8, top_k=2, seed=seed)
    none = replace(base, tokens=(5,) * size, routing="empty")
    some = [base, replace(base, layout="rank"), replace(base, slack=4), none, replace(none, layout="rank")]
    return [*some, replace(none, slack=0), replace(base, alignment=4)]


def many_steps(size: int, seed: int) -> list[Case]:
    """Returns steps for one communicator: ids, counts, layouts and the place of the input change at each."""
    rng = np.random.default_rng(seed)
    base = Case(tokens=(12,) * size, num_experts=2 * size, hidden=32, top_k=2)
    return [
        replace(
            base,
            tokens=(12, *(int(count) for count in rng.integers(0, 13, size - 1))),
            seed=seed + step // 2,
            layout=("expert", "rank")[step % 3 == 2],
            slack=(None, 2, -3)[step % 3],
            routing=("uniform", "holes", "one-rank")[step // 4 % 3],
            weights=step % 4 > 0,
            input_in_window=step % 5 > 2,
        )
        for step in range(30)
    ]


@functools.lru_cache(maxsize=16)
def _all_inputs(case: Case) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray] | None]:
    """Rows as they arrive, ids, and weights of all ranks."""
    ranks = range(case.size)
    weights = [case.topk_weights(r) for r in ranks] if case.weights else None
    return [case.arriving(r) for r in ranks], [case.ids(r) for r in ranks], weights


@functools.lru_cache(maxsize=16)
def _expected(case: Case, rank: int) -> reference.Dispatched:
    return reference.dispatch(
        *_all_inputs(replace(case, slack=None)),
        rank=rank,
        num_experts=case.num_experts,
        layout=case.layout,
        alignment=case.alignment,
        capacity=case.capacity,
    )


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
    combine = functools.partial(
        reference.combine, rows, expected, counts, dtype=case.dtype, ranks_per_node=case.ranks_per_node
    )
    plain, weighted = combine(), combine(weights=weights)
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
