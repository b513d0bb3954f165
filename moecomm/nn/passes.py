"""Arguments and saved state of one MoE forward or backward."""

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
    """Weights of the local experts, (L, H, I) and (L, F, H), and of the shared ones, (H, I') and (F', H), if
    any."""

    w_in: Tensor
    w_out: Tensor
    shared_in: Tensor | None
    shared_out: Tensor | None


@dataclass
class Deferred:
    """Weight gradients of the experts that are still to be computed, oldest first: each function returns
    those of w_in and of w_out, or None."""

    pending: list[Callable[[], tuple[Tensor | None, Tensor | None]]] = field(default_factory=list)

    def run(self, w_in: nn.Parameter, w_out: nn.Parameter) -> None:
        """Computes all pending gradients and adds them to the parameters' `grad`. Raises InvalidArgument
        where the parameters have hooks, which would not run, or are sharded."""
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
    """Timelines of the last forward and backward that were recorded. Their results are not held here, since
    autograd's graph holds this object."""

    forward: Recorded | None = None
    backward: Recorded | None = None

    def timelines(self) -> dict[str, Timeline]:
        """Returns the timelines of the recorded runs, by the names "forward" and "backward". Waits for
        them."""
        runs = {"forward": self.forward, "backward": self.backward}
        return {name: recorded.timeline() for name, recorded in runs.items() if recorded is not None}


class Call(NamedTuple):
    """Arguments of a pass besides the tensors that have gradients."""

    comm: Communicator
    executor: Executor
    topk_idx_TK: Tensor
    capacity: int | None
    activation: str
    products: Products
    keep: Keep
    split: Split | None
    """The split of the SMs between transfers and products; None: products leave no SMs to transfers."""
    home_split: Split | None
    """The split of the SMs between the dispatch backward and the weight gradients of the first product, which
    overlap; None: no split."""
    in_turns_sms: Mapping[str, int] | None
    """SMs of a transfer beside another program's products, by its stage; None: as many as for any transfer.
    """
    deferred: Deferred | None
    """The list to which the computation of the weights' gradients is put off; None: they are computed in the
    backward."""
    runs: Runs | None
    """The object that gets the timelines; None: nothing is recorded."""
    pool: ActivationPool | None = None
    """The pool for the rows that are kept; only with a capacity, and only if rows are kept."""
    overflow: Tensor | None = None
    """0-d int32, raised to the most rows that a dispatch would have needed beyond its capacity."""


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Turns autocast off for the block, so that products are in the dtype of their operands."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # the context takes some ten microseconds to do nothing
    return torch.autocast(device_type, enabled=False)
