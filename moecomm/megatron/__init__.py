"""moecomm as the token dispatcher of Megatron-Core's mixture-of-experts layers.

    model = GPTModel(...)
    moecomm.megatron.use_moecomm(model)

Megatron-Core has no registry of dispatchers, so each layer's own dispatcher is replaced after the layer is
built (docs/megatron.md).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn

from moecomm.arguments import require_module, weight_dtype
from moecomm.communicator import Communicator
from moecomm.errors import Unsupported
from moecomm.shared import LayerCommunicators
from moecomm.types import DispatchOutput

__all__ = ["TokenDispatcher", "use_moecomm"]

_Left = TypeVar("_Left")


def use_moecomm(model: nn.Module) -> int:
    """Replaces the dispatcher of every MoELayer in `model`, and returns the number of layers.

    Raises:
        InvalidArgument: `model` is no module. Call this for each module of a list of pipeline chunks.
        Unsupported: a layer splits each expert over tensor parallel ranks, overlaps shared experts with the
            dispatch, pads experts to a capacity, is captured by Megatron-Core's own graphs, or overlaps
            microbatches with the "flex" dispatcher.
    """
    require_module(model)
    layers = [each for each in model.modules() if isinstance(each, MoELayer)]
    dispatchers = [TokenDispatcher(each) for each in layers]
    for layer, dispatcher in zip(layers, dispatchers, strict=True):
        layer.token_dispatcher = dispatcher
    return len(layers)


class TokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Dispatch and combine in the six methods that Megatron-Core calls, and that its 1F1B schedule overlaps.

    Layers of one shape share a communicator (moecomm/shared.py). The experts multiply their rows by the
    probabilities that travel along, as after Megatron-Core's own dispatchers.
    """

    def __init__(self, layer: MoELayer) -> None:
        config, own = layer.config, layer.token_dispatcher
        groups = {"ep": own.ep_group, "expt_tp": own.tp_group, "tp_ep": own.tp_ep_group}
        super().__init__(config=config, pg_collection=ProcessGroupCollection(**groups))
        for wrong, name in (
            (self.tp_size > 1, f"expert_tensor_parallel_size is {self.tp_size}, must be 1"),
            (config.moe_shared_expert_overlap, "moe_shared_expert_overlap is True, must be False"),
            (
                config.moe_pad_expert_input_to_capacity,
                "moe_pad_expert_input_to_capacity is True, must be False (a capacity alone drops tokens)",
            ),
            (
                config.cuda_graph_impl != "none",
                f"cuda_graph_impl is {config.cuda_graph_impl!r}, must be 'none'",
            ),
            (
                config.overlap_moe_expert_parallel_comm and config.moe_token_dispatcher_type == "flex",
                "moe_token_dispatcher_type is 'flex', must be 'alltoall' with overlapped microbatches",
            ),
        ):
            if wrong:
                raise Unsupported(f"layer {layer.layer_number}: {name} for moecomm's dispatcher")
        self._layer = layer.layer_number
        self._comms = LayerCommunicators(self.ep_group, config.num_moe_experts)
        # What one of the six methods leaves to a later one. One batch at a time suffices: even with 1F1B one
        # forward calls all six before another begins. Backwards, which come at any time, do not use it.
        self._routed: tuple[Tensor, torch.Size] | None = None
        self._dispatched: tuple[Communicator, DispatchOutput, torch.Size] | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens, (..., H), as (T, H), and the probabilities of their experts, (T, K).
        routing_map: (T, E) bool, the experts of a token, at most moe_router_topk; probs: (T, E), zero for the
        others."""
        going_TK, ids_TK = routing_map.to(torch.uint8).topk(self.config.moe_router_topk, sorted=False)
        self._routed = ids_TK.masked_fill(going_TK == 0, -1), tokens.shape
        x_TH = self._apart(tokens.reshape(-1, tokens.shape[-1]))
        return x_TH, probs.gather(1, ids_TK).to(weight_dtype(x_TH.dtype))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of this rank's experts, (P, H) by expert, and their probabilities, (P,)."""
        (ids_TK, shape), self._routed = self._left(self._routed, "token_dispatch"), None
        comm, out = self._comms.of(hidden_states, ids_TK.shape[1]).dispatch(hidden_states, ids_TK, probs)
        self._dispatched = comm, out, shape
        assert out.weights is not None
        return out.tokens, out.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows, the number of rows of each of this rank's experts, and the probabilities."""
        _, out, _ = self._left(self._dispatched, "dispatch_postprocess")
        return self._apart(hidden_states), out.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns (T, H): the sum of each token's expert rows."""
        (comm, out, self._shape), self._dispatched = self._left(self._dispatched, "token_combine"), None
        return comm.combine(hidden_states, out.handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)

    def _apart(self, x: Tensor) -> Tensor:
        """Returns x; where microbatches overlap, a copy of x: their schedule frees the inputs of a dispatch
        and of the experts, but the router and the experts keep these tensors for their backward."""
        return x.clone() if self.config.overlap_moe_expert_parallel_comm else x

    def _left(self, left: _Left | None, part: str) -> _Left:
        """Returns `left`, what an earlier method has left to the method `part`. Raises Unsupported if another
        batch has taken it."""
        if left is None:
            raise Unsupported(
                f"layer {self._layer}: {part} finds nothing of its batch: the parts of two batches came in "
                "between each other, and a batch's combine must come before the dispatch of the next"
            )
        return left
