"""What a backend is: the methods that the communicator and autograd call, whatever the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from moecomm.errors import MoecommError
from moecomm.setup.memory_plan import MemoryPlan
from moecomm.setup.topology import NodeMap
from moecomm.types import Layout, PlanViews, Work

Result = TypeVar("Result")
Finished = TypeVar("Finished")


class RawDispatch(NamedTuple):
    """The tensors of a DispatchOutput before autograd has seen them, and the plan behind its handle."""

    tokens_PH: torch.Tensor
    weights: torch.Tensor | None
    topk_idx_PK: torch.Tensor | None
    plan_views: Callable[[], PlanViews]
    """Makes them; called when one is first asked for, if ever."""
    plan: Any
    """The backend's own: it has `tokens` and `rows`. Redispatch and combine take it, or a TensorPlan."""
    scales: torch.Tensor | None = None
    """With tokens handed on as they travelled: (P, ceil(H / 128)) float32."""


class TensorPlan(NamedTuple):
    """A plan as a tensor and numbers that are known without looking into it."""

    blob: torch.Tensor
    """(words,) int32 with the fields of `PlanFields`; the rest is the backend's own. In device memory it is
    the device that writes it, so it stays valid over replays of a CUDA graph."""
    layout: Layout
    tokens: int
    rows: int
    stream: int = 0
    """That the blob's memory belongs to."""


class PlanFields(NamedTuple):
    """Where to find what a DispatchOutput tells of its plan, in int32 words of a blob."""

    words: int
    overflow: int
    expert_rows: slice
    offsets: slice
    """Expert layout."""
    source_ends: slice
    """Rank layout."""

    def views(self, blob: torch.Tensor, layout: Layout) -> PlanViews:
        """Those of the plan in `blob`."""
        ends = self.source_ends if layout == "rank" else self.offsets
        return blob[self.expert_rows], blob[ends], blob[self.overflow]


class DispatchCall(NamedTuple):
    """The checked arguments of a dispatch."""

    x_TH: torch.Tensor
    x_scales: torch.Tensor | None
    """With x_TH in the wire format already: (T, ceil(H / 128)) float32."""
    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor | None
    layout: Layout
    alignment: int
    capacity: int
    """-1 for exact sizes."""
    dequantize: bool


class Backend(Protocol):
    """Turns tensors into pointers for one kind of memory.

    `dispatch` and its halves, `redispatch`, `combine`, `empty_input`, `ready` and `fail` are called within
    `run` or `launch` only, which put the operations of all threads into one order.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    top_k: int
    memory: MemoryPlan
    nodes: NodeMap
    network_lanes: int
    """Endpoints towards other nodes; 0 on one node."""
    num_sms: int
    """SMs that an operation holds; on the CPU, threads."""
    plan_fields: PlanFields
    """Of the blob in a TensorPlan."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where operations of `launch` run; None where there are no streams."""

    def limit_sms(self, num_sms: int | None) -> int | None:
        """Operations that begin from now on use so many SMs; None: as many as the communicator was made with.
        Returns what it was before."""

    def run(self, name: str, operation: Callable[[], Result]) -> Result:
        """The result of `operation` after all before it; `name` is for profilers."""

    def settle_begun(self) -> None:
        """Completes what `launch` has only begun."""

    def launch(
        self,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
        inputs: tuple[Any, ...],
    ) -> Work[Finished]:
        """Starts an operation beside the caller, after all before it: `complete(begin())`, where `complete`
        keeps the host waiting for peers, or `begin()` alone.

        `finish` is for the caller's thread, in `wait`. `inputs`: tensors that the operation reads (what is no
        tensor is left alone).
        """

    def ready(self) -> None:
        """Raises what must keep the next dispatch from running; on all ranks alike."""

    def dispatch(self, call: DispatchCall) -> RawDispatch:
        """Sends rows and receives those that arrive."""

    def begin_dispatch(self, call: DispatchCall) -> Any:
        """The first half of one without capacity: brings the rows on their way. What it returns goes to
        `finish_dispatch`."""

    def finish_dispatch(self, begun: Any) -> RawDispatch:
        """The second half: the rows that arrive."""

    def tensor_plan(self, plan: Any) -> TensorPlan:
        """The plan of a RawDispatch as a tensor; it lives as long as the blob's memory."""

    def redispatch(
        self,
        plan: Any,
        rows_TH: torch.Tensor,
        scales_P: torch.Tensor | None,
        other_PH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows along a kept plan, times scales; with `other_PH` also <row, other[p]> for each place."""

    def combine(
        self,
        plan: Any,
        rows_PH: torch.Tensor | None,
        weights_P: torch.Tensor | None,
        weight_grads: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(y_TH, or None without rows; gradients (T, K) of the routing weights, or None without
        weight_grads)."""

    def empty_input(self, num_tokens: int) -> torch.Tensor:
        """(num_tokens, H), in the window if that saves a copy."""

    def fail(self, error: MoecommError) -> NoReturn:
        """Tells all ranks that this one's arguments are bad, and raises `error`."""

    def check(self) -> None:
        """Raises what is pending: CapacityExceeded, or what broke the communicator."""

    def stats(self) -> dict[str, float]:
        """Counters since construction or the last reset."""

    def reset_stats(self) -> None:
        """Sets the counters to zero."""

    def close(self) -> None:
        """Waits for what is under way, tells the peers, and lets go of the window."""
