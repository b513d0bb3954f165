"""Outputs of a cheap module that autograd does not keep for their consumer, but recomputes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm import InvalidArgument

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_SAME_VALUES = frozenset(("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
"""Nodes of autograd's graph whose result has the values of their input, perhaps in another dtype or shape."""


def saving_hooks() -> Hooks | None:
    """Returns the active saved_tensors_hooks, of which autograd calls only the innermost."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def require_unchanged(tensor: Tensor, version: int) -> None:
    """Raises RuntimeError, as autograd does, for a saved tensor that was changed in place afterwards."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} is at version "
            f"{version_of(tensor)}, expected version {version}"
        )


@contextlib.contextmanager
def recompute_outputs(
    make: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Tensor | Sequence[Tensor],
) -> Iterator[None]:
    """Makes autograd keep the inputs of a module in place of its outputs, for computations in the block.

        h = norm(x)
        with recompute_outputs(norm, (x,), h):
            y = ffn(h)

    When the block's backward needs `outputs`, or copies of them in another dtype or shape (which autocast
    makes), make(*inputs) recomputes them, without gradients and in the same autocast mode, once for all uses.
    The backward of `make` itself is that of the first call. So this is for a module whose backward needs its
    inputs and not its outputs: a norm, or products of narrow inputs with wide outputs.

    Args:
        make: a function of the inputs that returns the same bits each time, and draws no random numbers.
        inputs: tensors, which the graph keeps.
        outputs: the result of make(*inputs): a tensor, or several.

    Hooks that were active before (torch.autograd.graph.saved_tensors_hooks), such as those of
    torch.utils.checkpoint and save_on_cpu, see the inputs and all other tensors that the block saves. Results
    of other operations on the outputs are kept as usual, and so are outputs that are changed in place. Raises
    InvalidArgument in the backward if `make` returns tensors of other shapes or dtypes.
    """
    source = _Source(make, tuple(inputs), _as_tuple(outputs), saving_hooks())
    try:
        with torch.autograd.graph.saved_tensors_hooks(source.pack, source.unpack):
            yield
    finally:
        source.forget_outputs()


def _as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class _Again(NamedTuple):
    """A stand-in that autograd keeps for a tensor derived from outputs[number]."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...] | None
    """The strides of a view of the output's memory at `offset`; None: all values in order."""
    offset: int


class _Likeness(NamedTuple):
    """The properties that a recomputed output must share with the first."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


def _likeness(tensor: Tensor) -> _Likeness:
    return _Likeness(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class _Source:
    """The inputs and the function from which outputs are recomputed; `pack` and `unpack` are the hooks."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        around: Hooks | None,
    ) -> None:
        self._make, self._outputs, self._around = make, outputs, around
        self._likeness = [_likeness(each) for each in outputs]
        self._versions = [version_of(each) for each in outputs]
        self._inputs = [self._keep(each) for each in inputs]
        kind = outputs[0].device.type
        self._autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self._made: tuple[Tensor, ...] = ()
        self._users = self._left = 0

    def forget_outputs(self) -> None:
        """Releases the outputs, at the end of the block."""
        self._outputs = ()

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd keeps in place of a tensor."""
        found = self._find(tensor)
        if found is None:
            return self._keep(tensor)
        self._users += 1
        self._left = self._users
        return found

    def unpack(self, kept: Any) -> Tensor:
        """Returns the tensor for what `pack` has returned."""
        if not isinstance(kept, _Again):
            return self._restore(kept)
        if not self._made:
            self._made = self._compute()
        made = self._made[kept.number]
        self._left -= 1
        if self._left == 0:  # a graph kept for another backward recomputes them then
            self._made, self._left = (), self._users
        if kept.strides is not None:
            return made.as_strided(kept.shape, kept.strides, kept.offset)
        return made.to(kept.dtype).reshape(kept.shape)

    def _find(self, tensor: Tensor) -> _Again | None:
        """Returns how a tensor derives from an output; None if it does not."""
        if type(tensor) is not Tensor or not tensor.numel():
            return None
        memory = tensor.untyped_storage().data_ptr()
        for number, output in enumerate(self._outputs):
            if memory == output.untyped_storage().data_ptr() and tensor.dtype is output.dtype:
                if version_of(output) != self._versions[number]:
                    return None  # it was changed in place, which a recomputation would not repeat
                offset = int(tensor.storage_offset())
                return _Again(number, tensor.dtype, tensor.shape, tensor.stride(), offset)
        node = tensor.grad_fn
        while node is not None and node.name() in _SAME_VALUES:
            node, of_node = node.next_functions[0]
            for number, output in enumerate(self._outputs):
                same = node is output.grad_fn and of_node == output.output_nr
                whole = tensor.numel() == output.numel()
                unchanged = version_of(output) == self._versions[number]
                if same and whole and unchanged and tensor.is_contiguous() and output.is_contiguous():
                    return _Again(number, tensor.dtype, tensor.shape, None, 0)
        return None

    def _keep(self, tensor: Tensor) -> Any:
        if self._around is not None:
            return self._around[0](tensor)
        # A tensor with its graph would keep alive the node that holds it. Behind hooks torch does not compare
        # versions.
        return tensor if tensor.is_leaf else tensor.detach(), version_of(tensor)

    def _restore(self, kept: Any) -> Tensor:
        if self._around is not None:
            return self._around[1](kept)
        tensor, version = kept
        require_unchanged(tensor, version)
        return tensor

    def _compute(self) -> tuple[Tensor, ...]:
        inputs = [self._restore(each) for each in self._inputs]
        kind, enabled, dtype = self._autocast
        with torch.no_grad(), torch.autocast(kind, dtype, enabled=enabled):
            made = _as_tuple(self._make(*inputs))
        found = [_likeness(each) for each in made]
        if found != self._likeness:
            raise InvalidArgument(f"make returned {found}, must return what it did before: {self._likeness}")
        return made
