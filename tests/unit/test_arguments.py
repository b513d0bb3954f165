"""The checks of a call's arguments, without a communicator."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from moecomm import InvalidArgument, InvalidRouting
from moecomm.arguments import (
    check_dispatch,
    check_options,
    most_alignment,
    require_integer,
)
from moecomm.backends.base import address_of

CPU = torch.device("cpu")


def _check(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "x_TH": torch.zeros(3, 8),
        "topk_idx_TK": torch.zeros(3, 2, dtype=torch.int64),
        "topk_weights_TK": torch.zeros(3, 2),
    }
    sizes: dict[str, Any] = {"hidden": 8, "top_k": 2, "max_tokens": 3, "dtype": torch.float32, "device": CPU}
    check_dispatch(**{**arguments, **sizes, **changes})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x_TH", torch.zeros(4, 8), ["4 tokens", "max_tokens = 3"]),
        ("x_TH", torch.zeros(3, 9), ["x has shape (3, 9)", "hidden = 8"]),
        ("x_TH", torch.zeros(3, 8, 1), ["x has shape (3, 8, 1)"]),
        ("x_TH", torch.zeros(3, 8).half(), ["x is torch.float16", "torch.float32"]),
        ("x_TH", None, ["x is NoneType"]),
        ("x_TH", torch.zeros(3, 8).to_sparse(), ["x has layout torch.sparse_coo"]),
        ("topk_idx_TK", [[0, 1]] * 3, ["topk_idx is list"]),
        ("topk_weights_TK", 1.0, ["topk_weights is float"]),
        ("topk_idx_TK", torch.zeros(3, 3, dtype=torch.int32), ["topk_idx has shape (3, 3)", "(3, 2)"]),
        ("topk_weights_TK", torch.zeros(2, 2), ["topk_weights has shape (2, 2)", "(3, 2)"]),
        ("topk_weights_TK", torch.zeros(3, 2).double(), ["topk_weights is torch.float64"]),
        ("device", torch.device("cuda"), ["x is on cpu", "cuda"]),
        ("x_TH", torch._efficientzerotensor((3, 8)), ["x is a Tensor without memory"]),
        ("x_TH", FakeTensorMode().from_tensor(torch.zeros(3, 8)), ["x is a FakeTensor"]),
        (
            "topk_weights_TK",
            TwoTensor(torch.zeros(3, 2), torch.zeros(3, 2)),
            ["topk_weights is a TwoTensor without memory of its own", "to_local()"],
        ),
        ("topk_idx_TK", torch.zeros(3, 2, dtype=torch.uint8), ["topk_idx is torch.uint8", "int32"]),
    ],
)
def test_bad_arguments(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _check(**{name: value})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    about_ids = "torch.uint8" in str(caught.value)  # their dtype is a matter of the routing
    assert type(caught.value) is (InvalidRouting if about_ids else InvalidArgument)


def test_options() -> None:
    assert check_options("expert", 1, None, None, 4) == ("expert", 1, -1, -1)
    assert check_options("expert", 128, 4096, None, 4) == ("expert", 128, 4096, -1)
    assert check_options("rank", 1, None, None, 4) == ("rank", 1, -1, -1)
    assert check_options("rank", 1, 7, None, 4) == ("rank", 1, 7, 28)
    assert check_options("rank", 1, 7, 9, 4) == ("rank", 1, 7, 9)
    for bad in [
        ("experts", 1, None, None),
        ("expert", 0, None, None),
        ("expert", True, None, None),
        ("rank", 8, None, None),
        ("expert", 1, -1, None),
        ("rank", 1, None, 8),
        ("rank", 1, 8, -1),
    ]:
        with pytest.raises(InvalidArgument):
            check_options(*bad, 4)
    with pytest.raises(InvalidArgument, match="capacity is 2147483648"):
        check_options("expert", 1, 2**31, None, 4)
    of_groups = {"local_experts": 3, "most_rows": 8}
    assert check_options("expert", 1, None, 8, 4, **of_groups) == ("expert", 1, 24, 8)
    assert check_options("expert", 1, 24, 8, 4, **of_groups) == ("expert", 1, 24, 8)
    for alignment, capacity, rows in [(1, None, 7), (8, None, 8), (1, 23, 8), (1, None, 2**31 // 3 + 1)]:
        with pytest.raises(InvalidArgument, match="expert_capacity"):
            check_options("expert", alignment, capacity, rows, 4, **of_groups)


def test_rows_are_counted_in_31_bits() -> None:
    """An alignment by which a rank could have more rows is refused, as is one past the largest of all."""
    assert most_alignment(64 * 4096 * 8, 4) == 2**20
    most = most_alignment(4096 * 8, 65536 // 16)
    assert 4096 * most + 4096 * 8 <= 2**31 - 1 < 4096 * (most + 1) + 4096 * 8
    assert check_options("expert", most, None, None, 4, most) == ("expert", most, -1, -1)
    for largest in (most, 2**20):
        with pytest.raises(InvalidArgument, match="alignment"):
            check_options("expert", largest + 1, None, None, 4, largest)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 8])
def test_integers(value: object) -> None:
    with pytest.raises(InvalidArgument, match="name is "):
        require_integer("name", value, 0, 7)
    assert require_integer("name", 7, 0, 7) == 7


def test_tensors_of_torch_func_are_refused() -> None:
    def look(x_TH: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidArgument, match=r"no tensor of torch\.func"):
            _check(x_TH=x_TH)
        return x_TH.sum()

    torch.func.grad(look)(torch.zeros(3, 8))
    torch.func.vmap(look)(torch.zeros(2, 3, 8))


def test_a_tensor_whose_memory_was_freed() -> None:
    x = torch.ones(3, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match=r"\(3, 8\) has no memory, .* not freed by resize_\(0\)"):
        address_of(x, 1)
