"""The base class of the baselines of operations: how each is called, and how its results are checked."""

from __future__ import annotations

import torch
from torch import Tensor

from ..harness import verify
from ..harness.case import Case, poison
from ..harness.path import CALL, Path, Verdict
from ..harness.timing import sum_over_ranks
from ..harness.verify import Received


class Baseline:
    """Another way to dispatch the rows of a case to expert-major order, and to combine them from there."""

    name: str
    case: Case
    kept: dict[str, Tensor]  # buffers that are the same in each call
    counts: Tensor | None = None  # rows of each local expert in the last dispatch, where they are known
    waits_in_dispatch, waits_in_combine = True, False  # whether the host waits for the GPU
    fresh_ids = True  # whether a dispatch gets other ids each time

    def dispatch(self) -> Tensor:
        """Returns (P, H) rows, or more behind them."""
        raise NotImplementedError

    def combine(self, rows_PH: Tensor) -> Tensor:
        """Returns (T, H) sums of rows that lie where `dispatch` put them."""
        raise NotImplementedError

    def dispatch_path(self) -> Path:
        """The path of `dispatch`."""
        case = self.case
        rows = case.rows_of(case.rank, 1)

        def check(round: int) -> Verdict:
            case.load(round)
            poison(*self.kept.values())
            _settle(case)
            rows_PH = self.dispatch()[: rows.num_rows]
            _settle(case)
            case.maybe_corrupt(rows_PH)
            received = Received(tokens=rows_PH, counts=self.counts)
            wrong = verify.wrong_dispatch(received, rows, case.key, case.point.topk)
            poison(rows_PH)
            return Verdict(wrong)

        return Path(
            name=self.name,
            calls={CALL: self.dispatch},
            check=check,
            before=case.fresh_ids if self.fresh_ids else None,
            blocks=self.waits_in_dispatch,
        )

    def combine_path(self) -> Path:
        """The path of `combine`, of rows that lie where a dispatch of this case has put them."""
        case = self.case
        rows = case.rows_of(case.rank, 1)
        owner_PH = self.dispatch()[: rows.num_rows]

        def check(round: int) -> Verdict:
            case.load(round)
            poison(*self.kept.values())
            owner_PH.copy_(verify.answers(rows, case.key, rows.num_rows, case.device))
            _settle(case)
            y_TH = self.combine(owner_PH)
            _settle(case)
            case.maybe_corrupt(y_TH)
            wrong = verify.wrong_combine(y_TH, case)
            poison(y_TH)
            return Verdict(wrong)

        check(0)  # gives the rows their values also when checks are off
        return Path(
            name=self.name,
            calls={CALL: lambda: self.combine(owner_PH)},
            check=check,
            blocks=self.waits_in_combine,
        )


def _settle(case: Case) -> None:
    """Waits for the devices of all ranks: peers may write into a buffer that is poisoned here."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    sum_over_ranks(0)
