"""The weighted activation's kernels: the tests of the CPU, and what only kernels have: bits that do not
depend on the address, memory that they leave alone, streams, graphs, devices.

Bodies run on rank 0 of a pool of one.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch

from moecomm import _C
from moecomm.kernels.activation import prepare
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks
from tests.unit.test_activation import (  # noqa: F401
    ACTIVATIONS,
    Case,
    test_against_the_reference,
    test_far_out,
    test_strides_do_not_matter,
    unequal,
    wrong,
)

KINDS = ("bfloat16", "float16", "float32")


# -- what has to be the same bits --------------------------------------------------------------------------
@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(1)
def test_same_bits(rank: int, world_size: int, activation: str, dtype: str, seed: int) -> list[str]:
    """Run after run; when a base address is one element off; and whatever rows there are besides."""
    problems = []
    for width in (1, 7, 64, 1000, 2048, 4104, 16384 + 8):
        case = Case(300, width, activation, dtype, seed)
        want = case.results()
        for again in range(3):
            harness.poison(1 << 24)
            problems += unequal(f"width {width}, run {again}", want, case.results(), 300)
        aligned = case.inner, case.grad, case.weights
        for off in range(1, 8):
            for name, value in zip(("inner", "grad", "weights"), aligned, strict=True):
                flat = value.new_empty(value.numel() + off)
                moved = flat[off:].view(value.shape)
                setattr(case, name, moved.copy_(value))
            problems += unequal(f"width {width}, {off} elements off", want, case.results(), 300)
        case.inner, case.grad, case.weights = (each[:7] for each in aligned)
        problems += unequal(f"width {width}, the first rows alone", want, case.results(), 7)
        case.inner, case.grad, case.weights = (torch.cat([each] * 40) for each in aligned)
        problems += unequal(f"width {width}, with more rows", want, case.results(), 300)
    return problems


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


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(1)
def test_rows_past_the_last_end_are_left_alone(
    rank: int, world_size: int, activation: str, dtype: str, seed: int
) -> list[str]:
    """The extension's functions on memory of the test's own: the first rows are right, and nothing else is
    written; what is not real holds NaN."""
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
                    *given, case.grad.data_ptr(), at["grad_inner"], at["grad_weights"], at["again"], stream
                )
                text = f"{rows} x {width}, ends {ends}, {off} bytes off"
                values = {name: output.value for name, output in outputs.items()}
                problems += unequal(text, whole, values, real)
                problems += [
                    f"{text}: {name} was written past its real rows"
                    for name, output in outputs.items()
                    if output.touched(real)
                ]
    return problems


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_the_host_does_not_wait(rank: int, world_size: int, seed: int) -> list[str]:
    """Checks that the host waits for nothing if `ends` is on the device, the first call excepted."""
    case = Case(100, 64, "swiglu", "bfloat16", seed)
    ends = torch.tensor([30, 60], dtype=torch.int32, device=harness.device())
    case.results(ends=ends)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    got = case.results(ends=ends)
    torch.cuda.set_sync_debug_mode("default")
    return wrong("with ends", case, got, True, 60)


# -- streams, graphs, devices ------------------------------------------------------------------------------
@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(1)
def test_in_a_cuda_graph(rank: int, world_size: int, activation: str, seed: int) -> list[str]:
    """Checks a graph of forward and backward; inputs and the number of real rows change between replays."""
    problems = []
    static = Case(400, 136, activation, "bfloat16", seed)
    ends = torch.tensor([100, 400], dtype=torch.int32, device=harness.device())
    graph, captured = harness.captured(lambda: static.results(ends=ends), warm_ups=1)
    for replay, real in enumerate((400, 0, 17, 399, 250)):
        now = Case(400, 136, activation, "bfloat16", seed + replay + 1)
        for name in ("inner", "grad", "weights"):
            getattr(static, name).copy_(getattr(now, name))
        ends[1] = real
        for each in captured.values():
            each.fill_(math.nan)
        graph.replay()
        problems += unequal(f"replay {replay}", now.results(), captured, real)
        problems += [
            f"replay {replay}: {name} was written past its real rows"
            for name, each in captured.items()
            if not bool(each[real:].isnan().all())
        ]
    return problems


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_on_the_current_stream(rank: int, world_size: int, seed: int) -> list[str]:
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
    return unequal("on a side stream", want, got, 300)


def _another_device(rank: int, world_size: int, seed: int) -> list[str]:
    """Tensors of a GPU that is not the current device."""
    case = Case(300, 64, "swiglu", "bfloat16", seed)
    want = {name: each.cpu() for name, each in case.results().items()}
    there = torch.device("cuda", 1)
    for name in ("inner", "grad", "weights"):
        setattr(case, name, getattr(case, name).to(there))
    got = {name: each.cpu() for name, each in case.results().items()}
    problems = [] if torch.cuda.current_device() == 0 else ["the current device has changed"]
    return problems + unequal("on another device", want, got, 300)


@pytest.mark.usefixtures("cuda_only")
def test_on_another_device(pool: Pools, require_gpus: Any, seed: int) -> None:
    require_gpus(2)
    harness.assert_none(pool(1)(_another_device, seed))


@pytest.mark.usefixtures("cuda_only")
@on_ranks(1)
def test_what_the_extension_refuses(rank: int, world_size: int) -> None:
    """Checks that the extension itself refuses bad arguments by the typed error."""
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
    for text, changed in bad.items():
        values = (*{**good, **changed}.values(), _C.DType.bfloat16, _C.Activation.swiglu, 8192, 0)
        refused(partial(_C.activation, *values), text)
