"""Top-k router: scores every expert for every token, chooses k, and drops choices beyond a capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from moecomm.arguments import require_integer, require_tensor
from moecomm.autograd.repeated import refuse_reentrant
from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.kernels import choices
from moecomm.kernels.outside_autocast import matmul, without_autocast
from moecomm.kernels.parameters import init_shared_weight
from moecomm.kernels.routing import route, routes_here
from moecomm.nn.config import MoEConfig, require_config
from moecomm.nn.losses import SequenceSums, StepCounts, expert_sums, loss_of_counts, loss_of_sequences, z_loss

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of tokens to experts.

    Attributes:
        topk_idx_TK: (T, K) int32 global expert ids, -1 for choices that the capacity dropped and for padding.
        topk_weights_TK: (T, K) float32 (float64 for a float64 config), 0 where dropped; differentiable.
        scores_TE: (T, E) float32 (float64 for float64 tokens): softmax over all experts, or sigmoid.
        losses: 0-d tensors "aux_loss" and "z_loss", each only if configured, multiplied by its coefficient;
            differentiable.
        tokens_per_expert_E: (E,) int64, choices before any drop: the load to balance.
        chosen_TK: (T, K) int32, topk_idx_TK before any drop: what a later forward replays as topk_idx. None:
            nothing is dropped; a later forward replays topk_idx_TK.
    """

    topk_idx_TK: Tensor
    topk_weights_TK: Tensor
    scores_TE: Tensor
    losses: dict[str, Tensor]
    tokens_per_expert_E: Tensor
    chosen_TK: Tensor | None = None


register_dataclass(Routing)  # FSDP2 of torch 2.11 finds a module's results by pytree alone


class TopKRouter(nn.Module):
    """Linear router, by default without bias; its steps have the order of Megatron-Core's TopKRouter.

    jitter on the input -> logits -> scores -> choice of k (group-limited and with balancing bias if
    configured) -> weights (normalised, scaled) -> losses -> drop to capacity. All steps are in float32, even
    within autocast (float64 for float64 tokens). `weight` is initialised from torch's default generator. A
    config with limit_nodes raises InvalidArgument: use `TopKRouter(config.for_nodes(nodes))`.

    Attributes:
        weight: (E, H) float32 (float64 for a float64 config).
        bias: (E,) of the weight's dtype, added to the logits; None without router_bias.
        expert_bias_E: (E,) float32 balancing biases, saved; None without bias_update_rate or balancing_bias.
        load_E: (E,) int64 choices counted since the last `update_expert_bias`, not saved; None without
            bias_update_rate, balancing_bias or aux_loss="global".
        config: the layer's MoEConfig.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    expert_bias_E: Tensor | None
    load_E: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        balance: StepCounts | None = None,
    ) -> None:
        """balance: sums the balancing loss's counts over ranks; None: the loss is over this rank alone."""
        super().__init__()
        require_config(config)
        if config.limit_nodes is not None:
            raise InvalidArgument(
                f"limit_nodes is {config.limit_nodes} and a router does not know the nodes: "
                "pass config.for_nodes(number of nodes)"
            )
        self.config, self._balance = config, balance
        dtype = torch.promote_types(config.dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden, dtype=dtype, device=device))
        bias = nn.Parameter(torch.empty_like(self.weight[:, 0])) if config.router_bias else None
        self.register_parameter("bias", bias)
        balances = config.bias_update_rate > 0 or config.balancing_bias
        bias_E = torch.empty(config.num_experts, dtype=torch.float32, device=device) if balances else None
        counts = balances or config.aux_loss == "global"
        load_E = torch.empty(config.num_experts, dtype=torch.int64, device=device) if counts else None
        self.register_buffer("expert_bias_E", bias_E)
        self.register_buffer("load_E", load_E, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the weight with new random numbers of standard deviation config.init_std, from torch's
        default CPU generator, and the bias, the balancing biases and the load with zeros."""
        init_shared_weight(self.weight, self.config.init_std)
        with torch.no_grad():
            for zero in (self.bias, self.expert_bias_E, self.load_E):
                if zero is not None:
                    zero.zero_()

    def forward(
        self,
        x_TH: Tensor,
        seq_len: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        topk_idx: Tensor | None = None,
        again: Choices | None = None,
    ) -> Routing:
        """Routes tokens. x_TH: (T, H) of any float dtype; T may be 0.

        seq_len, cu_seqlens, mask and topk_idx are those of `MoELayer.forward`, for T tokens. again: choices
        and drops of the first forward, if this forward recomputes it. Raises InvalidArgument on a wrong shape
        or dtype or a seq_len that does not divide T."""
        config = self.config
        self.check(x_TH, seq_len, cu_seqlens=cu_seqlens, mask=mask, topk_idx=topk_idx)
        # gaps: choices may already be -1 before the capacity drops any.
        gaps = mask is not None or topk_idx is not None
        if not gaps and self._is_plain and routes_here(x_TH, self.weight, config.top_k):
            return self._route_by_kernel(x_TH, seq_len, cu_seqlens, again)
        care = torch.is_autocast_enabled(x_TH.device.type)
        with torch.autocast(x_TH.device.type, enabled=False):
            x_TH = x_TH.to(torch.promote_types(x_TH.dtype, torch.float32))
            if self.training and config.jitter > 0:
                x_TH = x_TH * torch.empty_like(x_TH).uniform_(1 - config.jitter, 1 + config.jitter)
            bias_E = None if self.bias is None else self.bias.to(x_TH.dtype)
            weight_EH = self.weight.to(x_TH.dtype)
            if care:
                logits_TE = matmul(x_TH, weight_EH.t(), care)
                logits_TE = logits_TE if bias_E is None else logits_TE + bias_E
            else:
                logits_TE = nn.functional.linear(x_TH, weight_EH, bias_E)
            scores_TE = choices.scores_of(logits_TE, self._rule)
            if again is None:
                chosen_TK = self._choose(logits_TE.detach(), scores_TE.detach())
                if topk_idx is not None:
                    chosen_TK = replayed(topk_idx, chosen_TK)
                if mask is not None:
                    chosen_TK = chosen_TK.masked_fill(~mask.unsqueeze(1), -1)
            else:
                chosen_TK = again.chosen_TK.to(torch.int64)
            # known_TK has -1 for invalid ids, which must not be indices. The dispatch gets and refuses these.
            known_TK = chosen_TK
            if topk_idx is not None:
                known_TK = chosen_TK.masked_fill(chosen_TK >= config.num_experts, -1).clamp(min=-1)
            weights_TK = choices.weights_of(logits_TE, scores_TE, known_TK, self._rule, gaps)
            load_E = choices.counts_of(known_TK, config.num_experts, gaps)
            of_tokens = {"sequence_len": seq_len, "cu_seqlens": cu_seqlens, "mask_T": mask}
            losses = self._losses(logits_TE, scores_TE, known_TK, load_E, gaps, **of_tokens)
            kept_TK = chosen_TK
            if again is not None:
                kept_TK = again.kept_TK
            elif config.capacity_factor is not None:
                kept_TK = chosen_TK.masked_fill(~self._kept(known_TK, weights_TK, gaps) & (known_TK >= 0), -1)
            if config.capacity_factor is not None:
                weights_TK = weights_TK.masked_fill(kept_TK < 0, 0.0)
        return Routing(
            topk_idx_TK=kept_TK.to(torch.int32),
            topk_weights_TK=weights_TK.to(torch.promote_types(config.dtype, torch.float32)),
            scores_TE=scores_TE,
            losses=losses,
            tokens_per_expert_E=load_E,
            chosen_TK=None if config.capacity_factor is None else chosen_TK.to(torch.int32),
        )

    @property
    def _rule(self) -> choices.Rule:
        config = self.config
        chosen_first = config.score_function == "softmax" and not config.pre_softmax
        scores = "chosen_softmax" if chosen_first else config.score_function
        return choices.Rule(config.top_k, scores, config.normalize_topk, config.scaling_factor)

    @property
    def _is_plain(self) -> bool:
        """True for a router without drops, groups of experts, noise and forced balance."""
        config = self.config
        special = config.capacity_factor is not None or config.num_groups is not None
        return not (special or config.force_balanced or (self.training and config.jitter > 0))

    def _route_by_kernel(
        self, x_TH: Tensor, seq_len: int | None, cu_seqlens: Tensor | None, again: Choices | None
    ) -> Routing:
        """Does what forward does for a plain router without mask and topk_idx, in fewer operations."""
        config, given_TK = self.config, None if again is None else again.chosen_TK
        found = route(x_TH, self.weight, self.bias, self.expert_bias_E, self._rule, given_TK)
        losses = {}
        if config.aux_loss != "none" or config.z_loss_coef > 0:
            with without_autocast(x_TH.device.type):
                parts = (found.logits_TE, found.scores_TE, found.ids_TK, found.counts_E)
                losses = self._losses(*parts, False, sequence_len=seq_len, cu_seqlens=cu_seqlens)
        return Routing(
            topk_idx_TK=found.ids_TK if again is None else again.kept_TK,
            topk_weights_TK=found.weights_TK,
            scores_TE=found.scores_TE,
            losses=losses,
            tokens_per_expert_E=found.counts_E,
        )

    def check(
        self,
        x_TH: Tensor,
        seq_len: int | None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> None:
        """Raises InvalidArgument for arguments that forward cannot route."""
        config = self.config
        if x_TH.dim() != 2 or x_TH.shape[1] != config.hidden:
            raise InvalidArgument(
                f"x has shape {tuple(x_TH.shape)}, must be (tokens, hidden={config.hidden})"
            )
        tokens = x_TH.shape[0]
        if seq_len is not None and tokens % require_integer("seq_len", seq_len, 1):
            raise InvalidArgument(f"seq_len is {seq_len}, must divide the number of tokens {tokens}")
        if seq_len is not None and cu_seqlens is not None:
            raise InvalidArgument(f"seq_len is {seq_len}, must be None with cu_seqlens")
        for name, value, shape, dtypes in (
            ("cu_seqlens", cu_seqlens, None, _INTEGERS),
            ("mask", mask, (tokens,), (torch.bool,)),
            ("topk_idx", topk_idx, (tokens, config.top_k), _INTEGERS),
        ):
            if value is None:
                continue
            require_tensor(name, value, x_TH.device)
            if value.dtype not in dtypes:
                raise InvalidArgument(f"{name} is {value.dtype}, must be {' or '.join(map(str, dtypes))}")
            if value.shape != shape and (shape is not None or value.dim() != 1 or not value.shape[0]):
                expected = shape or "(sequences + 1,)"
                raise InvalidArgument(f"{name} has shape {tuple(value.shape)}, must be {expected}")

    def _kept(self, topk_idx_TK: Tensor, weights_TK: Tensor, gaps: bool) -> Tensor:
        """Returns (T, K) bool: the choices that the capacity keeps; arbitrary for choices of -1."""
        config = self.config
        by_weight = weights_TK if config.drop_policy == "probs" else None
        limit = tokens_per_expert_limit(config, topk_idx_TK.shape[0])
        if gaps:  # choices of -1 form one more expert, number E
            topk_idx_TK = topk_idx_TK.masked_fill(topk_idx_TK < 0, config.num_experts)
        return choices.kept_choices(topk_idx_TK, by_weight, config.num_experts + gaps, limit)

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        config = self.config
        if config.force_balanced:
            return choices.balanced_choice(
                logits_TE.shape[0], config.num_experts, config.top_k, logits_TE.device
            )
        # Softmax is monotone: logits and scores choose alike if there are no balancing biases and no groups.
        rank_by_TE = logits_TE if self._rule.scores == "chosen_softmax" else scores_TE
        if self.expert_bias_E is not None:
            rank_by_TE = rank_by_TE + self.expert_bias_E
        if config.num_groups is not None and config.topk_groups is not None:
            rank_by_TE = choices.limit_to_groups(
                rank_by_TE, config.num_groups, config.topk_groups, config.top_k, config.scores_per_group
            )
        return rank_by_TE.topk(config.top_k, dim=-1).indices

    def _losses(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        topk_idx_TK: Tensor,
        counts_E: Tensor,
        gaps: bool,
        **of_tokens: Any,
    ) -> dict[str, Tensor]:
        """Returns the losses by name. gaps: ids may be -1; of_tokens: sequence_len, cu_seqlens and mask_T of
        `expert_sums`."""
        config, mask_T = self.config, of_tokens.get("mask_T")
        losses: dict[str, Tensor] = {}
        if config.aux_loss != "none":
            probs_TE = scores_TE
            if config.score_function == "sigmoid":
                probs_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
            coefficient = config.aux_loss_coef * config.num_experts
            if config.aux_loss == "batch":
                loss = loss_of_counts(probs_TE, counts_E, config.top_k, mask_T)
            elif config.aux_loss == "global":
                # load_E has the choices of the step's microbatches whose backward has run.
                if self.training and self.load_E is not None:
                    refuse_reentrant()
                    counts_E = counts_E + self.load_E
                if self._balance is not None:
                    counts_E = self._balance.over_ranks(counts_E)
                loss = loss_of_counts(probs_TE, counts_E, None, mask_T)
            elif gaps or self._balance is not None or of_tokens.get("cu_seqlens") is not None:
                coefficient, sums = config.aux_loss_coef, expert_sums(probs_TE, topk_idx_TK, **of_tokens)
                if isinstance(self._balance, SequenceSums):
                    sums = self._balance.over_ranks(sums)
                loss = sums.loss(config.top_k)
            else:
                loss = loss_of_sequences(probs_TE, topk_idx_TK, of_tokens["sequence_len"])
            losses["aux_loss"] = coefficient * loss
        if config.z_loss_coef > 0:
            losses["z_loss"] = config.z_loss_coef * z_loss(logits_TE, mask_T)
        return losses

    def record_load(self, tokens_per_expert_E: Tensor) -> None:
        """Adds a batch's choices to load_E: the next `update_expert_bias` balances by it; for
        aux_loss="global", later losses of the step include it. Does nothing without load_E."""
        if self.load_E is not None:
            self.load_E += tokens_per_expert_E

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        # model.to(torch.bfloat16) must not round the balancing bias: steps of 0.001 would be lost.
        bias_E = self.expert_bias_E
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias_E is not None and self.expert_bias_E is not None and self.expert_bias_E.dtype != bias_E.dtype:
            self.expert_bias_E = bias_E.to(self.expert_bias_E.device)
        return self

    def extra_repr(self) -> str:
        config = self.config
        return f"experts={config.num_experts}, top_k={config.top_k}, scores={config.score_function}"


# -- choices that a forward gets or keeps ------------------------------------------------------------------


class Choices(NamedTuple):
    """The choices of a forward, for its recomputation."""

    chosen_TK: Tensor
    """(T, K) int32, before drops."""
    kept_TK: Tensor
    """(T, K) int32, after drops."""


def flat(x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Returns `given`, the arguments beside x (B, S, H), with mask and topk_idx flattened to B * S tokens."""
    dims, shape = {"mask": 2, "topk_idx": 3}, x.shape[:2]
    return {
        name: value.flatten(0, 1)
        if isinstance(value, Tensor) and value.dim() == dims.get(name) and value.shape[:2] == shape
        else value
        for name, value in given.items()
    }


def replayed(given_TK: Tensor, own_TK: Tensor) -> Tensor:
    """Returns (T, K) int64: the given choices; for a token whose given ids are all -1, the router's own.
    Invalid ids stay, within int32: a dispatch refuses them on all ranks, so that no host waits here.

    Example: given = [[2, 0], [-1, -1], [1, -1]], own = [[0, 1], [0, 3], [2, 3]] gives [[2, 0], [0, 3],
    [1, -1]]: the third token has one expert.
    """
    given_TK = given_TK.to(torch.int64).clamp(-(2**31), 2**31 - 1)
    return torch.where((given_TK == -1).all(dim=1, keepdim=True), own_TK, given_TK)


# -- capacity ----------------------------------------------------------------------------------------------


def tokens_per_expert_limit(config: MoEConfig, num_tokens: int) -> int:
    """Returns how many of a rank's T tokens may go to one expert: ceil(T * K / E * capacity_factor), at most
    T, as Megatron-Core's get_capacity."""
    assert config.capacity_factor is not None
    limit = math.ceil(num_tokens * config.top_k * config.capacity_factor / config.num_experts)
    return min(limit, num_tokens)


def rows_at_worst(comm: Communicator) -> int:
    """Returns the most rows that one rank can get under any routing: each token chooses as many of the rank's
    experts as it can."""
    return comm.size * comm.max_tokens * min(comm.top_k, comm.num_local_experts)


def received_rows_bound(config: MoEConfig, comm: Communicator) -> int:
    """Returns the most rows that one rank can receive under config.capacity_factor, for any routing and any
    number of tokens of each rank."""
    of_expert = comm.size * tokens_per_expert_limit(config, comm.max_tokens)
    return min(rows_at_worst(comm), comm.num_local_experts * of_expert)
