"""Who takes part: for each operation moecomm's path and the baselines that were asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import moecomm

from .case import Case
from .ceilings import bare_rows_path, copy_engine_path, sm_push_path
from .flags import BETWEEN_NODES
from .memcpy import memcpy_path
from .paths import NotRun, Path, Yardstick
from .permute import bare_alltoall_path, permuted_combine_path, permuted_dispatch_path
from .product import combine_path, dispatch_path, kept_handle_path, weighted_kept_handle_path
from .raw_fabric import raw_fabric
from .timing import Clock
from .vdev import vdev_combine_path, vdev_dispatch_path

Baseline = Callable[[Case, Clock], Path]
_DISPATCH: dict[str, Baseline] = {
    "": lambda case, clock: permuted_dispatch_path(case, tuned=False),
    "-tuned": lambda case, clock: permuted_dispatch_path(case, tuned=True),
    "torch-symm": lambda case, clock: vdev_dispatch_path(case),
}
_COMBINE: dict[str, Baseline] = {
    "": lambda case, clock: permuted_combine_path(case, tuned=False),
    "-tuned": lambda case, clock: permuted_combine_path(case, tuned=True),
    "torch-symm": lambda case, clock: vdev_combine_path(case),
}
_ALLTOALL: dict[str, Baseline] = {"": lambda case, clock: bare_alltoall_path(case)}
_OF_OPERATION = {"dispatch": _DISPATCH, "combine": _COMBINE, "alltoall": _ALLTOALL}
_OF_ALL: dict[str, Baseline] = {
    "memcpy": memcpy_path,
    "sm-push": sm_push_path,
    "copy-engine": lambda case, clock: copy_engine_path(case),
    "-rows": lambda case, clock: bare_rows_path(case),
}


def product_path(comm: moecomm.Communicator, case: Case) -> Path:
    """moecomm's way of doing the operation."""
    if case.options.kept_handle == "weighted":
        return weighted_kept_handle_path(comm, case)
    if case.options.kept_handle == "plain":
        return kept_handle_path(comm, case)
    return (combine_path if case.options.operation == "combine" else dispatch_path)(comm, case)


def baseline(name: str, operation: str) -> Baseline:
    """The maker of a baseline. gloo and nccl are one code over two backends."""
    known = _OF_OPERATION[operation] | _OF_ALL
    for backend in ("gloo", "nccl"):
        if name.startswith(backend):
            return known[name.removeprefix(backend)]
    return known[name]


def make_baselines(case: Case, clock: Clock, lanes: int) -> list[Path | Yardstick | NotRun]:
    """The baselines asked for, in that order; one that cannot be made on any rank runs on none. `lanes`:
    endpoints of a rank that moecomm uses."""
    made: list[Path | Yardstick | NotRun] = []
    for name in case.options.baselines:
        if name in BETWEEN_NODES:
            made.append(raw_fabric(name, case, lanes))
            continue
        make = baseline(name, case.options.operation)
        made.append(attempt(name, lambda make=make: make(case, clock)))  # type: ignore[misc]
    return made


def attempt(name: str, make: Callable[[], Path]) -> Path | NotRun:
    """What `make` gives, or why it failed, on this rank or another; the same kind on all ranks."""
    path, problem = None, ""
    try:
        path = make()
    except Exception as error:  # whatever a baseline needs and this machine lacks
        problem = f"{type(error).__name__}: {error}"
    reason = first_problem(problem)
    if path is None or reason:
        return NotRun(name, reason)
    return path


def first_problem(own: str) -> str:
    """The first of the ranks' problems, shortened to a line; "" if no rank has one."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    reason = next((text for text in found if text), "")
    return " ".join(reason.split())[:200]


def checked(path: Path, rounds: int) -> tuple[int, str]:
    """(this rank's wrong values over `rounds` rounds of data, what went wrong on any rank while checking)."""
    wrong, problem = 0, ""
    try:
        # Rounds count from 1: round 0 is the data the paths were made with.
        wrong = sum(path.check(round) for round in range(1, rounds + 1))
        if rounds == 0:
            path.call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    except Exception as error:  # the path is left out, the others are measured
        problem = f"{type(error).__name__}: {error}"
    return wrong, first_problem(problem)
