"""moecomm's own paths: dispatch and combine of one Communicator, through its public names only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

import moecomm

from .case import Case, as_array, poison, to_storage
from .options import Options
from .paths import Path
from .verify import Received


def communicator(options: Options, dtype: str) -> moecomm.Communicator:
    """A Communicator over the default group that serves every size of the run."""
    return moecomm.Communicator(
        num_experts=options.experts,
        hidden=options.hidden,
        top_k=options.topk,
        max_tokens=max(options.sizes),
        dtype=getattr(torch, dtype),
        device="cpu",
        num_sms=options.threads,
        timeout=timedelta(seconds=options.timeout),
    )


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
        tokens=to_storage(out.tokens),
        offsets=as_array(out.offsets),
        weights=as_array(out.weights),
        counts=as_array(out.tokens_per_expert),
        topk_idx=as_array(out.topk_idx),
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
    )


def _checked_dispatch(
    comm: moecomm.Communicator, case: Case, inputs: _Inputs
) -> tuple[moecomm.DispatchOutput, int]:
    """One dispatch of the loaded data, and how much of it is wrong."""
    out = _dispatch(comm, case, inputs)
    comm.check()  # with --capacity: raises when rows did not fit, instead of timing a cut-off result
    if case.options.operation != "combine":
        case.maybe_corrupt(out.tokens)
    return out, case.wrong_dispatch(_received(out), case.layout, case.capacity)


def dispatch_path(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.dispatch` of rows and weights."""
    inputs = _Inputs(comm, case)

    def check(round: int) -> int:
        inputs.load(round)
        poison(_scratch(case))
        out, wrong = _checked_dispatch(comm, case, inputs)
        poison(out.tokens)
        return wrong

    return Path(
        name="moecomm", call=lambda: _dispatch(comm, case, inputs), check=check, before=case.fresh_ids
    )


def combine_path(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.combine` of rows laid out by an earlier dispatch; the expert layout hands over the weights that
    came along.
    """
    inputs = _Inputs(comm, case)
    state: dict[str, Any] = {}

    def prepare() -> int:
        out, wrong = _checked_dispatch(comm, case, inputs)
        # The rows come from the independent layout, not from what was dispatched: combine is judged by
        # itself.
        state["rows_PH"] = case.answers(case.layout, out.tokens.shape[0])
        state["handle"] = out.handle
        state["weights"] = out.weights if case.options.layout == "expert" else None
        return wrong

    def call() -> torch.Tensor:
        return comm.combine(state["rows_PH"], state["handle"], weights=state["weights"])

    def check(round: int) -> int:
        inputs.load(round)
        wrong = prepare()
        poison(_scratch(case, case.tokens))
        y_TH = call()
        case.maybe_corrupt(y_TH)
        wrong += case.wrong_combine(y_TH)
        poison(y_TH)
        return wrong

    prepare()  # so that it can be timed also when checks are off
    return Path(name="moecomm", call=call, check=check)


def _scratch(case: Case, rows: int | None = None) -> torch.Tensor:
    """Memory as large as a result, to be poisoned and let go: the allocator may well hand it out for the
    result.
    """
    return torch.empty(
        case.capacity or case.layout.num_rows if rows is None else rows,
        case.options.hidden,
        dtype=case.torch_dtype,
    )
