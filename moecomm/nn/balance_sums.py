"""Sums of the load-balancing losses over ranks: over those that hold parts of the same sequences
(aux_loss="sequence"), and over all that take part in a step (aux_loss="global").

All ranks of the group call `over_ranks` for each forward, or `bring_nothing` in its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import MismatchedArguments, PeerLost
from moecomm.nn.losses import ExpertSums
from moecomm.types import Group, GroupReference


class StepCounts:
    """The choices of all ranks of a step: one all-reduce of E numbers a forward."""

    phase = "the balancing loss over all ranks"

    def __init__(self, group: Group) -> None:
        self._group = GroupReference(group)
        self.exchanges = 0
        """Exchanges so far, also those that failed."""

    def over_ranks(self, counts_E: Tensor) -> Tensor:
        """Returns the sums of (E,) int64 counts."""
        self.exchanges += 1
        return self._all_reduce(counts_E.clone(), dist.ReduceOp.SUM)

    def bring_nothing(self, experts: int, device: torch.device) -> None:
        """Takes part in the exchange of a forward that this rank refuses."""
        self.over_ranks(torch.zeros(experts, dtype=torch.int64, device=device))

    def _all_reduce(self, value: Tensor, op: Any) -> Tensor:
        """Returns the result, in place. Turns what torch says of a collective that failed into PeerLost."""
        group = self._group()
        try:
            dist.all_reduce(value, op=op, group=group)
        except RuntimeError as error:
            rank = dist.get_rank()
            raise PeerLost(
                f"rank {rank}, {self.phase}: a rank of {dist.get_process_group_ranks(group)} is gone or did "
                f"not come ({error})",
                rank=rank,
                phase=self.phase,
            ) from error
        return value


class SequenceSums(StepCounts):
    """The sums of sequences of which each rank of the group holds a part, the same number of sequences on
    all, in the same order; ranks without tokens take part in any number. The host learns first how many there
    are, but in the capture of a CUDA graph, within which it cannot: the runs before have compared."""

    phase = "the balancing loss over sequences"

    def over_ranks(self, sums: ExpertSums) -> ExpertSums:  # type: ignore[override]
        """Returns the sums of all parts. A gradient of them becomes, for this rank's part, what makes the
        mean of all ranks' gradients that of one process: it is multiplied by the ranks of the group. Raises
        MismatchedArguments, on all of these ranks, for other numbers of sequences."""
        self.exchanges += 1
        own = int(sums.tokens_S.shape[0])
        count = own
        if not (sums.tokens_S.is_cuda and torch.cuda.is_current_stream_capturing()):
            seen = torch.tensor([own, -(own or 1 << 60)], device=sums.tokens_S.device)
            most, least = self._all_reduce(seen, dist.ReduceOp.MAX).tolist()
            count = int(most)
            if count and least != -count:
                raise MismatchedArguments(
                    f"aux_loss='sequence': rank {dist.get_rank()} has parts of {own} sequences, ranks "
                    f"{dist.get_process_group_ranks(self._group())} have parts of {-least} to {count}, and "
                    "must have as many, by x (B, S, H), seq_len or cu_seqlens"
                )
        if not count:
            return sums
        # In float64, which holds counts and sums of any dtype.
        packed = torch.cat((sums.probs_SE, sums.chosen_SE, sums.tokens_S.unsqueeze(1)), dim=1).double()
        if not own:
            packed = packed.sum(dim=0).expand(count, -1)
        total = _Sum.apply(packed, self).to(sums.probs_SE.dtype)  # type: ignore[no-untyped-call]
        experts = sums.probs_SE.shape[1]
        return ExpertSums(total[:, :experts], total[:, experts:-1].detach(), total[:, -1].detach())

    def bring_nothing(self, experts: int, device: torch.device) -> None:
        """Takes part in the exchange of a forward that this rank refuses."""
        none = torch.zeros(0, experts, device=device)
        self.over_ranks(ExpertSums(none, none, none[:, 0]))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sums: SequenceSums) -> Tensor:
        ctx.ranks = dist.get_world_size(sums._group())
        return sums._all_reduce(own.clone(memory_format=torch.contiguous_format), dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None
