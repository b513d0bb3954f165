"""moecomm's own paths: dispatch and combine of one Communicator, through its public names only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import moecomm

from ..harness import verify
from ..harness.case import Case, poison
from ..harness.options import MOECOMM, Options, Point
from ..harness.path import CALL, Path, Verdict
from ..harness.verify import Received

_WARMUP_BEFORE_CAPTURE = 2


def communicator(options: Options, point: Point) -> moecomm.Communicator:
    """A Communicator over the default group that serves every point of a setup."""
    name, before = "MOECOMM_FABRIC_PROVIDER", os.environ.get("MOECOMM_FABRIC_PROVIDER")
    if options.fabric_provider is not None:
        os.environ[name] = options.fabric_provider
    try:
        return moecomm.Communicator(
            num_experts=point.experts,
            hidden=point.hidden,
            top_k=point.topk,
            max_tokens=options.most_tokens,
            dtype=getattr(torch, point.dtype),
            wire=options.wire,
            device=options.device,
            ranks_per_node=options.ranks_per_node,
            num_sms=point.num_sms if options.device == "cuda" else options.threads,
            timeout=timedelta(seconds=options.timeout),
        )
    finally:  # other runs may follow in this process
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class Captured:
    """A call captured once in a CUDA graph; `replay` is the call, `result` what each replay writes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks after its own events meanwhile: only this thread is watched.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.result = call()
        self._graph = graph

    def replay(self) -> Any:
        self._graph.replay()
        return self.result


class _Own:
    """Communicator, case and inputs that the moecomm paths of one case share."""

    def __init__(self, comm: moecomm.Communicator, case: Case) -> None:
        self.comm, self.case = comm, case
        self.load = case.load
        self.load(0)

    def dispatch(self) -> moecomm.DispatchOutput:
        case, options = self.case, self.case.options
        return self.comm.dispatch(
            case.x_TH,
            case.topk_idx_TK,
            case.weights_TK,
            layout=options.layout,
            alignment=options.alignment,
            capacity=case.capacity,
            dequantize=options.dequantize,
        )

    def wrong(self, got: Received, wire: str | None = None) -> int:
        """Wrong values of a dispatch of this round's data."""
        case = self.case
        return verify.wrong_dispatch(got, case.rows, case.key, case.point.topk, case.capacity, wire)

    def wrong_output(self, out: moecomm.DispatchOutput) -> int:
        """Wrong values of all that a dispatch returns."""
        received = Received(
            tokens=out.tokens,
            scales=out.scales,
            offsets=out.offsets,
            weights=out.weights,
            counts=out.tokens_per_expert,
            topk_idx=out.topk_idx,
            overflow=int(out.overflow),
        )
        return self.wrong(received, self.case.options.wire)

    def settle(self) -> None:
        """Waits for the device; raises what it found, instead of timing a cut-off result."""
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()
        self.comm.check()

    def poison_scratch(self, rows: int | None = None) -> None:
        """Poisons memory as large as a result and lets it go: the allocator may hand it out again."""
        case = self.case
        count = case.capacity or case.rows.num_rows if rows is None else rows
        poison(torch.empty(count, case.point.hidden, dtype=case.dtype, device=case.device))

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, or with --graph its replay."""
        return Captured(call).replay if self.case.options.graph else call

    def path(self, call: Callable[[], object], check: Callable[[int], int], **more: Any) -> Path:
        """The path of a call. Only a dropless dispatch waits for the GPU within the call."""
        case, options = self.case, self.case.options
        sms = case.point.num_sms
        if case.device.type == "cuda" and sms is None and (said := re.search(r"(\d+) SMs", repr(self.comm))):
            sms = int(said[1])  # what the communicator says of its own choice
        return Path(
            name=MOECOMM,
            calls={CALL: call},
            check=lambda round: Verdict(check(round)),
            own=True,
            sms=sms,
            blocks=case.capacity is None and options.program != "combine" and not options.kept_handle,
            waited=lambda: self.comm.stats().get("host_wait_seconds", 0.0),
            **more,
        )


def make_path(comm: moecomm.Communicator, case: Case) -> Path:
    """moecomm's path of the operation."""
    own = _Own(comm, case)
    if case.options.kept_handle == "weighted":
        return _weighted_kept_handle(own)
    if case.options.kept_handle == "plain":
        return _kept_handle(own)
    return _combine(own) if case.options.program == "combine" else _dispatch(own)


def _dispatch(own: _Own) -> Path:
    """`comm.dispatch` of rows and weights."""
    call = own.captured(own.dispatch)

    def check(round: int) -> int:
        own.load(round)
        own.poison_scratch()
        out = call()
        own.settle()
        own.case.maybe_corrupt(out.tokens)
        wrong = own.wrong_output(out)
        poison(out.tokens)
        return wrong

    return own.path(call, check, before=own.case.fresh_ids)


def _combine(own: _Own) -> Path:
    """`comm.combine` of rows laid out by an earlier dispatch; the expert layout hands over the weights that
    came along.
    """
    case = own.case
    state: dict[str, Any] = {}

    def prepare() -> int:
        out = own.dispatch()
        own.settle()
        wrong = own.wrong_output(out)
        # The rows come from the independent layout, not from what was dispatched: combine is judged by
        # itself. A captured call reads them, and the weights, where they lay at the capture.
        by_rank = case.rank if case.options.layout == "rank" else None
        rows_PH = verify.answers(case.rows, case.key, out.tokens.shape[0], case.device, by_rank)
        weights = out.weights if case.options.layout == "expert" else None
        if case.options.graph and state:
            state["rows_PH"].copy_(rows_PH)
            if weights is not None:
                state["weights"].copy_(weights)
        else:
            state.update(rows_PH=rows_PH, weights=weights, handle=out.handle)
        return wrong

    prepare()  # so that it can be captured, and timed also when checks are off
    call = own.captured(lambda: own.comm.combine(state["rows_PH"], state["handle"], weights=state["weights"]))

    def check(round: int) -> int:
        own.load(round)
        wrong = prepare()
        own.poison_scratch(case.point.tokens)
        y_TH = call()
        own.settle()
        case.maybe_corrupt(y_TH)
        wrong += verify.wrong_combine(y_TH, case)
        poison(y_TH)
        return wrong

    return own.path(call, check)


def _kept_handle(own: _Own) -> Path:
    """The dispatch along a kept handle: the backward of combine, through torch.autograd.grad.

    The gradient of y = combine(rows) is, for each row, the row of its token in dy: a dispatch of dy, checked
    as one.
    """
    made = own.dispatch()
    with torch.enable_grad():
        rows_PH = torch.zeros_like(made.tokens.detach(), requires_grad=True)
        y_TH = own.comm.combine(rows_PH, made.handle)
    call = own.captured(lambda: torch.autograd.grad(y_TH, rows_PH, own.case.x_TH, retain_graph=True)[0])

    def check(round: int) -> int:
        own.load(round)
        own.poison_scratch()
        grad_PH = call()
        own.settle()
        own.case.maybe_corrupt(grad_PH)
        wrong = own.wrong(Received(tokens=grad_PH))
        poison(grad_PH)
        return wrong

    return own.path(call, check)


def _weighted_kept_handle(own: _Own) -> Path:
    """The backward of y = combine(rows, weights): the rows of dy, times the weights where they arrive, and
    there the product of two rows as each weight's gradient.

    Rows and weights are those of round 0 for good, dy is each round's.
    """
    case = own.case
    made, made_of = own.dispatch(), case.key
    assert made.weights is not None
    rows_PH = verify.answers(case.rows, case.key, made.tokens.shape[0], case.device).requires_grad_()
    weights_P = made.weights.detach().requires_grad_()
    with torch.enable_grad():
        y_TH = own.comm.combine(rows_PH, made.handle, weights=weights_P)
    call = own.captured(
        lambda: torch.autograd.grad(y_TH, (rows_PH, weights_P), own.case.x_TH, retain_graph=True)
    )

    def check(round: int) -> int:
        own.load(round)
        own.poison_scratch()
        grad_PH, grad_weights_P = call()
        own.settle()
        case.maybe_corrupt(grad_PH)
        wrong = verify.wrong_backward(
            grad_PH, grad_weights_P, rows_PH.detach(), case.rows, case.key, made_of, case.point.topk
        )
        poison(grad_PH, grad_weights_P)
        return wrong

    return own.path(call, check)
