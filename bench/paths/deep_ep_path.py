"""The operations by compat/deep_ep (--api deep_ep) beside moecomm's own calls: in the rank layout those of
Buffer, in the expert layout its low-latency calls without fp8."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat_path import COMPAT  # noqa: F401  # puts deep_ep on the path

# isort: split
from deep_ep import Buffer

from ..harness import verify
from ..harness.case import Case
from ..harness.options import DEEP_EP
from ..harness.path import Path
from ..harness.verify import Received
from .moecomm_path import path_of


def make_path(case: Case) -> Path:
    """The path of the operation."""
    options, by_slots, experts = case.options, case.options.layout == "expert", case.point.experts
    if case.point.num_sms is not None:
        Buffer.set_num_sms(case.point.num_sms)
    buffer, ids_TK = Buffer(dist.group.WORLD, low_latency_mode=by_slots), case.topk_idx_TK
    _, _, per_expert, *_ = buffer.get_dispatch_layout(ids_TK, experts)
    most, fixed = options.most_tokens, None if by_slots else case.capacity
    given: dict[str, Any] = {"topk_weights": case.weights_TK, "num_worst_tokens": fixed or 0}

    def dispatch() -> tuple[Any, ...]:
        if by_slots:
            return buffer.low_latency_dispatch(case.x_TH, ids_TK, most, experts, use_fp8=False)
        return buffer.dispatch(case.x_TH, topk_idx=ids_TK, num_tokens_per_expert=per_expert, **given)

    def at() -> Tensor:
        """Returns the places among the slots of the rows of the expert layout."""
        counts_L = torch.diff(torch.from_numpy(case.rows.offsets_G), prepend=torch.zeros(1).long())
        slots = [torch.arange(n) + e * options.ranks * most for e, n in enumerate(counts_L.tolist())]
        return torch.cat(slots).to(case.device)

    def wrong_dispatch(found: tuple[Any, ...]) -> int:
        if by_slots:
            received = Received(tokens=found[0].flatten(0, 1)[at()], counts=found[1])
        else:
            received = Received(tokens=found[0], topk_idx=found[1], weights=found[2])
        return verify.wrong_dispatch(received, case.rows, case.key, case.point.topk, fixed)

    made = dispatch()
    rows, handle = made[0], made[2 if by_slots else 4]
    own = handle.comm
    if options.program == "dispatch":
        blocks = not by_slots and fixed is None
        return path_of(own, case, dispatch, wrong_dispatch, DEEP_EP, blocks=blocks, before=case.fresh_ids)

    def prepare() -> int:
        if by_slots:
            rows.flatten(0, 1)[at()] = verify.answers(case.rows, case.key, case.rows.num_rows, case.device)
        else:
            rows.copy_(verify.answers(case.rows, case.key, len(rows), case.device, case.rank))
        return 0

    def combine() -> Tensor:
        if by_slots:
            return buffer.low_latency_combine(rows, ids_TK, case.weights_TK, handle)[0]
        return buffer.combine(rows, handle)[0]

    prepare()
    return path_of(own, case, combine, partial(verify.wrong_combine, case=case), DEEP_EP, prepare=prepare)
