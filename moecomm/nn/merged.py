"""A transformer block with a MoELayer, for merged microbatches (moecomm/overlap/merged.py).

Its nodes do what the layer does by itself, with the same functions: the router within the attention's graph,
then the layer's forward and backward (moecomm/nn/expert_pass.py), which pause where the other microbatch's
turn is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.nn.expert_pass import (
    W_IN,
    Call,
    Forward,
    Weights,
    backward,
    without_autocast,
)
from moecomm.nn.experts import GroupedExperts, SharedExperts
from moecomm.nn.layer import MoELayer
from moecomm.nn.parameters import add_gradient, grad_in_place, has_hooks
from moecomm.nn.plans import keep_plans
from moecomm.nn.watched import OF_SHARDS, watcher
from moecomm.overlap.beside import Turns
from moecomm.overlap.blocks import CutBlock, Operations, Turned, Values

Result = TypeVar("Result")


class MoEBlock(nn.Module, CutBlock):
    """A transformer block whose feed-forward network is a MoELayer, cut into nodes.

        block = MoEBlock(before=attention_and_norm, layer=MoELayer(config, comm))

        before(x) -> (residual, h)    everything before the layer
        layer(h)  -> y
        after(residual, y) -> x of the next block

    `block(x)` is after(residual, layer(h)), as in a model without it. In `moecomm.overlap.run_microbatches`
    and `forward_backward` the same is computed node by node, beside another microbatch, with the same bits.

    Args:
        before: a module or function of x that returns the residual, a tensor, and h, the layer's input:
            (T, H), or (B, S, H).
        layer: the MoELayer.
        after: a module or function; by default the sum of residual and y.
        recompute: True keeps only x of `before` and the router, and computes them again in the backward
            (torch.utils.checkpoint). What is kept of the experts' rows is `layer.overlap.keep`.

    Merged, neither hooks of the layer and its `experts` and `shared` run, nor hooks of their parameters. Any
    that are not FSDP2's (its weights are gathered before) raise InvalidArgument on all ranks, and so do
    another `forward` of these modules, parameters with hooks (DistributedDataParallel with prepare_ddp), ones
    that are sharded by fully_shard, and layers with overlap=False or experts of one's own. Average gradients
    after the step (`sync_gradients`).

    Attributes:
        before: the module or function.
        layer: the MoELayer.
        after: the module or function.
        recompute: whether `before` and the router are computed again in the backward.
    """

    def __init__(
        self,
        before: Callable[[Tensor], tuple[Tensor, Tensor]],
        layer: MoELayer,
        after: Callable[[Tensor, Tensor], Tensor] = torch.add,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        for name, node in (("before", before), ("after", after)):
            if not callable(node):
                raise InvalidArgument(f"{name} is {type(node).__name__}, must be a module or a function")
        if not isinstance(layer, MoELayer):
            raise InvalidArgument(f"layer is {type(layer).__name__}, must be a MoELayer")
        self.before, self.layer, self.after = before, layer, after
        self.recompute = recompute

    @property
    def comm(self) -> Communicator:
        """The layer's communicator."""
        return self.layer.comm

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block by itself."""
        residual, h = self._run_before(x)
        return self.after(residual, self.layer(h))

    def _run_before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.before(x)
        tensors = isinstance(found, tuple) and all(isinstance(each, Tensor) for each in found)
        if not tensors or len(found) != 2 or not found[1].is_floating_point():
            raise InvalidArgument("before must return a tuple (residual, h) of two tensors, h a float one")
        residual, h = found
        if self.after is torch.add and residual.shape != h.shape:
            raise InvalidArgument(
                f"before returned a residual of shape {tuple(residual.shape)}, must have that of h, "
                f"{tuple(h.shape)}, to which the layer's result is added"
            )
        return residual, h

    # -- nodes -----------------------------------------------------------------------------------------

    def _to_experts(self, x: Tensor) -> tuple[Values, Values]:
        """Computes `before` and the router."""
        self._check()
        if self.recompute:
            kept = keep_plans(self.layer)  # of the choice; the experts' pass is not within
            return checkpoint(self._route, x, use_reentrant=False, context_fn=kept)
        return self._route(x)

    def _route(self, x: Tensor) -> tuple[Values, Values]:
        residual, h = self._run_before(x)
        routed = self.layer._route(h, None, in_order=False)
        home = (residual, h.shape, h.dtype, routed.unattached)
        return home, (routed.rows_TH, routed.topk_idx_TK, routed.topk_weights_TK)

    def _from_experts(self, home: Values, results: Values) -> Tensor:
        """Computes `after`."""
        residual, shape, dtype, unattached = home
        return self.after(residual, self.layer._finish(results[0], shape, dtype, unattached))

    def _forward_experts(self, inputs: Values, turns: Turns) -> Turned[tuple[Values, Any]]:
        """Runs the layer's forward."""
        rows_TH, topk_idx_TK, topk_weights_TK = inputs
        weights = self.layer._weights()
        differentiable = (rows_TH, topk_weights_TK, *weights)
        needs = [each is not None and each.requires_grad for each in differentiable]
        call = self.layer._call(topk_idx_TK)._replace(turns=turns)
        forward = Forward(call, rows_TH.detach(), topk_weights_TK.detach(), weights)
        y_TH = yield from _without_grad(forward.run(), self.comm)
        return (y_TH.requires_grad_(any(needs)),), _Kept(call, forward, weights, [False, *needs])

    def _backward_experts(
        self, kept: _Kept, grads: Sequence[Tensor | None], turns: Turns
    ) -> Turned[Sequence[Tensor | None]]:
        """Runs the layer's backward, and adds to the gradients of its weights."""
        kept.call = kept.call._replace(turns=turns)
        if not any(kept.needs_input_grad):
            return None, None, None
        (grad_y_TH,) = grads
        if grad_y_TH is None:
            grad_y_TH = torch.zeros(kept.shape, dtype=self.comm.dtype, device=self.comm.device)
        passing = backward(kept, grad_y_TH, kept.gradient_to_add_to)
        del grads, grad_y_TH
        _, grad_rows_TH, grad_weights_TK, *of_weights = yield from _without_grad(passing, self.comm)
        for weight, gradient in zip(kept.weights, of_weights, strict=True):
            add_gradient(weight, gradient)
        return grad_rows_TH, None, grad_weights_TK

    def _operations(self, kept: _Kept | None) -> Sequence[Operations]:
        """Returns the operations of the layer's forward, or of its backward."""
        if kept is None:
            return Operations(self.comm, 1, waits=self.layer.capacity is None), Operations(self.comm, 1)
        _, needs_rows, needs_weights, *_ = needs = kept.needs_input_grad
        rows_again = 2 if kept.call.keep == "nothing" else 1
        return (
            Operations(self.comm, rows_again if any(needs) else 0),
            Operations(self.comm, 1 if needs_rows or needs_weights else 0),
        )

    def _check(self) -> None:
        """Raises InvalidArgument for a layer whose nodes cannot do what it does by itself."""
        layer = self.layer
        if not layer.overlap.overlap or layer._own_experts:
            what = "experts of one's own" if layer._own_experts else "overlap=False"
            raise InvalidArgument(
                f"layer has {what}, which autograd differentiates: give callables for its nodes "
                "(moecomm.overlap.Block), or set layer.overlap = OverlapConfig()"
            )
        layer._require_parts()
        if layer.shared is not None and layer._shared_within is None:
            raise InvalidArgument(
                "layer has weights_on_input=True and shared experts, which see other rows: merged "
                "microbatches have no node for them"
            )
        for where, module, kind in (
            ("layer", layer, MoELayer),
            ("layer.experts", layer.experts, GroupedExperts),
            ("layer.shared", layer.shared, SharedExperts),
        ):
            found = None if module is None else watcher(module, kind, OF_SHARDS)
            if found is not None:
                raise InvalidArgument(
                    f"{where} has {found}, which does not run in merged microbatches: leave it out, or give "
                    "callables for the nodes (moecomm.overlap.Block)"
                )
        weights = layer._weights()
        for name, parameter in zip(weights._fields, weights, strict=True):
            if parameter is None:
                continue
            if has_hooks(parameter):
                raise InvalidArgument(
                    f"{name} of the layer has hooks (DistributedDataParallel with prepare_ddp has them), "
                    "which do not run in merged microbatches: leave the wrapper out, and call "
                    "sync_gradients after the step"
                )
            if isinstance(parameter, DTensor):
                raise InvalidArgument(
                    f"{name} of the layer is sharded by fully_shard, which gathers weights in the layer's "
                    "own call: merged microbatches need whole experts"
                )


class _Kept:
    """What a layer's forward leaves for its backward: the part of autograd's context."""

    def __init__(self, call: Call, forward: Forward, weights: Weights, needs: list[bool]) -> None:
        self.call, self.weights, self.needs_input_grad = call, weights, needs
        self.handle = forward.known.handle
        self.shape = forward.x_TH.shape
        self._saved = (*weights, *forward.kept(needs[W_IN + 1]))

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, which are let go of."""
        saved, self._saved = self._saved, ()
        return saved

    def gradient_to_add_to(self, ctx: Any, number: int) -> Tensor | None:
        """Returns the `grad` of the experts' weight with this number to which a product adds, if it can."""
        weight = self.weights[number - W_IN]
        if not self.call.products.adds or not isinstance(weight, nn.Parameter):
            return None
        return grad_in_place(weight)


def _without_grad(work: Turned[Result], comm: Communicator) -> Turned[Result]:
    """Does the work without graphs and autocast."""
    while True:
        with torch.no_grad(), without_autocast(comm.device.type):
            try:
                next(work)
            except StopIteration as stop:
                result: Result = stop.value
                return result
        yield
