"""Auxiliary losses of the router, over the tokens of this rank or of several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.arguments import check_balancing, described, require_ascending, require_integer, require_mask
from moecomm.autograd.repeated import dot_with_constants
from moecomm.errors import InvalidArgument, InvalidRouting, MismatchedArguments, PeerLost, of_peer
from moecomm.parallel import ParallelFolding
from moecomm.parallel.expert_ranks import SEQUENCE, STAGE
from moecomm.types import Group, GroupReference


class ExpertSums(NamedTuple):
    """The sums that make up the load-balancing loss, for each of S sequences. The counts have no gradient."""

    probs_SE: Tensor
    """Sums of the tokens' probabilities; differentiable."""
    chosen_SE: Tensor
    """How often each expert was chosen."""
    tokens_S: Tensor
    """Numbers of tokens."""

    def loss(self, top_k: int) -> Tensor:
        """Returns `load_balancing_loss`, averaged over the sequences that have tokens; 0 without tokens."""
        tokens_S1 = self.tokens_S.clamp(min=1).unsqueeze(1)
        share_SE = self.chosen_SE / (tokens_S1 * top_k)
        loss_S = (self.probs_SE / tokens_S1 * share_SE).sum(dim=1) * self.probs_SE.shape[1]
        return loss_S.sum() / (self.tokens_S > 0).sum().clamp(min=1)


def loss_of_counts(
    probs_TE: Tensor, counts_E: Tensor, top_k: int | None, mask_T: Tensor | None = None
) -> Tensor:
    """Returns sum over e of f_e * P_e (`load_balancing_loss`) from counted choices, in few operations; 0
    without tokens. f_e is counts_E[e] divided by top_k * tokens; if top_k is None, by the sum of counts_E."""
    tokens: Any = max(probs_TE.shape[0], 1)
    if mask_T is not None:
        probs_TE = probs_TE.masked_fill(~mask_T.unsqueeze(1), 0.0)
        tokens = mask_T.sum().clamp(min=1)
    chosen = counts_E.sum().clamp(min=1) if top_k is None else top_k * tokens
    factors_E = counts_E.to(probs_TE.dtype) / (chosen * tokens)
    return (torch.dot if top_k is not None else dot_with_constants)(probs_TE.sum(dim=0), factors_E)


def loss_of_sequences(probs_TE: Tensor, topk_idx_TK: Tensor, sequence_len: int | None) -> Tensor:
    """Returns sum over e of f_e * P_e, averaged over sequences of equal length. All ids are in 0..E-1."""
    (tokens, experts), top_k = probs_TE.shape, topk_idx_TK.shape[1]
    length = max(sequence_len or tokens, 1)
    probs_SE = probs_TE.view(-1, length, experts).sum(dim=1)
    first_S1 = torch.arange(0, probs_SE.numel(), experts, device=probs_SE.device).unsqueeze(1)
    # Sums of ones are exact in float32 up to 2^24, so any order of scatter_add_ gives the same bits.
    place_N = (topk_idx_TK.view(-1, length * top_k) + first_S1).flatten()
    chosen_N = probs_SE.new_zeros(probs_SE.numel())
    chosen_N.scatter_add_(0, place_N, probs_SE.new_ones(()).expand(place_N.shape))
    return torch.dot(probs_SE.flatten(), chosen_N) / (max(tokens, 1) * length * top_k)


def expert_sums(
    probs_TE: Tensor,
    topk_idx_TK: Tensor,
    sequence_len: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> ExpertSums:
    """Returns the ExpertSums. Arguments as in `load_balancing_loss`, whose shapes the caller has checked."""
    num_tokens, num_experts = probs_TE.shape
    probs_TE = _wide(probs_TE)  # bfloat16 counts no further than 256, float16 than 2048
    require_mask(mask_T, num_tokens)
    length = max(num_tokens, 1) if sequence_len is None else require_integer("sequence_len", sequence_len, 1)
    if num_tokens % length:
        raise InvalidArgument(f"sequence_len is {length}, must divide the number of tokens {num_tokens}")
    token_T = torch.arange(num_tokens, device=probs_TE.device)
    real_T = torch.ones_like(token_T, dtype=probs_TE.dtype) if mask_T is None else mask_T.to(probs_TE.dtype)
    if mask_T is not None:
        probs_TE = probs_TE.masked_fill(~mask_T.unsqueeze(1), 0.0)
    if cu_seqlens is None:
        count, of_T = num_tokens // length, token_T // length
        probs_SE = probs_TE.view(count, length, num_experts).sum(dim=1)
        tokens_S = real_T.view(count, length).sum(dim=1)
    else:
        seen = require_ascending("cu_seqlens", cu_seqlens, num_tokens, first=0)
        # An additional row takes the tokens past the last sequence.
        count, of_T = cu_seqlens.shape[0] - 1, torch.bucketize(token_T, cu_seqlens[1:], right=True)
        probs_SE = probs_TE.new_zeros(count + 1, num_experts).index_add(0, of_T, probs_TE)[:count]
        if not seen:  # as on a GPU: wrong values make the loss and its gradients NaN
            falls = (cu_seqlens.long().diff() < 0).any()
            wrong = falls | (cu_seqlens[0] != 0) | (cu_seqlens[-1] > num_tokens)
            probs_SE = probs_SE * probs_SE.new_ones(()).masked_fill(wrong, torch.nan)
        tokens_S = real_T.new_zeros(count + 1).index_add(0, of_T, real_T)[:count]
    chosen_TK = topk_idx_TK.to(torch.int64)
    ones_TK = (chosen_TK >= 0) * real_T.unsqueeze(1)
    place_TK = of_T.unsqueeze(1) * num_experts + chosen_TK.clamp(min=0)
    chosen_N = real_T.new_zeros((count + 1) * num_experts)
    chosen_N.scatter_add_(0, place_TK.flatten(), ones_TK.flatten())
    return ExpertSums(probs_SE, chosen_N.view(-1, num_experts)[:count], tokens_S)


def load_balancing_loss(
    probs_TE: Tensor,
    topk_idx_TK: Tensor,
    sequence_len: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Switch Transformer's load-balancing loss (arXiv 2101.03961, eq. 4-6; for top-k as in Megatron-Core).

    Returns E * sum over e of f_e * P_e, 0-d, where f_e is the share of the (token, k) pairs that chose expert
    e and P_e the mean probability of e; 1 when both are uniform, 0 without tokens. Gradient flows through P.

    Args:
        probs_TE: (T, E), rows sum to 1.
        topk_idx_TK: (T, K) global expert ids; -1 for a choice that was dropped.
        sequence_len: the loss is averaged over sequences of this many tokens; must divide T.
        cu_seqlens: instead of sequence_len: (S + 1,) integers: S starts, the first 0, and the last end.
        mask_T: (T,) bool, False for tokens that do not count (padding).

    Raises InvalidArgument for other shapes, devices and dtypes, a sequence_len that does not divide T or is
    given with cu_seqlens, and cu_seqlens that descend, end above T or do not begin at 0; InvalidRouting for
    ids outside -1..E-1. If compiled or on a GPU, where no host waits, wrong values make the loss NaN.
    """
    check_balancing(probs_TE, topk_idx_TK, sequence_len, cu_seqlens)
    wrong_TK = (topk_idx_TK < -1) | (topk_idx_TK >= probs_TE.shape[1])
    if topk_idx_TK.device.type == "cpu" and not torch.compiler.is_compiling() and wrong_TK.any():
        found = int(topk_idx_TK[wrong_TK][0])
        raise InvalidRouting(f"topk_idx_TK has the id {found}, must have -1..{probs_TE.shape[1] - 1}")
    ids_TK = topk_idx_TK.masked_fill(wrong_TK, -1)
    sums = expert_sums(probs_TE, ids_TK, sequence_len, cu_seqlens=cu_seqlens, mask_T=mask_T)
    return sums.loss(topk_idx_TK.shape[1]).masked_fill(wrong_TK.any(), torch.nan)


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Returns the mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5). 0-d; 0 when T is
    0. mask_T: (T,) bool, False for tokens that do not count. Raises InvalidArgument for other shapes."""
    if not isinstance(logits_TE, Tensor) or logits_TE.dim() != 2:
        raise InvalidArgument(f"logits_TE is {described(logits_TE)}, must be (T, E)")
    require_mask(mask_T, logits_TE.shape[0])
    squares_T = _wide(logits_TE).logsumexp(dim=-1).square()
    if mask_T is None:
        return squares_T.sum() / max(logits_TE.shape[0], 1)
    return squares_T.masked_fill(~mask_T, 0.0).sum() / mask_T.sum().clamp(min=1)


def _wide(values: Tensor) -> Tensor:
    """Returns the values in float32; float64 values stay."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# -- sums over ranks ---------------------------------------------------------------------------------------
# The ranks hold parts of the same sequences (aux_loss="sequence"), or take part in one step ("global"). In
# each forward every rank calls `over_ranks`, or `bring_nothing` in its place.


class StepCounts:
    """Counts the choices of all ranks of a step: one all-reduce of E numbers per forward."""

    phase = "the balancing loss over all ranks"

    def __init__(self, group: Group) -> None:
        self._group = GroupReference(group)
        self.exchanges = 0
        """Number of exchanges so far, including failed ones."""

    def over_ranks(self, counts_E: Tensor) -> Tensor:
        """Returns the sums of (E,) int64 counts over ranks."""
        self.exchanges += 1
        return self._all_reduce(counts_E.clone(), dist.ReduceOp.SUM)

    def bring_nothing(self, experts: int, device: torch.device) -> None:
        """Takes part in the exchange without tokens, for a forward that this rank refuses."""
        self.over_ranks(torch.zeros(experts, dtype=torch.int64, device=device))

    def _all_reduce(self, value: Tensor, op: Any) -> Tensor:
        """Reduces in place and returns the result. Turns torch's error of a collective into PeerLost."""
        group = self._group()
        try:
            dist.all_reduce(value, op=op, group=group)
        except RuntimeError as error:
            text = f"a rank of {dist.get_process_group_ranks(group)} is gone or did not come ({error})"
            raise of_peer(PeerLost, text, dist.get_rank(), self.phase) from error
        return value


class SequenceSums(StepCounts):
    """Adds up ExpertSums over ranks that hold parts of the same sequences, in the same order. Ranks without
    tokens take part. Ranks first compare numbers of sequences, except in a CUDA graph capture."""

    phase = "the balancing loss over sequences"

    def over_ranks(self, sums: ExpertSums) -> ExpertSums:  # type: ignore[override]
        """Returns the sums of all parts. Gradients are multiplied by the number of ranks, so that their mean
        over ranks is the gradient in a single process. All ranks raise MismatchedArguments for different
        numbers of sequences."""
        self.exchanges += 1
        own = count = int(sums.tokens_S.shape[0])
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
        # float64 holds counts and sums of any dtype.
        packed = torch.cat((sums.probs_SE, sums.chosen_SE, sums.tokens_S.unsqueeze(1)), dim=1).double()
        if not own:
            packed = packed.sum(dim=0).expand(count, -1)
        total = _Sum.apply(packed, self).to(sums.probs_SE.dtype)  # type: ignore[no-untyped-call]
        experts = sums.probs_SE.shape[1]
        return ExpertSums(total[:, :experts], total[:, experts:-1].detach(), total[:, -1].detach())

    def bring_nothing(self, experts: int, device: torch.device) -> None:
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


def balance_ranks(aux_loss: str, folding: ParallelFolding | None, group: Group | None) -> StepCounts | None:
    """Returns the object that sums the balancing loss's counts over ranks; None: each rank has its own loss.
    `group`: the ranks for aux_loss="global" without a folding."""
    if aux_loss == "sequence" and folding is not None and folding.size(SEQUENCE) > 1:
        return SequenceSums(folding.group(SEQUENCE))
    if aux_loss != "global" or not dist.is_initialized():
        return None
    if folding is not None and folding.pp > 1:
        group = folding.group(STAGE)
    group = dist.group.WORLD if group is None else group
    return StepCounts(group) if group is not None and dist.get_world_size(group) > 1 else None
