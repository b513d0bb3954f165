"""Products with adapters are those of weights to which the adapters are added, and no such weight is made."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm.kernels.activation import weighted_activation
from moecomm.kernels.expert_ffn import LowRank, expert_ffn, join_adapters
from moecomm.kernels.products import Products, grouped_linear

L, H, F = 4, 16, 12
OFFSETS = torch.tensor([10, 10, 33, 50], dtype=torch.int32)


def _new(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("ranks_in", "ranks_out"), [([8], [8]), ([3], [3, 4]), ([1, 1, 6], []), ([], [2]), ([], [])]
)
def test_as_with_added_weights(
    columns_first: bool, bias: bool, ranks_in: list[int], ranks_out: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    products, rows = Products(columns_first=columns_first), int(OFFSETS[-1])
    x_PH, w_in, w_out, weights_P = _new(rows, H), _new(L, H, 2 * F), _new(L, F, H), _new(rows)
    b_in, b_out = (_new(L, 2 * F), _new(L, H)) if bias else (None, None)
    of_in = [LowRank(_new(L, H, r), _new(L, r, 2 * F), 0.5 + r) for r in ranks_in]
    of_out = [LowRank(_new(L, F, r), _new(L, r, H), 0.5 + r) for r in ranks_out]
    leaves = [x_PH, w_in, w_out, weights_P, *(each for each in (b_in, b_out) if each is not None)]
    leaves += [each for adapter in of_in + of_out for each in adapter[:2]]

    def numbers(y_PH: Tensor) -> tuple[Tensor, ...]:
        grad_PH = torch.linspace(-1, 1, y_PH.numel(), dtype=y_PH.dtype).view(y_PH.shape)
        return y_PH.detach(), *torch.autograd.grad(y_PH, leaves, grad_PH)

    added = [
        weight + sum(scale * left @ right for left, right, scale in adapters)
        for weight, adapters in ((w_in, of_in), (w_out, of_out))
    ]
    inner_PI = grouped_linear(x_PH, added[0], b_in, OFFSETS, products)
    z_PF = weighted_activation(inner_PI, weights_P, OFFSETS, activation="swiglu")
    y_PH = grouped_linear(z_PF, added[1], None, OFFSETS, products)
    if b_out is not None:
        y_PH = y_PH + weights_P[:, None] * b_out.repeat_interleave(
            OFFSETS.diff(prepend=OFFSETS.new_zeros(1)), 0
        )
    wanted = numbers(y_PH)
    given: dict[str, Any] = {"products": products, "b_in_LI": b_in, "b_out_LH": b_out}
    given |= {"activation": "swiglu", "adapters": (join_adapters(of_in), join_adapters(of_out))}
    found = numbers(expert_ffn(x_PH, w_in, w_out, OFFSETS, weights_P, **given))
    torch.testing.assert_close(found, wanted)


def test_nothing_as_large_as_a_frozen_weight_is_made(seed: int) -> None:
    """Neither in the forward nor kept for the backward nor as a gradient."""
    torch.manual_seed(seed)
    w_in, w_out, sizes = _new(L, 64, 96).detach(), _new(L, 48, 64).detach(), list[int]()
    of_in = join_adapters([LowRank(_new(L, 64, 8), _new(L, 8, 96), 2.0)])
    of_out = join_adapters([LowRank(_new(L, 48, 8), _new(L, 8, 64), 2.0)])
    x_PH = _new(50, 64)

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            own = (w_in.data_ptr(), w_out.data_ptr())
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in own:
                sizes.append(made.numel())
            return made

    with Sizes():
        given: dict[str, Any] = {"activation": "swiglu", "products": Products()}
        expert_ffn(x_PH, w_in, w_out, OFFSETS, None, **given, adapters=(of_in, of_out)).sum().backward()
    assert sizes and max(sizes) < w_out.numel(), sizes
    assert x_PH.grad is not None
