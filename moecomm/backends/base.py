"""The interface of a backend, and the handling of failed operations that backends share."""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from moecomm.errors import (
    CapacityExceeded,
    InvalidArgument,
    PeerLost,
    PeerTimeout,
    Unsupported,
    announced_as,
    kind_of,
)
from moecomm.setup.memory_plan import MemoryPlan
from moecomm.setup.topology import NodeMap
from moecomm.types import Layout, PlanViews, WireFormat, Work

Result = TypeVar("Result")
Finished = TypeVar("Finished")


class ExpertIndex(NamedTuple):
    """The expert-major index of a dispatch in the rank layout: the row and the weight of each position."""

    rows_Q: Tensor
    weights_Q: Tensor | None
    plan: Any
    """The dispatch's plan for the expert layout, where these positions are the rows."""


class RawDispatch(NamedTuple):
    """The tensors of a DispatchOutput before autograd has seen them, and the plan behind its handle."""

    tokens_PH: Tensor
    weights: Tensor | None
    topk_idx_PK: Tensor | None
    plan_views: PlanViews
    """Makes the views of the plan, when one of them is first needed."""
    plan: Any
    """An object of the backend with attributes `tokens` and `rows`, which `redispatch` and `combine` take."""
    scales: Tensor | None = None
    """The scales of tokens_PH (WireFormat.scales_shape) if these are in the wire format; else None."""
    expert_index: ExpertIndex | None = None
    """The rows by expert, for the rank layout; else None."""
    host_counts: list[int] | None = None
    """The number of rows of each local expert, without padding, if the call asks for it; else None."""


MOST_CALLERS = 0xFFFF
"""The largest number that `caller_of` returns; the smallest is 1."""


def caller_of(number: int, settings: object) -> int:
    """Returns the `caller` of a layer's dispatches, by which ranks notice that they are in different layers.
    With equal `settings` the results for two `number`s (of layers within the communicator, from 1) differ;
    with different settings two results are equal by chance, once in 65,535."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=4).digest()
    return (number - 1 + int.from_bytes(digest, "big")) % MOST_CALLERS + 1


class DispatchCall(NamedTuple):
    """The checked arguments of a dispatch."""

    x_TH: Tensor
    x_scales: Tensor | None
    """The scales of x_TH (WireFormat.scales_shape) if it is in the wire format already; else None."""
    topk_idx_TK: Tensor
    topk_weights_TK: Tensor | None
    layout: Layout
    alignment: int
    capacity: int
    """Rows of the output; -1: as many as arrive."""
    expert_capacity: int
    """Rank layout: positions of the expert-major index; expert layout: rows of each expert's group; -1: as
    many as needed."""
    dequantize: bool
    caller: int = 0
    """The number of the calling layer (`caller_of`), equal on all ranks; 0: the caller is not a layer."""
    host_counts: bool = False
    """True: return `RawDispatch.host_counts`; only for a dropless dispatch."""


class Backend(ABC):
    """Turns tensors into pointers for one kind of memory.

    `dispatch` and its halves, `redispatch`, `combine`, `empty_input` and `ready` are only called within `run`
    or `launch`, which put the operations of all threads into one order. If a rank finds an error before the
    runtime has the operation, it tells all ranks of the error in its place, so that they stay in step.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    top_k: int
    wire_format: WireFormat | None = None
    """The format in which rows of a dispatch travel; None: in their dtype."""
    memory: MemoryPlan
    nodes: NodeMap
    network_lanes: int
    """The number of endpoints of this rank towards other nodes; 0 on one node."""
    num_sms: int
    """The number of SMs that an operation holds; on the CPU, the number of threads."""
    weighs_tokens: bool = False
    """True if `combine_weighted` works."""
    _native: Any
    """The communicator of the runtime."""
    has_ended = False
    """True after PeerTimeout or PeerLost, which end the communicator."""
    _announced = True
    """True once the runtime has the operation: from then on the runtime tells all ranks of errors."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream on which operations of `launch` run; None where there are no streams."""
        return None

    # -- order -----------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, name: str, operation: Callable[[], Result]) -> Result:
        """Runs `operation` after all earlier ones and returns its result; `name` is for profilers."""

    @abstractmethod
    def launch(
        self,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
        inputs: tuple[Any, ...],
    ) -> Work[Finished]:
        """Starts an operation concurrently with the caller, after all earlier ones: calls `begin()` and, if
        given, `complete` with what `begin` returns; `complete` may make the host wait for peers.

        `wait()` of the Work calls `finish` on the operation's result, and returns what `finish` returns.
        `inputs`: tensors that the operation reads (other values are ignored).
        """

    def announce(self, error: Exception) -> NoReturn:
        """Raises `error`, found before an operation could begin, on all ranks in place of this operation."""

        held = [error]
        del error  # the error's traceback has this frame, and with it the operation's tensors

        def operation() -> NoReturn:
            self.ready()
            raise held.pop()

        self.run("moecomm refuse", operation)

    def _whole(self, operation: Callable[[], Result]) -> Result:
        """Runs an operation, with checks and copies of its arguments. Tells all ranks of an error that comes
        before `_announced` is set, as `announced_as` returns it. Marks InvalidArgument as known to all."""
        told: Exception | None = None
        self._announced = False
        try:
            return operation()
        except Exception as error:
            told = error
            if not self._announced:
                self._announced = True
                told = announced_as(error)
                self._announce(kind_of(told), str(told).encode(errors="replace").decode())
            self.has_ended |= isinstance(told, (PeerTimeout, PeerLost))
            if isinstance(told, InvalidArgument):
                told._is_known_to_all = True
            if told is error or isinstance(error, CapacityExceeded):
                raise
            raise told from error
        finally:
            del told  # as in `announce`

    @abstractmethod
    def _announce(self, kind: str, text: str) -> None:
        """Tells all ranks about an error of this rank, in place of an operation."""

    # -- operations ------------------------------------------------------------------------------------

    @abstractmethod
    def ready(self) -> None:
        """Raises the error, if any, that prevents the next dispatch; all ranks raise the same."""

    def splits(self, tokens: int) -> bool:
        """Returns whether an async operation of this many tokens runs in two halves, the second when the
        result is awaited, so that until then no SM waits for other ranks' rows."""
        return False

    def dispatch(self, call: DispatchCall) -> RawDispatch:
        """Sends rows and receives those that arrive."""
        return self.finish_dispatch(self.begin_dispatch(call))

    @abstractmethod
    def begin_dispatch(self, call: DispatchCall) -> Any:
        """Sends the rows of a dispatch: its first half. Returns the argument of `finish_dispatch`."""

    @abstractmethod
    def finish_dispatch(self, begun: Any, directly: bool = True) -> RawDispatch:
        """Receives the arriving rows: the second half of a dispatch. `directly`: no other work was put on the
        current stream since the first half, so that rows can be received while others are sent."""

    @abstractmethod
    def redispatch(
        self,
        plan: Any,
        rows_TH: Tensor,
        scales_P: Tensor | None,
        other_PH: Tensor | None,
        gradients: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Sends rows along a kept plan and returns (received rows (P, H) times scales, dots (P,)). dots[p] =
        <row p before scaling, other[p]>; dots is None without other. `gradients`: if scales and other are
        None, rows travel in the gradient_wire."""

    @abstractmethod
    def combine(
        self,
        plan: Any,
        rows_PH: Tensor | None,
        weights_P: Tensor | None,
        weight_grads: Tensor | None,
        forward: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sums rows per token and returns (y_TH, or None without rows; gradients (T, K) of the routing
        weights, or None without weight_grads). `forward`: sums travel in the combine_wire."""

    def combine_weighted(self, plan: Any, rows_PH: Tensor, weights_TK: Tensor) -> Tensor:
        """Sums rows per token, times weights that each rank gives for its own tokens. Raises Unsupported
        unless `weighs_tokens`."""
        raise Unsupported(
            "combine_weighted is for few tokens on GPUs of one node (weighs_tokens): dispatch the weights, "
            "and pass those that it returns to combine"
        )

    def begin_combine(self, plan: Any, rows_PH: Tensor, weights_P: Tensor | None) -> Any:
        """Starts the combine of a forward: sends this rank's sums. A backend that does not split the
        operation runs the whole combine. Returns the argument of `finish_combine`, which includes the
        tensors that kernels still read."""
        return self.combine(plan, rows_PH, weights_P, None, forward=True)

    def finish_combine(self, begun: Any) -> Tensor:
        """Receives and adds the arriving sums, and returns y (T, H): the second half of a combine."""
        return begun[0]

    @abstractmethod
    def empty_input(self, num_tokens: int) -> Tensor:
        """Returns an uninitialised (num_tokens, H) tensor, in the window if that saves a copy."""

    # -- state -----------------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Raises a pending error: CapacityExceeded, or the error that has ended the communicator."""

    def stats(self) -> dict[str, Any]:
        """Returns the counters since construction or the last reset."""
        return dict(self._native.stats())

    def reset_stats(self) -> None:
        """Sets the counters to zero."""
        self._native.reset_stats()

    def last_phases(self) -> dict[str, dict[str, float]]:
        """Returns when the last operation of each kind passed its phases. Raises Unsupported on the CPU."""
        raise Unsupported("last_phases() is of CUDA: operations on the CPU have no clock of their phases")

    @abstractmethod
    def close(self) -> None:
        """Waits for running operations, tells the peers, and frees the window. Warns (RuntimeWarning) if
        the thread that talks to other nodes does not end (`warn_of_thread`)."""

    def __str__(self) -> str:
        network, _ = self._native.network()
        return f"{self._native}{f'; {self.nodes.nodes} nodes, {network}' if network else ''}"


def address_of(tensor: Tensor | None, nowhere: int) -> int:
    """Returns the address of a tensor's elements, 0 for None. The runtime takes null for an absent tensor, so
    an empty tensor, whose address is null as well, gets the address `nowhere`. Raises InvalidArgument for a
    tensor with elements but without memory."""
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise InvalidArgument(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory, expected one that "
            "was not freed by resize_(0), and a call outside of FakeTensorMode and of modes like it"
        )
    return address or nowhere


def warn_of_thread() -> None:
    """Warns that close() left the thread that talks to other nodes running, and did not free the window."""
    warnings.warn(
        "moecomm: the thread that talks to other nodes has not come back from the network's library, so "
        "Communicator.close() has left it behind, with the window, until this process ends. A peer that "
        "was killed while it held a lock of the library does this (docs/nodes.md)",
        RuntimeWarning,
        stacklevel=3,
    )
