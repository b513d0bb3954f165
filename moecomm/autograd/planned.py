"""Operations along the plan of an earlier dispatch: combine, redispatch, and the backward of dispatch."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from moecomm.arguments import check_rows, check_weights, check_weights_of_rows
from moecomm.autograd import functions as ops
from moecomm.backends.opened import _Opened
from moecomm.compiled import break_graph, outside_graph
from moecomm.errors import InvalidArgument
from moecomm.types import Handle, Work

Array = Any
"""A torch.Tensor, or an array that shares its memory by DLPack or `__cuda_array_interface__`."""


class _Planned(_Opened):
    """A base class of `Communicator`: the operations along the plan of an earlier dispatch."""

    dtype: torch.dtype
    hidden: int
    top_k: int
    _id: int

    @overload
    def combine(
        self,
        rows_PH: Array,
        handle: Handle,
        *,
        weights: Array | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self, rows_PH: Array, handle: Handle, *, weights: Array | None = None, async_op: Literal[True]
    ) -> Work[torch.Tensor]: ...

    def combine(
        self, rows_PH: Array, handle: Handle, *, weights: Array | None = None, async_op: bool = False
    ) -> torch.Tensor | Work[torch.Tensor]:
        """Sums the rows of each token of the dispatch that made `handle`, on the token's own rank.

        Each rank sums its rows of a token in the order of k, times `weights` if given, in float32 (float64
        for float64 rows), and rounds once to the dtype. The rank that brought the token adds these partial
        sums by ascending rank in float32 and rounds once. Differentiable in `rows_PH` and `weights`.

        Args:
            rows_PH: (P, H) in the communicator's dtype and in the order of the dispatch's output.
            handle: the handle of that dispatch.
            weights: (P,) factors, float32 (float64 for float64 rows); for the expert layout this is
                `DispatchOutput.weights`.
            async_op: return a Work at once; its `wait()` gives the result. On CUDA as for `dispatch`.

        Returns:
            (T, H) in the communicator's dtype; zero for tokens without experts.

        Raises:
            InvalidArgument, MismatchedArguments: on all ranks; nothing was exchanged. (CUDA: the rank whose
                tensors are wrong raises here, other ranks in `check()`.)
            PeerTimeout, PeerLost: the communicator can't be used any more.
            OutOfMemory: no memory for the result (CUDA: other ranks raise it in `check()`).
            CommunicatorClosed: after `close()`.
        """
        if torch.compiler.is_compiling():
            break_graph("a combine runs outside of the graphs of torch.compile")
        return self._combine(rows_PH, handle, weights, async_op)

    def _check_combine(self, rows: Any, handle: Any, weights: Any) -> None:
        self._check_handle(handle)
        check_rows("rows", rows, handle.num_rows, self.hidden, self.dtype, self.device)
        if weights is not None:
            check_weights("weights", weights, (handle.num_rows,), "(P,)", self.dtype, self.device)

    @outside_graph
    def _combine(
        self, rows_PH: Any, handle: Handle, weights: Any, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        backend = self._open()
        rows, factors = self._shared(backend, rows_PH, weights)

        def execute() -> torch.Tensor:
            self._check_combine(rows, handle, factors)
            y_TH, _ = backend.combine(handle.plan, rows, factors, None, forward=True)
            assert y_TH is not None
            return y_TH

        def begin() -> Any:
            self._check_combine(rows, handle, factors)
            return backend.begin_combine(handle.plan, rows, factors)

        def finish(y_TH: torch.Tensor) -> torch.Tensor:
            return ops.combine(rows, factors, y_TH, handle.plan, backend)

        name, inputs = "moecomm combine", (rows, factors)
        if not async_op:
            return finish(backend.run(name, execute))
        if isinstance(handle, Handle) and backend.splits(handle.num_tokens):
            return backend.launch(name, begin, backend.finish_combine, finish, inputs)
        return backend.launch(name, execute, None, finish, inputs)

    @outside_graph
    def combine_weighted(self, rows_PH: Array, handle: Handle, topk_weights_TK: Array) -> torch.Tensor:
        """Combines with weights that did not come with the dispatch: each rank gives the weights of its own
        tokens, which travel with the operation. The result is bit for bit that of `combine` with these
        weights, had a dispatch brought them. Not differentiable; breaks a graph of torch.compile.

        For few tokens on GPUs of one node, where `weighs_tokens` is True.

        Args:
            rows_PH: (P, H) in the communicator's dtype and in the order of the dispatch's output.
            handle: the handle of a dispatch in the expert layout.
            topk_weights_TK: (T, K) float32 weights of this rank's tokens.

        Returns:
            (T, H) in rows_PH's dtype; zero for tokens without experts.

        Raises:
            Unsupported: `weighs_tokens` is False.
            As combine.
        """
        backend = self._open()
        rows, weights = self._shared(backend, rows_PH, topk_weights_TK)

        def execute() -> torch.Tensor:
            self._check_combine(rows, handle, None)
            if handle.layout != "expert":
                raise InvalidArgument('handle is of a dispatch with layout="rank", expected "expert"')
            shape = (handle.num_tokens, self.top_k)
            check_weights("topk_weights", weights, shape, "(T, K)", self.dtype, self.device)
            if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
                raise InvalidArgument(
                    "rows or topk_weights require gradients, expected torch.no_grad(): dispatch the weights, "
                    "and pass those that it returns to combine"
                )
            return backend.combine_weighted(handle.plan, rows, weights)

        return backend.run("moecomm combine", execute)

    @outside_graph
    def redispatch(self, x_TH: Array, handle: Handle, *, gradients: bool = False) -> torch.Tensor:
        """Sends other rows along the plan of an earlier dispatch: no new plan, and no wait on the host.

        The backward of a combine sends its result's gradient in this way. Call this to schedule a backward
        yourself, or in a backward that needs rows which the forward did not keep. Differentiable in `x_TH`.
        Breaks a graph of torch.compile.

        Args:
            x_TH: (T, H) rows in the communicator's dtype, T as in that dispatch.
            handle: the handle of that dispatch.
            gradients: True: rows travel in the communicator's `gradient_wire`; False: in its dtype, whatever
                `wire` is. All ranks give the same value.

        Returns:
            (P, H) rows in the communicator's dtype, in the order of that dispatch's output.

        Raises:
            As combine.
        """
        backend = self._open()
        (x,) = self._shared(backend, x_TH)

        def execute() -> torch.Tensor:
            self._check_handle(handle)
            check_rows("x", x, handle.num_tokens, self.hidden, self.dtype, self.device)
            rows_PH, _ = backend.redispatch(handle.plan, x, None, None, gradients)
            return rows_PH

        rows_PH = backend.run("moecomm redispatch", execute)
        return ops.redispatch(x, rows_PH, handle.plan, backend)

    @outside_graph
    def dispatch_backward(
        self, grad_rows_PH: Array, handle: Handle, *, grad_weights: Array | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the gradients of a dispatch's `x` and `topk_weights`, given the gradients of the output's
        `tokens` and `weights`. Autograd calls this; call it yourself only to schedule a backward. Not
        differentiable. Breaks a graph of torch.compile.

        Args:
            grad_rows_PH: (P, H) in the communicator's dtype.
            handle: the handle of that dispatch.
            grad_weights: gradient of the output's `weights`, in the shape of `weights`; None if not needed.

        Returns:
            (T, H) in the communicator's dtype, summed as in a combine; and (T, K) of the weights' dtype, zero
            where a token names no expert, or None without `grad_weights`.

        Raises:
            As combine.
        """
        backend = self._open()
        rows, weights = self._shared(backend, grad_rows_PH, grad_weights)

        def execute() -> tuple[torch.Tensor, torch.Tensor | None]:
            self._check_handle(handle)
            check_rows("grad_rows", rows, handle.num_rows, self.hidden, self.dtype, self.device)
            if weights is not None:
                given = weights, handle, self.top_k, self.dtype, self.device
                check_weights_of_rows("grad_weights", *given)
            grad_x_TH, grad_weights_TK = backend.combine(handle.plan, rows, None, weights)
            assert grad_x_TH is not None
            return grad_x_TH, grad_weights_TK

        return backend.run("moecomm dispatch backward", execute)

    def _check_handle(self, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise InvalidArgument(f"handle is {type(handle).__name__}, expected the handle of a dispatch")
        if handle.owner != self._id:
            raise InvalidArgument("handle belongs to another communicator")
