"""The experts function "moecomm" of transformers, for experts that are not spread over ranks:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moecomm")

It does what transformers' "grouped_mm" does, by a dispatch and a combine of this process alone and by
moecomm's products. A few rows without gradients, as while a text is generated, run by transformers'
"batched_mm" on GPUs, for which `generate` leaves "grouped_mm", too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moecomm.shared import LayerCommunicators
from moecomm.transformers.experts import LocalExperts
from moecomm.types import ALONE

MOST_COPIED = 1 << 30
"""The most bytes of weights for which "batched_mm", which copies an expert's weights for each of its rows, is
faster than kernels that do not (docs/transformers.md, "Generating")."""


class WholeExperts:
    """Runs a module of experts that this process has all of."""

    first_local_expert = 0

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.num_local_experts = int(experts.num_experts)
        others = ALL_EXPERTS_FUNCTIONS["grouped_mm"]  # for modules that moecomm's products do not serve
        self.local = LocalExperts(experts, partial(others, experts), self.num_local_experts)
        self._comms = LayerCommunicators(ALONE, self.num_local_experts)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module makes its own

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns (T, H): the weighted sum of each token's expert results. Arguments as of `MoecommEP`."""
        if hidden_states.is_cuda and self.is_better_copied(top_k_index.numel()):
            batched = ALL_EXPERTS_FUNCTIONS["batched_mm"]
            y_TH: Tensor = batched(self.experts, hidden_states, top_k_index, top_k_weights)
            return y_TH
        if self.experts._is_expert_parallel:  # by another implementation, for which this id means none
            top_k_index = top_k_index.masked_fill(top_k_index == self.num_local_experts, -1)
        return self.local(self._comms, hidden_states, top_k_index, top_k_weights)

    def is_better_copied(self, rows: int) -> bool:
        """Returns whether "batched_mm" runs this number of rows: without gradients and adapters, on plain
        weights that are small enough to copy."""
        if torch.is_grad_enabled() or self.local.has_adapters or not self.local.has_plain_weights():
            return False
        weights = 3 if self.experts.has_gate else 2  # of the size of down_proj
        _, columns, inner = self.experts.down_proj.shape
        of_expert = columns * inner * self.experts.down_proj.itemsize * weights
        return bool(0 < rows * of_expert <= MOST_COPIED)


def whole_experts(experts: Any) -> WholeExperts:
    """Returns the WholeExperts of a module, made at its first use."""
    found = getattr(experts, "moecomm", None)
    if found is None or found.experts is not experts:  # a replica of DataParallel has that of its original
        found = experts.moecomm = WholeExperts(experts)
    return found


@_disable_dynamo  # the experts' kernels take addresses
def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns (T, H): what `experts` computes, as the functions in transformers' ALL_EXPERTS_FUNCTIONS do."""
    return whole_experts(experts)(hidden_states, top_k_index, top_k_weights)
