"""The public interface of the runtime: `Communicator`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

import moecomm._C as _C
from moecomm.arguments import check_dispatch, check_options, check_wire_options, most_alignment
from moecomm.autograd import functions as ops
from moecomm.autograd.planned import Array, _Planned
from moecomm.backends.base import Backend, DispatchCall, RawDispatch
from moecomm.backends.cpu import CpuBackend
from moecomm.backends.cuda import CudaBackend
from moecomm.compiled import break_graph, for_trace
from moecomm.env import Env, read_env
from moecomm.errors import InvalidArgument, MoecommError, announced_as
from moecomm.setup import checks
from moecomm.setup.devices import choose_device
from moecomm.setup.memory_plan import (
    MemoryPlan,
    device_shape,
    plan_device_memory,
    plan_memory,
    whole_sources,
    window_shape,
)
from moecomm.setup.rendezvous import Rendezvous
from moecomm.types import (
    ALONE,
    AnyGroup,
    DispatchOutput,
    Group,
    GroupReference,
    Handle,
    Layout,
    Work,
    as_group,
    build,
)

_numbers = itertools.count()


class Communicator(_Planned):
    """Dispatch and combine for expert parallelism between the ranks of `group`.

    All ranks build it, and call its operations, together and in the same order. Expert e lives on rank e //
    L with L = num_experts / ranks. The algorithms, signals and memory are described in docs/.

    Args:
        group: a torch.distributed ProcessGroup, or a DeviceMesh of one dimension; None is the default group,
            or this process alone if there is none.
        num_experts: E, a multiple of the number of ranks.
        hidden: H, elements of a row; a row has a multiple of 16 bytes.
        top_k: K, columns of `topk_idx`; a token with fewer experts has -1 in the others.
        max_tokens: the most tokens that a rank brings to one call.
        dtype: of the rows: float32, bfloat16, float16, or float64 on the CPU.
        wire: format in which the rows of a dispatch travel: None (`dtype`), or on CUDA "fp8" or "mxfp8"
            (hidden a multiple of 16), which docs/data_formats.md describes.
        combine_wire: format in which the sums of a combine travel back to the tokens' ranks, which add them
            in float32: None (`dtype`), or on CUDA "fp8" (hidden a multiple of 16). The backward of dispatch,
            which is a combine, travels in `dtype`. On one node a combine takes longer so; that is warned of.
        gradient_wire: format in which gradients travel to the experts, in the backward of a combine without
            weights and in `redispatch(gradients=True)`: None (`dtype`), or on CUDA "fp8" or "mxfp8".
        device: where the tensors are; None is the current CUDA device, or the CPU if torch finds no GPU. Each
            rank needs its own GPU, of compute capability 9.0 or 10.x.
        ranks_per_node: ranks that share memory; None: the ranks of each host. A smaller number emulates
            several nodes on a host. Ranks of different nodes reach each other over libfabric (docs/nodes.md);
            rows of CUDA tensors pass through pinned host memory there.
        num_sms: CUDA: SMs that an operation may use, at least 2 (with several nodes at least 3 are used; an
            eighth of them, at most 12, relay rows); None: three quarters of the GPU's SMs. The SMs of all
            communicators used on several streams at once must fit the GPU. CPU: threads with which a rank
            copies and sums; None: MOECOMM_THREADS, or the cores divided by the ranks.
        timeout: seconds (or timedelta) that one wait for peers may take; None: MOECOMM_TIMEOUT. Without
            either it is 60 s, but 1800 s for a peer that lives and has not begun the operation, for example
            because it saves a checkpoint or compiles (docs/errors.md).

    On CUDA an operation is put on the caller's current stream, after the communicator's previous operation,
    and the host goes on at once; only a dispatch without `capacity` waits on the host, for its row count.
    That wait and `check()` raise errors that the device finds (bad ids, arguments that differ, an exceeded
    capacity, a lost peer); if the error ended the communicator, every later call raises it too. The output of
    a failed operation has empty groups and unspecified rows. In a CUDA graph capture `capacity` is needed,
    and the communicator has to stay open as long as the graph is replayed; the caller orders replays and
    other operations of the same communicator.

    Raises:
        InvalidArgument, MismatchedArguments: on all ranks, if one rank's arguments are bad or differ.
        OutOfMemory: /dev/shm (CUDA: a GPU) has no room for the windows, or the system has no more threads for
            a rank; nothing was allocated.
        PeerTimeout: a rank of the group did not take part.
        Unsupported: a device, dtype, wire format or placement of ranks that this version can't serve.

    Attributes:
        rank: this rank within the group.
        size: ranks of the group.
        num_local_experts: L: this rank has the experts [rank * L, (rank + 1) * L).
        ranks_per_node: ranks that share memory.
        nodes: nodes of the group; node n has the ranks [n * ranks_per_node, (n + 1) * ranks_per_node).
        network_lanes: endpoints by which this rank reaches other nodes (docs/nodes.md); 0 on one node.
        memory: size and sections of this rank's window.
        num_sms: SMs that an operation holds while it runs; on the CPU, its threads.
        weighs_tokens: whether `combine_weighted` is possible.
    """

    def __init__(
        self,
        group: AnyGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: str | None = None,
        combine_wire: str | None = None,
        gradient_wire: str | None = None,
        device: torch.device | str | None = None,
        ranks_per_node: int | None = None,
        num_sms: int | None = None,
        timeout: float | timedelta | None = None,
        _alike: dict[str, str] | None = None,
        _error: MoecommError | None = None,
    ) -> None:
        self._backend: Backend | None = None
        alone = group is ALONE
        group = None if alone else as_group(group)
        if group is None and not alone and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        error = _error  # that a layer has found in its own arguments
        seconds, place, env = checks.DEFAULT_TIMEOUT, torch.device("cpu"), Env()
        rendezvous = Rendezvous(group, seconds)
        size = rendezvous.size
        try:
            rendezvous.timeout = seconds = checks.timeout_seconds(timeout)
            rendezvous.absence = checks.absence_seconds(timeout)
            checks.check_sizes(size, num_experts, hidden, top_k, max_tokens, dtype)
            place = choose_device(device)
            ranks_per_node = checks.check_ranks_per_node(size, ranks_per_node)
            env = read_env()
            num_sms = checks.check_num_sms(num_sms, place)
            checks.check_formats(place, hidden, dtype, wire, combine_wire, gradient_wire)
        except Exception as failed:
            error = error or announced_as(failed)
        arguments = {
            "num_experts": num_experts,
            "hidden": hidden,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "dtype": str(dtype),
            "wire": wire,
            "combine_wire": combine_wire,
            "gradient_wire": gradient_wire,
            "device": place.type,
            "ranks_per_node": ranks_per_node,
            "MOECOMM_FIRST_EPOCH": env.first_epoch or 1,
            "MOECOMM_WHOLE_SOURCES": whole_sources(env),
            **(_alike or {}),  # arguments that a layer compares between its ranks, by name
        }
        try:
            with rendezvous:
                backend: Backend
                if place.type == "cuda":
                    backend = CudaBackend(place, rendezvous, arguments, error, dtype, num_sms)
                else:
                    backend = CpuBackend(rendezvous, arguments, error, dtype, num_sms)
        finally:
            del error, _error  # an error's traceback has this frame
        self._group = GroupReference(group)
        self.rank: int = rendezvous.rank
        self.size: int = rendezvous.size
        self.num_experts, self.hidden, self.top_k, self.max_tokens = num_experts, hidden, top_k, max_tokens
        self.num_local_experts: int = num_experts // rendezvous.size
        self.ranks_per_node: int = backend.nodes.ranks_per_node
        self.nodes: int = backend.nodes.nodes
        self.network_lanes: int = backend.network_lanes
        self.dtype, self.device = dtype, backend.device
        self.wire, self.combine_wire, self.gradient_wire = wire, combine_wire, gradient_wire
        self.memory: MemoryPlan = backend.memory
        self.timeout = seconds
        self.num_sms: int = backend.num_sms
        self.weighs_tokens: bool = backend.weighs_tokens
        local, most_tokens = self.num_local_experts, self.size * max_tokens
        most_experts = min(top_k, local)  # of a token on one rank
        largest = most_alignment(most_tokens * most_experts, local)
        self._limits = (most_experts, largest, local, most_tokens)  # for check_options
        self._expected = (hidden, top_k, max_tokens, dtype, backend.device)
        self._id = next(_numbers)  # by which a handle knows its communicator
        self._begun: object = None  # the dispatch that begin_dispatch has sent and that was not received yet
        self._layers = 0  # number of layers built with this communicator
        self._backend = backend
        if combine_wire is not None and self.nodes == 1 and self.rank == 0:
            warnings.warn(
                f"combine_wire is {combine_wire!r}, and all ranks are on one node, where a combine takes "
                "longer with it (docs/data_formats.md): it is for networks between nodes",
                stacklevel=2,
            )

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
        combine_wire: str | None = None,
        gradient_wire: str | None = None,
        device: torch.device | str | None = None,
        ranks_per_node: int | None = None,
    ) -> MemoryPlan:
        """Returns the memory that a communicator of these arguments would take on each rank, without building
        it; print() shows a table.

        `device` has the default of the constructor; "cuda" needs no GPU here, only a build with the CUDA
        part. Raises InvalidArgument and Unsupported like the constructor.
        """
        checks.check_sizes(ranks, num_experts, hidden, top_k, max_tokens, dtype)
        ranks_per_node = checks.check_ranks_per_node(ranks, ranks_per_node) or ranks
        can_plan_cuda = device is not None and hasattr(_C, "device_window_sections")
        if can_plan_cuda and str(device).partition(":")[0] == "cuda":
            place = torch.device("cuda")
        else:
            place = choose_device(device)
        checks.check_formats(place, hidden, dtype, wire, combine_wire, gradient_wire)
        sizes: dict[str, Any] = {
            "ranks": ranks,
            "top_k": top_k,
            "hidden": hidden,
            "max_tokens": max_tokens,
            "dtype": dtype,
            "ranks_per_node": ranks_per_node,
        }
        if place.type != "cuda":
            return plan_memory(window_shape(**sizes), ranks_per_node)
        sources = whole_sources(read_env())
        shape = device_shape(**sizes, num_experts=num_experts, wire=wire, whole_sources=sources)
        return plan_device_memory(shape, ranks_per_node)

    # -- operations ------------------------------------------------------------------------------------

    @overload
    def dispatch(
        self,
        x_TH: Array | tuple[Array, Array],
        topk_idx_TK: Array,
        topk_weights_TK: Array | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        expert_capacity: int | None = None,
        dequantize: bool = True,
        host_counts: bool = False,
        async_op: Literal[False] = False,
        _layer: Any = None,
    ) -> DispatchOutput: ...

    @overload
    def dispatch(
        self,
        x_TH: Array | tuple[Array, Array],
        topk_idx_TK: Array,
        topk_weights_TK: Array | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        expert_capacity: int | None = None,
        dequantize: bool = True,
        host_counts: bool = False,
        async_op: Literal[True],
        _layer: Any = None,
    ) -> Work[DispatchOutput]: ...

    def dispatch(
        self,
        x_TH: Array | tuple[Array, Array],
        topk_idx_TK: Array,
        topk_weights_TK: Array | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        expert_capacity: int | None = None,
        dequantize: bool = True,
        host_counts: bool = False,
        async_op: bool = False,
        _layer: Any = None,
    ) -> DispatchOutput | Work[DispatchOutput]:
        """Brings every token to the ranks of its experts.

        Differentiable in `x_TH` and `topk_weights_TK`. A tensor may also be an array of another library that
        can share its memory (DLPack, `__cuda_array_interface__`). Under torch.compile a call breaks the graph
        unless it has a capacity, the expert layout, no pair as x, and no other option but alignment.

        CPU: a call reuses the plan of an earlier call if every rank brings the `topk_idx` that it brought
        then, as when a forward is recomputed for the backward.

        CUDA: without a capacity rows may be received before the host knows their number; the output's tensors
        can then have memory for more rows (docs/memory.md, "Outputs").

        Args:
            x_TH: (T, H) rows in the communicator's dtype, T at most max_tokens; ranks may have different T.
                With wire="fp8" or "mxfp8" also a pair, which has no gradient: data (T, H) float8_e4m3fn and
                scales, with "fp8" (T, ceil(H / 128)) float32, with "mxfp8" (T, ceil(H / 32)) float8_e8m0fnu.
            topk_idx_TK: (T, K) int32 or int64 expert ids, -1 for none; no id twice in a token.
            topk_weights_TK: (T, K) routing weights that travel along; float32 (float64 for float64 rows).
            layout: "expert": one row per (token, local expert), grouped by expert. "rank": one row per
                (token, rank), and an index of them by expert (DispatchOutput.expert_rows).
            alignment: each expert's group gets a multiple of this many rows; rows without a token are zero.
                At most 2**20, and less if a rank could otherwise have 2**31 rows.
            capacity: rows of the output. None: as many as arrive. With a number, rows past it are left out
                and reported: `overflow`, and CapacityExceeded from `check()` or from the next dispatch (CUDA:
                the next one without a capacity).
            expert_capacity: layout="expert": every expert's group has this number of rows, at least R *
                max_tokens, so that any routing fits: expert l has the rows from l * expert_capacity on, the
                first `tokens_per_expert[l]` of which are tokens, and the others unspecified. The capacity is
                then L * expert_capacity, and the host waits for nothing.
                layout="rank", with a capacity: positions of `expert_rows`; further ones are left out and
                reported like rows. None: min(K, L) times the capacity, which suffices while all rows fit.
                Positions of left-out rows count too, so positions of rows that fit may be left out.
            dequantize: with wire="fp8" or "mxfp8", False returns the rows in the wire format: `tokens` in
                float8_e4m3fn and `scales`. The result is then not differentiable.
            host_counts: return the rows of each local expert as a list, too (`DispatchOutput.host_counts`);
                for a dispatch without a capacity, whose number of rows the host waits for anyway.
            async_op: return a Work at once; its `wait()` gives the DispatchOutput. On CUDA the operation runs
                on `stream`, after the present work of the caller's current stream. Without a capacity, or if
                tokens are few (up to 1024 on one node), rows are sent at once and received by `wait()` or
                the next operation, so that no SM waits for rows meanwhile.

        Raises:
            InvalidArgument, InvalidRouting, MismatchedArguments: on all ranks; nothing was exchanged. (CUDA,
                with a capacity: only the rank whose tensors have the wrong shape, dtype or device raises them
                here; `check()` raises the other errors.)
            PeerTimeout, PeerLost: the communicator can't be used any more.
            CapacityExceeded: an earlier dispatch left rows out; this one did not run.
            OutOfMemory: no memory for the output; other ranks go on.
            CommunicatorClosed: after `close()`.
        """
        tensors: tuple[Any, Any, Any] = (x_TH, topk_idx_TK, topk_weights_TK)
        options = (layout, alignment, capacity, expert_capacity)
        if not torch.compiler.is_compiling():
            return self._dispatch(tensors, options, dequantize, host_counts, async_op, _layer)
        break_graph("a dispatch runs outside of the graphs of torch.compile")
        return self._dispatch_outside_graph(tensors, options, dequantize, host_counts, async_op, _layer)

    def _check_dispatch(self, x: Any, x_scales: Any, ids: Any, weights: Any, dequantize: Any) -> None:
        check_wire_options(self.wire, dequantize, x_scales)
        check_dispatch(x, ids, weights, *self._expected, x_scales=x_scales, wire=self.wire)

    def _dispatch(
        self,
        tensors: tuple[Any, Any, Any],
        options: tuple[Layout, int, int | None, int | None],
        dequantize: bool,
        host_counts: bool,
        async_op: bool,
        layer: Any,
    ) -> DispatchOutput | Work[DispatchOutput]:
        backend, caller = self._open(), 0 if layer is None else layer._caller
        (x_TH, *others), (layout, _, capacity, expert_capacity) = tensors, options
        pair = x_TH if isinstance(x_TH, (tuple, list)) and len(x_TH) == 2 else (x_TH, None)
        x, x_scales, ids, weights = inputs = self._shared(backend, *pair, *others)

        def checked() -> DispatchCall:
            backend.ready()  # errors that end the communicator come before errors in arguments
            known = check_options(*options, *self._limits)
            self._check_dispatch(x, x_scales, ids, weights, dequantize)
            if host_counts and known[2] >= 0:
                raise InvalidArgument("host_counts is True, expected False with a capacity")
            return DispatchCall(x, x_scales, ids, weights, *known, dequantize, caller, host_counts)

        def finish(raw: RawDispatch) -> DispatchOutput:
            if dequantize:
                source = x if x_scales is None else None
                raw = ops.dispatch(source, weights, raw, backend)
            return self._output(raw, layout)

        name = "moecomm dispatch"
        if not async_op:
            return finish(backend.run(name, lambda: backend.dispatch(checked())))
        try:
            few = isinstance(x, torch.Tensor) and x.dim() > 0 and backend.splits(x.shape[0])
        except Exception as error:  # for example of a nested tensor, which has no shape
            backend.announce(error)
        if not few and not (capacity is None and expert_capacity is None):
            return backend.launch(name, lambda: backend.dispatch(checked()), None, finish, inputs)
        return backend.launch(
            name, lambda: backend.begin_dispatch(checked()), backend.finish_dispatch, finish, inputs
        )

    @_disable_dynamo
    def _dispatch_outside_graph(self, *arguments: Any) -> DispatchOutput | Work[DispatchOutput]:
        """Dispatches after a compiled function has left its graph; prepares the output for the next graph."""
        found = self._dispatch(*arguments)
        if not isinstance(found, Work):
            return for_trace(found)
        wait = found._wait
        found._wait = lambda: for_trace(wait())
        return found

    def _output(self, raw: RawDispatch, layout: Layout) -> DispatchOutput:
        handle, index = self._handle(raw.plan, layout), raw.expert_index
        return build(
            DispatchOutput,
            tokens=raw.tokens_PH,
            weights=raw.weights,
            topk_idx=raw.topk_idx_PK,
            handle=handle,
            expert_handle=handle if index is None else self._handle(index.plan, "expert"),
            expert_rows=None if index is None else index.rows_Q,
            expert_weights=None if index is None else index.weights_Q,
            scales=raw.scales,
            host_counts=raw.host_counts,
            plan_views=raw.plan_views,
        )

    def _handle(self, plan: Any, layout: Layout) -> Handle:
        return build(
            Handle, plan=plan, owner=self._id, layout=layout, num_tokens=plan.tokens, num_rows=plan.rows
        )

    def begin_dispatch(
        self, x_TH: Array, topk_idx_TK: Array, topk_weights_TK: Array | None = None, *, _layer: Any = None
    ) -> Callable[..., DispatchOutput]:
        """Sends the rows of a dropless dispatch on the current stream, and returns a function. This function,
        `receive`, waits on the host for the number of rows, puts the rest of the dispatch on the stream that
        is current then, and returns the result. Issue other work between the two calls.

        CUDA: if no thread has put anything else on the stream in between, call `receive(directly=True)`,
        which receives rows while others are still being sent. `receive()` waits until all are sent.

        Not differentiable, and in the expert layout. The arguments must not change before the rows have been
        received. If another operation of this communicator comes before `receive`, the dispatch is abandoned.

        Raises:
            As `dispatch`, from either call; InvalidArgument from `receive` if the dispatch was abandoned.
        """
        backend = self._open()
        x, ids, weights = self._shared(backend, x_TH, topk_idx_TK, topk_weights_TK)

        def begin() -> Any:
            backend.ready()
            self._check_dispatch(x, None, ids, weights, True)
            caller = 0 if _layer is None else _layer._caller
            return backend.begin_dispatch(
                DispatchCall(x, None, ids, weights, "expert", 1, -1, -1, True, caller)
            )

        begun = self._begun = backend.run("moecomm dispatch", begin)

        def receive(*, directly: bool = False) -> DispatchOutput:
            if self._begun is not begun:
                raise InvalidArgument(
                    "the dispatch was received already, or another one was begun after it; expected one call "
                    "for each begin_dispatch, before the next operation"
                )
            self._begun = None
            raw = backend.run("moecomm dispatch", lambda: backend.finish_dispatch(begun, directly))
            return self._output(raw, "expert")

        return receive

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be copied or pickled, as it holds memory and connections of this process: "
            "save a model's state_dict() (moecomm.nn.sharded_state, for all ranks' experts), and build a new "
            "Communicator. A copy of a MoELayer shares the communicator"
        )

    # -- state -----------------------------------------------------------------------------------------

    @property
    def group(self) -> Group | None:
        """The process group of the ranks; None stands for this process alone. Raises CommunicatorClosed after
        destroy_process_group()."""
        return self._group()

    def __repr__(self) -> str:
        if self._backend is None:
            return "Communicator(closed)"
        return (
            f"Communicator(rank {self.rank} of {self.size}, {self.num_experts} experts, top-{self.top_k}, "
            f"hidden {self.hidden}, {self.dtype}, at most {self.max_tokens} tokens, {self._backend})"
        )
