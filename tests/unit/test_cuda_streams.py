"""The CUDA backend's Python side: on which stream operations run, what they wait for, and work that is waited
for later."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import moecomm
from tests.unit.loopback import IDS_TK, make_inputs, opened

pytestmark = pytest.mark.usefixtures("loopback")


class TestStreams:
    def test_an_operation_follows_the_last_one(self) -> None:
        comm, native, gpu = opened()
        inputs = make_inputs()
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
        comm, _, gpu = opened()
        inputs = make_inputs()
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
        comm, native, gpu = opened()
        gpu.device_is_current = False
        out = comm.dispatch(*make_inputs())
        assert native.calls[-1] == "finish_dispatch@100" and not gpu.device_is_current
        gpu.device_is_current = True
        assert out.tokens.shape == (7, 8)

    def test_check_waits_for_nothing(self) -> None:
        comm, native, gpu = opened()
        comm.dispatch(*make_inputs())
        gpu.streams[0].done = False
        gpu.captures.add(100)
        log = list(gpu.log)
        native.pending = moecomm.InvalidRouting("bad id")
        with pytest.raises(moecomm.InvalidRouting):
            comm.check()
        comm.check()
        assert gpu.log == log


class TestWork:
    def test_on_the_side(self) -> None:
        comm, native, gpu = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
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
        comm, native, gpu = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
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
        comm, native, _ = opened()
        x_TH, ids_TK, weights_TK = make_inputs()
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
        comm, native, _ = opened()
        native.few = 100
        out = comm.dispatch(*make_inputs(), capacity=8)
        work = comm.combine(out.tokens, out.handle, async_op=True)
        native.dropped = True
        for _ in range(2):
            with pytest.raises(moecomm.InvalidArgument, match="has ended without its second half"):
                work.wait()
        native.dropped = False
        assert comm.combine(out.tokens, out.handle).shape == (5, 8)

    @pytest.mark.parametrize("half", [1, 2])
    def test_an_event_that_cannot_be_recorded(self, half: int) -> None:
        """A stream whose capture has failed meanwhile takes no event."""
        comm, native, _ = opened()
        native.few = 100
        side: Any = comm.stream

        def fails() -> None:
            raise RuntimeError("capture failed")

        if half == 1:
            side.record_event = fails
        work = comm.dispatch(*make_inputs(), capacity=8, async_op=True)
        side.record_event = fails
        for _ in range(2):
            with pytest.raises(RuntimeError, match="capture failed"):
                work.wait()
        assert work.is_completed()
        del side.record_event

    def test_what_few_tokens_are_read_from_stays_until_they_are_received(self) -> None:
        comm, native, _ = opened()
        native.few = 100
        out = comm.dispatch(*make_inputs(), capacity=8)
        rows_PH = out.tokens * 3
        want = comm.combine(rows_PH, out.handle)
        gone = weakref.ref(rows_PH)
        work = comm.combine(rows_PH, out.handle, async_op=True)
        del rows_PH
        gc.collect()
        assert gone() is not None
        assert torch.equal(work.wait(), want)

    def test_polling_gets_there(self) -> None:
        comm, native, gpu = opened()
        work = comm.dispatch(*make_inputs(), async_op=True)
        gpu.streams[1].done = False
        assert not work.is_completed() and native.calls[-1] == "begin_dispatch@101"
        gpu.streams[1].done = True
        assert work.is_completed() and native.calls[-1] == "finish_dispatch@101"

    def test_close_completes_it(self) -> None:
        comm, native, _ = opened()
        work = comm.dispatch(*make_inputs(), async_op=True)
        comm.close()
        assert native.calls[-2:] == ["finish_dispatch@101", "close"]
        assert work.wait().tokens.shape == (7, 8)

    def test_an_error_comes_from_wait(self) -> None:
        comm, native, _ = opened()
        work = comm.dispatch(torch.zeros(1, 2), IDS_TK, async_op=True)
        assert native.calls[-1] == "fail@101" and work.is_completed()
        for _ in range(2):
            with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
                work.wait()
        assert comm.dispatch(*make_inputs()).tokens.shape == (7, 8)

    @pytest.mark.parametrize("half", ["begin_dispatch", "finish_dispatch"])
    def test_an_error_keeps_no_tensors(self, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An operation that has failed lets go of its tensors at once, not when Python next looks for
        cycles."""
        comm, native, _ = opened()
        monkeypatch.setattr(native, half, Mock(side_effect=RuntimeError))

        def fails() -> weakref.ref[torch.Tensor]:
            x_TH, ids_TK, weights_TK = make_inputs()
            work = comm.dispatch(x_TH, ids_TK, weights_TK, async_op=True)
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    work.wait()
            return weakref.ref(x_TH)

        gc.disable()
        try:
            assert fails()() is None
        finally:
            gc.enable()
