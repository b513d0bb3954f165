"""The CUDA backend's Python side: what it asks of the runtime, in which order and on which stream."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moecomm
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.types import Layout
from tests.unit.loopback import IDS_TK, FakeWindow, make_inputs, opened

pytestmark = pytest.mark.usefixtures("loopback")


def on_new_tensors(monkeypatch: pytest.MonkeyPatch, look: Callable[[Any, Any], None]) -> list[torch.Tensor]:
    """Calls look(like, shape) before each new tensor is made; returns those that were."""
    made: list[torch.Tensor] = []
    real = torch.Tensor.new_empty_strided

    def new_empty(like: torch.Tensor, shape: Any, strides: Any) -> torch.Tensor:
        look(like, shape)
        made.append(real(like, shape, strides))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", new_empty)
    return made


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


class TestOperations:
    def test_construction_and_close(self) -> None:
        comm, native, gpu = opened()
        assert native.calls == ["link", "connect", "unlink"]
        assert FakeWindow.last.bytes == comm.memory.total_bytes == 12288
        assert native.settings["num_sms"] == 0 and native.settings["timeout"] == comm.timeout
        comm.close()
        assert native.closed and FakeWindow.last.closed and gpu.log == ["synchronize"]
        with pytest.raises(moecomm.CommunicatorClosed):
            comm.dispatch(*make_inputs())

    def test_a_thread_that_is_left_behind_keeps_the_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()
        monkeypatch.setattr(native, "ends", False)
        with pytest.warns(RuntimeWarning, match="has left it behind"):
            comm.close()
        assert native.closed and not FakeWindow.last.closed

    def test_its_window_outlives_a_capture(self) -> None:
        """A window that is let go of in a capture, which freeing would spoil, goes when the next communicator
        closes."""
        comm, native, gpu = opened()
        window = FakeWindow.last
        gpu.captures.add(100)
        comm.close()
        assert native.closed and not window.closed and gpu.log == []
        other, *_ = opened()
        other.close()
        assert window.closed and FakeWindow.last.closed

    @pytest.mark.parametrize("name", ["stats", "reset_stats", "last_phases"])
    def test_counters_are_read_on_its_device(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The runtime would otherwise go to the device and back, which opens the one that it goes back to."""
        comm, native, gpu = opened()
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
        comm, native, _ = opened()
        del comm
        gc.collect()
        assert native.closed and FakeWindow.last.closed

    @pytest.mark.parametrize("capacity", [None, 9])
    def test_expert_rows(self, capacity: int | None) -> None:
        comm, native, gpu = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
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

    def test_counts_on_the_host(self) -> None:
        comm, native, _ = opened()
        tensors = make_inputs()
        assert comm.dispatch(*tensors).host_counts is None
        assert comm.dispatch(*tensors, host_counts=True).host_counts == [0, 1, 2, 3]
        assert native.calls.count("host_counts") == 1
        with pytest.raises(moecomm.InvalidArgument, match="host_counts is True, expected False"):
            comm.dispatch(*tensors, capacity=9, host_counts=True)

    @pytest.mark.parametrize("layout", ["expert", "rank"])
    @pytest.mark.parametrize("offer", [(7, 7), (20, 20), (3, 3), (20, 3), (3, 20)])
    def test_offered_rows(self, offer: tuple[int, int], layout: Layout) -> None:
        """Rows that fit stay where they are, and their tensors can be changed in place; others are received
        into tensors of their size."""
        comm, native, _ = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
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

    def test_weights_that_travel_with_a_combine(self) -> None:
        comm, *_ = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        want = comm.combine(out.tokens, out.handle, weights=out.weights)
        assert torch.equal(comm.combine_weighted(out.tokens, out.handle, weights_TK), want)
        by_rank = comm.dispatch(x_TH, ids_TK, layout="rank")
        for handle, weights, words in (
            (by_rank.handle, weights_TK, 'layout="rank"'),
            (out.handle, weights_TK[1:], "topk_weights has shape"),
            (out.handle, weights_TK.clone().requires_grad_(), "require gradients"),
        ):
            rows = by_rank.tokens if handle is by_rank.handle else out.tokens
            with pytest.raises(InvalidArgument, match=words):
                comm.combine_weighted(rows, handle, weights)
        comm._backend.weighs_tokens = False
        with pytest.raises(Unsupported, match="few tokens"):
            comm.combine_weighted(out.tokens, out.handle, weights_TK)

    @pytest.mark.parametrize("room", [0, 3, 7, 20])
    def test_what_other_threads_free_meanwhile_is_not_written_to(
        self, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the host waits for the number of rows, another thread may launch a kernel and free what it
        reads. So rows are received beside other kernels only into memory from before the first half."""
        comm, native, _ = opened()
        want = comm.dispatch(*make_inputs())
        native.offer, native.at_once = (room, room), False
        seen, make = len(native.calls), comm._backend._outputs
        monkeypatch.setattr(
            comm._backend, "_outputs", lambda *args: (native.calls.append("outputs"), make(*args))[1]
        )
        out = comm.dispatch(*make_inputs())
        before, after = ["outputs"] * (room > 0), ["outputs"] * (room < 7)
        halves = ["begin_dispatch@100", "wait_rows", *after, "finish_dispatch@100"]
        assert native.calls[seen:] == [*before, *halves]
        assert native.directly is (room >= 7)
        assert torch.equal(out.tokens, want.tokens) and torch.equal(out.weights, want.weights)

    def test_what_is_begun_is_not_offered_anything(self) -> None:
        """The rows are received when the caller asks for them, and until then no SM waits for other ranks."""
        comm, native, _ = opened()
        native.offer = (20, 20)
        receive = comm.begin_dispatch(*make_inputs())
        assert native.calls[-1] == "begin_dispatch@100"
        assert receive().tokens.shape == (7, 8)
        work = comm.dispatch(*make_inputs(), async_op=True)
        assert native.calls[-1] == "begin_dispatch@101"
        assert work.wait().tokens.shape == (7, 8)

    def test_rows_are_received_beside_those_that_are_sent(self) -> None:
        """They are where nothing can be between the halves: a kernel of others may let the one behind it
        start while it still reads what that one writes to."""
        comm, native, gpu = opened()
        comm.dispatch(*make_inputs())
        assert native.directly is False and native.waited_on == 100
        for directly in (False, True):
            comm.begin_dispatch(*make_inputs())(directly=directly)
            assert native.directly is directly
        comm.begin_dispatch(*make_inputs())()
        assert native.directly is False
        comm.dispatch(*make_inputs(), async_op=True).wait()
        assert native.directly and native.waited_on == 101
        native.few = 100
        for layout in ("expert", "rank"):  # of which the index is zero first
            comm.dispatch(*make_inputs(), layout=layout, capacity=8, async_op=True).wait()
            assert native.directly is (layout == "expert")
        native.few = 0
        torch.use_deterministic_algorithms(True)  # new tensors are filled
        try:
            comm.dispatch(*make_inputs())
        finally:
            torch.use_deterministic_algorithms(False)
        assert not native.directly
        comm.dispatch(*make_inputs(), async_op=True).wait()
        assert native.directly
        with torch.autograd.set_detect_anomaly(True):  # as are those of anomaly mode
            comm.dispatch(*make_inputs(), async_op=True).wait()
        assert not native.directly
        receive = comm.begin_dispatch(*make_inputs())
        gpu.now = gpu.new_stream()
        receive()
        assert native.waited_on == gpu.now.number

    def test_rows_without_memory_for_the_offer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()
        want = comm.dispatch(*make_inputs())
        on_new_tensors(monkeypatch, lambda like, shape: no_memory() if shape[0] == 1000 else None)
        native.offer = (1000, 1000)
        assert torch.equal(comm.dispatch(*make_inputs()).tokens, want.tokens)
        assert native.calls[-3:] == ["begin_dispatch@100", "wait_rows", "finish_dispatch@100"]

    def test_memory_of_an_offer_is_free_before_more_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()

        def look(like: torch.Tensor, shape: Any) -> None:
            if shape[0] == 7:
                held = sum(each.untyped_storage().nbytes() for each in made if each.shape[0] == 3)
                assert held == 0 and native.calls[-1] == "wait_rows"

        made = on_new_tensors(monkeypatch, look)
        native.offer = (3, 3)
        assert comm.dispatch(*make_inputs()).tokens.shape == (7, 8)
        assert [each.shape[0] for each in made[1:]] == [3, 3, 7, 7]

    def test_rank_rows(self) -> None:
        comm, _, _ = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
        out = comm.dispatch(x_TH, ids_TK.int(), weights_TK, layout="rank")
        assert out.topk_idx is not None and torch.equal(out.topk_idx, ids_TK[:4].int())
        assert out.offsets.tolist() == [4] and torch.equal(out.tokens, x_TH[:4])
        assert out.weights is not None
        assert torch.equal(out.weights, torch.where(ids_TK >= 0, weights_TK, 0)[:4])

    def test_overflow(self) -> None:
        comm, native, _ = opened()
        out = comm.dispatch(*make_inputs(), capacity=3)
        assert int(out.overflow) == 7 and out.tokens.shape == (3, 8) and out.handle.num_rows == 3
        native.pending = moecomm.CapacityExceeded("too many", needed=7, capacity=3, rank=0)
        with pytest.raises(moecomm.CapacityExceeded):
            comm.check()
        comm.check()

    def test_gradients(self) -> None:
        comm, native, gpu = opened()
        x_TH, ids_TK, weights_TK = (each.clone() for each in make_inputs())
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
        comm, _, _ = opened()
        x_TH, ids_TK, _ = make_inputs()
        shifted = torch.empty(41)[1:].view(5, 8)  # contiguous, 4 bytes off
        for strange in (x_TH.t().contiguous().t(), shifted.copy_(x_TH)):
            out = comm.dispatch(strange, ids_TK.t().contiguous().t())
            assert torch.equal(out.tokens, x_TH[[1, 3, 0, 2, 3, 0, 2]])
            torch.testing.assert_close(comm.combine(out.tokens.t().contiguous().t(), out.handle)[1], x_TH[1])

    def test_copied_inputs_live_until_the_rows_are_received(self) -> None:
        comm, native, _ = opened()
        inputs = [each.t().contiguous().t() for each in make_inputs()]
        work = comm.dispatch(inputs[0], inputs[1], inputs[2], async_op=True)
        assert native.calls[-1] == "begin_dispatch@101"
        begun = comm._open()._unfinished._begun  # type: ignore[attr-defined]
        kept = {each.data_ptr() for each in begun.inputs if each is not None}
        assert {native.begun["x"], native.begun["weights"], native.ids} == kept
        assert kept.isdisjoint(each.data_ptr() for each in inputs)
        assert torch.equal(work.wait().tokens, inputs[0][[1, 3, 0, 2, 3, 0, 2]])

    def test_an_interrupted_wait_is_no_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()
        work = comm.dispatch(*make_inputs(), async_op=True)

        def interrupted(stream: int) -> tuple[int, int]:
            raise KeyboardInterrupt

        monkeypatch.setattr(native, "wait_rows", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                work.wait()

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_kernels_give_up_before_an_interrupted_communicator_closes(self, interrupted: bool) -> None:
        comm, native, _ = opened()
        native.interrupted = interrupted
        comm.close()
        assert native.closed and ("stop_waiting" in native.calls) == interrupted

    def test_an_operation_within_another_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()
        wait, within = native.wait_rows, []

        def handled(stream: int) -> tuple[int, int]:  # as a signal's handler would
            with pytest.raises(moecomm.InvalidArgument, match="under way in this thread"):
                comm.dispatch(*make_inputs(), capacity=8)
            within.append(native.calls[-1])
            return wait(stream)

        monkeypatch.setattr(native, "wait_rows", handled)
        out = comm.dispatch(*make_inputs())
        assert len(within) == 1 and native.failed is None
        assert torch.equal(out.tokens, make_inputs()[0][[1, 3, 0, 2, 3, 0, 2]])

    @pytest.mark.parametrize(
        ("variable", "value", "told"),
        [
            ("FUSED_TOKENS", "", []),
            ("FUSED_TOKENS", "0", ["fuse_up_to 0"]),
            ("FUSED_TOKENS", "128", ["fuse_up_to 128"]),
            ("LOG", "launch", ["log_launches"]),
        ],
    )
    def test_what_the_environment_tells(
        self, variable: str, value: str, told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"MOECOMM_{variable}", value)
        comm, native, _ = opened()
        assert sorted({*native.calls} - {"link", "connect", "unlink"}) == told
        comm.close()

    def test_a_begun_dispatch_is_completed_before_the_next_operation(self) -> None:
        comm, native, _ = opened()
        inputs = make_inputs()
        work = comm.dispatch(*inputs, async_op=True)
        begun = len(native.calls)
        comm.redispatch(inputs[0], comm.dispatch(*inputs).handle)
        assert native.calls[begun : begun + 2] == ["wait_rows", "finish_dispatch@101"]
        done = len(native.calls)
        assert torch.equal(work.wait().tokens, inputs[0][[1, 3, 0, 2, 3, 0, 2]])
        assert len(native.calls) == done
        comm.close()

    def test_no_tokens(self) -> None:
        comm, _, _ = opened()
        out = comm.dispatch(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
        assert out.tokens.shape == (0, 8) and out.offsets.tolist() == [0] * 4
        assert comm.combine(out.tokens, out.handle, weights=out.weights).shape == (0, 8)

    @pytest.mark.parametrize(
        ("wire", "scales_TS"),
        [("fp8", torch.rand(5, 2)), ("mxfp8", torch.rand(5, 5).to(torch.float8_e8m0fnu))],
        ids=["fp8", "mxfp8"],
    )
    def test_quantised_rows_go_through_as_they_are(self, wire: str, scales_TS: torch.Tensor) -> None:
        comm, _, _ = opened(wire=wire, hidden=144)
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


def test_results_alone_travel_in_combine_wire() -> None:
    """The backward of a dispatch is a combine of gradients, in the dtype."""
    with pytest.warns(UserWarning, match="combine_wire is 'fp8', and all ranks are on one node"):
        comm, native, _ = opened(combine_wire="fp8", hidden=16)
    x_TH = torch.randn(5, 16).requires_grad_()
    out = comm.dispatch(x_TH, IDS_TK)
    comm.combine(out.tokens, out.handle).sum().backward()
    assert native.quantised == [True, False] and x_TH.grad is not None


def test_gradients_alone_travel_in_gradient_wire() -> None:
    """The backward of a combine without weights sends gradients so, and redispatch rows that it is told are
    gradients; a communicator without the format sends all in the dtype."""
    comm, native, _ = opened(gradient_wire="mxfp8", hidden=32)
    x_TH, weights_TK = torch.randn(5, 32), torch.rand(5, 2)
    out = comm.dispatch(x_TH, IDS_TK, weights_TK)
    rows_PH = out.tokens.clone().requires_grad_()
    comm.combine(rows_PH, out.handle).sum().backward()
    comm.combine(rows_PH, out.handle, weights=out.weights).sum().backward()
    comm.redispatch(x_TH, out.handle)
    comm.redispatch(x_TH, out.handle, gradients=True)
    assert native.gradients == [True, False, False, True]
    plain, native, _ = opened()
    out = plain.dispatch(torch.randn(5, plain.hidden), IDS_TK)
    plain.redispatch(torch.randn(5, plain.hidden), out.handle, gradients=True)
    assert native.gradients == [False]


class TestErrors:
    def test_the_others_are_told(self) -> None:
        comm, native, _ = opened()
        x_TH, ids_TK, _ = make_inputs()
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
        for wrong in (False, 1):
            with pytest.raises(moecomm.InvalidArgument, match=f"dequantize is {wrong}"):
                comm.dispatch(x_TH, ids_TK, dequantize=wrong)
        with pytest.raises(moecomm.InvalidArgument, match="x is a pair"):
            comm.dispatch((x_TH.to(torch.float8_e4m3fn), torch.ones(5, 1)), ids_TK)

    def test_not_while_a_graph_is_captured(self) -> None:
        comm, native, gpu = opened()
        gpu.captures.add(100)
        calls = list(native.calls)
        with pytest.raises(moecomm.InvalidArgument, match="capacity is None within a CUDA graph capture"):
            comm.dispatch(*make_inputs())
        with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
            comm.dispatch(torch.zeros(1, 2), IDS_TK, capacity=4)
        assert native.calls == calls
        comm.dispatch(*make_inputs(), capacity=4)

    def test_no_memory_for_the_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm, native, _ = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        on_new_tensors(monkeypatch, lambda like, shape: no_memory() if like.dtype == torch.float32 else None)
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

    def test_results_without_memory(self) -> None:
        """Within a FakeTensorMode the rows have memory, what is made for the results has none."""
        comm, native, _ = opened()
        x_TH, ids_TK, _ = make_inputs()
        out = comm.dispatch(x_TH, ids_TK)
        for call in (
            lambda: comm.combine(out.tokens, out.handle),
            lambda: comm.redispatch(x_TH, out.handle),
        ):
            native.failed = None
            told = pytest.raises(moecomm.InvalidArgument, match=r"a FakeTensor of shape .* has no memory")
            with told, FakeTensorMode(allow_non_fake_inputs=True):
                call()
            assert native.failed is not None and "has no memory" in native.failed[1]


def test_statistics_begin_again() -> None:
    """Counters that the device keeps are never set to zero; the difference is shown."""
    comm, native, _ = opened()
    nothing = {"plans_reused": 0, "bytes_staged": 0}
    before = {"dispatch_calls": 2, "rows_out": 30, "late_seconds": [1.5]}
    after = {"dispatch_calls": 3, "rows_out": 37, "late_seconds": [3.5]}
    native.stats = lambda: before  # type: ignore[method-assign]
    assert comm.stats() == {**before, **nothing}
    comm.reset_stats()
    native.stats = lambda: after  # type: ignore[method-assign]
    assert comm.stats() == {"dispatch_calls": 1, "rows_out": 7, "late_seconds": [2.0], **nothing}


def test_no_memory_for_a_copy_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, native, _ = opened()
    x_TH, ids_TK, _ = make_inputs()
    out = comm.dispatch(x_TH, ids_TK)
    monkeypatch.setattr(torch.Tensor, "clone", no_memory)
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
