"""The weighted activation's kernels against float64, and bit for bit where that is promised.

Bodies run on rank 0 of a pool of one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moecomm.kernels.activation import prepare, weighted_activation, weighted_activation_backward
from tests.gpu import harness
from tests.gpu.conftest import Pools

ACTIVATIONS = ("swiglu", "gelu")
INPUTS = {"swiglu": 2, "gelu": 1}
KINDS = ("bfloat16", "float16", "float32")
WIDTHS = (1, 7, 64, 1000, 2048, 16384 + 8)
ROWS = (0, 1, 513, 5000)
NOISE = 2.0**-19
"""Relative error of what is not rounded yet: some 32 units in the last place of float32."""
AT_ONCE = 1 << 24
"""Elements of a comparison in float64."""


class Case:
    """Arguments on the device. Numbers reach from -30 to 30, most are small."""

    def __init__(self, rows: int, width: int, activation: str, dtype: str, seed: int) -> None:
        generator = torch.Generator(harness.device()).manual_seed(seed)
        self.activation, self.width = activation, width
        self.kind: torch.dtype = getattr(torch, dtype)
        options: dict[str, Any] = {"generator": generator, "device": harness.device()}

        def numbers(columns: int) -> Tensor:
            found = torch.randn(rows, columns, dtype=torch.float32, **options)
            found *= torch.randint(0, 11, (rows, columns), dtype=torch.int8, **options)
            return found.clamp_(-30, 30).to(self.kind)

        self.inner, self.grad = numbers(INPUTS[activation] * width), numbers(width)
        self.weights = torch.rand(rows, dtype=torch.float32, **options) + 0.02

    def forward(self, weighted: bool = True, ends: Tensor | None = None) -> Tensor:
        weights = self.weights if weighted else None
        return weighted_activation(self.inner, weights, ends, activation=self.activation)

    def backward(self, weighted: bool = True, ends: Tensor | None = None) -> list[Tensor]:
        """grad_inner, grad_weights, z."""
        found = weighted_activation_backward(
            self.grad,
            self.inner,
            self.weights if weighted else None,
            ends,
            activation=self.activation,
            need_weights=True,
            need_z=True,
        )
        return [each for each in found if each is not None]

    def results(self, weighted: bool = True, ends: Tensor | None = None) -> dict[str, Tensor]:
        names = ("z", "grad_inner", "grad_weights", "again")
        return dict(zip(names, (self.forward(weighted, ends), *self.backward(weighted, ends)), strict=True))


def _exact(inner: Tensor, weights: Tensor, grad: Tensor, activation: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by result, in float64: the right value, and the size that float32's error is relative to."""
    inner = inner.double().requires_grad_()
    weights = weights.double().unsqueeze(1).requires_grad_()
    grad = grad.double()
    x = inner[:, : grad.shape[1]]
    if activation == "swiglu":
        share = x.detach().sigmoid()
        up = inner[:, grad.shape[1] :]
        value = functional.silu(x) * up
        first = up.detach().abs() * share * (1 + x.detach().abs())
        others = [(x.detach() * share).abs()]
    else:
        value = x * 0.5 * torch.erfc(x * -math.sqrt(0.5))
        first, others = 1 + x.detach().abs(), []
    z = weights * value
    grad_inner, grad_weights = torch.autograd.grad(z, (inner, weights), grad)
    # The exponential's error grows with its argument, the sum's is that of its terms.
    grow = 1 + x.detach() ** 2
    scaled = (weights.detach() * grad).abs() * grow
    return {
        "z": (z.detach(), z.detach().abs() * grow),
        "grad_inner": (grad_inner, torch.cat([scaled * each for each in (first, *others)], dim=1)),
        "grad_weights": (grad_weights.squeeze(1), ((grad * value.detach()).abs() * grow).sum(dim=1)),
    }


def _half_ulp(value: Tensor, kind: torch.dtype) -> Tensor:
    """Half the distance of neighbours of `value` in dtype."""
    info = torch.finfo(kind)
    _, exponent = torch.frexp(value.abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(value, info.eps / 2), exponent - 1)


def _wrong(text: str, case: Case, got: dict[str, Tensor], weighted: bool, rows: int) -> list[str]:
    """Lists what is off in the first `rows` rows by more than a rounding and the error before it."""
    problems = []
    step = max(1, AT_ONCE // case.inner.shape[1])
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        weights = case.weights[part] if weighted else torch.ones_like(case.weights[part])
        exact = _exact(case.inner[part], weights, case.grad[part], case.activation)
        for name, (want, size) in exact.items():
            found = got[name][part]
            error = (found.double() - want).abs()
            bound = _half_ulp(want, found.dtype) * (1 + 2**-10) + NOISE * size + 1e-36
            off = ~(error <= bound)  # NaN is
            if bool(off.any()):
                at = tuple(off.nonzero()[0].tolist())
                problems.append(
                    f"{text}: {name}: {int(off.sum())} of {off.numel()} rows {begin}.. are off, first {at}: "
                    f"{found[at].item()!r}, expected {want[at].item()!r} within {bound[at].item():.3g}"
                )
    return problems


def _unequal(text: str, want: dict[str, Tensor], got: dict[str, Tensor], rows: int) -> list[str]:
    """The names of what has other bits in the first `rows` rows."""
    off = [name for name in want if not torch.equal(want[name][:rows], got[name][:rows])]
    return [f"{text}: {name} has other bits" for name in off]


# -- numbers -----------------------------------------------------------------------------------------------


def _shapes(rank: int, world_size: int, activation: str, dtype: str, seed: int) -> list[str]:
    problems = []
    for width in WIDTHS:
        for rows in ROWS:
            if harness.on_cpu() and rows * width > 1 << 20:
                continue
            case = Case(rows, width, activation, dtype, seed)
            for weighted in (True, False):
                text = f"{rows} x {width}{' weighted' if weighted else ''}"
                harness.poison(max(1 << 20, 2 * case.inner.nbytes))
                got = case.results(weighted)
                problems += _wrong(text, case, got, weighted, rows)
                if not torch.equal(got["z"], got["again"]):
                    problems.append(f"{text}: the backward's z has other bits than the forward's")
    return problems


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_shapes(pool: Pools, activation: str, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_shapes, activation, dtype, seed))


def _beside_the_cpu(rank: int, world_size: int, activation: str, dtype: str, seed: int) -> list[str]:
    """The CPU's results are within two roundings: both round what differs in the last places of float32."""
    problems = []
    for rows, width in ((1, 1), (513, 7), (64, 1000), (33, 2048), (3, 16384 + 8)):
        case = Case(rows, width, activation, dtype, seed)
        got = {name: each.cpu() for name, each in case.results().items()}
        for name in ("inner", "grad", "weights"):
            setattr(case, name, getattr(case, name).cpu())
        want = case.results()
        exact = _exact(case.inner, case.weights, case.grad, activation)
        for name, (value, size) in exact.items():
            error = (got[name].double() - want[name].double()).abs()
            bound = 2 * (_half_ulp(value, got[name].dtype) * (1 + 2**-10) + NOISE * size + 1e-36)
            if bool((~(error <= bound)).any()):
                problems.append(
                    f"{rows} x {width}: {name} is off by {(error / bound).max().item():.3g} bounds"
                )
    return problems


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_beside_the_cpu(pool: Pools, activation: str, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_beside_the_cpu, activation, dtype, seed))


def _far_out(rank: int, world_size: int) -> list[str]:
    """Checks inputs where an exponential over- or underflows, and where 1 + erf has no digits left."""
    problems = []
    x = torch.tensor([[-1e4, -200, -89, -12, -6, 0, 6, 89, 200, 1e4]], device=harness.device())
    for dtype in KINDS:
        for activation in ACTIVATIONS:
            kind = getattr(torch, dtype)
            inner = torch.cat([x, torch.ones_like(x)], dim=1) if activation == "swiglu" else x
            inner = inner.to(kind, copy=True)
            want = _exact(inner, torch.ones(1, device=x.device), torch.ones_like(x), activation)["z"][0]
            inner.requires_grad_()
            z = weighted_activation(inner, activation=activation)
            z.sum().backward()
            allowed = _half_ulp(want, kind) * (1 + 2**-10) + 2.0**-15 * want.abs() + 1e-36
            if bool(((z.double() - want).abs() > allowed).any()) or not bool(torch.isfinite(z).all()):
                problems.append(f"{activation} of {dtype}: {z.tolist()}, expected {want.tolist()}")
            if inner.grad is None or not bool(torch.isfinite(inner.grad).all()):
                problems.append(f"{activation} of {dtype}: gradient {inner.grad}")
    return problems


def test_far_out(pool: Pools) -> None:
    harness.assert_none(pool(1)(_far_out))


def _autograd(rank: int, world_size: int, activation: str, seed: int) -> list[str]:
    """Checks autograd with strides of all kinds, in a graph of torch.compile and outside."""
    torch._dynamo.reset()
    problems = []
    for dtype in ("bfloat16", "float32"):
        case = Case(200, 24, activation, dtype, seed)

        def program(inner: Tensor, weights: Tensor) -> Tensor:
            return weighted_activation(inner, weights, activation=activation)

        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        want = case.results()
        for text, call in (("eager", program), ("compiled", compiled)):
            inner = torch.stack([case.inner, case.inner.neg()], dim=2)[:, :, 0].requires_grad_()
            weights = torch.stack([case.weights, case.weights.neg()], dim=1)[:, 0].requires_grad_()
            z = call(inner, weights)
            z.backward(case.grad.t().contiguous().t())
            assert inner.grad is not None and weights.grad is not None
            got = {"z": z.detach(), "grad_inner": inner.grad, "grad_weights": weights.grad}
            problems += _unequal(f"{text}, {dtype}", {name: want[name] for name in got}, got, 200)
    return problems


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd(pool: Pools, activation: str, seed: int) -> None:
    harness.assert_none(pool(1)(_autograd, activation, seed))


# -- what has to be the same bits --------------------------------------------------------------------------


def _same_bits(rank: int, world_size: int, activation: str, dtype: str, seed: int) -> list[str]:
    """Run after run; when a base address is one element off; and whatever rows there are besides."""
    problems = []
    for width in (1, 7, 64, 1000, 2048, 4104, 16384 + 8):
        case = Case(300, width, activation, dtype, seed)
        want = case.results()
        for again in range(3):
            harness.poison(1 << 24)
            problems += _unequal(f"width {width}, run {again}", want, case.results(), 300)
        aligned = case.inner, case.grad, case.weights
        for off in range(1, 8):
            for name, value in zip(("inner", "grad", "weights"), aligned, strict=True):
                flat = value.new_empty(value.numel() + off)
                moved = flat[off:].view(value.shape)
                setattr(case, name, moved.copy_(value))
            problems += _unequal(f"width {width}, {off} elements off", want, case.results(), 300)
        case.inner, case.grad, case.weights = (each[:7] for each in aligned)
        problems += _unequal(f"width {width}, the first rows alone", want, case.results(), 7)
        case.inner, case.grad, case.weights = (torch.cat([each] * 40) for each in aligned)
        problems += _unequal(f"width {width}, with more rows", want, case.results(), 300)
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_same_bits(pool: Pools, activation: str, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_same_bits, activation, dtype, seed))


# -- rows that are not real --------------------------------------------------------------------------------

MARGIN = 4096
"""Bytes around an output that nobody may write."""


class Output:
    """Memory full of ones, for `shape`, `off` bytes past a multiple of 16, with a margin on both sides."""

    def __init__(self, shape: tuple[int, ...], kind: torch.dtype, off: int) -> None:
        count = math.prod(shape) * kind.itemsize
        self.bytes = torch.full((count + 2 * MARGIN,), 0xFF, dtype=torch.uint8, device=harness.device())
        self.begin, self.end = MARGIN + off, MARGIN + off + count
        self.value = self.bytes[self.begin : self.end].view(kind).view(shape)

    def touched(self, rows: int) -> bool:
        """True if anything but the first `rows` rows was written."""
        real = self.value[:rows].numel() * self.value.element_size()
        around = torch.cat([self.bytes[: self.begin], self.bytes[self.begin + real :]])
        return bool((around != 0xFF).any())


def _untouched(rank: int, world_size: int, activation: str, dtype: str, seed: int) -> list[str]:
    """The extension's functions on memory of the test's own: the first rows are right, and nothing else is
    written; what is not real holds NaN."""
    from moecomm import _C
    from moecomm.setup.memory_plan import NATIVE_DTYPES

    problems = []
    prepare(harness.device(), getattr(torch, dtype))
    stream = torch.cuda.current_stream().cuda_stream
    for rows, width in ((0, 8), (1, 1), (70, 7), (513, 64), (70, 1000), (33, 16384 + 8)):
        for ends in ([rows], [0, 0], [rows // 3, rows // 3, rows // 2], [rows + 9], [-4]):
            real = max(0, min(ends[-1], rows))
            case = Case(rows, width, activation, dtype, seed)
            whole = case.results()
            for each in (case.inner, case.grad, case.weights):
                each[real:] = math.nan
            ends_L = torch.tensor(ends, dtype=torch.int32, device=harness.device())
            for off in (0, case.kind.itemsize):
                outputs = {
                    "z": Output((rows, width), case.kind, off),
                    "grad_inner": Output(tuple(case.inner.shape), case.kind, off),
                    "grad_weights": Output((rows,), case.weights.dtype, 0),
                    "again": Output((rows, width), case.kind, off),
                }
                given = (
                    case.inner.data_ptr(),
                    case.weights.data_ptr(),
                    ends_L.data_ptr(),
                    len(ends),
                    rows,
                    width,
                    NATIVE_DTYPES[case.kind],
                    getattr(_C.Activation, activation),
                )
                at = {name: output.value.data_ptr() for name, output in outputs.items()}
                _C.activation(*given, at["z"], stream)
                _C.activation_backward(
                    *given,
                    case.grad.data_ptr(),
                    at["grad_inner"],
                    at["grad_weights"],
                    at["again"],
                    stream,
                )
                text = f"{rows} x {width}, ends {ends}, {off} bytes off"
                values = {name: output.value for name, output in outputs.items()}
                problems += _unequal(text, whole, values, real)
                problems += [
                    f"{text}: {name} was written past its real rows"
                    for name, output in outputs.items()
                    if output.touched(real)
                ]
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_past_the_last_end_are_left_alone(pool: Pools, activation: str, dtype: str, seed: int) -> None:
    harness.assert_none(pool(1)(_untouched, activation, dtype, seed))


def _no_wait(rank: int, world_size: int, seed: int) -> list[str]:
    """Checks that the host waits for nothing if `ends` is on the device, the first call excepted."""
    case = Case(100, 64, "swiglu", "bfloat16", seed)
    ends = torch.tensor([30, 60], dtype=torch.int32, device=harness.device())
    case.results(ends=ends)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    got = case.results(ends=ends)
    torch.cuda.set_sync_debug_mode("default")
    return _wrong("with ends", case, got, True, 60)


@pytest.mark.usefixtures("cuda_only")
def test_the_host_does_not_wait(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_no_wait, seed))


# -- streams, graphs, devices ------------------------------------------------------------------------------


def _graph(rank: int, world_size: int, activation: str, seed: int) -> list[str]:
    """Checks a graph of forward and backward; inputs and the number of real rows change between replays."""
    problems = []
    static = Case(400, 136, activation, "bfloat16", seed)
    ends = torch.tensor([100, 400], dtype=torch.int32, device=harness.device())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.results(ends=ends)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = static.results(ends=ends)
    for replay, real in enumerate((400, 0, 17, 399, 250)):
        now = Case(400, 136, activation, "bfloat16", seed + replay + 1)
        for name in ("inner", "grad", "weights"):
            getattr(static, name).copy_(getattr(now, name))
        ends[1] = real
        for each in captured.values():
            each.fill_(math.nan)
        graph.replay()
        problems += _unequal(f"replay {replay}", now.results(), captured, real)
        problems += [
            f"replay {replay}: {name} was written past its real rows"
            for name, each in captured.items()
            if not bool(each[real:].isnan().all())
        ]
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_a_cuda_graph(pool: Pools, activation: str, seed: int) -> None:
    harness.assert_none(pool(1)(_graph, activation, seed))


def _current_stream(rank: int, world_size: int, seed: int) -> list[str]:
    """Checks that work already on the current stream comes first."""
    case = Case(300, 64, "swiglu", "bfloat16", seed)
    want = case.results()
    inner = case.inner.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    case.inner.fill_(math.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.inner.copy_(inner)
        got = case.results()
    torch.cuda.synchronize()
    return _unequal("on a side stream", want, got, 300)


@pytest.mark.usefixtures("cuda_only")
def test_on_the_current_stream(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_current_stream, seed))


def _another_device(rank: int, world_size: int, seed: int) -> list[str]:
    """Tensors of a GPU that is not the current device."""
    case = Case(300, 64, "swiglu", "bfloat16", seed)
    want = {name: each.cpu() for name, each in case.results().items()}
    there = torch.device("cuda", 1)
    for name in ("inner", "grad", "weights"):
        setattr(case, name, getattr(case, name).to(there))
    got = {name: each.cpu() for name, each in case.results().items()}
    problems = [] if torch.cuda.current_device() == 0 else ["the current device has changed"]
    return problems + _unequal("on another device", want, got, 300)


@pytest.mark.usefixtures("cuda_only")
def test_on_another_device(pool: Pools, require_gpus: Any, seed: int) -> None:
    require_gpus(2)
    harness.assert_none(pool(1)(_another_device, seed))


def _refusals(rank: int, world_size: int) -> list[str]:
    """Checks that the extension itself refuses bad arguments by the typed error."""
    from moecomm import _C
    from moecomm.errors import InvalidArgument

    good: dict[str, Any] = {"inner": 4096, "weights": 0, "ends": 0, "groups": 0, "rows": 4, "width": 8}
    bad = {
        "rows is -1": {"rows": -1},
        "rows is 2147483648": {"rows": 1 << 31},
        "width is 0": {"width": 0},
        "groups is 0": {"ends": 4096, "groups": 0},
        "ends is at address 4098": {"ends": 4098, "groups": 1},
        "inner has no address": {"inner": 0},
        "inner is at address 4097": {"inner": 4097},
        "weights is at address 4098": {"weights": 4098},
    }
    problems = []
    for text, changed in bad.items():
        values = tuple({**good, **changed}.values())
        try:
            _C.activation(*values, _C.DType.bfloat16, _C.Activation.swiglu, 8192, 0)
            problems.append(f"no error, expected: {text}")
        except InvalidArgument as error:
            if text not in str(error):
                problems.append(f"{error}, expected: {text}")
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_what_the_extension_refuses(pool: Pools) -> None:
    harness.assert_none(pool(1)(_refusals))
