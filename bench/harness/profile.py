"""Where the time of a training step goes: the kernels of a GPU by what they are for, and the time in which
none runs.

A kernel is told by its name. Sums of kinds may exceed the step's time, since kernels run beside each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

KINDS = (
    ("dispatch and combine", r"moecomm::gpu"),
    ("experts' activation", r"moecomm::experts"),
    ("collectives", r"nccl|gloo"),
    ("attention", r"flash|fmha|sdpa|flex_attention|attention"),
    ("loss and embedding", r"softmax|nll_loss|cross_?entropy|embedding"),
    ("experts' products", r"quack|grouped|GroupProblem"),
    ("dense products", r"nvjet|gemm|cutlass|cublas|splitK|gemv"),
    ("copies", r"memcpy|memset|copy_kernel|CatArray|fill"),
)
"""The first of these patterns that a kernel's name has is its kind."""
REST = "elementwise, optimizer and others"
Span = tuple[float, float]


def kind_of(name: str) -> str:
    """Returns what a kernel of this name is for."""
    return next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), REST)


def covered(spans: Iterable[Span]) -> float:
    """Returns the time in which at least one of the spans, (start, end), runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def shares(kernels: Sequence[tuple[str, Span]]) -> dict[str, float]:
    """Returns the milliseconds of each kind of kernels, whose spans are in microseconds; "step", from the
    start of the first to the end of the last; and "idle", in which none of them ran."""
    if not kernels:
        return {}
    spans = [span for _, span in kernels]
    step = max(end for _, end in spans) - min(start for start, _ in spans)
    found = {"step": step / 1e3, "idle": (step - covered(spans)) / 1e3}
    for kind in (*(kind for kind, _ in KINDS), REST):
        of_kind = covered(span for name, span in kernels if kind_of(name) == kind)
        if of_kind:
            found[kind] = of_kind / 1e3
    return found


def profiled(call: Callable[[], Any], trace: Path | None = None) -> dict[str, Any]:
    """Runs `call` and returns, of its kernels on this rank's GPU, their `shares` as "profile". trace: the
    file for a trace that a browser shows (chrome://tracing, ui.perfetto.dev); it has what the host did, too,
    which takes minutes for a step of many layers."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    if trace is not None:
        kinds.append(torch.profiler.ProfilerActivity.CPU)
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(trace))
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return {"profile": shares(kernels)}
