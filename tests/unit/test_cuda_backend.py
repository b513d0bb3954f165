"""The CUDA backend's Python side: what it asks of the runtime, in which order and on which stream."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.arguments import check_dispatch, check_wire_options
from moecomm.backends.arrays import shared_tensor
from moecomm.backends.order import ProcessLock
from moecomm.setup import discovery
from moecomm.setup.checks import check_formats
from moecomm.types import Layout
from tests.unit.loopback import FakeGpu, FakeWindow, LoopbackNative, loopback

__all__ = ["loopback"]  # a fixture, which pytest finds by its name here

SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens": 6, "dtype": torch.float32}
IDS_TK = torch.tensor([[1, 3], [0, -1], [3, 1], [2, 0], [-1, -1]])


def _comm(**changes: Any) -> tuple[moecomm.Communicator, LoopbackNative, FakeGpu]:
    comm = moecomm.Communicator(**{**SIZES, **changes})
    native = comm._open()._native  # type: ignore[attr-defined]
    return comm, native, FakeGpu.last


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), IDS_TK, torch.rand(5, 2, generator=generator)


@pytest.mark.usefixtures("loopback")
class TestOperations:
    def test_construction_and_close(self) -> None:
        comm, native, gpu = _comm()
        assert native.calls == ["link_control", "connect", "unlink_control"]
        assert FakeWindow.last.bytes == comm.memory.total_bytes == 12288
        assert native.settings["num_sms"] == 0 and native.settings["timeout"] == comm.timeout
        comm.close()
        assert native.closed and FakeWindow.last.closed and gpu.log == ["synchronize"]
        with pytest.raises(moecomm.CommunicatorClosed):
            comm.dispatch(*_inputs())

    def test_a_thread_that_is_left_behind_keeps_the_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        monkeypatch.setattr(native, "ends", False)
        with pytest.warns(RuntimeWarning, match="has left it behind"):
            comm.close()
        assert native.closed and not FakeWindow.last.closed

    def test_its_window_outlives_a_capture(self) -> None:
        """A window that is let go of in a capture, which freeing would spoil, goes when the next communicator
        closes."""
        comm, native, gpu = _comm()
        window = FakeWindow.last
        gpu.captures.add(100)
        comm.close()
        assert native.closed and not window.closed and gpu.log == []
        other, *_ = _comm()
        other.close()
        assert window.closed and FakeWindow.last.closed

    @pytest.mark.parametrize("name", ["stats", "reset_stats", "last_phases"])
    def test_counters_are_read_on_its_device(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The runtime would otherwise go to the device and back, which opens the one that it goes back to."""
        comm, native, gpu = _comm()
        gpu.device_is_current = False
        seen = []
        for each in ("stats", "reset_stats", "phases"):
            real = getattr(native, each)
            monkeypatch.setattr(
                native, each, lambda real=real: (seen.append(gpu.device_is_current), real())[1]
            )
        getattr(comm, name)()
        assert seen and all(seen) and not gpu.device_is_current

    def test_forgetting_it_closes_it(self) -> None:
        comm, native, _ = _comm()
        del comm
        gc.collect()
        assert native.closed and FakeWindow.last.closed

    @pytest.mark.parametrize("capacity", [None, 9])
    def test_expert_rows(self, capacity: int | None) -> None:
        comm, native, gpu = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=capacity)
        halves = ["begin_dispatch@100", "wait_rows", "finish_dispatch@100"]
        assert native.calls[3:] == (halves if capacity is None else ["dispatch@100"])
        assert out.tokens.shape == (7 if capacity is None else 9, 8)
        assert out.offsets.tolist() == [2, 4, 5, 7] and out.tokens_per_expert.tolist() == [2, 2, 1, 2]
        assert out.overflow.shape == () and int(out.overflow) == 0 and out.overflow.dtype == torch.int32
        assert torch.equal(out.tokens[:7], x_TH[[1, 3, 0, 2, 3, 0, 2]])
        # What the device writes again at a graph's replay is what the caller holds.
        storage = out.handle.plan.blob.untyped_storage().data_ptr()
        for view in (out.offsets, out.tokens_per_expert, out.overflow):
            assert view.untyped_storage().data_ptr() == storage
        y_TH = comm.combine(out.tokens, out.handle, weights=out.weights)
        torch.testing.assert_close(y_TH, x_TH * torch.where(ids_TK >= 0, weights_TK, 0).sum(1, keepdim=True))
        assert native.calls[-1] == "combine@100" and gpu.log == []
        assert gpu.ranges == ["moecomm dispatch", "pop", "moecomm combine", "pop"]

    @pytest.mark.parametrize("layout", ["expert", "rank"])
    @pytest.mark.parametrize("offer", [(7, 7), (20, 20), (3, 3), (20, 3), (3, 20)])
    def test_offered_rows(self, offer: tuple[int, int], layout: Layout) -> None:
        """Rows that fit stay where they are, and their tensors can be changed in place; others are received
        into tensors of their size."""
        comm, native, _ = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        want = comm.dispatch(x_TH, ids_TK, weights_TK, layout=layout)
        rows, positions = len(want.tokens), 7
        native.offer = offer if layout == "rank" else (offer[0], offer[0])
        seen = len(native.calls)
        x_TH.requires_grad_()
        out = comm.dispatch(x_TH, ids_TK, weights_TK, layout=layout)
        fits = rows <= offer[0] and (layout == "expert" or positions <= offer[1])
        last = "accept_rows" if fits else "finish_dispatch@100"
        assert native.calls[seen:] == ["dispatch@100", "wait_rows", last]
        for name in ("tokens", "weights", "expert_rows", "expert_weights", "topk_idx", "offsets"):
            got, wanted = getattr(out, name), getattr(want, name)
            assert (got is None) == (wanted is None), name
            assert got is None or torch.equal(got, wanted), name
        out.tokens.mul_(2)
        comm.combine(out.tokens, out.handle).sum().backward()
        assert x_TH.grad is not None

    @pytest.mark.parametrize("room", [0, 3, 7, 20])
    def test_what_other_threads_free_meanwhile_is_not_written_to(
        self, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the host waits for the number of rows, another thread may launch a kernel and free what it
        reads. So rows are received beside other kernels only into memory from before the first half."""
        comm, native, _ = _comm()
        want = comm.dispatch(*_inputs())
        native.offer, native.at_once = (room, room), False
        seen, make = len(native.calls), comm._backend._outputs
        monkeypatch.setattr(
            comm._backend, "_outputs", lambda *args: (native.calls.append("outputs"), make(*args))[1]
        )
        out = comm.dispatch(*_inputs())
        before, after = ["outputs"] * (room > 0), ["outputs"] * (room < 7)
        halves = ["begin_dispatch@100", "wait_rows", *after, "finish_dispatch@100"]
        assert native.calls[seen:] == [*before, *halves]
        assert native.directly is (room >= 7)
        assert torch.equal(out.tokens, want.tokens) and torch.equal(out.weights, want.weights)

    def test_what_is_begun_is_not_offered_anything(self) -> None:
        """The rows are received when the caller asks for them, and until then no SM waits for other ranks."""
        comm, native, _ = _comm()
        native.offer = (20, 20)
        receive = comm.begin_dispatch(*_inputs())
        assert native.calls[-1] == "begin_dispatch@100"
        assert receive().tokens.shape == (7, 8)
        work = comm.dispatch(*_inputs(), async_op=True)
        assert native.calls[-1] == "begin_dispatch@101"
        assert work.wait().tokens.shape == (7, 8)

    def test_rows_are_received_beside_those_that_are_sent(self) -> None:
        """They are where nothing can be between the halves: a kernel of others may let the one behind it
        start while it still reads what that one writes to."""
        comm, native, gpu = _comm()
        comm.dispatch(*_inputs())
        assert native.directly is False and native.waited_on == 100
        for directly in (False, True):
            comm.begin_dispatch(*_inputs())(directly=directly)
            assert native.directly is directly
        comm.begin_dispatch(*_inputs())()
        assert native.directly is False
        comm.dispatch(*_inputs(), async_op=True).wait()
        assert native.directly and native.waited_on == 101
        native.few = 100
        for layout in ("expert", "rank"):  # of which the index is zero first
            comm.dispatch(*_inputs(), layout=layout, capacity=8, async_op=True).wait()
            assert native.directly is (layout == "expert")
        native.few = 0
        torch.use_deterministic_algorithms(True)  # new tensors are filled
        try:
            comm.dispatch(*_inputs())
        finally:
            torch.use_deterministic_algorithms(False)
        assert not native.directly
        receive = comm.begin_dispatch(*_inputs())
        gpu.now = gpu.new_stream()
        receive()
        assert native.waited_on == gpu.now.number

    def test_rows_without_memory_for_the_offer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        want = comm.dispatch(*_inputs())
        real = torch.Tensor.new_empty_strided

        def new_empty(like: torch.Tensor, shape: Any, strides: Any) -> torch.Tensor:
            if shape[0] == 1000:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(like, shape, strides)

        monkeypatch.setattr(torch.Tensor, "new_empty_strided", new_empty)
        native.offer = (1000, 1000)
        assert torch.equal(comm.dispatch(*_inputs()).tokens, want.tokens)
        assert native.calls[-3:] == ["begin_dispatch@100", "wait_rows", "finish_dispatch@100"]

    def test_memory_of_an_offer_is_free_before_more_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        made: list[torch.Tensor] = []
        real = torch.Tensor.new_empty_strided

        def new_empty(like: torch.Tensor, shape: Any, strides: Any) -> torch.Tensor:
            if shape[0] == 7:
                held = sum(each.untyped_storage().nbytes() for each in made if each.shape[0] == 3)
                assert held == 0 and native.calls[-1] == "wait_rows"
            made.append(real(like, shape, strides))
            return made[-1]

        monkeypatch.setattr(torch.Tensor, "new_empty_strided", new_empty)
        native.offer = (3, 3)
        assert comm.dispatch(*_inputs()).tokens.shape == (7, 8)
        assert [each.shape[0] for each in made[1:]] == [3, 3, 7, 7]

    def test_rank_rows(self) -> None:
        comm, _, _ = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        out = comm.dispatch(x_TH, ids_TK.int(), weights_TK, layout="rank")
        assert out.topk_idx is not None and torch.equal(out.topk_idx, ids_TK[:4].int())
        assert out.offsets.tolist() == [4] and torch.equal(out.tokens, x_TH[:4])
        assert out.weights is not None
        assert torch.equal(out.weights, torch.where(ids_TK >= 0, weights_TK, 0)[:4])

    def test_overflow(self) -> None:
        comm, native, _ = _comm()
        out = comm.dispatch(*_inputs(), capacity=3)
        assert int(out.overflow) == 7 and out.tokens.shape == (3, 8) and out.handle.num_rows == 3
        native.pending = moecomm.CapacityExceeded("too many", needed=7, capacity=3, rank=0)
        with pytest.raises(moecomm.CapacityExceeded):
            comm.check()
        comm.check()

    def test_gradients(self) -> None:
        comm, native, gpu = _comm()
        x_TH, ids_TK, weights_TK = (each.clone() for each in _inputs())
        x_TH.requires_grad_()
        weights_TK.requires_grad_()
        out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=10)
        y_TH = comm.combine(out.tokens.sin(), out.handle, weights=out.weights)
        y_TH.square().sum().backward()
        assert native.calls[-2:] == ["redispatch@100", "combine@100"]
        assert gpu.ranges[-4::2] == ["moecomm combine backward", "moecomm dispatch backward"]
        twin_x, twin_weights = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        total = torch.where(ids_TK >= 0, twin_weights, 0).sum(1, keepdim=True)
        (twin_x.sin() * total).square().sum().backward()
        torch.testing.assert_close(x_TH.grad, twin_x.grad)
        torch.testing.assert_close(weights_TK.grad, twin_weights.grad)

    def test_rows_that_kernels_cannot_read_are_copied(self) -> None:
        comm, _, _ = _comm()
        x_TH, ids_TK, _ = _inputs()
        shifted = torch.empty(41)[1:].view(5, 8)  # contiguous, 4 bytes off
        for strange in (x_TH.t().contiguous().t(), shifted.copy_(x_TH)):
            out = comm.dispatch(strange, ids_TK.t().contiguous().t())
            assert torch.equal(out.tokens, x_TH[[1, 3, 0, 2, 3, 0, 2]])
            torch.testing.assert_close(comm.combine(out.tokens.t().contiguous().t(), out.handle)[1], x_TH[1])

    def test_copied_inputs_live_until_the_rows_are_received(self) -> None:
        comm, native, _ = _comm()
        inputs = [each.t().contiguous().t() for each in _inputs()]
        work = comm.dispatch(inputs[0], inputs[1], inputs[2], async_op=True)
        assert native.calls[-1] == "begin_dispatch@101"
        begun = comm._open()._unfinished._begun  # type: ignore[attr-defined]
        kept = {each.data_ptr() for each in begun.inputs if each is not None}
        assert {native.begun["x"], native.begun["weights"], native.ids} == kept
        assert kept.isdisjoint(each.data_ptr() for each in inputs)
        assert torch.equal(work.wait().tokens, inputs[0][[1, 3, 0, 2, 3, 0, 2]])

    def test_an_interrupted_wait_is_no_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        work = comm.dispatch(*_inputs(), async_op=True)

        def interrupted(stream: int) -> tuple[int, int]:
            raise KeyboardInterrupt

        monkeypatch.setattr(native, "wait_rows", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                work.wait()

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_kernels_give_up_before_an_interrupted_communicator_closes(self, interrupted: bool) -> None:
        comm, native, _ = _comm()
        native.interrupted = interrupted
        comm.close()
        assert native.closed and ("stop_waiting" in native.calls) == interrupted

    def test_an_operation_within_another_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        wait, within = native.wait_rows, []

        def handled(stream: int) -> tuple[int, int]:  # as a signal's handler would
            with pytest.raises(moecomm.InvalidArgument, match="under way in this thread"):
                comm.dispatch(*_inputs(), capacity=8)
            within.append(native.calls[-1])
            return wait(stream)

        monkeypatch.setattr(native, "wait_rows", handled)
        out = comm.dispatch(*_inputs())
        assert len(within) == 1 and native.failed is None
        assert torch.equal(out.tokens, _inputs()[0][[1, 3, 0, 2, 3, 0, 2]])

    @pytest.mark.parametrize("most", [None, 0, 128])
    def test_tokens_that_one_kernel_takes(self, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        if most is not None:
            monkeypatch.setenv("MOECOMM_FUSED_TOKENS", str(most))
        comm, native, _ = _comm()
        told = [call for call in native.calls if call.startswith("fuse_up_to")]
        assert told == ([] if most is None else [f"fuse_up_to {most}"])
        comm.close()

    def test_a_begun_dispatch_is_settled_on_the_sms_that_it_began_with(self) -> None:
        comm, native, _ = _comm()
        backend, inputs = comm._open(), _inputs()
        comm.settle()  # nothing is begun
        before = backend.limit_sms(20)
        work = comm.dispatch(*inputs, async_op=True)
        backend.limit_sms(before)
        assert native.calls[-1] == "limit_sms 0"
        begun = len(native.calls)
        comm.settle()
        comm.settle()
        assert native.calls[begun:] == ["limit_sms 20", "wait_rows", "finish_dispatch@101", "limit_sms 0"]
        assert torch.equal(work.wait().tokens, inputs[0][[1, 3, 0, 2, 3, 0, 2]])
        assert len(native.calls) == begun + 4
        comm.close()
        with pytest.raises(moecomm.CommunicatorClosed):
            comm.settle()

    def test_no_tokens(self) -> None:
        comm, _, _ = _comm()
        out = comm.dispatch(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
        assert out.tokens.shape == (0, 8) and out.offsets.tolist() == [0] * 4
        assert comm.combine(out.tokens, out.handle, weights=out.weights).shape == (0, 8)

    @pytest.mark.parametrize(
        ("wire", "scales_TS"),
        [("fp8", torch.rand(5, 2)), ("mxfp8", torch.rand(5, 5).to(torch.float8_e8m0fnu))],
        ids=["fp8", "mxfp8"],
    )
    def test_quantised_rows_go_through_as_they_are(self, wire: str, scales_TS: torch.Tensor) -> None:
        comm, _, _ = _comm(wire=wire, hidden=144)
        data_TH = torch.randn(5, 144).to(torch.float8_e4m3fn)
        weights_TK = torch.rand(5, 2).requires_grad_()
        out = comm.dispatch((data_TH, scales_TS), IDS_TK, weights_TK, dequantize=False)
        rows = [1, 3, 0, 2, 3, 0, 2]
        assert out.tokens.dtype == torch.float8_e4m3fn and torch.equal(
            out.tokens.float(), data_TH[rows].float()
        )
        assert out.scales is not None and out.scales.dtype == scales_TS.dtype
        assert torch.equal(out.scales.view(torch.uint8), scales_TS.view(torch.uint8)[rows])
        assert out.tokens.grad_fn is None
        shapes = rf"scales of x has shape \(5, 1\).* = \(5, {scales_TS.shape[1]}\)"
        with pytest.raises(moecomm.InvalidArgument, match=shapes):
            comm.dispatch((data_TH, scales_TS[:, :1]), IDS_TK)
        other = torch.float32 if wire == "mxfp8" else torch.float16
        with pytest.raises(moecomm.InvalidArgument, match=f"scales of x is {other}"):
            comm.dispatch((data_TH, scales_TS.to(other)), IDS_TK)


@pytest.mark.usefixtures("loopback")
def test_results_alone_travel_in_combine_wire() -> None:
    """The backward of a dispatch is a combine of gradients, in the dtype."""
    comm, native, _ = _comm(combine_wire="fp8", hidden=16)
    x_TH = torch.randn(5, 16).requires_grad_()
    out = comm.dispatch(x_TH, IDS_TK)
    comm.combine(out.tokens, out.handle).sum().backward()
    assert native.quantised == [True, False] and x_TH.grad is not None


@pytest.mark.usefixtures("loopback")
def test_gradients_alone_travel_in_gradient_wire() -> None:
    """The backward of a combine without weights sends gradients so, and redispatch rows that it is told are
    gradients; a communicator without the format sends all in the dtype."""
    comm, native, _ = _comm(gradient_wire="mxfp8", hidden=32)
    x_TH, weights_TK = torch.randn(5, 32), torch.rand(5, 2)
    out = comm.dispatch(x_TH, IDS_TK, weights_TK)
    rows_PH = out.tokens.clone().requires_grad_()
    comm.combine(rows_PH, out.handle).sum().backward()
    comm.combine(rows_PH, out.handle, weights=out.weights).sum().backward()
    comm.redispatch(x_TH, out.handle)
    comm.redispatch(x_TH, out.handle, gradients=True)
    assert native.gradients == [True, False, False, True]
    plain, native, _ = _comm()
    out = plain.dispatch(torch.randn(5, plain.hidden), IDS_TK)
    plain.redispatch(torch.randn(5, plain.hidden), out.handle, gradients=True)
    assert native.gradients == [False]


def test_bad_formats() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    check_formats(cpu, 7, torch.float32)
    check_formats(cuda, 32, torch.float32, combine_wire="fp8", gradient_wire="mxfp8")
    for device, hidden, name, wire, error, words in (
        (cpu, 16, "gradient_wire", "fp8", moecomm.Unsupported, "gradients travel in their own dtype"),
        (cuda, 32, "gradient_wire", "nvfp4", moecomm.Unsupported, "None .* and 'fp8' and 'mxfp8'"),
        (cuda, 24, "gradient_wire", "fp8", moecomm.InvalidArgument, "with gradient_wire='fp8'"),
        (cpu, 16, "combine_wire", "fp8", moecomm.Unsupported, "on the cpu sums travel in their own"),
        (cuda, 16, "combine_wire", "mxfp8", moecomm.Unsupported, "this version has None"),
        (cuda, 24, "combine_wire", "fp8", moecomm.InvalidArgument, "a multiple of 16"),
    ):
        with pytest.raises(error, match=words):
            check_formats(device, hidden, torch.float32, **{name: wire})


@pytest.mark.usefixtures("loopback")
class TestErrors:
    def test_the_others_are_told(self) -> None:
        comm, native, _ = _comm()
        x_TH, ids_TK, _ = _inputs()
        with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
            comm.dispatch(x_TH[:, :4], ids_TK)
        assert native.calls[-1] == "fail@100" and native.failed is not None
        assert native.failed[0] == "invalid_argument" and "x has shape" in native.failed[1]
        with pytest.raises(moecomm.InvalidRouting):
            comm.dispatch(x_TH, ids_TK.float())
        assert native.failed[0] == "invalid_routing"
        out = comm.dispatch(x_TH, ids_TK)
        with pytest.raises(moecomm.InvalidArgument, match="rows has shape"):
            comm.combine(out.tokens[1:], out.handle)
        with pytest.raises(moecomm.InvalidArgument, match="dequantize is False"):
            comm.dispatch(x_TH, ids_TK, dequantize=False)
        with pytest.raises(moecomm.InvalidArgument, match="x is a pair"):
            comm.dispatch((x_TH.to(torch.float8_e4m3fn), torch.ones(5, 1)), ids_TK)

    def test_not_while_a_graph_is_captured(self) -> None:
        comm, native, gpu = _comm()
        gpu.captures.add(100)
        calls = list(native.calls)
        with pytest.raises(moecomm.InvalidArgument, match="capacity is None within a CUDA graph capture"):
            comm.dispatch(*_inputs())
        with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
            comm.dispatch(torch.zeros(1, 2), IDS_TK, capacity=4)
        assert native.calls == calls
        comm.dispatch(*_inputs(), capacity=4)

    def test_no_memory_for_the_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        real = torch.Tensor.new_empty_strided

        def new_empty(like: torch.Tensor, *sizes: Any) -> torch.Tensor:
            if like.dtype == torch.float32:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(like, *sizes)

        monkeypatch.setattr(torch.Tensor, "new_empty_strided", new_empty)
        for capacity, last in ((None, "finish_dispatch@100"), (9, "dispatch@100")):
            with pytest.raises(moecomm.OutOfMemory) as caught:
                comm.dispatch(x_TH, ids_TK, weights_TK, capacity=capacity)
            # The peers' rows are received all the same, into nothing.
            assert caught.value.needed == (capacity or 7) * 8 * 4 and native.calls[-1] == last
            assert native.received == 0
        with pytest.raises(moecomm.OutOfMemory):
            comm.combine(out.tokens, out.handle)
        assert native.calls[-1] == "fail@100" and native.failed is not None
        assert native.failed[0] == "out_of_memory"


@pytest.mark.usefixtures("loopback")
class TestStreams:
    def test_an_operation_follows_the_last_one(self) -> None:
        comm, native, gpu = _comm()
        inputs = _inputs()
        other = gpu.new_stream()
        out = comm.dispatch(*inputs)
        comm.combine(out.tokens, out.handle)
        assert gpu.log == []
        with gpu.on(other):
            comm.combine(out.tokens, out.handle)
            comm.combine(out.tokens, out.handle)
        assert native.calls[-1] == "combine@101" and gpu.log == ["record 100", "101 waits for 100"]
        comm.combine(out.tokens, out.handle)
        assert gpu.log[2:] == ["record 101", "100 waits for 101"]

    def test_a_capture_has_an_order_of_its_own(self) -> None:
        comm, _, gpu = _comm()
        inputs = _inputs()
        recorded, branch, later = (gpu.new_stream() for _ in range(3))
        comm.dispatch(*inputs, capacity=8)
        gpu.captures |= {recorded.number, branch.number}
        with gpu.on(recorded):
            comm.dispatch(*inputs, capacity=8)
        assert gpu.log == []
        with gpu.on(branch):
            comm.dispatch(*inputs, capacity=8)
        assert gpu.log == ["record 101", "102 waits for 101"]
        gpu.captures.clear()
        with gpu.on(later):
            comm.dispatch(*inputs)
        assert gpu.log[2:] == ["record 100", "103 waits for 100"]
        gpu.captures.add(100)  # the next capture does not wait for streams of the one before
        comm.dispatch(*inputs, capacity=8)
        assert len(gpu.log) == 4

    def test_another_current_device(self) -> None:
        comm, native, gpu = _comm()
        gpu.device_is_current = False
        out = comm.dispatch(*_inputs())
        assert native.calls[-1] == "finish_dispatch@100" and not gpu.device_is_current
        gpu.device_is_current = True
        assert out.tokens.shape == (7, 8)

    def test_check_waits_for_nothing(self) -> None:
        comm, native, gpu = _comm()
        comm.dispatch(*_inputs())
        gpu.streams[0].done = False
        gpu.captures.add(100)
        log = list(gpu.log)
        native.pending = moecomm.InvalidRouting("bad id")
        with pytest.raises(moecomm.InvalidRouting):
            comm.check()
        comm.check()
        assert gpu.log == log


@pytest.mark.usefixtures("loopback")
class TestWork:
    def test_on_the_side(self) -> None:
        comm, native, gpu = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        work = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8, async_op=True)
        assert comm.stream is gpu.streams[1]
        assert native.calls[-1] == "dispatch@101"
        assert gpu.log[:2] == ["record 100", "101 waits for 100"]
        gpu.streams[1].done = False
        assert not work.is_completed()
        gpu.streams[1].done = True
        assert work.is_completed()
        out = work.wait()
        assert gpu.log[-1] == "100 waits for 101" and work.wait() is out
        second = comm.combine(out.tokens, out.handle, weights=out.weights, async_op=True)
        assert second.wait().shape == (5, 8) and native.calls[-1] == "combine@101"

    @pytest.mark.parametrize("capturing", [False, True])
    def test_few_tokens_are_received_when_they_are_waited_for(self, capturing: bool) -> None:
        comm, native, gpu = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        want = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8)
        y_TH = comm.combine(want.tokens, want.handle, weights=want.weights)
        if capturing:
            gpu.captures |= {100, comm.stream.number}
        native.few = len(x_TH)
        native.calls.clear()
        work = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8, async_op=True)
        assert native.calls == ["begin_dispatch@101"]
        out = work.wait()
        assert native.calls.pop(0) and native.calls == ["finish_dispatch@101"]
        assert torch.equal(out.tokens[:7], want.tokens[:7])
        home = comm.combine(out.tokens, out.handle, weights=out.weights, async_op=True)
        assert native.calls[1:] == ["begin_combine@101"]
        assert torch.equal(home.wait(), y_TH) and native.calls[2:] == ["complete@101"]
        native.few = len(x_TH) - 1
        comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8, async_op=True)
        assert native.calls[-1] == "dispatch@101"

    def test_the_next_operation_receives_few_tokens(self) -> None:
        comm, native, _ = _comm()
        x_TH, ids_TK, weights_TK = _inputs()
        native.few = 100
        out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8)
        first = comm.combine(out.tokens * 1, out.handle, async_op=True)
        second = comm.combine(out.tokens * 2, out.handle, async_op=True)
        third = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=8, async_op=True)
        comm.dispatch(x_TH * 2, ids_TK, weights_TK, capacity=8)
        names = [call.partition("@")[0] for call in native.calls[-7:]]
        assert names == [
            *("begin_combine", "complete", "begin_combine", "complete"),
            *("begin_dispatch", "finish_dispatch", "dispatch"),
        ]
        assert torch.equal(second.wait(), first.wait() * 2)
        assert torch.equal(third.wait().tokens[:7], out.tokens[:7])

    def test_a_capture_that_ends_between_the_halves(self) -> None:
        comm, native, _ = _comm()
        native.few = 100
        out = comm.dispatch(*_inputs(), capacity=8)
        work = comm.combine(out.tokens, out.handle, async_op=True)
        native.dropped = True
        for _ in range(2):
            with pytest.raises(moecomm.InvalidArgument, match="has ended without its second half"):
                work.wait()
        native.dropped = False
        assert comm.combine(out.tokens, out.handle).shape == (5, 8)

    @pytest.mark.parametrize("half", [1, 2])
    def test_an_event_that_cannot_be_recorded(self, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stream whose capture has failed meanwhile takes no event."""
        comm, native, _ = _comm()
        native.few = 100
        side: Any = comm.stream

        def fails() -> None:
            raise RuntimeError("capture failed")

        def fail() -> None:
            monkeypatch.setattr(side, "record_event", fails)

        if half == 1:
            fail()
        work = comm.dispatch(*_inputs(), capacity=8, async_op=True)
        fail()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="capture failed"):
                work.wait()
        assert work.is_completed()
        monkeypatch.undo()

    def test_what_few_tokens_are_read_from_stays_until_they_are_received(self) -> None:
        comm, native, _ = _comm()
        native.few = 100
        out = comm.dispatch(*_inputs(), capacity=8)
        rows_PH = out.tokens * 3
        want = comm.combine(rows_PH, out.handle)
        gone = weakref.ref(rows_PH)
        work = comm.combine(rows_PH, out.handle, async_op=True)
        del rows_PH
        gc.collect()
        assert gone() is not None
        assert torch.equal(work.wait(), want)

    def test_the_next_operation_completes_it(self) -> None:
        comm, native, _ = _comm()
        x_TH, ids_TK, _ = _inputs()
        first = comm.dispatch(x_TH, ids_TK, async_op=True)
        second = comm.dispatch(x_TH * 2, ids_TK)
        assert [call.partition("@")[0] for call in native.calls[3:]] == [
            "begin_dispatch",
            "wait_rows",
            "finish_dispatch",
        ] * 2
        assert torch.equal(first.wait().tokens * 2, second.tokens)

    def test_polling_gets_there(self) -> None:
        comm, native, gpu = _comm()
        work = comm.dispatch(*_inputs(), async_op=True)
        gpu.streams[1].done = False
        assert not work.is_completed() and native.calls[-1] == "begin_dispatch@101"
        gpu.streams[1].done = True
        assert work.is_completed() and native.calls[-1] == "finish_dispatch@101"

    def test_close_completes_it(self) -> None:
        comm, native, _ = _comm()
        work = comm.dispatch(*_inputs(), async_op=True)
        comm.close()
        assert native.calls[-2:] == ["finish_dispatch@101", "close"]
        assert work.wait().tokens.shape == (7, 8)

    def test_an_error_comes_from_wait(self) -> None:
        comm, native, _ = _comm()
        work = comm.dispatch(torch.zeros(1, 2), IDS_TK, async_op=True)
        assert native.calls[-1] == "fail@101" and work.is_completed()
        for _ in range(2):
            with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
                work.wait()
        assert comm.dispatch(*_inputs()).tokens.shape == (7, 8)

    def test_gradients(self) -> None:
        comm, _, _ = _comm()
        x_TH, ids_TK, _ = _inputs()
        x_TH.requires_grad_()
        out = comm.dispatch(x_TH, ids_TK, async_op=True).wait()
        comm.combine(out.tokens, out.handle, async_op=True).wait().sum().backward()
        assert x_TH.grad is not None
        assert torch.equal(x_TH.grad, (ids_TK >= 0).sum(1, keepdim=True).expand(5, 8).float())


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)])
def test_a_gpu_without_kernels_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the CPU is not chosen instead of it."""
    devices = moecomm.setup.devices
    monkeypatch.setattr(devices, "_C", SimpleNamespace(cuda_version="13.0", DeviceCommunicator=object))
    monkeypatch.setattr(discovery, "_C", SimpleNamespace(cuda_version="13.0", fabric_missing=lambda: None))
    monkeypatch.setattr(devices, "_has_driver_bindings", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if capability[0] in (9, 10):
        assert devices.why_no_cuda() is None and not list(discovery.left_out())
        return
    reason = re.escape("the GPU has compute capability {}.{}, 9.0 or 10.x is needed".format(*capability))
    with pytest.raises(moecomm.Unsupported, match=f"device is cuda, this version serves cpu here: {reason}"):
        devices.choose_device("cuda")
    with pytest.raises(moecomm.Unsupported, match=rf"device is None, .*: {reason}.*pass device='cpu'"):
        devices.choose_device(None)
    assert devices.choose_device("cpu") == torch.device("cpu")
    assert [re.match(f"GPUs: left out, {reason}", line) is not None for line in discovery.left_out()] == [
        True
    ]


def test_cuda_is_offered_only_where_it_works() -> None:
    reason = moecomm.setup.devices.why_no_cuda()
    assert moecomm.available_devices() == (("cuda", "cpu") if reason is None else ("cpu",))
    if reason is not None:
        with pytest.raises(moecomm.Unsupported) as caught:
            moecomm.Communicator(**SIZES, device="cuda")
        assert reason in str(caught.value)
        with moecomm.Communicator(**SIZES) as comm:
            assert comm.device.type == "cpu" and comm.stream is None


def test_device_names_that_are_none() -> None:
    with pytest.raises(moecomm.InvalidArgument, match="device is 'gpu'"):
        moecomm.Communicator(**SIZES, device="gpu")


@pytest.mark.usefixtures("loopback")
def test_memory_plan_of_device_memory() -> None:
    plan = moecomm.Communicator.memory_plan(ranks=2, **SIZES, device="cuda")
    assert plan.total_bytes == plan.committed_bytes == 12288
    assert plan.sections == (("control", 0, 4096), ("rows", 4096, 8192))
    assert "24576" in str(plan)


def test_arrays_share_their_memory() -> None:
    cpu = torch.device("cpu")
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    tensor = shared_tensor(array, cpu)
    array[0, 0] = 7
    assert isinstance(tensor, torch.Tensor) and tensor[0, 0] == 7
    assert shared_tensor(tensor, cpu) is tensor
    for useless in ([1, 2], None, numpy.array(["text"])):
        assert shared_tensor(useless, cpu) is useless


def test_numpy_in_a_cpu_communicator() -> None:
    numpy = pytest.importorskip("numpy")
    with moecomm.Communicator(**SIZES, device="cpu") as comm:
        x_TH = numpy.random.default_rng(0).random((5, 8), dtype=numpy.float32)
        out = comm.dispatch(x_TH, IDS_TK.numpy())
        y_TH = numpy.from_dlpack(comm.combine(numpy.from_dlpack(out.tokens), out.handle))
        numpy.testing.assert_allclose(y_TH, x_TH * (IDS_TK.numpy() >= 0).sum(1, keepdims=True), rtol=1e-6)
        with pytest.raises(moecomm.InvalidArgument, match="x is list, expected a torch"):
            comm.dispatch([[1.0]], IDS_TK)


def test_the_device_of_a_tensor() -> None:
    sizes: dict[str, Any] = {"hidden": 8, "top_k": 2, "max_tokens": 9, "dtype": torch.float32}
    with pytest.raises(moecomm.InvalidArgument, match="x is on cpu, expected cuda:1"):
        check_dispatch(torch.zeros(5, 8), IDS_TK, None, device=torch.device("cuda", 1), **sizes)


def test_sms_of_a_cpu_communicator() -> None:
    with moecomm.Communicator(num_experts=2, hidden=8, top_k=1, max_tokens=1, device="cpu") as comm:
        with pytest.raises(moecomm.Unsupported, match="for CUDA communicators"), comm.limit_sms(2):
            pass
        with pytest.raises(moecomm.InvalidArgument, match="num_sms is"), comm.limit_sms(0):
            pass
    with pytest.raises(moecomm.CommunicatorClosed), comm.limit_sms(2):
        pass


def test_a_thread_that_is_left_behind_by_a_cpu_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = moecomm.Communicator(**SIZES, device="cpu")
    native = comm._backend._native  # type: ignore[union-attr]
    closes = SimpleNamespace(close=lambda: native.close() and False)
    monkeypatch.setattr(comm._backend, "_native", closes)
    with pytest.warns(RuntimeWarning, match="has left it behind"):
        comm.close()


@pytest.mark.usefixtures("loopback")
def test_statistics_begin_again() -> None:
    """Counters that the device keeps are never set to zero; the difference is shown."""
    comm, native, _ = _comm()
    native.stats = lambda: {"dispatch_calls": 2, "rows_out": 30}  # type: ignore[method-assign]
    assert comm.stats() == {"dispatch_calls": 2, "rows_out": 30, "plans_reused": 0, "bytes_staged": 0}
    before = {"dispatch_calls": 0, "late_seconds": [1.5]}
    after = {"dispatch_calls": 1, "late_seconds": [3.5]}
    native.stats = lambda: {**before, "rows_out": 30}  # type: ignore[method-assign]
    comm.reset_stats()
    native.stats = lambda: {**after, "rows_out": 37}  # type: ignore[method-assign]
    want = {"dispatch_calls": 1, "rows_out": 7, "late_seconds": [2.0], "plans_reused": 0, "bytes_staged": 0}
    assert comm.stats() == want


@pytest.mark.usefixtures("loopback")
def test_phases_are_those_of_the_device() -> None:
    comm, _, _ = _comm()
    assert comm.last_phases()["dispatch"] == {"announced": 2e-6, "ended": 9e-6}


def test_a_cpu_communicator_has_no_phases() -> None:
    with (
        moecomm.Communicator(**SIZES, device="cpu") as comm,
        pytest.raises(moecomm.Unsupported, match=r"last_phases\(\) is of CUDA"),
    ):
        comm.last_phases()


def test_wire_options() -> None:
    check_wire_options(None, True, None)
    check_wire_options("fp8", False, torch.zeros(1))
    with pytest.raises(moecomm.InvalidArgument, match="wire='nvfp4' on their way alone"):
        check_wire_options("nvfp4", False, None)
    with pytest.raises(moecomm.InvalidArgument, match="x is a pair"):
        check_wire_options("nvfp4", True, torch.zeros(1))
    with pytest.raises(moecomm.InvalidArgument, match="dequantize is 1"):
        check_wire_options("fp8", 1, None)


@pytest.mark.usefixtures("loopback")
def test_no_memory_for_a_copy_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, native, _ = _comm()
    x_TH, ids_TK, _ = _inputs()
    out = comm.dispatch(x_TH, ids_TK)
    _no_copies(monkeypatch)
    for call in (
        lambda: comm.dispatch(x_TH.t().contiguous().t(), ids_TK),
        lambda: comm.combine(out.tokens.t().contiguous().t(), out.handle),
        lambda: comm.combine(out.tokens, out.handle, weights=torch.ones(14)[::2]),
        lambda: comm.redispatch(x_TH.t().contiguous().t(), out.handle),
    ):
        native.failed = None
        with pytest.raises(moecomm.OutOfMemory, match="no device memory"):
            call()
        assert native.failed is not None and native.failed[0] == "out_of_memory"


def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "clone", clone)


def test_a_forked_child_finds_the_lock_free() -> None:
    lock, held, done = ProcessLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # else it would wait for ever
        with lock, lock:
            os._exit(7)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        done.set()
        thread.join()
    with lock:
        pass
