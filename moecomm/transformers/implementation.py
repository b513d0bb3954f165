"""The implementation of expert parallelism that transformers calls: dispatch, experts, combine."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from moecomm.shared import LayerCommunicators
from moecomm.transformers.experts import LocalExperts
from moecomm.transformers.sole_experts import batches_to_divide_by, leave_out_of_fsdp


class MoecommEP(EPImplementation):  # type: ignore[misc]
    """The implementation "moecomm" of transformers' expert parallelism, for one module of experts.

    transformers builds it with the module, its EP mesh and the TP mesh. Ranks of the TP mesh have the same
    batch: each takes a slice of the tokens, and gathers the results. Routing weights travel in float32."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.local = LocalExperts(experts, self.experts_forward, self.num_local_experts)
        self.first_local_expert = ep_mesh.get_local_rank() * self.num_local_experts
        self.num_experts = self.num_local_experts * ep_mesh.size()
        self._comms = LayerCommunicators(ep_mesh.get_group(), self.num_experts)
        self.experts = module = cast(Any, experts)
        module.moecomm = self  # where adapters find it
        leave_out_of_fsdp(experts, ep_mesh)

    @_disable_dynamo  # the experts' kernels take addresses
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns (T, H): the weighted sum of each token's expert results.

        hidden_states: (T, H), of this rank's batch; top_k_index: (T, K) global expert ids, of which those
        below 0 or from num_experts on mean no expert; top_k_weights: (T, K). Raises the errors of
        `Communicator.dispatch` and `combine`, on all ranks of the EP group.
        """
        tokens = hidden_states.shape[0]
        if self.tp_mesh.size() > 1:
            parts = (hidden_states, top_k_index, top_k_weights)
            hidden_states, top_k_index, top_k_weights = (_slice_of(each, self.tp_mesh) for each in parts)
        none_TK = (top_k_index < 0) | (top_k_index >= self.num_experts)
        ids_TK = top_k_index.masked_fill(none_TK, -1)
        batches = batches_to_divide_by(self.experts, self.ep_mesh, self.tp_mesh)
        y_TH = self.local(self._comms, hidden_states, ids_TK, top_k_weights, batches)
        return _whole_of(y_TH, self.tp_mesh, tokens) if self.tp_mesh.size() > 1 else y_TH


def _slice_of(same_T: Tensor, tp_mesh: Any) -> Tensor:
    """Returns this rank's slice of tokens that are the same on all ranks of `tp_mesh`; differentiable."""
    whole = DTensor.from_local(same_T, tp_mesh, [Replicate()], run_check=False)
    return whole.redistribute(tp_mesh, [Shard(0)]).to_local()


def _whole_of(part_TH: Tensor, tp_mesh: Any, tokens: int) -> Tensor:
    """Gathers the slices of all ranks of `tp_mesh` and returns all tokens; differentiable."""
    shape = torch.Size((tokens, part_TH.shape[1]))
    parts = DTensor.from_local(
        part_TH.contiguous(), tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
    )
    return parts.full_tensor()
