"""Two ranks in one process on one GPU: their kernels really run at the same time, as those of several
processes on a GPU never do. What is missing of two GPUs is the link between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import _C

RANKS = 2
MOST_FUSED = 512
"""Tokens of a rank that one kernel takes."""


@dataclass(kw_only=True)
class Shape:
    tokens: int
    layout: str = "expert"
    wire: str = "same"
    hidden: int = 7168
    num_experts: int = 256
    top_k: int = 8
    num_sms: int = 66
    """SMs of each rank; all blocks of both ranks have to be on the GPU together."""
    timeout: float = 10.0


class Rank:
    """The inputs and outputs of one rank, with room for all rows that can come."""

    def __init__(self, shape: Shape, plan_words: int, generator: torch.Generator) -> None:
        tokens, top_k = shape.tokens, shape.top_k
        by_rank = shape.layout == "rank"
        self.capacity = RANKS * tokens * (1 if by_rank else top_k)
        self.positions = RANKS * tokens * top_k if by_rank else -1
        self.x_TH = torch.randn(tokens, shape.hidden, generator=generator).bfloat16().cuda()
        ids = [torch.randperm(shape.num_experts, generator=generator)[:top_k] for _ in range(tokens)]
        self.ids_TK = torch.stack(ids).cuda()
        self.weights_TK = torch.rand(tokens, top_k, generator=generator).cuda()
        self.plan = torch.zeros(plan_words, dtype=torch.int32, device="cuda")
        self.rows_PH = torch.zeros(self.capacity, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.weights_P = torch.zeros(self.capacity, top_k if by_rank else 1, device="cuda")
        self.ids_PK = torch.zeros(self.capacity, top_k, dtype=self.ids_TK.dtype, device="cuda")
        self.index_Q = torch.zeros(max(self.positions, 0), dtype=torch.int32, device="cuda")
        self.grad_PH = torch.zeros_like(self.rows_PH)
        self.scaled_PH = torch.zeros_like(self.rows_PH)
        self.dots_P = torch.zeros(self.capacity, device="cuda")
        self.y_TH = torch.zeros_like(self.x_TH)

    def results(self) -> list[torch.Tensor]:
        of_rows = [self.rows_PH, self.weights_P, self.ids_PK, self.index_Q, self.grad_PH]
        return [*of_rows, self.scaled_PH, self.dots_P, self.y_TH]


class Twin:
    """The two ranks."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        self.layout = getattr(_C.RowLayout, shape.layout)
        device_shape = _C.DeviceShape(
            ranks=RANKS,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden=shape.hidden,
            max_tokens=shape.tokens,
            dtype=_C.DType.bfloat16,
            wire=getattr(_C.WireFormat, shape.wire),
            ranks_per_node=RANKS,
        )
        self.plan_words = _C.device_plan_fields(device_shape)["total"][1]
        size = _C.device_window_bytes(device_shape)
        self.windows = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]
        torch.cuda.synchronize()
        self.native = [
            _C.DeviceCommunicator(
                shape=device_shape,
                rank=rank,
                timeout=shape.timeout,
                num_sms=shape.num_sms,
                device=torch.cuda.current_device(),
                host_ranks=RANKS,
            )
            for rank in range(RANKS)
        ]
        names = [native.link_control() for native in self.native]
        for native in self.native:
            native.connect(
                bases=[window.data_ptr() for window in self.windows], names=names, pids=[os.getpid()] * RANKS
            )
        for native in self.native:
            native.unlink_control()
        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize()
        for native in self.native:
            native.close()

    def fuse(self, *most: int) -> None:
        """Sets the tokens that one kernel takes, of each rank."""
        for native, tokens in zip(self.native, most, strict=True):
            native.fuse_up_to(tokens)

    def ranks(self) -> list[Rank]:
        generator = torch.Generator().manual_seed(self.seed)
        return [Rank(self.shape, self.plan_words, generator) for _ in range(RANKS)]

    def _sent(self, own: Rank, capacity: int, positions: int) -> tuple[Any, ...]:
        sent = (own.x_TH.data_ptr(), 0, own.ids_TK.data_ptr(), True, own.weights_TK.data_ptr())
        return (*sent, self.shape.tokens, self.layout, 1, capacity, positions, 0, own.plan.data_ptr())

    def _received(self, own: Rank) -> tuple[int, ...]:
        by_rank = self.shape.layout == "rank"
        ids, index = (own.ids_PK.data_ptr(), own.index_Q.data_ptr()) if by_rank else (0, 0)
        return (own.rows_PH.data_ptr(), 0, own.weights_P.data_ptr(), ids, index, 0)

    def _each(self, ranks: list[Rank]) -> Iterator[tuple[Any, Rank, int]]:
        """Yields each rank with its stream, which first waits for what the caller's has been given: what
        makes the inputs, and clears the outputs."""
        for native, own, stream in zip(self.native, ranks, self.streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            yield native, own, stream.cuda_stream

    def dispatch(self, ranks: list[Rank]) -> None:
        for native, own, stream in self._each(ranks):
            rows = (own.capacity, own.positions if self.shape.layout == "rank" else own.capacity)
            sent = self._sent(own, own.capacity, own.positions)
            native.dispatch(*sent, *rows, *self._received(own), stream)

    def dispatch_dropless(self, ranks: list[Rank]) -> None:
        """A dispatch of as many rows as there are, which the host waits to know."""
        for native, own, stream in self._each(ranks):
            native.begin_dispatch(*self._sent(own, -1, -1), stream)
        for native, own, stream in self._each(ranks):
            native.finish_dispatch(True, *native.wait_rows(stream), *self._received(own), stream)

    def redispatch(self, ranks: list[Rank]) -> None:
        """The backward of a combine."""
        for native, own, stream in self._each(ranks):
            rows = (own.x_TH.data_ptr(), self.shape.tokens, own.capacity, own.grad_PH.data_ptr())
            native.redispatch(own.plan.data_ptr(), self.layout, *rows, 0, 0, 0, False, stream)

    def weighted(self, ranks: list[Rank]) -> None:
        """The backward of a combine with routing weights, whose gradients it makes too."""
        for native, own, stream in self._each(ranks):
            rows = (own.x_TH.data_ptr(), self.shape.tokens, own.capacity, own.scaled_PH.data_ptr())
            products = (own.weights_P.data_ptr(), own.rows_PH.data_ptr(), own.dots_P.data_ptr())
            native.redispatch(own.plan.data_ptr(), self.layout, *rows, *products, False, stream)

    def combine(self, ranks: list[Rank]) -> None:
        """Combines the rows that were dispatched, in the expert layout with routing weights."""
        for native, own, stream in self._each(ranks):
            weights = own.weights_P.data_ptr() if self.shape.layout == "expert" else 0
            rows = (own.rows_PH.data_ptr(), weights, 0, self.shape.tokens, own.y_TH.data_ptr())
            native.combine(own.plan.data_ptr(), self.layout, *rows, 0, 0, False, False, stream)

    def check(self) -> None:
        """Waits for both ranks. Raises what either has reported."""
        torch.cuda.synchronize()
        for native in self.native:
            native.check()

    def operations(self) -> dict[str, Callable[[list[Rank]], None]]:
        operations = {"dispatch": self.dispatch, "combine": self.combine, "redispatch": self.redispatch}
        if self.shape.layout == "expert":  # in the rank layout rows have no weights
            operations["weighted"] = self.weighted
        return operations

    def capture(self, operation: Callable[[list[Rank]], None], ranks: list[Rank], times: int) -> Any:
        """Returns a CUDA graph in which the operation follows itself so many times on both ranks."""
        operation(ranks)
        self.check()
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=main):
            for _ in range(times):
                operation(ranks)
            for stream in self.streams:
                main.wait_stream(stream)
        return graph
