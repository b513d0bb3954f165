"""moecomm's own paths: dispatch and combine of one Communicator, through its public names only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

import moecomm

from .case import Case, poison
from .options import Options
from .paths import Path
from .verify import Received

NAME = "moecomm"
_WARMUP_BEFORE_CAPTURE = 2


def communicator(options: Options, dtype: str) -> moecomm.Communicator:
    """A Communicator over the default group that serves every size of the run."""
    lanes = None if options.fabric_lanes is None else str(options.fabric_lanes)
    with (
        _environment("MOECOMM_FABRIC_PROVIDER", options.fabric_provider),
        _environment("MOECOMM_FABRIC_LANES", lanes),
    ):
        return moecomm.Communicator(
            num_experts=options.experts,
            hidden=options.hidden,
            top_k=options.topk,
            max_tokens=max(options.sizes),
            dtype=getattr(torch, dtype),
            wire=options.wire,
            device=options.device,
            ranks_per_node=options.ranks_per_node,
            num_sms=options.num_sms if options.device == "cuda" else options.threads,
            timeout=timedelta(seconds=options.timeout),
        )


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Sets a variable, if there is a value, and puts it back: other runs may follow in this process."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]


class _Inputs:
    """The rows to dispatch: the case's own tensor, or a copy of it that lies in the window."""

    def __init__(self, comm: moecomm.Communicator, case: Case) -> None:
        self._comm, self._case = comm, case
        self._in_window: torch.Tensor | None = None
        self.load(0)

    @property
    def x_TH(self) -> torch.Tensor:
        return self._case.x_TH if self._in_window is None else self._in_window

    def load(self, round: int) -> None:
        """Another round of data."""
        self._case.load(round)
        if self._case.options.input == "window":
            # Peers may still read what was dispatched last. Taking the memory anew waits for them.
            self._in_window = None
            self._in_window = self._comm.empty_input(self._case.tokens)
            self._in_window.copy_(self._case.x_TH)


def _received(out: moecomm.DispatchOutput) -> Received:
    return Received(
        tokens=out.tokens,
        scales=out.scales,
        offsets=out.offsets,
        weights=out.weights,
        counts=out.tokens_per_expert,
        topk_idx=out.topk_idx,
        overflow=int(out.overflow),
    )


def _dispatch(comm: moecomm.Communicator, case: Case, inputs: _Inputs) -> moecomm.DispatchOutput:
    return comm.dispatch(
        inputs.x_TH,
        case.topk_idx_TK,
        case.topk_weights_TK,
        layout=case.options.layout,
        alignment=case.options.alignment,
        capacity=case.capacity,
        dequantize=case.options.dequantize,
    )


def _settle(comm: moecomm.Communicator, case: Case) -> None:
    """Waits for the device; raises what it found, instead of timing a cut-off result."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    comm.check()


def _sms(comm: moecomm.Communicator, case: Case) -> int | None:
    """SMs at work: those asked for, or what the communicator says of its own choice."""
    if case.device.type == "cpu" or case.options.num_sms is not None:
        return case.options.num_sms
    said = re.search(r"(\d+) SMs", repr(comm))
    return int(said[1]) if said else None


def _path(comm: moecomm.Communicator, case: Case, **given: Any) -> Path:
    """A path of moecomm. Only a dropless dispatch waits for the GPU within the call."""
    blocks = case.capacity is None and case.options.operation != "combine" and not case.options.kept_handle
    return Path(
        name=NAME,
        sms=_sms(comm, case),
        blocks=blocks,
        waited=lambda: comm.stats().get("host_wait_seconds", 0.0),
        **given,
    )


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


def _call(case: Case, call: Callable[[], Any]) -> Callable[[], Any]:
    return Captured(call).replay if case.options.graph else call


def dispatch_path(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.dispatch` of rows and weights."""
    inputs = _Inputs(comm, case)
    call = _call(case, lambda: _dispatch(comm, case, inputs))

    def check(round: int) -> int:
        inputs.load(round)
        poison(_scratch(case))
        out = call()
        _settle(comm, case)
        case.maybe_corrupt(out.tokens)
        wrong = case.wrong_dispatch(_received(out), case.layout, case.capacity, case.options.wire)
        poison(out.tokens)
        return wrong

    return _path(comm, case, call=call, check=check, before=case.fresh_ids)


def combine_path(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.combine` of rows laid out by an earlier dispatch; the expert layout hands over the weights that
    came along.
    """
    inputs = _Inputs(comm, case)
    state: dict[str, Any] = {}

    def prepare() -> int:
        out = _dispatch(comm, case, inputs)
        _settle(comm, case)
        wrong = case.wrong_dispatch(_received(out), case.layout, case.capacity, case.options.wire)
        # The rows come from the independent layout, not from what was dispatched: combine is judged by
        # itself. A captured call reads them, and the weights, where they lay at the capture.
        rows_PH = case.answers(case.layout, out.tokens.shape[0])
        weights = out.weights if case.options.layout == "expert" else None
        if case.options.graph and state:
            state["rows_PH"].copy_(rows_PH)
            if weights is not None:
                state["weights"].copy_(weights)
        else:
            state.update(rows_PH=rows_PH, weights=weights, handle=out.handle)
        return wrong

    prepare()  # so that it can be captured, and timed also when checks are off
    call = _call(case, lambda: comm.combine(state["rows_PH"], state["handle"], weights=state["weights"]))

    def check(round: int) -> int:
        inputs.load(round)
        wrong = prepare()
        poison(_scratch(case, case.tokens))
        y_TH = call()
        _settle(comm, case)
        case.maybe_corrupt(y_TH)
        wrong += case.wrong_combine(y_TH)
        poison(y_TH)
        return wrong

    return _path(comm, case, call=call, check=check)


def kept_handle_path(comm: moecomm.Communicator, case: Case) -> Path:
    """The dispatch along a kept handle: the backward of combine, through torch.autograd.grad.

    The gradient of y = combine(rows) is, for each row, the row of its token in dy: a dispatch of dy, checked
    as one.
    """
    inputs = _Inputs(comm, case)
    made = _dispatch(comm, case, inputs)
    with torch.enable_grad():
        rows_PH = torch.zeros_like(made.tokens.detach(), requires_grad=True)
        y_TH = comm.combine(rows_PH, made.handle)

    def grad() -> torch.Tensor:
        return torch.autograd.grad(y_TH, rows_PH, inputs.x_TH, retain_graph=True)[0]

    call = _call(case, grad)

    def check(round: int) -> int:
        inputs.load(round)
        poison(_scratch(case))
        grad_PH = call()
        _settle(comm, case)
        case.maybe_corrupt(grad_PH)
        wrong = case.wrong_dispatch(Received(tokens=grad_PH), case.layout, case.capacity)
        poison(grad_PH)
        return wrong

    return _path(comm, case, call=call, check=check)


def weighted_kept_handle_path(comm: moecomm.Communicator, case: Case) -> Path:
    """The backward of y = combine(rows, weights): the rows of dy, times the weights where they arrive, and
    there the product of two rows as each weight's gradient.

    Rows and weights are those of round 0 for good, dy is each round's.
    """
    inputs = _Inputs(comm, case)
    made, made_of = _dispatch(comm, case, inputs), case.key
    assert made.weights is not None
    rows_PH = case.answers(case.layout, made.tokens.shape[0]).requires_grad_()
    weights_P = made.weights.detach().requires_grad_()
    with torch.enable_grad():
        y_TH = comm.combine(rows_PH, made.handle, weights=weights_P)

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y_TH, (rows_PH, weights_P), inputs.x_TH, retain_graph=True)

    call = _call(case, grads)

    def check(round: int) -> int:
        inputs.load(round)
        poison(_scratch(case))
        grad_PH, grad_weights_P = call()
        _settle(comm, case)
        case.maybe_corrupt(grad_PH)
        wrong = case.wrong_backward(grad_PH, grad_weights_P, rows_PH.detach(), made_of)
        poison(grad_PH, grad_weights_P)
        return wrong

    return _path(comm, case, call=call, check=check)


def _scratch(case: Case, rows: int | None = None) -> torch.Tensor:
    """Memory as large as a result, to be poisoned and let go: the allocator may well hand it out for the
    result.
    """
    return torch.empty(
        case.capacity or case.layout.num_rows if rows is None else rows,
        case.options.hidden,
        dtype=case.torch_dtype,
        device=case.device,
    )
