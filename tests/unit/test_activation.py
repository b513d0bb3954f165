"""The weighted activation on the CPU: against a reference in float64, its rounding, what is no real row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import activation as module
from moecomm.kernels.activation import prepare, weighted_activation, weighted_activation_backward
from tests.unit.loopback import DTYPES, memory

ACTIVATIONS = ("swiglu", "gelu")
INPUTS = {"swiglu": 2, "gelu": 1}
KINDS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NOISE = {torch.float64: 2.0**-46}
"""Relative error of what is not rounded yet; 2**-19, some 32 units in the last place, of float32."""

erfc = np.vectorize(math.erfc, otypes=[np.float64])


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def reference(inner: np.ndarray, activation: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """act(inner) and its derivatives by gate and up (or by x), in float64."""
    if activation == "swiglu":
        gate, up = np.split(inner, 2, axis=1)
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(-gate))
        return gate * share * up, [up * (share + gate * share * (1 - share)), gate * share]
    below = erfc(-inner / math.sqrt(2)) / 2 if inner.size else inner
    return inner * below, [below + inner * np.exp(-(inner**2) / 2) / math.sqrt(2 * math.pi)]


def half_ulp(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half the distance of neighbours of `value` in dtype."""
    kind = torch.finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(value), kind.tiny))
    return np.ldexp(kind.eps / 2, exponent - 1)


def assert_rounded_once(got: Tensor, want: np.ndarray, noise: np.ndarray) -> None:
    """`got` is `want`, which is off by at most `noise`, rounded once."""
    error = np.abs(got.double().numpy() - want)
    bound = half_ulp(want, got.dtype) * (1 + 2**-10) + noise + 1e-36
    off = np.count_nonzero(~(error <= bound))  # NaN is
    assert off == 0, f"{off} of {error.size} off, at most by {np.max(error / bound)} bounds"


class Case:
    """Arguments of all kinds, and the exact results. Numbers reach from -30 to 30, most are small."""

    def __init__(self, rows: int, width: int, activation: str, dtype: torch.dtype, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.activation = activation
        exact = torch.float64 if dtype == torch.float64 else torch.float32

        def numbers(columns: int) -> Tensor:
            spread = rng.choice([0.1, 1, 4, 10], size=(rows, columns))
            return torch.from_numpy(np.clip(rng.standard_normal((rows, columns)) * spread, -30, 30)).to(dtype)

        self.inner, self.grad = numbers(INPUTS[activation] * width), numbers(width)
        self.weights = torch.from_numpy(rng.uniform(0.02, 1, rows)).to(exact)
        self.noise = NOISE.get(dtype, 2.0**-19)

    def exact(self, weighted: bool = True) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns, by result, the right value and the error that it may have before the last rounding."""
        inner, grad = self.inner.double().numpy(), self.grad.double().numpy()
        factor = self.weights.double().numpy()[:, None] if weighted else np.ones((len(inner), 1))
        value, slopes = reference(inner, self.activation)
        scaled = factor * grad
        # The exponential's error grows with its argument. The first slope is a sum, and has the error of its
        # largest term.
        x = np.abs(inner[:, : value.shape[1]])
        grow = 1 + x**2
        first = 1 + x
        if self.activation == "swiglu":
            with np.errstate(over="ignore"):
                first /= 1 + np.exp(-inner[:, : value.shape[1]])
            first *= np.abs(inner[:, value.shape[1] :])
        sizes = [np.abs(scaled) * first * grow, *(np.abs(scaled * each) * grow for each in slopes[1:])]
        dots = grad * value
        return {
            "z": (factor * value, self.noise * np.abs(factor * value) * grow),
            "grad_inner": (
                np.concatenate([scaled * each for each in slopes], axis=1),
                self.noise * np.concatenate(sizes, axis=1),
            ),
            "grad_weights": (dots.sum(axis=1), self.noise * (np.abs(dots) * grow).sum(axis=1)),
        }


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (40, 64), (0, 8), (3, 1000)])
def test_against_the_reference(rows: int, width: int, activation: str, dtype: torch.dtype, seed: int) -> None:
    case = Case(rows, width, activation, dtype, seed)
    for weighted in (True, False):
        exact = case.exact(weighted)
        inner, weights = case.inner.clone().requires_grad_(), case.weights.clone().requires_grad_()
        z = weighted_activation(inner, weights if weighted else None, activation=activation)
        assert z.shape == (rows, width) and z.dtype == dtype
        assert_rounded_once(z.detach(), *exact["z"])
        z.backward(case.grad)
        assert inner.grad is not None and inner.grad.dtype == dtype
        assert_rounded_once(inner.grad, *exact["grad_inner"])
        if weighted:
            assert weights.grad is not None and weights.grad.dtype == weights.dtype
            assert_rounded_once(weights.grad, *exact["grad_weights"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_rounding(activation: str, seed: int) -> None:
    """Two, of the activation and of its product with the weight, would fail the check that one passes."""
    case = Case(200, 64, activation, torch.bfloat16, seed)
    want, noise = case.exact()["z"]
    assert_rounded_once(weighted_activation(case.inner, case.weights, activation=activation), want, noise)
    value = torch.from_numpy(reference(case.inner.double().numpy(), activation)[0])
    twice = (value.to(torch.bfloat16).float() * case.weights.unsqueeze(1)).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="off"):
        assert_rounded_once(twice, want, noise)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [True, False])
def test_what_the_backward_gives(activation: str, weighted: bool, dtype: torch.dtype, seed: int) -> None:
    case = Case(9, 24, activation, dtype, seed)
    weights = case.weights if weighted else None
    exact = case.exact(weighted)
    z = weighted_activation(case.inner, weights, activation=activation)
    for need_weights in (True, False):
        for need_z in (True, False):
            grad_inner, grad_weights, again = weighted_activation_backward(
                case.grad,
                case.inner,
                weights,
                None,
                activation=activation,
                need_weights=need_weights,
                need_z=need_z,
            )
            assert_rounded_once(grad_inner, *exact["grad_inner"])
            assert (grad_weights is not None, again is not None) == (need_weights, need_z)
            if grad_weights is not None:
                assert_rounded_once(grad_weights, *exact["grad_weights"])
            if again is not None:
                assert torch.equal(again, z)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ends", [None, [2, 2, 4], [0, 0, 0], [6]])
def test_gradcheck(activation: str, ends: list[int] | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randn(6, 3 * INPUTS[activation], dtype=torch.float64, generator=generator)
    weights = torch.rand(6, dtype=torch.float64, generator=generator).requires_grad_()
    inner.requires_grad_()
    ends_L = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def run(inner: Tensor, weights: Tensor | None = None) -> Tensor:
        return weighted_activation(inner, weights, ends_L, activation=activation)

    assert torch.autograd.gradcheck(run, (inner,))
    assert torch.autograd.gradcheck(run, (inner, weights))
    assert torch.autograd.gradcheck(lambda weights: run(inner.detach(), weights), (weights,))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ends", [[1, 4, 4, 5], [0, 0], [7], [9]])
def test_rows_past_the_last_end(ends: list[int], activation: str, dtype: torch.dtype, seed: int) -> None:
    """Rows past the last end hold NaN, come out zero and get a zero gradient, and change no other row."""
    case = Case(7, 10, activation, dtype, seed)
    real = min(ends[-1], 7)
    ends_L = torch.tensor(ends, dtype=torch.int32)

    def run(ends_L: Tensor | None) -> list[Tensor]:
        inner, weights = case.inner.clone().requires_grad_(), case.weights.clone().requires_grad_()
        z = weighted_activation(inner, weights, ends_L, activation=activation)
        z.backward(case.grad)
        assert inner.grad is not None and weights.grad is not None
        _, _, again = weighted_activation_backward(
            case.grad,
            inner.detach(),
            weights.detach(),
            ends_L,
            activation=activation,
            need_weights=False,
            need_z=True,
        )
        assert again is not None
        return [z.detach(), inner.grad, weights.grad, again]

    clean = run(None)
    for each in (case.inner, case.weights, case.grad):
        each[real:] = math.nan
    for got, want in zip(run(ends_L), clean, strict=True):
        assert torch.equal(got[:real], want[:real])
        assert torch.count_nonzero(got[real:]) == 0 and not got[real:].isnan().any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strides_do_not_matter(activation: str, seed: int) -> None:
    case = Case(6, 8, activation, torch.float32, seed)
    results = []
    for spread in (False, True):
        inner, weights = case.inner, case.weights
        grad = case.grad[:1].expand(6, 8)
        if spread:
            inner = torch.stack([inner, -inner], dim=2)[:, :, 0]
            weights = torch.stack([weights, -weights], dim=1)[:, 0]
            assert not inner.is_contiguous() and not weights.is_contiguous()
        else:
            grad = grad.contiguous()
        inner, weights = inner.detach().requires_grad_(), weights.detach().requires_grad_()
        z = weighted_activation(inner, weights, activation=activation)
        z.backward(grad)
        assert z.is_contiguous()
        results.append((z.detach(), inner.grad, weights.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


def test_far_out() -> None:
    """Results are right where an exponential over- or underflows, and where a difference loses its digits."""
    x = torch.tensor([[-200.0, -89.0, -12.0, -6.0, 0.0, 6.0, 89.0, 200.0]])
    for dtype in (torch.float32, torch.float64):
        inner = x.to(dtype, copy=True).requires_grad_()
        z = weighted_activation(inner, activation="gelu")
        want, _ = reference(x.double().numpy(), "gelu")
        np.testing.assert_allclose(z.detach().double().numpy(), want, rtol=2e-5, atol=1e-36)
        z.sum().backward()
        assert inner.grad is not None and torch.isfinite(inner.grad).all()
        gate_up = torch.cat([x, torch.ones_like(x)], dim=1).to(dtype).requires_grad_()
        z = weighted_activation(gate_up, activation="swiglu")
        want, _ = reference(gate_up.detach().double().numpy(), "swiglu")
        np.testing.assert_allclose(z.detach().double().numpy(), want, rtol=2e-5, atol=1e-36)
        z.sum().backward()
        assert gate_up.grad is not None and torch.isfinite(gate_up.grad).all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "relu"}, r"activation is 'relu', expected one of swiglu, gelu"),
    "dtype": ({"inner": torch.zeros(4, 6, dtype=torch.int32)}, r"inner is torch.int32, expected one of"),
    "rank": ({"inner": torch.zeros(4)}, r"inner has shape \(4,\), expected \(rows, 2F\) for swiglu"),
    "odd": ({"inner": torch.zeros(4, 5)}, r"inner has shape \(4, 5\), expected \(rows, 2F\)"),
    "no columns": ({"inner": torch.zeros(4, 0)}, r"inner has shape \(4, 0\).* F at least 1"),
    "weights' shape": ({"weights": torch.ones(4, 1)}, r"weights has shape \(4, 1\), expected \(4,\)"),
    "weights' number": ({"weights": torch.ones(3)}, r"weights has shape \(3,\), expected \(4,\)"),
    "weights' dtype": (
        {"weights": torch.ones(4, dtype=torch.float64)},
        r"weights is torch.float64, expected torch.float32",
    ),
    "weights of float64": (
        {"inner": torch.zeros(4, 6, dtype=torch.float64)},
        r"weights is torch.float32, expected torch.float64",
    ),
    "weights' device": ({"weights": torch.ones(4, device="meta")}, r"weights is on meta, expected cpu"),
    "ends' dtype": ({"ends": torch.tensor([4])}, r"ends is torch.int64, expected torch.int32"),
    "ends' shape": ({"ends": torch.zeros((), dtype=torch.int32)}, r"ends has shape \(\), expected \(L,\)"),
    "no ends": ({"ends": torch.zeros(0, dtype=torch.int32)}, r"ends has shape \(0,\).* L at least 1"),
    "ends' device": (
        {"ends": torch.zeros(2, dtype=torch.int32, device="meta")},
        r"ends is on meta, expected cpu, where inner is",
    ),
}
BAD_GRADS: dict[str, tuple[Tensor, str]] = {
    "shape": (torch.zeros(4, 6), r"grad_z has shape \(4, 6\), expected \(4, 3\)"),
    "dtype": (torch.zeros(4, 3, dtype=torch.float64), r"grad_z is torch.float64, expected torch.float32"),
    "device": (torch.zeros(4, 3, device="meta"), r"grad_z is on meta, expected cpu"),
}


def _arguments(**changed: Any) -> tuple[list[Any], str]:
    values = {
        "inner": torch.zeros(4, 6),
        "weights": torch.ones(4),
        "ends": torch.tensor([1, 4], dtype=torch.int32),
        "activation": "swiglu",
        **changed,
    }
    return [values["inner"], values["weights"], values["ends"]], values["activation"]


@pytest.mark.parametrize(("changed", "text"), BAD.values(), ids=BAD.keys())
def test_refuses(changed: dict[str, Any], text: str) -> None:
    tensors, activation = _arguments(**changed)
    with pytest.raises(InvalidArgument, match=text):
        weighted_activation(*tensors, activation=activation)
    with pytest.raises(InvalidArgument, match=text):
        weighted_activation_backward(
            torch.zeros(4, 3), *tensors, activation=activation, need_weights=True, need_z=True
        )


@pytest.mark.parametrize(("grad_z", "text"), BAD_GRADS.values(), ids=BAD_GRADS.keys())
def test_refuses_gradients(grad_z: Tensor, text: str) -> None:
    tensors, activation = _arguments()
    with pytest.raises(InvalidArgument, match=text):
        weighted_activation_backward(
            grad_z, *tensors, activation=activation, need_weights=False, need_z=False
        )


# -- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_a_graph(backend: str, activation: str, seed: int) -> None:
    def program(inner: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return weighted_activation(inner * 2, weights, ends, activation=activation) + 1

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for rows in (6, 6, 9, 0):
        case = Case(rows, 8, activation, torch.float32, seed)
        found = []
        for each in (program, compiled):
            inner, weights = case.inner.clone().requires_grad_(), case.weights.clone().requires_grad_()
            y = each(inner, weights, torch.tensor([2, rows // 2], dtype=torch.int32))
            y.backward(case.grad)
            found.append((y.detach(), inner.grad, weights.grad))
        for want, got in zip(*found, strict=True):
            assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_operators_are_what_they_say(activation: str, seed: int) -> None:
    case = Case(5, 4, activation, torch.float32, seed)
    ends = torch.tensor([2, 3], dtype=torch.int32)
    ops = torch.ops.moecomm
    inner, weights = case.inner.requires_grad_(), case.weights.requires_grad_()
    for values in ((inner, weights, ends), (inner, None, None), (inner.detach(), weights, None)):
        torch.library.opcheck(ops.weighted_activation.default, (*values, activation))
        plain = [None if each is None else each.detach() for each in values]
        for needs in ((True, True), (False, False)):
            torch.library.opcheck(
                ops.weighted_activation_backward.default, (case.grad, *plain, activation, *needs)
            )


# -- what the extension is given ---------------------------------------------------------------------------


class Kernels:
    """The extension's functions for CUDA tensors, on the host's memory."""

    DType = module._C.DType
    Activation = SimpleNamespace(swiglu="swiglu", gelu="gelu")

    def __init__(self) -> None:
        self.streams: list[int] = []

    def activation(self, *arguments: Any) -> None:
        *given, z, stream = arguments
        values, rows, width, activation = self._given(*given)
        self._put(z, module._forward_by_torch(*values, activation), (rows, width))
        self.streams.append(stream)

    def activation_backward(self, *arguments: Any) -> None:
        *given, grad_z, grad_inner, grad_weights, z, stream = arguments
        self.streams.append(stream)
        values, rows, width, activation = self._given(*given)
        grad = memory(grad_z, (rows, width), values[0].dtype)
        if grad is None:
            assert rows == 0
            return
        found = module._backward_by_torch(grad, *values, activation, grad_weights != 0, z != 0)
        for address, value in zip((grad_inner, grad_weights, z), found, strict=True):
            self._put(address, value, tuple(value.shape))

    @staticmethod
    def _given(
        inner: int,
        weights: int,
        ends: int,
        groups: int,
        rows: int,
        width: int,
        dtype: Any,
        activation: str,
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], int, int, str]:
        kind = DTYPES[dtype]
        exact = torch.float64 if kind == torch.float64 else torch.float32
        shape = (rows, INPUTS[activation] * width)
        inner_PI = torch.empty(shape, dtype=kind) if rows == 0 else memory(inner, shape, kind)
        assert inner_PI is not None
        assert (ends == 0) == (groups == 0)
        values = (inner_PI, memory(weights, (rows,), exact), memory(ends, (groups,), torch.int32))
        return values, rows, width, activation

    @staticmethod
    def _put(address: int, value: Tensor, shape: tuple[int, ...]) -> None:
        to = memory(address, shape, value.dtype)
        if to is not None:
            to.copy_(value)


class Gpu:
    """`device.cuda_device.CudaDevice` number 3, which is not the current device until a block makes it so."""

    index = 3
    launch = CudaDevice.launch

    def __init__(self) -> None:
        self.entered = 0

    def is_current(self) -> bool:
        return False

    def raw_stream(self) -> int:
        return 77

    def current(self) -> Gpu:
        return self

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [5, 0])
def test_what_kernels_are_given(
    rows: int, activation: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(rows, 6, activation, dtype, seed)
    kernels, gpu = Kernels(), Gpu()
    prepared: list[tuple[int, torch.dtype]] = []

    def run(weights: Tensor | None, ends: Tensor | None) -> list[Tensor | None]:
        z = weighted_activation(case.inner.t().contiguous().t(), weights, ends, activation=activation)
        found = [
            weighted_activation_backward(
                case.grad,
                case.inner,
                weights,
                ends,
                activation=activation,
                need_weights=needed,
                need_z=needed,
            )
            for needed in (True, False)
        ]
        return [z, *found[0], *found[1]]

    several = torch.stack([torch.tensor([1, 3, 4], dtype=torch.int32)] * 2, dim=1)[:, 0]
    choices = [(case.weights, several), (None, None), (case.weights.repeat_interleave(2)[::2], several[:2])]
    expected = [run(*each) for each in choices]
    monkeypatch.setattr(module, "_C", kernels)
    monkeypatch.setattr(module, "_has_kernel", lambda tensor: True)
    monkeypatch.setattr(module, "_gpu", lambda index: gpu)
    monkeypatch.setattr(module, "_prepare", lambda *arguments: prepared.append(arguments))
    for choice, results in zip(choices, expected, strict=True):
        for got, want in zip(run(*choice), results, strict=True):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert torch.equal(got, want)
    assert kernels.streams == [77] * 9 and gpu.entered == 9
    assert prepared == [(3, dtype)] * 9


def test_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module._C, "activation", raising=False)
    with pytest.raises(Unsupported, match=r"inner is on cuda:5, but this moecomm was built without its CUDA"):
        prepare(torch.device("cuda", 5), torch.bfloat16)
    prepare(torch.device("cpu"), torch.bfloat16)  # nothing to load there
