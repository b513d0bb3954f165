"""Whole-job cases: what every rank gives to a dispatch and a combine, made from seeds.

A `Case` travels to the ranks; tests/oracle.py says what has to come out. Small cases have the same inputs on
every device.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests import reference
from tests.ranks import COMM_TIMEOUT_S

SMALL = 1 << 18
"""Elements of all ranks' rows up to which inputs are made on the CPU, whatever the device."""
HIDDEN = {"float32": 20, "bfloat16": 40, "float16": 24, "float64": 6}
"""Small rows: multiples of 16 bytes that fill no vector register."""


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
    weights: bool = True
    wide_ids: bool = False
    wire: str | None = None
    combine_wire: str | None = None
    gradient_wire: str | None = None
    num_sms: int | None = None
    seed: int = 0
    routing: str = "uniform"
    """uniform: distinct random experts; skewed: some much more often; holes: some -1; one-rank: all to the
    last rank; one-expert: all to expert 0; empty: all -1."""
    input_in_window: bool = False
    extremes: bool = False
    """Mix in infinities, NaN, subnormals and the largest numbers."""
    ranks_per_node: int | None = None
    id_seeds: tuple[int, ...] = ()
    """A seed for the ids of each rank, so that some ranks repeat earlier ids and others do not."""

    @classmethod
    def on(cls, size: int, tokens: int | tuple[int, ...], *, experts: int, **shape: Any) -> Any:
        """A case of `size` ranks with so many tokens each, or the first of `tokens`, and so many experts."""
        each = (tokens,) * size if isinstance(tokens, int) else tokens[:size]
        return cls(tokens=each, num_experts=experts * size, **shape)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def accumulate(self) -> torch.dtype:
        """The type of sums and of weights."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def communicator(self) -> dict[str, Any]:
        """Arguments of a communicator for this job."""
        return {
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "max_tokens": max(*self.tokens, 1),
            "dtype": self.torch_dtype,
            "num_sms": self.num_sms,
            "wire": self.wire,
            "combine_wire": self.combine_wire,
            "gradient_wire": self.gradient_wire,
            "ranks_per_node": self.ranks_per_node,
            "timeout": COMM_TIMEOUT_S,
        }

    @property
    def capacity(self) -> int | None:
        return None if self.slack is None else max(max(self.needed()) + self.slack, 0)

    def needed(self) -> tuple[int, ...]:
        """Rows that each rank needs."""
        whole = replace(self, slack=None)
        return tuple(len(_expected(whole, None, rank).origin) for rank in range(self.size))

    def expected(self, rank: int) -> reference.Dispatched:
        """The results by tests/reference.py. All callers get the same arrays, which nobody may change."""
        return _expected(replace(self, slack=None), self.capacity, rank)

    # The inputs as numpy arrays, narrow floating-point types widened to float32.

    def x(self, rank: int) -> np.ndarray:
        return to_numpy(inputs(self, rank, torch.device("cpu")).x_TH)

    def ids(self, rank: int) -> np.ndarray:
        return inputs(self, rank, torch.device("cpu")).ids_TK.int().numpy()

    def topk_weights(self, rank: int) -> np.ndarray | None:
        return inputs(self, rank, torch.device("cpu")).weights_TK.numpy() if self.weights else None

    def rows(self, rank: int, count: int) -> np.ndarray:
        """Returns random rows of experts of `rank`."""
        return to_numpy(_values(self, 4, rank, count, torch.device("cpu")))

    def grad_y(self, rank: int) -> np.ndarray:
        return to_numpy(gradient(self, rank, torch.device("cpu")))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one rank."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


def generator(device: torch.device, *numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator(device).manual_seed(seed)


def inputs(case: Case, rank: int, device: torch.device) -> Inputs:
    made_on = _maker(case, device)
    gen = generator(made_on, case.seed, 3, rank)
    shape = (case.tokens[rank], case.top_k)
    weights_TK = torch.rand(shape, generator=gen, device=made_on, dtype=case.accumulate)
    ids_TK = _ids(case, rank, made_on)
    return Inputs(
        x_TH=_values(case, 1, rank, case.tokens[rank], device),
        ids_TK=(ids_TK if case.wide_ids else ids_TK.int()).to(device),
        weights_TK=weights_TK.to(device),
    )


def gradient(case: Case, rank: int, device: torch.device) -> torch.Tensor:
    """The gradient that y of `rank` gets."""
    return _values(replace(case, extremes=False), 6, rank, case.tokens[rank], device)


def _maker(case: Case, device: torch.device) -> torch.device:
    return torch.device("cpu") if sum(case.tokens) * case.hidden <= SMALL else device


def _values(case: Case, stream: int, rank: int, count: int, device: torch.device) -> torch.Tensor:
    made_on, kind = _maker(case, device), case.torch_dtype
    gen = generator(made_on, case.seed, stream, rank)
    x_TH = torch.randn(count, case.hidden, generator=gen, device=made_on, dtype=kind)
    # Rows of very different size, so that another order of summing gives other bits.
    x_TH *= torch.exp2(torch.randint(-4, 5, (count, 1), generator=gen, device=made_on).to(kind))
    if case.extremes:
        info = torch.finfo(kind)
        tiny = info.tiny * info.eps  # the smallest subnormal
        large = [torch.inf, -torch.inf, torch.nan, info.max, info.min, info.max / 2]
        some = torch.tensor([0.0, -0.0, *large, info.tiny, tiny, -3 * tiny], dtype=kind, device=made_on)
        chosen = torch.randint(len(some), x_TH.shape, generator=gen, device=made_on)
        mixed_in = torch.rand(x_TH.shape, generator=gen, device=made_on) < 0.4
        x_TH = torch.where(mixed_in, some[chosen], x_TH)
    return x_TH.to(device)


def _ids(case: Case, rank: int, device: torch.device) -> torch.Tensor:
    count, experts = case.tokens[rank], case.num_experts
    gen = generator(device, case.id_seeds[rank] if case.id_seeds else case.seed, 2, rank)
    ids_TK = torch.full((count, case.top_k), -1, dtype=torch.int64, device=device)
    if case.routing == "empty" or count == 0:
        return ids_TK
    if case.routing == "one-expert":
        places = torch.randint(case.top_k, (count, 1), generator=gen, device=device)
        return ids_TK.scatter_(1, places, 0)
    first = experts - experts // case.size if case.routing == "one-rank" else 0
    score_TE = torch.rand(count, experts - first, generator=gen, device=device)
    if case.routing == "skewed":
        score_TE += 3.0 * torch.linspace(1, 0, experts, device=device) ** 6
    columns = min(case.top_k, experts - first)
    ids_TK[:, :columns] = first + score_TE.topk(columns, dim=1).indices
    # topk sorts: shuffle each token's places, so that ascending k is not ascending anything.
    shuffle_TK = torch.rand(count, case.top_k, generator=gen, device=device).argsort(1)
    ids_TK = ids_TK.gather(1, shuffle_TK)
    if case.routing == "holes":
        ids_TK[torch.rand(count, case.top_k, generator=gen, device=device) < 0.4] = -1
    return ids_TK


@functools.lru_cache(maxsize=16)
def _all_inputs(case: Case) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray] | None]:
    """Rows as they arrive, ids, and weights of all ranks."""
    ranks = range(case.size)
    x = [case.x(rank) for rank in ranks]
    if case.wire is not None:
        x = [reference.through_wire(each, case.dtype, case.wire) for each in x]
    return (
        x,
        [case.ids(rank) for rank in ranks],
        [case.topk_weights(r) for r in ranks] if case.weights else None,
    )


@functools.lru_cache(maxsize=64)
def _expected(case: Case, capacity: int | None, rank: int) -> reference.Dispatched:
    return reference.dispatch(
        *_all_inputs(case),
        rank=rank,
        num_experts=case.num_experts,
        layout=case.layout,
        alignment=case.alignment,
        capacity=capacity,
    )


# -- sets of cases -------------------------------------------------------------------------------------------
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


# -- on a rank -----------------------------------------------------------------------------------------------
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


def dispatch(comm: Any, case: Case, rank: int, own: Inputs | None = None, **options: Any) -> Any:
    """The case's dispatch on this rank; `own`: its inputs, if they are made already."""
    own = own or inputs(case, rank, comm.device)
    x_TH = own.x_TH
    if case.input_in_window:
        x_TH = comm.empty_input(len(x_TH))
        x_TH.copy_(own.x_TH)
    if "capacity" not in options:
        options["capacity"] = case.capacity
    return comm.dispatch(
        x_TH,
        own.ids_TK,
        own.weights_TK if case.weights else None,
        layout=case.layout,
        alignment=case.alignment,
        **options,
    )


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
