"""The public face of the runtime: `Communicator`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from moecomm import ops
from moecomm.backends import CpuBackend, RawDispatch, available_devices
from moecomm.env import read_env
from moecomm.errors import CommunicatorClosed, InvalidArgument, MoecommError, Unsupported
from moecomm.memory import MemoryPlan, plan_memory, window_shape
from moecomm.rendezvous import Rendezvous
from moecomm.routing import check_dispatch, check_options, check_rows, check_weights, require_integer
from moecomm.types import DispatchOutput, Group, Handle, Layout, Work
from moecomm.version import __version__

_DEFAULT_TIMEOUT = 60.0
_ids = itertools.count()
Result = TypeVar("Result")


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return read_env().timeout or _DEFAULT_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
        raise InvalidArgument(f"timeout is {timeout!r}, expected seconds above 0 or a timedelta")
    return float(seconds)


def _check_sizes(size: int, num_experts: Any, hidden: Any, top_k: Any, max_tokens: Any, dtype: Any) -> None:
    """Raises InvalidArgument for sizes that no communicator of `size` ranks can have."""
    window_shape(ranks=size, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype)
    require_integer("num_experts", num_experts, 1)
    if num_experts % size != 0:
        raise InvalidArgument(
            f"num_experts is {num_experts}, expected a multiple of the {size} ranks of the group"
        )
    if top_k > num_experts:
        raise InvalidArgument(f"top_k is {top_k}, expected at most num_experts = {num_experts}")
    rows = size * max_tokens * min(top_k, num_experts // size)
    if rows >= 2**31:
        raise InvalidArgument(
            f"max_tokens is {max_tokens}: a rank could get {rows} rows, expected fewer than {2**31}; "
            "lower max_tokens"
        )


def _check_device(device: Any) -> None:
    if device is not None and torch.device(device).type not in available_devices():
        raise Unsupported(f"device is {device}, this version serves {', '.join(available_devices())}")


def _check_wire(wire: Any) -> None:
    if wire is not None:
        raise Unsupported(f"wire is {wire!r}: rows travel in their own dtype in this version; pass wire=None")


def _check_nodes(size: int, ranks_per_node: Any) -> None:
    if ranks_per_node is None:
        ranks_per_node = read_env().ranks_per_node
    if ranks_per_node is None:
        return
    require_integer("ranks_per_node", ranks_per_node, 1)
    if ranks_per_node < size:
        raise Unsupported(
            f"ranks_per_node is {ranks_per_node} for {size} ranks: nodes reach each other over a fabric "
            "transport, which this version does not have"
        )


class Communicator:
    """Dispatch and combine for expert parallelism between the ranks of `group`.

    All ranks build it, and call its operations, together and in the same order. Expert e lives on rank e //
    L with L = num_experts / ranks. The algorithms, signals and memory are described in docs/.

    Args:
        group: a torch.distributed ProcessGroup; None is the default group, or this process alone if there is
            none.
        num_experts: E, a multiple of the ranks.
        hidden: H, elements of a row; a row has a multiple of 16 bytes.
        top_k: K, columns of `topk_idx`; tokens with fewer experts fill up with -1.
        max_tokens: the most tokens that a rank brings to one call.
        dtype: of the rows: float32, bfloat16, float16 or float64.
        wire: format in which rows travel; None is `dtype`, the only one of this version.
        device: where the tensors are; None is the first of `moecomm.available_devices()`, now "cpu".
        ranks_per_node: ranks that share memory; None finds out.
        num_sms: threads that a rank copies and sums with; None: MOECOMM_THREADS, or the cores divided by the
            ranks.
        timeout: seconds (or timedelta) that one wait for peers may take; None: MOECOMM_TIMEOUT, or 60.

    Raises:
        InvalidArgument, MismatchedArguments: on all ranks, if one rank's arguments are bad or differ.
        OutOfMemory: /dev/shm has no room for the windows; nothing was allocated.
        PeerTimeout: a rank of the group did not come.
        Unsupported: a device, wire format or placement of ranks that this version can't serve.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: str | None = None,
        device: torch.device | str | None = None,
        ranks_per_node: int | None = None,
        num_sms: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        self._backend: CpuBackend | None = None
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        error: MoecommError | None = None
        seconds, threads = _DEFAULT_TIMEOUT, None
        try:
            seconds = _seconds(timeout)
            size = 1 if group is None else dist.get_world_size(group)
            _check_sizes(size, num_experts, hidden, top_k, max_tokens, dtype)
            _check_device(device)
            _check_nodes(size, ranks_per_node)
            threads = read_env().threads if num_sms is None else require_integer("num_sms", num_sms, 1, 4096)
            _check_wire(wire)
        except MoecommError as failed:
            error = failed
        meeting = Rendezvous(group, seconds)
        arguments = {
            "num_experts": num_experts,
            "hidden": hidden,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "dtype": str(dtype),
            "wire": wire,
            "moecomm version": __version__,
        }
        backend = CpuBackend(meeting, arguments, error, dtype, threads)
        self.rank: int = meeting.rank
        """This rank within the group."""
        self.size: int = meeting.size
        """Ranks of the group."""
        self.num_experts, self.hidden, self.top_k, self.max_tokens = num_experts, hidden, top_k, max_tokens
        self.num_local_experts: int = num_experts // meeting.size
        """L: this rank has the experts [rank * L, (rank + 1) * L)."""
        self.dtype, self.device = dtype, backend.device
        self.memory: MemoryPlan = backend.memory
        """Size and sections of this rank's window."""
        self.timeout = seconds
        self._id = next(_ids)
        self._backend = backend

    @staticmethod
    def memory_plan(
        *,
        ranks: int,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: str | None = None,
        ranks_per_node: int | None = None,
    ) -> MemoryPlan:
        """The memory that a communicator of these arguments would take on each rank, without building it;
        print it.

        Raises InvalidArgument as the constructor does.
        """
        _check_sizes(ranks, num_experts, hidden, top_k, max_tokens, dtype)
        _check_nodes(ranks, ranks_per_node)
        _check_wire(wire)
        shape = window_shape(ranks=ranks, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype)
        return plan_memory(shape, ranks)

    # -- operations ------------------------------------------------------------------------------------

    @overload
    def dispatch(
        self,
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        async_op: Literal[False] = False,
    ) -> DispatchOutput: ...

    @overload
    def dispatch(
        self,
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        async_op: Literal[True],
    ) -> Work[DispatchOutput]: ...

    def dispatch(
        self,
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        async_op: bool = False,
    ) -> DispatchOutput | Work[DispatchOutput]:
        """Brings every token to the ranks of its experts.

        Differentiable in `x_TH` and `topk_weights_TK`. A call with the same `topk_idx` as an earlier one on
        all ranks (a forward that is computed again for the backward) finds the plan of that one.

        Args:
            x_TH: (T, H) rows in the communicator's dtype, T at most max_tokens, different on each rank as it
                likes.
            topk_idx_TK: (T, K) int32 or int64 expert ids, -1 for none; no id twice in a token.
            topk_weights_TK: (T, K) routing weights that travel along; float32 (float64 for float64 rows).
            layout: "expert": a row a (token, local expert), grouped by expert. "rank": a row a (token, rank).
            alignment: each expert's group gets a multiple of this many rows, zero where no token is.
            capacity: rows of the output. None: as many as there are. With a number, rows past it are left
                out and reported: `overflow`, and CapacityExceeded from `check()` or from the next dispatch.
            async_op: return a Work at once; its `wait()` gives the DispatchOutput.

        Raises:
            InvalidArgument, InvalidRouting, MismatchedArguments: on all ranks; nothing was exchanged.
            PeerTimeout, PeerLost: the communicator can't be used any more.
            CapacityExceeded: an earlier dispatch left rows out; this one did not run.
            CommunicatorClosed: after `close()`.
        """
        backend = self._open()

        def execute() -> RawDispatch:
            backend.check()  # before the arguments: every rank sees a passed capacity, and none may go on
            try:
                checked = check_options(layout, alignment, capacity)
                check_dispatch(
                    x_TH,
                    topk_idx_TK,
                    topk_weights_TK,
                    hidden=self.hidden,
                    top_k=self.top_k,
                    max_tokens=self.max_tokens,
                    dtype=self.dtype,
                    device=self.device,
                )
            except MoecommError as error:
                backend.fail(error)
            weights = None if topk_weights_TK is None else topk_weights_TK.detach().contiguous()
            return backend.dispatch(x_TH.detach().contiguous(), topk_idx_TK.contiguous(), weights, *checked)

        def finish(raw: RawDispatch) -> DispatchOutput:
            tokens_PH, weights = ops.dispatch(x_TH, topk_weights_TK, raw, backend)
            return DispatchOutput(
                tokens=tokens_PH,
                weights=weights,
                topk_idx=raw.topk_idx_PK,
                tokens_per_expert=raw.tokens_per_expert_L,
                offsets=raw.offsets,
                overflow=raw.overflow,
                handle=Handle(
                    plan=raw.plan,
                    owner=self._id,
                    layout=layout,
                    num_tokens=raw.plan.tokens,
                    num_rows=raw.plan.rows,
                ),
            )

        return self._run(backend, execute, finish, async_op)

    @overload
    def combine(
        self,
        rows_PH: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        rows_PH: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        async_op: Literal[True],
    ) -> Work[torch.Tensor]: ...

    def combine(
        self,
        rows_PH: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Work[torch.Tensor]:
        """Brings rows back to the tokens of the dispatch that made `handle`, and sums them there.

        Each rank sums its rows of a token in the order of k, times `weights` if given, in float32 (float64
        for float64 rows), and rounds once to the dtype; the token's home sums these partial rows by
        ascending rank in float32 and rounds once. Differentiable in `rows_PH` and `weights`.

        Args:
            rows_PH: (P, H) in the communicator's dtype and in the order of the dispatch's output.
            handle: of that dispatch.
            weights: (P,) factors, float32 (float64 for float64 rows); for the expert layout this is
                `DispatchOutput.weights`.
            async_op: return a Work at once; its `wait()` gives the result.

        Returns:
            (T, H) in the dtype; zero for tokens without experts.

        Raises:
            InvalidArgument, MismatchedArguments: on all ranks; nothing was exchanged.
            PeerTimeout, PeerLost: the communicator can't be used any more.
            CommunicatorClosed: after `close()`.
        """
        backend = self._open()

        def execute() -> torch.Tensor:
            try:
                self._check_handle(handle)
                check_rows("rows", rows_PH, handle.num_rows, self.hidden, self.dtype, self.device)
                if weights is not None:
                    check_weights("weights", weights, (handle.num_rows,), "(P,)", self.dtype, self.device)
            except MoecommError as error:
                backend.fail(error)
            scales_P = None if weights is None else weights.detach().contiguous()
            y_TH, _ = backend.combine(handle.plan, rows_PH.detach().contiguous(), scales_P, None)
            assert y_TH is not None
            return y_TH

        def finish(y_TH: torch.Tensor) -> torch.Tensor:
            return ops.combine(rows_PH, weights, y_TH, handle.plan, backend)

        return self._run(backend, execute, finish, async_op)

    def empty_input(self, num_tokens: int) -> torch.Tensor:
        """An uninitialised (num_tokens, H) tensor inside the window: a dispatch of it need not copy it there
        first.

        At most two such tensors can be alive at a time; their memory is taken at the first call. Fill it,
        dispatch it, let go of it, and ask for another: asking waits until all ranks have read what was there
        before. Writing to one that was dispatched races with ranks that are still reading.

        Raises:
            InvalidArgument: more than max_tokens.
            OutOfMemory: two are alive already, or /dev/shm is full.
        """
        backend = self._open()
        require_integer("num_tokens", num_tokens, 0, self.max_tokens)
        return backend.order.run(lambda: backend.empty_input(num_tokens))

    # -- state -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises CapacityExceeded, once, if a dispatch since the last check left rows out on any rank, and
        PeerTimeout or PeerLost if that has ended the communicator. All ranks come to the same verdict
        without talking."""
        backend = self._open()
        backend.order.run(backend.check)

    def stats(self) -> dict[str, float]:
        """Counters since construction or `reset_stats()`.

        dispatch_calls, dispatch_seconds, combine_calls, combine_seconds (of each kind of transfer, forward
        and backward), wait_seconds (of both, waiting for peers), rows_in (tokens brought), rows_out (rows
        got), bytes_wire (row bytes that crossed between ranks, counted at the owner of the experts),
        plans_made, plans_reused.
        """
        return self._open().stats()

    def reset_stats(self) -> None:
        """Sets all counters of `stats()` to zero."""
        self._open().reset_stats()

    def close(self) -> None:
        """Waits for operations under way and lets go of the window. Peers that still wait for this rank get
        PeerLost.

        Calling it again does nothing. Leaving a `with` block and garbage collection do the same; the
        backward of earlier calls needs the communicator open.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._backend is None:
            return "Communicator(closed)"
        return (
            f"Communicator(rank {self.rank} of {self.size}, {self.num_experts} experts, top-{self.top_k}, "
            f"hidden {self.hidden}, {self.dtype}, at most {self.max_tokens} tokens, {self._backend})"
        )

    def _open(self) -> CpuBackend:
        if self._backend is None:
            raise CommunicatorClosed("the communicator is closed")
        return self._backend

    def _check_handle(self, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise InvalidArgument(f"handle is {type(handle).__name__}, expected the handle of a dispatch")
        if handle.owner != self._id:
            raise InvalidArgument("handle belongs to another communicator")

    @staticmethod
    def _run(
        backend: CpuBackend, execute: Callable[[], Any], finish: Callable[[Any], Result], async_op: bool
    ) -> Result | Work[Result]:
        if not async_op:
            return finish(backend.order.run(execute))
        future = backend.order.submit(execute)
        return Work(lambda: finish(future.result()), future.done)
