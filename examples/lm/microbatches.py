"""A step in microbatches: the forward of each beside the backward of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from moecomm.overlap import interleave


def forward_backward(
    loss_of: Callable[[Tensor], Tensor], parts: Sequence[Tensor], *, interleaved: bool
) -> Tensor:
    """The mean of the losses of equal parts, whose gradients are added up in the parameters.

    Interleaved, one part's rows are on their way while another one computes; else one part comes after the
    other, forward and backward.
    """
    share = 1 / len(parts)
    loss = loss_of(parts[0]) * share
    total = loss.detach()
    for following in parts[1:]:
        if interleaved:
            _, fresh = interleave(loss.backward, partial(loss_of, following))
        else:
            loss.backward()
            fresh = loss_of(following)
        loss = fresh * share
        total = total + loss.detach()
    loss.backward()
    return total
