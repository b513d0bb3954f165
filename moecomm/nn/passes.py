"""What a pass of tokens through the experts is told, and what is kept of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.kernels.grouped_mm import Products
from moecomm.nn.pool import ActivationPool
from moecomm.overlap import Executor, Keep, Recorded, Split, Timeline


class Weights(NamedTuple):
    """Of the experts here, (L, H, I) and (L, F, H), and of the shared ones, (H, I') and (F', H), if any."""

    w_in: Tensor
    w_out: Tensor
    shared_in: Tensor | None
    shared_out: Tensor | None


@dataclass
class Deferred:
    """Gradients of the experts' weights that are still to be computed, oldest first: each makes those of
    w_in and of w_out, or None."""

    pending: list[Callable[[], tuple[Tensor | None, Tensor | None]]] = field(default_factory=list)

    def run(self, w_in: nn.Parameter, w_out: nn.Parameter) -> None:
        """Computes them all and adds them to the parameters' `grad`. Raises InvalidArgument where those have
        hooks, which would not run, or are sharded."""
        for parameter in (w_in, w_out) if self.pending else ():
            hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            if hooked or isinstance(parameter, DTensor):
                raise InvalidArgument(
                    "defer_weights is True for experts under DistributedDataParallel (prepare_ddp) or "
                    "fully_shard, or with hooks, which would not see the gradients: set it to False"
                )
        while self.pending:
            for parameter, gradient in zip((w_in, w_out), self.pending.pop(0)(), strict=True):
                if gradient is None:
                    continue
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@dataclass
class Runs:
    """The last forward and backward that were recorded. What they have made is not held: that has autograd's
    graph, which holds this."""

    forward: Recorded | None = None
    backward: Recorded | None = None

    def timelines(self) -> dict[str, Timeline]:
        """Of those that there were, by their names. Waits for them."""
        runs = {"forward": self.forward, "backward": self.backward}
        return {name: recorded.timeline() for name, recorded in runs.items() if recorded is not None}


class Call(NamedTuple):
    """What a pass needs beside the tensors that have gradients."""

    comm: Communicator
    executor: Executor
    topk_idx_TK: Tensor
    capacity: int | None
    activation: str
    products: Products
    keep: Keep
    split: Split | None
    """None: products leave no SMs to what travels meanwhile."""
    home_split: Split | None
    """How the way home of the gradients, and those of the first weights, share the SMs; None: not."""
    in_turns_sms: Mapping[str, int] | None
    """SMs of a transfer beside another program's products, by its stage; None: as any."""
    deferred: Deferred | None
    """None: the weights' gradients are computed in the backward."""
    runs: Runs | None
    """None: nothing is recorded."""
    pool: ActivationPool | None = None
    """Where the rows go that are kept; only with a capacity, and if any are."""
    overflow: Tensor | None = None
    """0-d int32: becomes the most rows that a dispatch would have needed beyond its capacity, if that is
    more."""


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Products within the block are in the dtype of their operands."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # the context takes some ten microseconds to do nothing
    return torch.autocast(device_type, enabled=False)
