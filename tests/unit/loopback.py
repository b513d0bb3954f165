"""Stand-ins for a GPU: the CUDA backend's Python side, on CPU tensors and with one rank.

`LoopbackNative` is `_C.DeviceCommunicator` for a single rank: it reads and writes the addresses that it is
given, at once, and records each call. `FakeGpu` is `backends.device.CudaDevice` with streams that only count.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _C
from moecomm.backends import cuda as cuda_backend
from moecomm.backends.cuda import CudaBackend
from tests.reference import layout_of

DTYPES = {
    _C.DType.float32: torch.float32,
    _C.DType.bfloat16: torch.bfloat16,
    _C.DType.float16: torch.float16,
    _C.DType.float64: torch.float64,
}
NOT_THERE = 0
VIEWS = ("expert_rows", "expert_starts", "source_ends")
SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens": 6, "dtype": torch.float32}
IDS_TK = torch.tensor([[1, 3], [0, -1], [3, 1], [2, 0], [-1, -1]])


class DeviceShape(SimpleNamespace):
    """`_C.DeviceShape`: keeps what it is given."""


def device_plan_fields(shape: Any) -> dict[str, int | slice]:
    """A plan: the overflow, and behind it the views that a dispatch returns."""
    experts = shape.num_experts // shape.ranks
    starts, sources = 1 + experts, 2 + 2 * experts
    views = slice(1, starts), slice(starts, sources), slice(sources, sources + shape.ranks)
    return {"words": sources + shape.ranks, "overflow": 0, **dict(zip(VIEWS, views, strict=True))}


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor of what lies at an address; None for 0."""
    if address == NOT_THERE:
        return None
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class LoopbackNative:
    """A native communicator of a single rank: dispatch and combine, expert-major or rank-major, in torch."""

    ends = True
    """Do its threads end at close()?"""
    few = 0
    """Tokens up to which operations are split in two halves."""
    offer = (0, 0)
    """Rows and positions that a dropless dispatch is offered."""
    at_once = True
    """Are they received before the host knows how many come?"""

    def __init__(self, *, shape: Any, gradients: Any, **settings: Any) -> None:
        self.shape, self.settings = shape, settings
        self.num_sms, self.weighs_tokens = settings["num_sms"] or 99, True
        self.calls: list[str] = []
        self.quantised: list[bool] = []  # of combines: whether sums travel in combine_wire
        self.narrow_gradients = gradients != "same"
        self.gradients: list[bool] = []  # of redispatches: whether rows travel in gradient_wire
        self.failed: tuple[str, str] | None = None
        self.closed = self.interrupted = False
        self.pending: Exception | None = None
        self.dtype = DTYPES[shape.dtype]
        self.weight = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.rows = 0
        self.origins: dict[tuple[int, Any], list[list[tuple[int, int, int]]]] = {}
        """For each row the (source, token, k) that it is for, by the plan's address and the layout."""
        self.held: Callable[[], None] | None = None
        self.directly: bool | None = None  # of the last finish_dispatch
        self.waited_on = -1  # the stream of the last wait_rows
        self.dropped = False  # a capture has ended between the halves of what was held

    def link(self) -> str:
        self.calls.append("link")
        return "/moecomm-test"

    def unlink(self) -> None:
        self.calls.append("unlink")

    def connect(self, bases: list[int], names: list[str], pids: list[int]) -> None:
        assert len(bases) == len(names) == len(pids) == self.shape.ranks == 1
        self.calls.append("connect")

    def network(self) -> tuple[str, int]:
        return "", 0

    def fuse_up_to(self, tokens: int) -> None:
        self.calls.append(f"fuse_up_to {tokens}")

    def log_launches(self) -> None:
        self.calls.append("log_launches")

    def check(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def fail(self, kind: Any, text: str, stream: int) -> None:
        self.calls.append(f"fail@{stream}")
        self.failed = (kind.name, text)

    def stats(self) -> dict[str, float]:
        return {"dispatch_calls": float(sum(call.startswith("begin") for call in self.calls))}

    def phases(self) -> dict[str, dict[str, float]]:
        return {"dispatch": {"announced": 2e-6, "ended": 9e-6}, "combine": {}}

    def reset_stats(self) -> None:
        self.calls.clear()

    def stop_waiting(self) -> None:
        self.calls.append("stop_waiting")

    def close(self) -> bool:
        self.calls.append("close")
        self.closed = True
        return self.ends

    def dispatch(self, *arguments: Any) -> None:
        sending, receiving, stream = arguments[:12], arguments[12:20], arguments[20]
        self.calls.append(f"dispatch@{stream}")
        self._send(*sending)
        dropless, rows, positions = sending[8] < 0, *receiving[:2]
        if not dropless or (self.rows <= rows and self.positions <= positions):
            self._receive(*receiving)

    def begin_dispatch(self, *arguments: Any) -> None:
        *sending, stream = arguments
        self.calls.append(f"begin_dispatch@{stream}")
        self._send(*sending)

    def finish_dispatch(self, directly: bool, *arguments: Any) -> None:
        self.directly = directly
        self.calls.append(f"finish_dispatch@{arguments[-1]}")
        self._receive(*arguments[:-1])

    def _send(
        self,
        x: int,
        x_scales: int,
        ids: int,
        wide_ids: bool,
        weights: int,
        tokens: int,
        layout: Any,
        alignment: int,
        capacity: int,
        expert_capacity: int,
        caller: int,
        plan: int,
    ) -> None:
        experts, by_rank = self.shape.num_experts, layout == _C.RowLayout.rank
        chosen = memory(ids, (tokens, self.shape.top_k), torch.int64 if wide_ids else torch.int32)
        assert chosen is not None and x != NOT_THERE
        of_all: dict[str, Any] = {"ids": [chosen.numpy()], "rank": 0, "num_experts": experts}
        groups = own = layout_of(**of_all, alignment=alignment)
        if by_rank:
            own = layout_of(**of_all, layout="rank")
        self.rows, self.positions = len(own.origin), len(groups.origin)
        most = expert_capacity if by_rank else capacity
        kept = self.rows if capacity < 0 else min(self.rows, capacity)
        self.origins[plan, _C.RowLayout.expert] = groups.origin[: most if most >= 0 else None]
        if by_rank:
            self.origins[plan, layout] = own.origin[:kept]
        fields = device_plan_fields(self.shape)
        blob = memory(plan, (fields["words"],), torch.int32)  # type: ignore[arg-type]
        assert blob is not None
        blob[fields["overflow"]] = self.rows if self.rows > kept else 0
        blob[fields["expert_rows"]] = torch.tensor(groups.tokens_per_expert)
        starts = torch.tensor([0, *groups.offsets])
        blob[fields["expert_starts"]] = starts if most < 0 else starts.clamp(max=most)
        blob[fields["source_ends"]] = kept
        self.ids, self.ids_shape = ids, (tokens, self.shape.top_k)
        self.begun = {"x": x, "x_scales": x_scales, "weights": weights, "plan": plan}
        self.begun |= {"layout": layout, "wide_ids": wide_ids}

    def complete(self, stream: int) -> bool:
        self.calls.append(f"complete@{stream}")
        held, self.held = self.held, None
        if held is not None:
            held()
        return not self.dropped

    def splits(self, tokens: int) -> bool:
        return tokens <= self.few

    def offered_rows(self, tokens: int, layout: Any, alignment: int) -> tuple[int, int, bool]:
        return *self.offer, self.at_once

    def accept_rows(self) -> None:
        self.calls.append("accept_rows")

    def wait_rows(self, stream: int) -> tuple[int, int]:
        self.calls.append("wait_rows")
        self.waited_on = stream
        return self.rows, self.positions

    def host_counts(self) -> list[int]:
        self.calls.append("host_counts")
        return list(range(self.shape.num_experts))

    def _receive(
        self,
        rows: int,
        positions: int,
        out: int,
        out_scales: int,
        weights: int,
        ids: int,
        index: int,
        index_weights: int,
    ) -> None:
        self.received = rows
        tokens, top_k = self.ids_shape
        hidden, mx = self.shape.hidden, self.shape.wire == "mxfp8"
        columns, scale_type = -(-hidden // (32 if mx else 128)), torch.uint8 if mx else torch.float32
        begun = self.begun
        x_scales, by_rank = begun["x_scales"], begun["layout"] == _C.RowLayout.rank
        index_Q = memory(index, (positions,), torch.int32)
        index_weights_Q = memory(index_weights, (positions,), self.weight)
        source_TH = memory(begun["x"], (tokens, hidden), torch.float8_e4m3fn if x_scales else self.dtype)
        source_scales = memory(x_scales, (tokens, columns), scale_type)
        rows_PH = memory(out, (rows, hidden), torch.float8_e4m3fn if out_scales else self.dtype)
        scales_P = memory(out_scales, (rows, columns), scale_type)
        given = memory(begun["weights"], (tokens, top_k), self.weight)
        got = memory(weights, (rows, top_k) if by_rank else (rows,), self.weight)
        kind = torch.int64 if begun["wide_ids"] else torch.int32
        ids_PK, chosen = memory(ids, (rows, top_k), kind), memory(self.ids, (tokens, top_k), kind)
        assert rows_PH is not None and source_TH is not None and chosen is not None
        for each in (rows_PH.view(torch.uint8), got, ids_PK):
            if each is not None:
                each.zero_()
        if ids_PK is not None:
            ids_PK.fill_(-1)
        found: dict[int, int] = {}
        for p, t, k in self._assignments(begun["plan"], begun["layout"]):
            if p >= rows:
                break
            found[t], at = p, (p, k) if by_rank else p
            for here, to, value, there in (
                (rows_PH.view(torch.uint8), p, source_TH.view(torch.uint8), t),
                (scales_P, p, source_scales, t),
                (ids_PK, at, chosen, (t, k)),
                (got, at, given, (t, k)),
            ):
                if here is not None and value is not None:
                    here[to] = value[there]
        for q, t, k in self._assignments(begun["plan"], _C.RowLayout.expert):
            if index_Q is not None and q < positions and t in found:
                index_Q[q] = found[t]
                if index_weights_Q is not None and given is not None:
                    index_weights_Q[q] = given[t, k]

    def _assignments(self, plan: int, layout: Any) -> Iterator[tuple[int, int, int]]:
        """(p, t, k) of each row's token and experts."""
        return ((p, t, k) for p, row in enumerate(self.origins[plan, layout]) for _, t, k in row)

    def redispatch(
        self,
        plan: int,
        layout: Any,
        x: int,
        tokens: int,
        rows: int,
        out: int,
        scales: int,
        other: int,
        dots: int,
        quantised: bool,
        stream: int,
    ) -> None:
        self.calls.append(f"redispatch@{stream}")
        self.gradients.append(quantised and self.narrow_gradients)
        hidden = self.shape.hidden
        source_TH, rows_PH = memory(x, (tokens, hidden), self.dtype), memory(out, (rows, hidden), self.dtype)
        scales_P, dots_P = memory(scales, (rows,), self.weight), memory(dots, (rows,), self.weight)
        other_PH = memory(other, (rows, hidden), self.dtype)
        assert source_TH is not None and rows_PH is not None
        rows_PH.zero_()
        for p, t, _ in self._assignments(plan, layout):
            rows_PH[p] = source_TH[t] if scales_P is None else source_TH[t].to(self.weight) * scales_P[p]
            if dots_P is not None and other_PH is not None:
                dots_P[p] = (source_TH[t].to(self.weight) * other_PH[p].to(self.weight)).sum()

    def combine(self, *arguments: Any) -> None:
        """Takes the arguments of `_sum`, and behind them quantised, held and stream."""
        *summed, quantised, held, stream = arguments
        self.calls.append(f"{'begin_' if held else ''}combine@{stream}")
        self.quantised.append(quantised)
        if held:
            self.held = partial(self._sum, *summed)
        else:
            self._sum(*summed)

    def _sum(
        self,
        plan: int,
        layout: Any,
        rows: int,
        weights: int,
        token_weights: int,
        tokens: int,
        y: int,
        weight_grads: int,
        out_weight_grads: int,
    ) -> None:
        hidden, top_k = self.shape.hidden, self.shape.top_k
        by_rank = layout == _C.RowLayout.rank
        num_rows = len(self.origins[plan, layout])
        rows_PH, y_TH = memory(rows, (num_rows, hidden), self.dtype), memory(y, (tokens, hidden), self.dtype)
        factors_P = memory(weights, (num_rows,), self.weight)
        given_TK = memory(token_weights, (tokens, top_k), self.weight)
        if rows_PH is not None and y_TH is not None:
            sums = torch.zeros(tokens, hidden, dtype=self.weight)
            for p, row in enumerate(self.origins[plan, layout]):
                for _, t, k in row[:1]:
                    factor = factors_P[p] if factors_P is not None else 1
                    sums[t] += rows_PH[p].to(self.weight) * (factor if given_TK is None else given_TK[t, k])
            y_TH.copy_(sums)
        grads = memory(weight_grads, (num_rows, top_k) if by_rank else (num_rows,), self.weight)
        home_TK = memory(out_weight_grads, (tokens, top_k), self.weight)
        if grads is not None and home_TK is not None:
            home_TK.zero_()
            for p, t, k in self._assignments(plan, layout):
                home_TK[t, k] = grads[p, k] if by_rank else grads[p]


class FakeStream:
    """Counts events; `done` says whether its work is."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self.gpu, self.number, self.done = gpu, number, True

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other  # as torch's streams: none differs from None

    def record_event(self) -> Any:
        self.gpu.log.append(f"record {self.number}")
        return SimpleNamespace(stream=self, query=lambda: self.done)

    def wait_event(self, event: Any) -> None:
        self.gpu.log.append(f"{self.number} waits for {event.stream.number}")

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.done


class FakeGpu:
    """`CudaDevice` without a device. Streams are numbered from 100; `captures` holds those that record."""

    last: FakeGpu

    def __init__(self, index: int | None) -> None:
        self.log: list[str] = []
        self.ranges: list[str] = []
        self.captures: set[int] = set()
        self.streams = [FakeStream(self, 100)]
        self.now = self.streams[0]
        self.index = 0
        self.device_is_current = True
        FakeGpu.last = self

    def is_current(self) -> bool:
        return self.device_is_current

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        before, self.device_is_current = self.device_is_current, True
        yield
        self.device_is_current = before

    def raw_stream(self) -> int:
        return self.now.number

    def stream(self) -> FakeStream:
        return self.now

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self, 100 + len(self.streams)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        with self.current():
            before, self.now = self.now, stream
            yield
            self.now = before

    def capturing(self) -> bool:
        assert self.device_is_current
        return self.now.number in self.captures

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def free_bytes(self, wanted: int) -> int:
        return 1 << 30

    def uuid(self) -> str:
        return "GPU-0"

    def push_range(self, name: str) -> None:
        self.ranges.append(name)

    def pop_range(self) -> None:
        self.ranges.append("pop")


class FakeWindow:
    """`SymmetricMemory` that holds nothing."""

    last: FakeWindow

    def __init__(self, rendezvous: Any, bytes: int, device_index: int, *, ranks: list[int]) -> None:
        self.bytes, self.closed = bytes, False
        self.bases = [1 << 20] * len(ranks)
        FakeWindow.last = self

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators of this process are CUDA ones, on CPU tensors and with one rank."""
    fakes = {
        "DeviceShape": DeviceShape,
        "DeviceCommunicator": LoopbackNative,
        "WireFormat": SimpleNamespace(same="same", fp8="fp8", mxfp8="mxfp8"),
        "device_plan_fields": device_plan_fields,
        "device_window_sections": lambda shape: [("control", 0, 4096), ("rows", 4096, 8192)],
        "device_window_bytes": lambda shape: 12288,
        "device_host_bytes": lambda shape: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(_C, name, fake, raising=False)
    monkeypatch.setattr(cuda_backend, "CudaDevice", FakeGpu)
    monkeypatch.setattr("moecomm.setup.symmetric_memory.SymmetricMemory", FakeWindow)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("moecomm.communicator.CpuBackend", partial(CudaBackend, torch.device("cpu")))
    monkeypatch.setattr("moecomm.setup.checks.check_formats", lambda *arguments: None)


def opened(**changes: Any) -> tuple[moecomm.Communicator, LoopbackNative, FakeGpu]:
    """A communicator of these SIZES but for the changes, with what stands behind it."""
    comm = moecomm.Communicator(**{**SIZES, **changes})
    native = comm._open()._native  # type: ignore[attr-defined]
    return comm, native, FakeGpu.last


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of five tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 8, generator=generator), IDS_TK, torch.rand(5, 2, generator=generator)
