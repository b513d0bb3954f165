"""The numpy reference against examples worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import reference

# Two ranks, four experts: experts 0 and 1 live on rank 0, experts 2 and 3 on rank 1. Top-2.
#   rank 0, token a: experts 2, 0      rank 1, token c: experts 3, 2
#   rank 0, token b: expert  1         rank 1, token d: experts 0, 1
IDS = [np.array([[2, 0], [1, -1]]), np.array([[3, 2], [0, 1]])]
A, B, C, D = 1.0, 2.0, 4.0, 8.0
X = [np.array([[A], [B]], np.float32), np.array([[C], [D]], np.float32)]
W = [np.array([[0.5, 0.25], [1.0, 9.0]], np.float32), np.array([[0.75, 0.125], [2.0, 3.0]], np.float32)]


def test_expert_major_rows_go_by_expert_source_token() -> None:
    first = reference.dispatch(X, IDS, W, rank=0, num_experts=4)
    assert first.tokens[:, 0].tolist() == [A, D, B, D]
    assert first.weights.tolist() == [0.25, 2.0, 1.0, 3.0]
    assert first.tokens_per_expert.tolist() == [2, 2] and first.offsets.tolist() == [2, 4]
    second = reference.dispatch(X, IDS, W, rank=1, num_experts=4)
    assert second.tokens[:, 0].tolist() == [A, C, C]
    assert second.weights.tolist() == [0.5, 0.125, 0.75]
    assert second.tokens_per_expert.tolist() == [2, 1] and second.offsets.tolist() == [2, 3]
    assert first.overflow == 0 and first.topk_idx is None


def test_alignment_rows_are_zero() -> None:
    out = reference.dispatch(X, IDS, W, rank=1, num_experts=4, alignment=4)
    assert out.tokens[:, 0].tolist() == [A, C, 0, 0, C, 0, 0, 0]
    assert out.offsets.tolist() == [4, 8] and out.tokens_per_expert.tolist() == [2, 1]
    assert out.weights.tolist() == [0.5, 0.125, 0, 0, 0.75, 0, 0, 0]


def test_capacity_keeps_the_first_rows_and_says_what_was_needed() -> None:
    out = reference.dispatch(X, IDS, W, rank=0, num_experts=4, capacity=3)
    assert out.tokens[:, 0].tolist() == [A, D, B]
    assert out.offsets.tolist() == [2, 3] and out.tokens_per_expert.tolist() == [2, 2] and out.overflow == 4
    assert reference.dispatch(X, IDS, W, rank=0, num_experts=4, capacity=4).overflow == 0


def test_rank_major_rows_are_one_for_a_token_and_owner() -> None:
    first = reference.dispatch(X, IDS, W, rank=0, num_experts=4, layout="rank")
    assert first.tokens[:, 0].tolist() == [A, B, D]
    assert first.topk_idx.tolist() == [[-1, 0], [1, -1], [0, 1]]
    assert first.weights.tolist() == [[0, 0.25], [1.0, 0], [2.0, 3.0]]
    assert first.offsets.tolist() == [2, 3] and first.tokens_per_expert.tolist() == [2, 2]
    second = reference.dispatch(X, IDS, None, rank=1, num_experts=4, layout="rank")
    assert second.tokens[:, 0].tolist() == [A, C] and second.weights is None
    assert second.topk_idx.tolist() == [[0, -1], [1, 0]] and second.offsets.tolist() == [1, 2]


def test_combine_sums_by_hand() -> None:
    sent = [reference.dispatch(X, IDS, W, rank=r, num_experts=4) for r in range(2)]
    rows = [np.array([[1], [10], [100], [1000]], np.float32), np.array([[2], [20], [200]], np.float32)]
    plain = reference.combine(rows, sent, [2, 2], dtype="float32")
    assert [y[:, 0].tolist() for y in plain] == [[3, 100], [220, 1010]]
    weights = [out.weights for out in sent]
    weighted = reference.combine(rows, sent, [2, 2], dtype="float32", weights=weights)
    assert [y[:, 0].tolist() for y in weighted] == [[1.25, 100], [152.5, 3020]]


def test_the_owner_rounds_before_the_home_sums() -> None:
    """bfloat16 holds 8 bits: 256 + 1 rounds to 256, so two owners' ones vanish where one owner's three do
    not.
    """
    ids = [np.array([[0, 1, 2]]), np.zeros((0, 3), int), np.zeros((0, 3), int)]
    x = [np.ones((1, 1), np.float32), np.zeros((0, 1), np.float32), np.zeros((0, 1), np.float32)]
    sent = [reference.dispatch(x, ids, None, rank=r, num_experts=3) for r in range(3)]
    rows = [np.array([[v]], np.float32) for v in (256.0, 1.0, 1.0)]
    assert reference.combine(rows, sent, [1, 0, 0], dtype="bfloat16")[0].item() == 258.0
    one = reference.dispatch(x[:1], ids[:1], None, rank=0, num_experts=3)
    again = reference.combine([np.concatenate(rows)], [one], [1], dtype="bfloat16")
    assert again[0].item() == 258.0
    rows = [np.array([[v]], np.float32) for v in (256.0, 1.0, 0.0)]
    assert reference.combine(rows, sent, [1, 0, 0], dtype="bfloat16")[0].item() == 256.0


def test_k_order_decides_the_float32_sum() -> None:
    ids = [np.array([[2, 1, 0]])]
    sent = [reference.dispatch([np.ones((1, 1), np.float32)], ids, None, rank=0, num_experts=3)]
    rows = [np.array([[2.0**24], [1.0], [1.0]], np.float32)]
    assert reference.combine(rows, sent, [1], dtype="float32")[0].item() == 2.0**24 + 2
    sent = [reference.dispatch([np.ones((1, 1), np.float32)], [ids[0][:, ::-1]], None, rank=0, num_experts=3)]
    assert reference.combine(rows, sent, [1], dtype="float32")[0].item() == 2.0**24


def test_gradients_by_hand() -> None:
    sent = [reference.dispatch(X, IDS, W, rank=r, num_experts=4) for r in range(2)]
    grad_rows = [np.array([[1], [10], [100], [1000]], np.float32), np.array([[2], [20], [200]], np.float32)]
    grad_out_w = [np.array([1, 2, 3, 4], np.float32), np.array([5, 6, 7], np.float32)]
    grad_x, grad_w = reference.dispatch_backward(grad_rows, grad_out_w, sent, [2, 2], 2, dtype="float32")
    assert [g[:, 0].tolist() for g in grad_x] == [[3, 100], [220, 1010]]
    assert [g.tolist() for g in grad_w] == [[[5, 1], [3, 0]], [[7, 6], [2, 4]]]

    weights = [out.weights for out in sent]
    grad_y = [np.array([[1], [2]], np.float32), np.array([[3], [4]], np.float32)]
    grad, grad_w = reference.combine_backward(grad_y, grad_rows, sent, dtype="float32", weights=weights)
    assert [g[:, 0].tolist() for g in grad] == [[0.25, 8, 2, 12], [0.5, 0.375, 2.25]]
    assert [g.tolist() for g in grad_w] == [[1, 40, 200, 4000], [2, 60, 600]]


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_rounding_is_that_of_the_dtype(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(5000).astype(reference.wide(dtype)) * 10.0 ** rng.integers(-9, 6, 5000)
    x = x.astype(reference.wide(dtype))
    x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 2.0**-24]
    torch_dtype = getattr(torch, dtype)
    expected = torch.from_numpy(x).to(torch_dtype).to(torch.from_numpy(x).dtype).numpy()
    np.testing.assert_array_equal(reference.rounded(x, dtype), expected)
