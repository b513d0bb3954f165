"""What moves the rows: the words that a communicator takes, and what the CUDA backend asks of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.overlap import Beside
from tests.unit.loopback import FakeGpu, LoopbackNative, loopback

__all__ = ["loopback"]  # a fixture, which pytest finds by its name here

SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens": 6, "dtype": torch.float32}
IDS_TK = torch.tensor([[1, 3], [0, -1], [3, 1], [2, 0], [-1, -1]])


@pytest.fixture
def auto(loopback: None, monkeypatch: pytest.MonkeyPatch) -> tuple[moecomm.Communicator, LoopbackNative]:
    """A CUDA communicator of engine "auto" for whose sizes copies pay, and its runtime, without calls."""
    monkeypatch.setattr(LoopbackNative, "copies_pay", lambda native: True)
    comm = moecomm.Communicator(**SIZES, engine="auto")
    native: LoopbackNative = comm._open()._native  # type: ignore[attr-defined]
    native.calls.clear()
    return comm, native


def _sent(comm: moecomm.Communicator) -> tuple[torch.Tensor, moecomm.Handle]:
    """Rows whose dispatch is over, and its handle."""
    x_TH = torch.randn(5, 8)
    return x_TH, comm.dispatch(x_TH, IDS_TK, capacity=9).handle


def test_use_engine_on_the_cpu() -> None:
    with moecomm.Communicator(**SIZES, device="cpu", engine="auto") as comm:
        assert comm.engine == "auto" and not comm.copies_beside
        with pytest.raises(moecomm.Unsupported, match="copy"), comm.use_engine("copy"):
            pass
        for bad in ("auto", "nccl", None):
            refused = pytest.raises(moecomm.InvalidArgument, match="expected 'sm' or 'copy'")
            with refused, comm.use_engine(bad):  # type: ignore[arg-type]
                pass
        with pytest.raises(moecomm.Unsupported):
            comm.hold_copies()
        with comm.use_engine("sm"):
            x_TH = torch.randn(5, 8)
            out = comm.dispatch(x_TH, IDS_TK)
        comm.complete(0)
        side = Beside(comm, only_transfers=True)
        with side:
            y_TH = comm.combine(out.tokens, out.handle)
        side.join(y_TH)
        assert torch.equal(y_TH, x_TH * (IDS_TK >= 0).sum(1, keepdim=True))


def test_use_engine_of_a_communicator_without_room() -> None:
    refused = pytest.raises(moecomm.InvalidArgument, match="built with engine='sm'")
    with moecomm.Communicator(**SIZES, device="cpu") as comm, refused, comm.use_engine("copy"):
        pass


def test_engines_of_the_memory_plan() -> None:
    with pytest.raises(moecomm.Unsupported, match="copy"):
        moecomm.Communicator.memory_plan(ranks=2, **SIZES, device="cpu", engine="copy")
    with pytest.raises(moecomm.InvalidArgument, match="'warp'"):
        moecomm.Communicator.memory_plan(ranks=2, **SIZES, device="cpu", engine="warp")  # type: ignore[arg-type]


@pytest.mark.parametrize(("pays", "beside"), [(True, True), (False, False)])
def test_auto_copies_beside_products_where_it_pays(
    loopback: None, monkeypatch: pytest.MonkeyPatch, pays: bool, beside: bool
) -> None:
    monkeypatch.setattr(LoopbackNative, "copies_pay", lambda native: pays)
    comm = moecomm.Communicator(**SIZES, engine="auto")
    native: LoopbackNative = comm._open()._native  # type: ignore[attr-defined]
    assert comm.copies_beside is beside and native.shape.copies is True
    assert not any(call.startswith("use_copies") for call in native.calls)


def test_use_engine_and_the_setting_before(auto: tuple[moecomm.Communicator, LoopbackNative]) -> None:
    comm, native = auto
    with comm.use_engine("copy"):
        with comm.use_engine("sm"):
            pass
        with comm.use_engine("copy"):  # nothing changes, so the runtime is not asked
            pass
    with pytest.raises(KeyError), comm.use_engine("copy"):
        raise KeyError
    on, off = "use_copies True False", "use_copies False False"
    assert native.calls == [on, off, on, off, on, off]


def test_an_operation_is_held_and_completed(auto: tuple[moecomm.Communicator, LoopbackNative]) -> None:
    comm, native = auto
    x_TH, handle = _sent(comm)
    native.calls.clear()
    release = comm.hold_copies()
    first_PH = comm.redispatch(x_TH, handle)
    first = release()
    with comm.use_engine("copy"):
        comm.redispatch(x_TH, handle)  # not held, so the number is still that of the first
    release = comm.hold_copies()
    comm.combine(first_PH, handle)
    second = release()
    assert second == first + 1
    comm.complete(first)  # an operation has come after it, before which it was received
    comm.complete(second)
    held, off = "use_copies True True", "use_copies False False"
    assert native.calls == [
        *(held, "redispatch@100", off),
        *("use_copies True False", "redispatch@100", off),
        *(held, "combine@100", off),
        "complete@100",
    ]


def test_beside_holds_transfers(auto: tuple[moecomm.Communicator, LoopbackNative]) -> None:
    """Where copies pay, a block of transfers stays on the caller's stream, and `join` receives."""
    comm, native = auto
    gpu = FakeGpu.last
    x_TH, handle = _sent(comm)
    native.calls.clear()
    side = Beside(comm, only_transfers=True)
    with side:
        rows_PH = comm.redispatch(x_TH, handle)
        assert gpu.now.number == 100
    assert not side.apart
    assert native.calls == ["use_copies True True", "redispatch@100", "use_copies False False"]
    side.join(rows_PH)
    assert native.calls[3:] == ["complete@100"]
    later = Beside(comm, only_transfers=True)
    with pytest.raises(moecomm.InvalidArgument), later:
        comm.redispatch(comm.redispatch(x_TH, handle)[:, :4], handle)
    assert native.calls[4:] == [
        *("use_copies True True", "redispatch@100", "fail@100", "use_copies False False"),
        "complete@100",  # an error completes what the block has begun
    ]


def test_nothing_is_held_that_is_not_wanted_beside(
    auto: tuple[moecomm.Communicator, LoopbackNative],
) -> None:
    comm, native = auto
    x_TH, handle = _sent(comm)
    native.calls.clear()
    side = Beside(comm, only_transfers=True, wanted=False)
    with side:
        rows_PH = comm.redispatch(x_TH, handle)
    side.join(rows_PH)
    assert native.calls == ["redispatch@100"]
