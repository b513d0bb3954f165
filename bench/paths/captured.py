"""Calls in CUDA graphs: what --graph times, of moecomm and of the ceilings beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WARMUP_BEFORE_CAPTURE = 2


class Captured:
    """A call captured in a CUDA graph, so many `times` one after the other; `replay` is the calls, `result`
    what the last of each replay writes.
    """

    def __init__(self, call: Callable[[], Any], times: int = 1) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks after its own events meanwhile: only this thread is watched. The stream
        # is the one that NCCL has been called on.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            for _ in range(times):
                self.result = call()
        self._graph, self._call = graph, call  # the call's tensors are the graph's

    def replay(self) -> Any:
        self._graph.replay()
        return self.result


def in_graph(call: Callable[[], Any], times: int) -> Callable[[], Any]:
    """Returns what is timed of a call: itself or, where --graph says how many `times`, their replay."""
    return Captured(call, times).replay if times else call
