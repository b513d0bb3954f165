"""`overlap.interleave` on GPUs: forward of one microbatch and backward of another in turns, two half-batches,
and what an error in one of them leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.moe_cases import LayerCase as Case

_STEPS = 3


def _inputs(case: Case, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [case.input(rank, step) for step in range(_STEPS)]
    return [(x.to(harness.device()).requires_grad_(), grad.to(harness.device())) for x, grad in pairs]


def _in_turn(layers: list[Any], inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Every microbatch by itself: results and gradients."""
    results = []
    for x, grad in inputs:
        y = layers[1](layers[0](x))
        y.backward(grad)
        results += [y.detach(), x.grad]
    return _with_parameters(layers, results)


def _merged(
    layers: list[Any], inputs: list[tuple[torch.Tensor, torch.Tensor]], first: str
) -> list[torch.Tensor]:
    """The forward of each microbatch beside the backward of the one before."""
    from moecomm.overlap import interleave

    def forward(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: layers[1](layers[0](x))

    def backward(y: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
        return lambda: y.backward(grad)

    results = []
    y = forward(inputs[0][0])()
    for (x, grad), following in zip(inputs, [*inputs[1:], None], strict=True):
        if following is None:
            backward(y, grad)()
            fresh = None
        elif first == "forward":
            fresh, _ = interleave(forward(following[0]), backward(y, grad))
        else:
            _, fresh = interleave(backward(y, grad), forward(following[0]))
        results += [y.detach(), x.grad]
        y = fresh
    return _with_parameters(layers, results)


def _with_parameters(layers: list[Any], results: list[Any]) -> list[torch.Tensor]:
    for layer in layers:
        for parameter in layer.parameters():
            results.append(parameter.grad)
            parameter.grad = None
    return [each.clone() for each in results]


def _layers(case: Case) -> list[Any]:
    """Two on one communicator."""
    from moecomm.nn import MoELayer

    first = case.layer()
    return [first, MoELayer(first.config, first.comm)]


def _compare(rank: int, world_size: int, case: Case, way: dict[str, Any], first: str) -> list[str]:
    """`way`: attributes of the layers."""
    layers = _layers(case)
    for layer in layers:
        for name, value in way.items():
            setattr(layer, name, value)
    wanted = _in_turn(layers, _inputs(case, rank))
    found = _merged(layers, _inputs(case, rank), first)
    harness.synchronize()
    layers[0].comm.close()
    # Sums of gradients, over microbatches and in autograd's own order: equal up to rounding.
    bound = 16 * torch.finfo(case.dtype).eps
    problems = []
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        scale = float(one.float().abs().max()) if one.numel() else 0.0
        if not bool(((one - other).float().abs() <= bound * scale).all()):
            problems.append(f"rank {rank}: tensor {number} of {len(wanted)}")
    return problems


@pytest.mark.parametrize("first", ["backward", "forward"])
@pytest.mark.parametrize("way", [{}, {"keep": "nothing"}, {"beside_sms": 8}], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_beside_backward(pool: Pools, size: int, way: dict[str, Any], first: str, seed: int) -> None:
    case = Case((300, 0, 257, 64)[:size], seed)
    harness.assert_none(pool(size)(_compare, case, way, first))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{"capacity_factor": 1.5, "pad_to_capacity": True}, {"num_shared_experts": 0}], ids=str
)
def test_other_layers_beside_each_other(pool: Pools, size: int, options: dict[str, Any], seed: int) -> None:
    case = Case((300, 0, 257, 64)[:size], seed, options=options)
    harness.assert_none(pool(size)(_compare, case, {}, "backward"))


@pytest.mark.parametrize("size", [2])
def test_beside_products_that_leave_sms(pool: Pools, size: int, seed: int) -> None:
    case = replace(Case((300, 270), seed), num_sms=8)
    harness.assert_none(pool(size)(_compare, case, {"keep": "rows"}, "backward"))


def _halves(rank: int, world_size: int, case: Case) -> list[str]:
    from moecomm.overlap import interleave

    layers = _layers(case)
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    middle = x.shape[0] // 2
    pieces = [x[:middle].clone().requires_grad_(), x[middle:].clone().requires_grad_()]

    def program(number: int) -> Callable[[], torch.Tensor]:
        return lambda: layers[1](layers[0](pieces[number]))

    whole = layers[1](layers[0](x))
    halves = torch.cat(interleave(program(0), program(1)))
    halves.backward(grad)
    # With other numbers of rows a product may add up in another order.
    bound = 64 * torch.finfo(case.dtype).eps * (float(whole.abs().max()) if whole.numel() else 0.0)
    problems = [] if bool(((whole - halves).abs() <= bound).all()) else [f"rank {rank}: results differ"]
    if any(piece.grad is None or not bool(torch.isfinite(piece.grad).all()) for piece in pieces):
        problems.append(f"rank {rank}: gradients")
    harness.synchronize()
    layers[0].comm.close()
    return problems


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_halves_of_a_step(pool: Pools, size: int, seed: int) -> None:
    """Two halves of a step give the result of the whole, in float32, where both choose the same experts."""
    harness.assert_none(pool(size)(_halves, Case((300, 12, 257, 64)[:size], seed, torch.float32)))


class _Mine(Exception):
    pass


def _error(rank: int, world_size: int, case: Case) -> list[str]:
    from moecomm.overlap import interleave

    layers = _layers(case)
    (x, grad), (other, _), _ = _inputs(case, rank)
    y = layers[1](layers[0](x))

    def fails() -> torch.Tensor:
        layers[0](other)
        raise _Mine

    problems = []
    try:
        interleave(fails, lambda: y.backward(grad))
        problems.append(f"rank {rank}: no error")
    except _Mine:
        pass
    if x.grad is None:
        problems.append(f"rank {rank}: the other program did not come to its end")
    again = layers[1](layers[0](x))
    if not torch.equal(again, y):
        problems.append(f"rank {rank}: other bits after the error")
    harness.synchronize()
    layers[0].comm.close()
    return problems


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_in_one_leaves_the_other_and_the_streams(pool: Pools, size: int, seed: int) -> None:
    harness.assert_none(pool(size)(_error, Case((300, 257)[:size], seed)))
