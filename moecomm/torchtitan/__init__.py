"""moecomm as a token dispatcher of torchtitan (0.3), by its overrides.

    torchtitan ... --override.imports moecomm.torchtitan.dispatcher

replaces the all-to-all dispatcher of every mixture-of-experts layer (docs/torchtitan.md), without changes to
torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torchtitan.config import override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher

from moecomm.arguments import weight_dtype
from moecomm.communicator import Communicator
from moecomm.shared import LayerCommunicators
from moecomm.types import DispatchOutput


class Dispatched(NamedTuple):
    """The part of a dispatch's result that its combine needs."""

    comm: Communicator
    out: DispatchOutput


class TokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Sends the tokens of a layer to its experts' ranks with moecomm, and sums the results per token. Layers
    of one shape share a communicator (moecomm/shared.py). Without an EP mesh tokens are reordered on their
    rank, as in torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._comms: LayerCommunicators | None = None

    def init_buffer(self) -> None:
        """Prepares communicators over the EP mesh, if there is one. torchtitan's `wire_meshes` calls it."""
        group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        self._comms = None if group is None else LayerCommunicators(group, self.num_experts)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns the rows for this rank's experts, (R, D) in the order of experts, the number of rows of
        each of these experts, and the argument `metadata` of `combine`, which weighs rows by the scores. The
        ids are in the numbering of all ranks' experts; num_local_tokens_per_expert_E is not read. Raises the
        errors of `Communicator.dispatch`, on all ranks of the EP mesh."""
        if self._comms is None:
            parts = (x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
            return super(BaseEPTokenDispatcher, self).dispatch(*parts)
        weights_TK = topk_scores_TK.to(weight_dtype(x_TD.dtype))
        shared = self._comms.of(x_TD, topk_expert_ids_TK.shape[1])
        comm, out = shared.dispatch(x_TD, topk_expert_ids_TK, weights_TK)
        return out.tokens, out.tokens_per_expert, Dispatched(comm, out)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Returns (T, D): the sum of each token's expert rows, weighted by its scores."""
        if not isinstance(metadata, Dispatched):
            return super(BaseEPTokenDispatcher, self).combine(routed_output_RD, metadata, x_TD)
        return metadata.comm.combine(routed_output_RD, metadata.out.handle, weights=metadata.out.weights)


@override(  # type: ignore[untyped-decorator]
    target=AllToAllTokenDispatcher.Config, description="Tokens travel by moecomm.", exact=True
)
def dispatcher(config: AllToAllTokenDispatcher.Config) -> TokenDispatcher.Config:
    """Returns the config of a moecomm dispatcher, to replace that of an all-to-all one."""
    return TokenDispatcher.Config(num_experts=config.num_experts, top_k=config.top_k)
