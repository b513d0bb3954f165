"""The tensors into which a CUDA dispatch receives its rows, and its state between sending and receiving."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moecomm.backends.base import DispatchCall
from moecomm.errors import OutOfMemory

Inputs = tuple[Tensor | None, ...]


class Outputs(NamedTuple):
    """The tensors into which a dispatch receives rows, in the order of the runtime's arguments."""

    tokens_PH: Tensor
    scales: Tensor | None
    weights: Tensor | None
    topk_idx_PK: Tensor | None
    rows_Q: Tensor | None
    """Rank layout: the row of each position in expert-major order."""
    weights_Q: Tensor | None

    def cut(self, rows: int, positions: int) -> None:
        """Keeps the first `rows` rows and `positions` positions. Resizes tensors, which keep their memory.
        Views would not do: where autograd records, they must not be changed in place."""
        for number, each in enumerate(self):
            if each is not None:
                each.resize_((rows if number < 4 else positions, *each.shape[1:]))

    def free(self) -> None:
        """Frees the tensors' memory, even if others hold them. For tensors that nothing was written to."""
        for each in self:
            if each is not None:
                each.untyped_storage().resize_(0)


class Begun(NamedTuple):
    """A dispatch after its first half, which sends the rows. `at_once`: a kernel that receives arriving rows
    into `outputs`, if they fit, was launched too."""

    call: DispatchCall
    blob: Tensor
    inputs: Inputs
    stream: int
    outputs: Outputs | None = None
    offered: tuple[int, int] = (0, 0)
    """Rows and positions of `outputs`."""
    at_once: bool = False
    in_one_call: bool = False
    """True if `dispatch` runs both halves: another thread may use the stream between them."""


def out_of_memory(shape: tuple[int, ...], dtype: torch.dtype, error: Exception) -> OutOfMemory:
    """Returns the error for a tensor that does not fit into memory."""
    needed = dtype.itemsize * math.prod(shape)
    return OutOfMemory(f"no device memory for {needed} bytes of {dtype} {shape}: {error}", needed=needed)
