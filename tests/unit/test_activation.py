"""The weighted activation against a reference in float64, its rounding, and what is no real row.
tests/gpu/test_activation.py runs the tests that have a `pool` on a GPU, too, where the kernels compute."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import activation as module
from moecomm.kernels.activation import activate_backward, prepare, weighted_activation
from tests import ranks
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks

ACTIVATIONS = ("swiglu", "swiglu_interleaved", "swiglu_clamped", "gelu")
INPUTS = {"swiglu": 2, "swiglu_interleaved": 2, "swiglu_clamped": 2, "gelu": 1}
INTERLEAVED = ("swiglu_interleaved", "swiglu_clamped")
ALPHA, LIMIT = 1.702, 7.0
KINDS = ("bfloat16", "float16", "float32", "float64")
ON_CPU = ((1, 1), (5, 7), (40, 64), (0, 8), (3, 1000))
ON_GPU = tuple((rows, width) for width in (1, 7, 64, 1000, 2048, 16384 + 8) for rows in (0, 1, 513, 5000))
AT_ONCE = 1 << 24
"""Elements of a comparison in float64."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Case:
    """Arguments on the rank's device. Numbers reach from -30 to 30, most are small."""

    def __init__(self, rows: int, width: int, activation: str, dtype: str, seed: int) -> None:
        device = ranks.device()
        generator = torch.Generator(device).manual_seed(seed)
        self.activation = activation
        self.kind: torch.dtype = getattr(torch, dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32
        options: dict[str, Any] = {"generator": generator, "device": device}

        def numbers(columns: int) -> Tensor:
            found = torch.randn(rows, columns, dtype=wide, **options)
            found *= torch.randint(0, 11, (rows, columns), dtype=torch.int8, **options)
            return found.clamp_(-30, 30).to(self.kind)

        self.inner, self.grad = numbers(INPUTS[activation] * width), numbers(width)
        self.weights = torch.rand(rows, dtype=wide, **options) + 0.02

    def forward(self, weighted: bool = True, ends: Tensor | None = None) -> Tensor:
        weights = self.weights if weighted else None
        return weighted_activation(self.inner, weights, ends, activation=self.activation)

    def backward(
        self,
        weighted: bool = True,
        ends: Tensor | None = None,
        need_weights: bool = True,
        need_z: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """grad_inner, grad_weights, z."""
        weights = self.weights if weighted else None
        return activate_backward(self.grad, self.inner, weights, ends, self.activation, need_weights, need_z)

    def results(self, weighted: bool = True, ends: Tensor | None = None) -> dict[str, Tensor]:
        grad_inner, grad_weights, again = self.backward(weighted, ends)
        z = self.forward(weighted, ends)
        return {"z": z, "grad_inner": grad_inner, "grad_weights": grad_weights, "again": again}


def parts(inner: Tensor, activation: str) -> list[Tensor]:
    """The gates and up values (or x)."""
    if activation in INTERLEAVED:
        return [inner[:, ::2], inner[:, 1::2]]
    return list(inner.chunk(INPUTS[activation], dim=1))


def whole(columns: list[Tensor], activation: str) -> Tensor:
    """What `parts` takes apart."""
    if activation in INTERLEAVED:
        return torch.stack(columns, dim=2).flatten(1)
    return torch.cat(columns, dim=1)


def reference(inner: Tensor, activation: str) -> tuple[Tensor, list[Tensor]]:
    """act(inner) and its derivatives by gate and up (or by x), in float64."""
    inner = inner.double()
    if activation == "swiglu_clamped":
        gate, up = parts(inner, activation)
        open_gate, open_up = gate <= LIMIT, up.abs() <= LIMIT
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        share = 1 / (1 + torch.exp(-ALPHA * gate))
        slope = share + ALPHA * gate * share * (1 - share)
        return gate * share * (up + 1), [(up + 1) * slope * open_gate, gate * share * open_up]
    if activation != "gelu":
        gate, up = parts(inner, activation)
        share = 1 / (1 + torch.exp(-gate))
        return gate * share * up, [up * (share + gate * share * (1 - share)), gate * share]
    below = torch.erfc(-inner / math.sqrt(2)) / 2
    return inner * below, [below + inner * torch.exp(-(inner**2) / 2) / math.sqrt(2 * math.pi)]


def exact(inner: Tensor, weights: Tensor, grad: Tensor, activation: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by result, in float64: the right value, and the error that it may have before it is rounded."""
    noise = 2.0**-46 if inner.dtype == torch.float64 else 2.0**-19  # some 32 units in the last place
    value, slopes = reference(inner, activation)
    inner, grad, factor = inner.double(), grad.double(), weights.double().unsqueeze(1)
    scaled = factor * grad
    # The exponential's error grows with its argument. The first slope is a sum, and has the error of its
    # largest term.
    x, *up = parts(inner, activation)
    if activation == "swiglu_clamped":
        x, up = ALPHA * x.clamp(max=LIMIT), [up[0].clamp(-LIMIT, LIMIT) + 1]
    grow, first = 1 + x**2, 1 + x.abs()
    for each in up:
        first = first * each.abs() / (1 + torch.exp(-x))
    sizes = [scaled.abs() * first * grow, *((scaled * each).abs() * grow for each in slopes[1:])]
    dots = grad * value
    return {
        "z": (factor * value, noise * (factor * value).abs() * grow),
        "grad_inner": (
            whole([scaled * each for each in slopes], activation),
            noise * whole(sizes, activation),
        ),
        "grad_weights": (dots.sum(1), noise * (dots.abs() * grow).sum(1)),
    }


def half_ulp(value: Tensor, kind: torch.dtype) -> Tensor:
    """Half the distance of neighbours of `value` in dtype."""
    info = torch.finfo(kind)
    _, exponent = torch.frexp(value.abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(value, info.eps / 2), exponent - 1)


def off_by_more(text: str, got: Tensor, want: Tensor, noise: Tensor) -> list[str]:
    """Says where `got` is not `want`, which is off by at most `noise`, rounded once."""
    bound = half_ulp(want, got.dtype) * (1 + 2**-10) + noise + 1e-36
    off = ~((got.double() - want).abs() <= bound)  # NaN is
    if not bool(off.any()):
        return []
    at = tuple(off.nonzero()[0].tolist())
    return [
        f"{text}: {int(off.sum())} of {off.numel()} are off, first {at}: {got[at].item()!r}, "
        f"expected {want[at].item()!r} within {bound[at].item():.3g}"
    ]


def wrong(text: str, case: Case, got: dict[str, Tensor], weighted: bool, rows: int) -> list[str]:
    """Lists what is off in the first `rows` rows by more than a rounding and the error before it."""
    problems = []
    step = max(1, AT_ONCE // case.inner.shape[1])
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        weights = case.weights[part] if weighted else torch.ones_like(case.weights[part])
        for name, pair in exact(case.inner[part], weights, case.grad[part], case.activation).items():
            problems += off_by_more(f"{text}: {name}, rows {begin}..", got[name][part], *pair)
    return problems


def unequal(text: str, want: dict[str, Tensor], got: dict[str, Tensor], rows: int) -> list[str]:
    """The names of what has other bits in the first `rows` rows."""
    off = [name for name in want if not torch.equal(want[name][:rows], got[name][:rows])]
    return [f"{text}: {name} has other bits" for name in off]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(1)
def test_against_the_reference(
    rank: int, world_size: int, activation: str, dtype: str, seed: int
) -> list[str]:
    """Results with and without weights are right, and the same whatever else the backward has to return."""
    problems = []
    for rows, width in ON_CPU if ranks.on_cpu() else ON_GPU:
        case = Case(rows, width, activation, dtype, seed)
        for weighted in (True, False):
            text = f"{rows} x {width}{' weighted' if weighted else ''}"
            ranks.poison(max(1 << 20, 2 * case.inner.nbytes))
            got = case.results(weighted)
            assert {each.dtype for name, each in got.items() if name != "grad_weights"} == {case.kind}
            assert got["z"].shape == (rows, width) and got["grad_weights"].dtype == case.weights.dtype
            problems += wrong(text, case, got, weighted, rows)
            problems += unequal(f"{text}, backward", {"z": got["z"]}, {"z": got["again"]}, rows)
        for needs in ((True, False), (False, True), (False, False)):
            grad_inner, *others = case.backward(weighted, None, *needs)
            assert rows == 0 or tuple(each.numel() > 0 for each in others) == needs
            problems += unequal(f"{text}, needs {needs}", got, {**got, "grad_inner": grad_inner}, rows)
    return problems


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(1)
def test_far_out(rank: int, world_size: int, activation: str, dtype: str) -> list[str]:
    """Results are right where an exponential over- or underflows, and where 1 + erf has no digits left."""
    x = torch.tensor([[-1e4, -200, -89, -12, -6, 0, 6, 89, 200, 1e4]], device=ranks.device())
    inner = whole([x, torch.ones_like(x)], activation) if activation != "gelu" else x
    inner = inner.to(getattr(torch, dtype), copy=True)
    want, _ = reference(inner, activation)
    inner.requires_grad_()
    z = weighted_activation(inner, activation=activation)
    z.sum().backward()
    assert inner.grad is not None and bool(inner.grad.isfinite().all()) and bool(z.isfinite().all())
    return off_by_more("z", z.detach(), want, 2.0**-15 * want.abs())


@pytest.mark.parametrize(("activation", "dtype"), [("swiglu_interleaved", "bfloat16"), ("gelu", "float32")])
@on_ranks(1)
def test_strides_do_not_matter(
    rank: int, world_size: int, activation: str, dtype: str, seed: int
) -> list[str]:
    """Autograd gives the same bits at strides of all kinds, between graphs of torch.compile as well."""
    torch._dynamo.reset()
    case, problems = Case(200, 24, activation, dtype, seed), []

    def program(inner: Tensor, weights: Tensor) -> Tensor:
        return weighted_activation(inner, weights, activation=activation)

    want = case.results()
    for text, call in (
        ("eager", program),
        ("compiled", torch.compile(program, backend="aot_eager")),
    ):
        inner = torch.stack([case.inner, case.inner.neg()], dim=2)[:, :, 0].requires_grad_()
        weights = torch.stack([case.weights, case.weights.neg()], dim=1)[:, 0].requires_grad_()
        z = call(inner, weights)
        assert z.is_contiguous() and not inner.is_contiguous()
        z.backward(case.grad.t().contiguous().t())
        assert inner.grad is not None and weights.grad is not None
        got = {"z": z.detach(), "grad_inner": inner.grad, "grad_weights": weights.grad}
        problems += unequal(text, {name: want[name] for name in got}, got, 200)
    return problems


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_past_the_last_end(pool: Pools, activation: str, dtype: str, seed: int) -> None:
    """Rows past the last end hold NaN, come out zero and get a zero gradient, and change no other row. On
    GPUs they are left alone."""
    for ends in ([1, 4, 4, 5], [0, 0], [7], [9]):
        case = Case(7, 10, activation, dtype, seed)
        real = min(ends[-1], 7)
        clean = case.results()
        for each in (case.inner, case.weights, case.grad):
            each[real:] = math.nan
        found = case.results(ends=torch.tensor(ends, dtype=torch.int32))
        assert not unequal(f"ends {ends}", clean, found, real)
        assert all(torch.equal(each[real:], torch.zeros_like(each[real:])) for each in found.values()), ends


BAD: list[tuple[str, Any, str]] = [
    (
        "activation",
        "relu",
        r"activation is 'relu', expected one of swiglu, swiglu_interleaved, swiglu_clamped, gelu",
    ),
    ("inner", torch.zeros(4, 6, dtype=torch.int32), r"inner is torch.int32, expected one of"),
    ("inner", torch.zeros(4), r"inner has shape \(4,\), expected \(rows, 2F\) for swiglu"),
    ("inner", torch.zeros(4, 5), r"inner has shape \(4, 5\), expected \(rows, 2F\)"),
    ("inner", torch.zeros(4, 0), r"inner has shape \(4, 0\).* F at least 1"),
    ("inner", torch.zeros(4, 6).double(), r"weights is torch.float32, expected torch.float64"),
    ("weights", torch.ones(4, 1), r"weights has shape \(4, 1\), expected \(4,\)"),
    ("weights", torch.ones(3), r"weights has shape \(3,\), expected \(4,\)"),
    ("weights", torch.ones(4).double(), r"weights is torch.float64, expected torch.float32"),
    ("weights", torch.ones(4, device="meta"), r"weights is on meta, expected cpu"),
    ("ends", torch.tensor([4]), r"ends is torch.int64, expected torch.int32"),
    ("ends", torch.zeros((), dtype=torch.int32), r"ends has shape \(\), expected \(L,\)"),
    ("ends", torch.zeros(0, dtype=torch.int32), r"ends has shape \(0,\).* L at least 1"),
    (
        "ends",
        torch.zeros(2, dtype=torch.int32, device="meta"),
        r"ends is on meta, expected cpu, where inner is",
    ),
    ("grad_z", torch.zeros(4, 6), r"grad_z has shape \(4, 6\), expected \(4, 3\)"),
    ("grad_z", torch.zeros(4, 3).double(), r"grad_z is torch.float64, expected torch.float32"),
    ("grad_z", torch.zeros(4, 3, device="meta"), r"grad_z is on meta, expected cpu"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD)
def test_refuses(name: str, value: Any, text: str) -> None:
    ends = torch.tensor([1, 4], dtype=torch.int32)
    good = {"inner": torch.zeros(4, 6), "weights": torch.ones(4), "ends": ends, "activation": "swiglu"}
    grad_z, *tensors, activation = {"grad_z": torch.zeros(4, 3), **good, name: value}.values()
    if name != "grad_z":
        with pytest.raises(InvalidArgument, match=text):
            weighted_activation(*tensors, activation=activation)
    with pytest.raises(InvalidArgument, match=text):
        activate_backward(grad_z, *tensors, activation, True, True)


# -- torch.compile -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("backend", "activation"), [("inductor", "swiglu"), ("aot_eager", "gelu")])
def test_between_graphs(pool: Pools, backend: str, activation: str, seed: int) -> None:
    """Around the activation stand products of matrices alone, which inductor takes from a library: it needs
    no minute of a C++ compiler."""
    before, after = (2 * torch.eye(width) for width in (8 * INPUTS[activation], 8))

    def program(inner: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return weighted_activation(inner @ before, weights, ends, activation=activation) @ after

    compiled = torch.compile(program, backend=backend)
    for rows in (6, 6, 9, 0):
        case = Case(rows, 8, activation, "float32", seed)
        found = []
        for each in (program, compiled):
            inner, weights = case.inner.clone().requires_grad_(), case.weights.clone().requires_grad_()
            y = each(inner, weights, torch.tensor([2, rows // 2], dtype=torch.int32))
            y.backward(case.grad)
            found.append((y.detach(), inner.grad, weights.grad))
        for want, got in zip(*found, strict=True):
            assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_are_computed_in_blocks(
    pool: Pools, activation: str, dtype: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    case, real = Case(101, 24, activation, dtype, seed), 90
    case.inner[real:] = torch.nan
    ends = torch.tensor([10, 10, real], dtype=torch.int32)

    def compute(block: int) -> list[Tensor]:
        monkeypatch.setattr(module, "_BLOCK", block)
        return list(case.results(ends=ends).values())

    whole = compute(2**30)
    for block in (1, 7 * case.inner.shape[1]):
        torch.testing.assert_close(compute(block), whole)  # but for the last bits of torch's functions
    assert all(each[:real].any() and not each[real:].any() for each in whole)


def test_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module._C, "prepare_activation", raising=False)
    with pytest.raises(Unsupported, match=r"a tensor is on cuda:5, but this moecomm was built without"):
        prepare(torch.device("cuda", 5), torch.bfloat16)
    prepare(torch.device("cpu"), torch.bfloat16)  # nothing to load there
