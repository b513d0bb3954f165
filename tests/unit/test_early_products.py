"""Products that the host issues before it knows how many rows a dropless dispatch brings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moecomm
from moecomm.kernels.products import Products
from moecomm.nn.expert_pass import Forward, PassContext, Weights, run_forward
from tests.unit.loopback import LoopbackNative, loopback, make_inputs, opened

__all__ = ["loopback"]  # a fixture, which pytest finds by its name here

ROWS = 7  # that the dispatch of make_inputs brings


class Told(Products):
    """Products that enter the calls of the runtime, and fail on request."""

    def __init__(self, native: LoopbackNative) -> None:
        super().__init__()
        self.native, self.fails = native, False

    def gated_mm(self, rows_PH: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if self.fails:
            raise ValueError("no product today")
        self.native.calls.append(f"fc1 of {rows_PH.shape[0]}")
        return super().gated_mm(rows_PH, *given, **options)


def run(comm: moecomm.Communicator, products: Products, keep: str = "all") -> list[Tensor]:
    """A forward and backward; returns the result and all gradients."""
    x_TH, ids_TK, weights_TK = make_inputs()
    generator = torch.Generator().manual_seed(1)
    w_in, w_out = (torch.randn(4, *shape, generator=generator) for shape in ((8, 12), (6, 8)))
    leaves = [each.requires_grad_() for each in (x_TH, weights_TK, w_in, w_out)]
    context = PassContext(
        comm=comm,
        topk_idx_TK=ids_TK,
        activation="swiglu",
        products=products,
        keep=keep,  # type: ignore[arg-type]
    )
    forward = Forward(context, None)
    y_TH = run_forward(forward, x_TH, weights_TK, Weights(w_in, w_out, None, None))
    y_TH.square().sum().backward()
    assert forward.out is not None and forward.out.handle.num_rows == ROWS
    return [y_TH.detach(), *(each.grad for each in leaves if each.grad is not None)]


@pytest.mark.usefixtures("loopback")
class TestEarlyProducts:
    @pytest.mark.parametrize("keep", ["all", "rows", "nothing"])
    @pytest.mark.parametrize("room", [0, 3, ROWS, 20])
    def test_numbers_and_order(self, room: int, keep: str) -> None:
        """A layer has the same numbers with and without room for its rows; without, products run again."""
        comm, native, _ = opened()
        products = Told(native)
        wanted = run(comm, products)
        native.offer, begin = (room, room), len(native.calls)
        found = run(comm, products, keep)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        calls = native.calls[begin : native.calls.index("combine@100", begin)]
        if not room:
            assert calls == ["begin_dispatch@100", "wait_rows", "finish_dispatch@100", f"fc1 of {ROWS}"]
        else:
            early = ["dispatch@100", f"fc1 of {room}", "wait_rows"]
            late = ["accept_rows"] if room >= ROWS else ["finish_dispatch@100", f"fc1 of {ROWS}"]
            assert calls == early + late

    @pytest.mark.parametrize("room", [3, 20])
    def test_the_next_operation_completes_it(self, room: int) -> None:
        comm, native, _ = opened()
        native.offer = (room, room)
        x_TH, ids_TK, weights_TK = make_inputs()
        early, count = comm._dispatch_early(x_TH, ids_TK, weights_TK, None)
        assert early.tokens.shape[0] == room and count is not None
        ends = early.expert_offsets.tolist()
        begin = len(native.calls)
        other = comm.dispatch(x_TH, ids_TK, weights_TK)
        assert native.calls[begin] == "wait_rows"
        out = count()
        assert (out.tokens is early.tokens) is (room >= ROWS)
        assert torch.equal(out.tokens, other.tokens) and torch.equal(out.weights, other.weights)
        assert ends == (other.expert_offsets.tolist() if room >= ROWS else [0] * 4)
        assert torch.equal(comm.combine(out.tokens, out.handle), comm.combine(other.tokens, other.handle))

    def test_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the wait for the rows: raised once, by the forward. Of a product: told to all ranks, behind the
        dispatch."""
        comm, native, _ = opened()
        native.offer = (20, 20)
        products = Told(native)
        products.fails = True
        with pytest.raises(ValueError, match="no product today"):
            run(comm, products)
        assert native.calls[-4:] == ["dispatch@100", "wait_rows", "accept_rows", "fail@100"]
        products.fails = False

        def lost(stream: int) -> tuple[int, int]:
            raise moecomm.PeerLost("rank 1 has ended")

        with monkeypatch.context() as patch:
            patch.setattr(native, "wait_rows", lost)
            with pytest.raises(moecomm.PeerLost, match="rank 1 has ended"):
                run(comm, products)
        assert run(comm, products)
