"""Recorders make the graph of a GraphedStep: they warm the step up, record it, and replay it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from moecomm.errors import Unsupported

Result = TypeVar("Result")


class Recorder(Protocol):
    """Records and replays a step. Tests use a recorder whose replays simply call the step."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs the step as it will be recorded, so that all lazy initialisation happens before `record`."""

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Records `run`; returns a function that replays it and returns its result, possibly in the same
        tensors each time."""


def require_gpu(device: torch.device) -> None:
    """Raises Unsupported if a model on `device` cannot be captured."""
    if device.type != "cuda":
        raise Unsupported(f"the model is on {device.type}: a step is captured on a GPU only")


class CudaRecorder:
    """Records a step as a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs the step on the recording stream, since autograd keeps accumulating gradients on the stream of
        the first run."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Captures `run`. Other threads may call CUDA meanwhile, as NCCL's watchdog thread does."""
        gc.collect()  # now, since freeing a CUDA object would invalidate the capture
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = run()

        def replay() -> Result:
            graph.replay()
            return result

        return replay
