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
from .captured import in_graph


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
            combine_wire=options.combine_wire,
            device=options.device,
            ranks_per_node=options.ranks_per_node,
            num_sms=point.num_sms if options.device == "cuda" else options.threads,
            timeout=timedelta(seconds=options.timeout),
        )
    finally:  # other runs may follow in this process
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def make_path(comm: moecomm.Communicator, case: Case) -> Path:
    """moecomm's path of the operation."""
    if case.options.kept_handle == "weighted":
        return _weighted_kept_handle(comm, case)
    if case.options.kept_handle == "plain":
        return _kept_handle(comm, case)
    return (_combine if case.options.program == "combine" else _dispatch)(comm, case)


def _dispatch(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.dispatch` of rows and weights."""
    return path_of(
        comm,
        case,
        lambda: _dispatched(comm, case),
        lambda out: _wrong_output(case, out),
        blocks=case.capacity is None,  # only a dropless dispatch waits for the GPU within the call
        before=case.fresh_ids,
    )


def _combine(comm: moecomm.Communicator, case: Case) -> Path:
    """`comm.combine` of rows laid out by an earlier dispatch; the expert layout hands over the weights that
    came along.
    """
    by_expert = case.options.layout == "expert"
    state: dict[str, Any] = {}

    def prepare() -> int:
        out = _dispatched(comm, case)
        _settle(comm, case)
        wrong = _wrong_output(case, out)
        # The rows come from the independent layout, not from what was dispatched: combine is judged by
        # itself. A captured call reads them, and the weights, where they lay at the capture.
        by_rank = None if by_expert else case.rank
        rows_PH = verify.answers(case.rows, case.key, out.tokens.shape[0], case.device, by_rank)
        if case.options.graph and state:
            state["rows_PH"].copy_(rows_PH)
            if by_expert:
                state["weights"].copy_(out.weights)
        else:
            state.update(rows_PH=rows_PH, weights=out.weights if by_expert else None, handle=out.handle)
        return wrong

    prepare()  # so that it can be captured, and timed also when checks are off
    return path_of(
        comm,
        case,
        lambda: comm.combine(state["rows_PH"], state["handle"], weights=state["weights"]),
        lambda y_TH: verify.wrong_combine(y_TH, case),
        prepare=prepare,
    )


def _kept_handle(comm: moecomm.Communicator, case: Case) -> Path:
    """The dispatch along a kept handle: the backward of combine, through torch.autograd.grad.

    The gradient of y = combine(rows) is, for each row, the row of its token in dy: a dispatch of dy, checked
    as one.
    """
    made = _dispatched(comm, case)
    with torch.enable_grad():
        rows_PH = torch.zeros_like(made.tokens.detach(), requires_grad=True)
        y_TH = comm.combine(rows_PH, made.handle)
    return path_of(
        comm,
        case,
        lambda: torch.autograd.grad(y_TH, rows_PH, case.x_TH, retain_graph=True),
        lambda grads: _wrong(case, Received(tokens=grads[0])),
    )


def _weighted_kept_handle(comm: moecomm.Communicator, case: Case) -> Path:
    """The backward of y = combine(rows, weights): the rows of dy, times the weights where they arrive, and
    there the product of two rows as each weight's gradient.

    Rows and weights are those of round 0 for good, dy is each round's.
    """
    made, made_of = _dispatched(comm, case), case.key
    assert made.weights is not None
    rows_PH = verify.answers(case.rows, case.key, made.tokens.shape[0], case.device).requires_grad_()
    weights_P = made.weights.detach().requires_grad_()
    with torch.enable_grad():
        y_TH = comm.combine(rows_PH, made.handle, weights=weights_P)
    return path_of(
        comm,
        case,
        lambda: torch.autograd.grad(y_TH, (rows_PH, weights_P), case.x_TH, retain_graph=True),
        lambda grads: verify.wrong_backward(
            grads[0], grads[1], rows_PH.detach(), case.rows, case.key, made_of, case.point.topk
        ),
    )


# -- what all of them have in common -------------------------------------------------------------------------


def path_of(
    comm: moecomm.Communicator,
    case: Case,
    call: Callable[[], Any],
    wrong: Callable[[Any], int],
    name: str = MOECOMM,
    *,
    prepare: Callable[[], int] = lambda: 0,
    blocks: bool = False,
    before: Callable[[], None] | None = None,
) -> Path:
    """The path of a call, or with --graph of its replay, whose result `wrong` counts the wrong values of;
    `prepare` makes its inputs of those of the case, and counts, too.
    """
    timed = in_graph(call, case.options.graph)

    def check(round: int) -> Verdict:
        case.load(round)
        count = prepare()
        # Memory that the allocator may well hand out for the result.
        rows = case.point.tokens if case.options.program == "combine" else case.capacity or case.rows.num_rows
        poison(torch.empty(rows, case.point.hidden, dtype=case.dtype, device=case.device))
        result = timed()
        _settle(comm, case)
        tensors = (result.tokens,) if isinstance(result, moecomm.DispatchOutput) else result
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        tensors = tuple(each for each in tensors if isinstance(each, torch.Tensor))
        case.maybe_corrupt(tensors[0])
        count += wrong(result)
        poison(*tensors)
        return Verdict(count)

    sms = case.point.num_sms
    if case.device.type == "cuda" and sms is None and (said := re.search(r"(\d+) SMs", repr(comm))):
        sms = int(said[1])  # what the communicator says of its own choice
    return Path(
        name=name,
        calls={CALL: timed},
        check=check,
        before=before,
        own=True,
        sms=sms,
        blocks=blocks,
        waited=lambda: comm.stats().get("host_wait_seconds", 0.0),
        times=case.options.calls_at_once,
    )


def _dispatched(comm: moecomm.Communicator, case: Case) -> moecomm.DispatchOutput:
    options = case.options
    return comm.dispatch(
        case.x_TH,
        case.topk_idx_TK,
        case.weights_TK,
        layout=options.layout,
        alignment=options.alignment,
        capacity=case.capacity,
        dequantize=options.dequantize,
    )


def _settle(comm: moecomm.Communicator, case: Case) -> None:
    """Waits for the device; raises what it found, instead of timing a cut-off result."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    comm.check()


def _wrong(case: Case, got: Received, wire: str | None = None) -> int:
    """Wrong values of a dispatch of this round's data."""
    return verify.wrong_dispatch(got, case.rows, case.key, case.point.topk, case.capacity, wire)


def _wrong_output(case: Case, out: moecomm.DispatchOutput) -> int:
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
    return _wrong(case, received, case.options.wire)
