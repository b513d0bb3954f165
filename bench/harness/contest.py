"""Who takes part: for each operation moecomm's path and the baselines that were asked for."""

from __future__ import annotations

from collections.abc import Callable

import moecomm

from .case import Case
from .gloo import gloo_alltoall_path, gloo_combine_path, gloo_dispatch_path
from .memcpy import memcpy_path
from .paths import Path
from .product import combine_path, dispatch_path
from .timing import CacheFlusher

Product = Callable[[moecomm.Communicator, Case], Path]
Baseline = Callable[[Case], Path]

_OPERATIONS: dict[str, tuple[Product, dict[str, Baseline]]] = {
    "dispatch": (
        dispatch_path,
        {
            "gloo": lambda case: gloo_dispatch_path(case, tuned=False),
            "gloo-tuned": lambda case: gloo_dispatch_path(case, tuned=True),
        },
    ),
    "combine": (
        combine_path,
        {
            "gloo": lambda case: gloo_combine_path(case, tuned=False),
            "gloo-tuned": lambda case: gloo_combine_path(case, tuned=True),
        },
    ),
    "alltoall": (dispatch_path, {"gloo": gloo_alltoall_path}),
}


def make_paths(comm: moecomm.Communicator, case: Case, flusher: CacheFlusher) -> list[Path]:
    """moecomm first, then the baselines asked for."""
    product, baselines = _OPERATIONS[case.options.operation]
    return [
        product(comm, case),
        *(
            memcpy_path(case, flusher) if name == "memcpy" else baselines[name](case)
            for name in case.options.baselines
        ),
    ]
