"""The training example's optimizer: weights and moments of float32 or bfloat16, arithmetic in float32."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import optimizer as under_test  # isort: skip
from lm.optimizer import AdamW  # isort: skip

SHAPES = [(40, 7), (3, 5, 64), (1,), (0, 8), (130,)]
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95)}
BFLOAT16 = 2**-8  # largest relative error of a rounding


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of these sizes are more than a slice, and several are one."""
    monkeypatch.setattr(under_test, "SLICE", 192)


def weights(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups(parameters: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "weight_decay": 0.0, "lr": 0.02},
    ]


def gradients(seed: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    scale = 10.0 ** torch.randint(-4, 3, (1,), generator=generator).item()
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def steps(made: torch.optim.Optimizer, parameters: list[Any], grads: list[list[Tensor]]) -> None:
    for each in grads:
        for parameter, grad in zip(parameters, each, strict=True):
            parameter.grad = grad.to(parameter.dtype)
        made.step()


def masters(made: AdamW, parameters: list[Any]) -> list[Tensor]:
    return [under_test._master(made._part(parameter)).view(parameter.shape) for parameter in parameters]


def test_in_float32_it_has_the_bits_of_torch(seed: int) -> None:
    ours, theirs = weights(seed, torch.float32), weights(seed, torch.float32)
    grads = [gradients(seed, step, torch.float32) for step in range(6)]
    made = AdamW(groups(ours), **SETTINGS)
    wanted = torch.optim.AdamW(groups(theirs), **SETTINGS, fused=True)
    steps(made, ours, grads)
    steps(wanted, theirs, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(made.state[a][name], wanted.state[b][name]) for name in wanted.state[b])


def test_a_bfloat16_weight_is_the_nearest_of_a_float32_one(seed: int) -> None:
    """Master weights, which are kept as 16 bits more than the weights, have the bits of torch's update of
    float32 weights with the same gradients."""
    ours = weights(seed, torch.bfloat16)
    theirs = [torch.nn.Parameter(each.detach().float()) for each in ours]
    grads = [gradients(seed, step, torch.bfloat16) for step in range(20)]
    made = AdamW(groups(ours), **SETTINGS)
    steps(made, ours, grads)
    steps(torch.optim.AdamW(groups(theirs), **SETTINGS, fused=True), theirs, grads)
    for weight, master, wanted in zip(ours, masters(made, ours), theirs, strict=True):
        assert weight.dtype == torch.bfloat16 and made.state[weight]["exp_avg"].dtype == torch.float32
        assert torch.equal(master, wanted.detach())
        other = wanted.detach().bfloat16()
        tie = (wanted.detach() - other.float()).abs() == (wanted.detach() - weight.detach().float()).abs()
        assert bool(((weight.detach() == other) | tie).all())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_compiled_for_gpus_is_the_same_update(
    dtype: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Step by step from the same state, since roundings of moments would drive two runs apart; here without
    the compiler."""
    made = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(each.detach()[:, :64]) for each in weights(seed, dtype)[1:2]]
        made.append(
            (AdamW([{"params": parameters, "weight_decay": 0.1}], **SETTINGS, moments=moments), parameters)
        )
    monkeypatch.setattr(under_test, "KERNEL_ROW", 64)
    monkeypatch.setattr(under_test, "KERNEL_ROWS", 3)  # so that a tensor goes by parts
    monkeypatch.setattr(under_test, "_compiled_update", lambda: under_test._update_one)
    for step in range(6):
        grads = [gradients(seed, step, dtype)[1]]
        for compiled, (each, parameters) in enumerate(made):
            monkeypatch.setattr(under_test._Part, "has_kernel", property(lambda part, it=compiled: bool(it)))
            steps(each, parameters, [grads])
        (plain, (one,)), (other, (two,)) = made
        found, wanted = masters(other, [two])[0], masters(plain, [one])[0]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            bound = 2 * BFLOAT16 if moments == torch.bfloat16 else 1e-6
            found, wanted = other.state[two][name], plain.state[one][name]
            torch.testing.assert_close(found, wanted, rtol=bound, atol=1e-6 * wanted.abs().max().item())
        other.load_state_dict(plain.state_dict())
        two.data.copy_(one.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_moments_are_near_those_of_float64(dtype: torch.dtype, seed: int) -> None:
    """A moment's error grows by one rounding a step and fades as the moment itself does. So does what it
    changes: the second moment's is at most 0.95 of the sum of 20 roundings, and a weight is less than a tenth
    of its way from the one that float64 finds."""
    ours = weights(seed, dtype)
    exact = [each.detach().double() for each in ours]
    made = AdamW(groups(ours), **SETTINGS, moments=torch.bfloat16)
    count, (beta1, beta2) = 40, SETTINGS["betas"]
    first, second, way = ([torch.zeros_like(each) for each in exact] for _ in range(3))
    errors = [[torch.zeros_like(each) for each in exact] for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, count + 1):
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        steps(made, ours, [grads])
        for number, (weight, grad) in enumerate(zip(exact, grads, strict=True)):
            group = made.param_groups[number // 3]
            first[number].mul_(beta1).add_(grad.double(), alpha=1 - beta1)
            second[number].mul_(beta2).add_(grad.double().square(), alpha=1 - beta2)
            for moment, error, beta in zip((first, second), errors, (beta1, beta2), strict=True):
                error[number].mul_(beta).mul_(1 + BFLOAT16).add_(moment[number].abs(), alpha=1.01 * BFLOAT16)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            scale = (second[number] / (1 - beta2**step)).sqrt() + group["eps"]
            change = group["lr"] * first[number] / (1 - beta1**step) / scale
            weight.sub_(change)
            way[number] += change.abs()
    for number, weight in enumerate(ours):
        state = made.state[weight]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        for name, moment, error in (("exp_avg", first, errors[0]), ("exp_avg_sq", second, errors[1])):
            assert bool(((state[name].double() - moment[number]).abs() <= error[number] + 1e-30).all()), name
        apart = (masters(made, [weight])[0].double() - exact[number]).abs()
        assert bool((apart <= 0.1 * way[number] + 1e-6).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_goes_on_with_the_same_bits(dtype: torch.dtype, moments: torch.dtype, seed: int) -> None:
    unbroken = weights(seed, dtype)
    grads = [gradients(seed, step, dtype) for step in range(8)]
    made = AdamW(groups(unbroken), **SETTINGS, moments=moments)
    steps(made, unbroken, grads[:4])
    saved = copy.deepcopy(made.state_dict())
    resumed = [torch.nn.Parameter(each.detach().clone()) for each in unbroken]
    steps(made, unbroken, grads[4:])
    again = AdamW(groups(resumed), **SETTINGS, moments=moments)
    again.load_state_dict(saved)
    steps(again, resumed, grads[4:])
    for a, b in zip(unbroken, resumed, strict=True):
        assert torch.equal(a, b) and made.state[a].keys() == again.state[b].keys()
        for name, value in made.state[a].items():
            assert value.dtype == again.state[b][name].dtype and torch.equal(value, again.state[b][name])
    assert ("remainder" in made.state[unbroken[0]]) == (dtype == torch.bfloat16)


def with_master(master: Tensor) -> tuple[torch.nn.Parameter, Tensor]:
    """A bfloat16 weight of four numbers that was given these master weights, and the ones that it has."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    made = AdamW([{"params": [weight]}], **SETTINGS)
    steps(made, [weight], [[torch.ones(4)]])
    under_test._set_master(made._part(weight), master.clone())
    return weight, masters(made, [weight])[0]


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, -0x400000])
def test_what_is_no_number_is_seen_in_the_weight(bits: int) -> None:
    weight, found = with_master(torch.full((4,), bits, dtype=torch.int32).view(torch.float32))
    assert bool(weight.isnan().all()) and bool(found.isnan().all())


@pytest.mark.parametrize(
    "value", [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3.4028234e38, 1.00390625, -3.0]
)
def test_a_master_is_kept_exactly(value: float) -> None:
    master = torch.full((4,), value)
    assert torch.equal(with_master(master)[1].view(torch.int32), master.view(torch.int32))


def test_no_slice_is_longer_than_a_slice(seed: int) -> None:
    ours = weights(seed, torch.bfloat16)
    made = AdamW(groups(ours), **SETTINGS)
    steps(made, ours, [gradients(seed, 0, torch.bfloat16)])
    parts = [made._part(each) for each in ours]
    for part in parts:
        assert part.remainder is not None
    found = list(under_test._slices(parts))
    sizes = [sum(each.weight.numel() for each in slices) for slices in found]
    assert max(sizes) <= under_test.SLICE and sum(sizes) == sum(each.numel() for each in ours)
    assert any(len(slices) > 1 for slices in found)


@pytest.mark.parametrize(
    ("weights_in", "moments", "bytes"),
    [(32, 32, 16), (32, 16, 12), (16, 32, 14), (16, 16, 10)],
)
def test_bytes_of_a_parameter(weights_in: int, moments: int, bytes: int, seed: int) -> None:
    """What docs/memory.md says of weight, gradient and optimizer."""
    of_bits = {32: torch.float32, 16: torch.bfloat16}
    ours = weights(seed, of_bits[weights_in])
    made = AdamW(groups(ours), **SETTINGS, moments=of_bits[moments])
    steps(made, ours, [gradients(seed, 0, of_bits[weights_in])])
    for weight in ours:
        assert weight.grad is not None
        kept = [weight, weight.grad, *(each for name, each in made.state[weight].items() if name != "step")]
        assert sum(each.element_size() for each in kept) == bytes
