"""Types of the public interface.

Shape letters, as they end the names of tensors:
    T tokens of this rank   H hidden   K top-k   E experts   R ranks   L local experts (E / R)
    P rows of a dispatch's output ("permuted" rows)   Q positions in expert-major order   B batch   S sequence
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moecomm.errors import CommunicatorClosed, InvalidArgument

Group = dist.ProcessGroup
AnyGroup = dist.ProcessGroup | DeviceMesh
"""The types by which a caller names the ranks: a process group, or a DeviceMesh of one dimension."""
Layout = Literal["expert", "rank"]
Result = TypeVar("Result")
Built = TypeVar("Built")
PLAN_VIEWS = ("tokens_per_expert", "offsets", "overflow", "expert_offsets", "expert_starts")
"""The fields of a DispatchOutput that are views of its plan."""
PlanViews = Callable[[str], torch.Tensor]
"""A function that makes the view of a plan with the given name, one of PLAN_VIEWS."""


@dataclass(frozen=True)
class WireFormat:
    """A wire format for rows of a dispatch (docs/data_formats.md; csrc/layout/wire_format.hpp has the bytes):
    the dtypes of a tensor of values and of one with a scale per `scale_columns` columns of a row; the last
    scale of a row may cover fewer."""

    values: torch.dtype
    scales: torch.dtype
    scale_columns: int

    def scales_shape(self, rows: int, hidden: int) -> tuple[int, int]:
        """Returns the shape of the scales of `rows` rows."""
        return rows, -(-hidden // self.scale_columns)


WIRE_FORMATS = {
    "fp8": WireFormat(torch.float8_e4m3fn, torch.float32, 128),
    "mxfp8": WireFormat(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
}


class _Alone:
    """The type of ALONE."""


ALONE: Any = _Alone()
"""The group of this process alone, whether or not torch.distributed is initialized."""


def as_group(group: AnyGroup | None, name: str = "group") -> Group | None:
    """Returns the process group of a one-dimensional DeviceMesh; a process group or None is returned
    unchanged. Raises InvalidArgument, on every calling rank, for anything else."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        outside = ", which new_group() gives ranks outside of the group" if group == -100 else ""
        raise InvalidArgument(
            f"{name} is {group!r}{outside}, must be a process group that this rank is in, or a DeviceMesh of "
            "one dimension"
        )
    if group.ndim != 1:
        named = group.mesh_dim_names
        way = f"one of its dimensions {named}, mesh[{named[-1]!r}] for example" if named else "one with names"
        raise InvalidArgument(f"{name} is a DeviceMesh of {group.ndim} dimensions, must have one: pass {way}")
    return group.get_group()


class GroupReference:
    """A weak reference to a process group (None: this process alone). A group held beyond
    destroy_process_group() keeps its threads, which abort the process if they outlive the interpreter.
    """

    def __init__(self, group: Group | None) -> None:
        self._find = None if group is None else weakref.ref(group)

    def __call__(self) -> Group | None:
        """Returns the group. Raises CommunicatorClosed if it was destroyed."""
        group = None if self._find is None else self._find()
        if self._find is not None and group is None:
            raise CommunicatorClosed("the process group was destroyed")
        return group


def build(kind: type[Built], **fields: Any) -> Built:
    """Builds a frozen dataclass like `kind(**fields)`, in half the time: the constructor of a frozen
    dataclass calls a function for each field."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Handle:
    """The plan of one dispatch, kept for its combine and for the backwards of dispatch and combine. Opaque
    except for `layout`, `num_tokens` and `num_rows`.

    It may be used any number of times, with the communicator that made it. All ranks use handles in the same
    order. A handle made during the capture of a CUDA graph holds the plan of the graph's last replay.

    Attributes:
        plan: the backend's data of the plan; opaque.
        owner: number of the communicator that made the handle.
        layout: "expert" or "rank", as in the dispatch.
        num_tokens: T: this rank's tokens in the dispatch.
        num_rows: P: rows of the dispatch's output.
    """

    plan: Any
    owner: int
    layout: Layout
    num_tokens: int
    num_rows: int

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Handle cannot be copied or pickled: its plan belongs to the communicator that made it: keep "
            "the handle itself, or dispatch again"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchOutput:
    """The rows that a dispatch brings to this rank, and facts about them.

    Expert layout: one row per (token, local expert), ordered by expert, then source rank, then token; each
    expert's group is padded with zero rows to a multiple of `alignment`. Rank layout: one row per token with
    at least one local expert, ordered by source rank, then token. There the index `expert_rows` holds the row
    of `tokens` for each of the Q positions in expert-major order, so that `tokens[expert_rows]` are the rows
    of the expert layout. Your own kernel can gather rows by this index, so that a row is not written once
    for each of its experts. With a fixed capacity there are exactly `capacity` rows; rows past
    `offsets[-1]` are unspecified.

    The views of the plan (`tokens_per_expert`, `offsets`, `overflow`, `expert_offsets`, `expert_starts`) are
    made on first access.

    Attributes:
        tokens: (P, H) in the communicator's dtype.
        weights: routing weights, float32 (float64 for float64 rows): (P,) in the expert layout, (P, K) in the
            rank layout; 0 in padding rows, and for a k without a local expert. None if the dispatch had none.
        tokens_per_expert: (L,) int32: rows for each local expert, without padding, and including rows past
            the capacity.
        offsets: (L,) int32 cumulative ends of the aligned groups, at most P: the `offs` of
            torch.nn.functional.grouped_mm. Rank layout: (R,) cumulative ends of the sources.
        overflow: 0-d int32: 0 if all rows (rank layout: and positions) of this rank fit the capacity, else
            the number that it needed.
        expert_offsets: (L,) int32 cumulative ends of the experts' groups in expert-major order; in the expert
            layout they are `offsets`.
        expert_starts: (L + 1,) int32: 0 followed by `expert_offsets`, for kernels that take the groups as
            `cu_seqlens`.
        handle: for `combine` of rows like `tokens`.
        expert_handle: for `combine` of rows in expert-major order; in the expert layout it is `handle`.
        expert_rows: rank layout: (Q,) int32: the row of `tokens` for each position. Q is expert_offsets[-1],
            or `expert_capacity`; positions past expert_offsets[-1] have 0. None in the expert layout.
        expert_weights: rank layout: (Q,) routing weights of the positions, 0 past expert_offsets[-1]. None in
            the expert layout, where `weights` has them, and if the dispatch had no weights.
        topk_idx: rank layout: (P, K) local expert ids in the dtype of the ids that were dispatched, -1 where
            the expert is elsewhere, and in rows past offsets[-1]. None in the expert layout.
        scales: with `dequantize=False` the scales of `tokens`, which are then float8_e4m3fn: value = tokens *
            scale. wire="fp8": (P, ceil(H / 128)) float32, one for each 128 columns. "mxfp8": (P, ceil(H /
            32)) float8_e8m0fnu. None otherwise.
        host_counts: with `host_counts=True` the L numbers of `tokens_per_expert`, known before the rows have
            arrived. None otherwise.
        plan_views: a function that makes a view of the plan from its name. It keeps the plan alive, but no
            rows.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    overflow: torch.Tensor
    expert_offsets: torch.Tensor
    expert_starts: torch.Tensor
    handle: Handle
    expert_handle: Handle
    expert_rows: torch.Tensor | None = None
    expert_weights: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    host_counts: list[int] | None = None
    plan_views: PlanViews | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            views = self.plan_views
            if views is None or name not in PLAN_VIEWS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            made = self.__dict__[name] = views(name)
            return made


class Work(Generic[Result]):
    """A running operation, like torch.distributed's Work.

    The arguments of the operation must not change before `wait` returns; on CUDA, work that changes them must
    come after `wait` on the caller's stream.
    """

    def __init__(
        self,
        wait: Callable[[], Result],
        is_completed: Callable[[], bool],
        join: Callable[[], None] | None = None,
    ) -> None:
        """`wait` completes the operation and returns its result; `is_completed` says whether it is done; each
        call of `wait()` calls `join`, which makes the caller's current stream wait for the operation."""
        self._wait, self._is_completed, self._join = wait, is_completed, join
        self._recording = torch.is_grad_enabled()
        self._lock = threading.RLock()
        self._result: Result | None = None
        self._waited = False

    def wait(self) -> Result:
        """Waits and returns the operation's result, or raises its error. Further calls, also from other
        threads, return the same object. Autograd records if it was enabled at the operation's call.

        On CUDA the caller's current stream waits, not the host; only for a dispatch without a capacity does
        the host wait, until the row count is known.
        """
        if not self._waited:
            with self._lock:
                if not self._waited:
                    try:
                        with torch.inference_mode(False), torch.set_grad_enabled(self._recording):
                            self._result = self._wait()
                    except Exception as error:
                        self._wait = partial(_raise_again, type(error), error.args, error.__dict__)
                        self._is_completed = lambda: True
                        raise
                    self._waited = True
        if self._join is not None:
            self._join()
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Returns True when the operation is done."""
        return self._is_completed()


def _raise_again(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> NoReturn:
    """Raises a copy of an earlier error. A Work that kept the error itself would keep the operation's tensors
    alive: the error's traceback has the caller's frame, and this frame may hold the Work."""
    again = kind.__new__(kind, *args)
    again.__dict__.update(attributes)
    try:
        raise again
    finally:
        del again
