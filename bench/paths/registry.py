"""The paths of an operation: moecomm's and the baselines that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import moecomm

from ..harness.case import Case
from ..harness.options import BETWEEN_NODES, DEEP_EP, MOECOMM
from ..harness.path import NotRun, Path, Yardstick, attempt
from ..harness.timing import Clock
from . import between_nodes, ceilings, deep_ep_path, moecomm_path, permute, torch_symm
from .baseline import Baseline

# By name without the backend: gloo and nccl are one code.
_CEILINGS: dict[str, Callable[[Case, Clock], Path]] = {
    "memcpy": ceilings.memcpy_path,
    "sm-push": ceilings.sm_push_path,
    "sm-exchange": ceilings.sm_exchange_path,
    "-rows": lambda case, clock: ceilings.bare_rows_path(case),
}
_BASELINES: dict[str, Callable[[Case], Baseline]] = {
    "": lambda case: permute.PermutedExchange(case, tuned=False),
    "-tuned": lambda case: permute.PermutedExchange(case, tuned=True),
    "torch-symm": torch_symm.SymmetricExchange,
}


def make_paths(comm: moecomm.Communicator, case: Case, clock: Clock) -> list[Path | Yardstick | NotRun]:
    """moecomm's path first, then the baselines; one that cannot be made on any rank runs on none."""
    own, problem = attempt(lambda: moecomm_path.make_path(comm, case))
    made: list[Path | Yardstick | NotRun] = [own or NotRun(MOECOMM, problem, failed=True)]
    if case.options.api == DEEP_EP:
        path, problem = attempt(lambda: deep_ep_path.make_path(case))
        made.append(path or NotRun(DEEP_EP, problem, failed=True))
    for name in case.options.baselines:
        if name in BETWEEN_NODES:
            made.append(between_nodes.yardstick(name, case, comm.network_lanes))
            continue
        path, problem = attempt(partial(_make, name, case, clock))
        made.append(path or NotRun(name, problem))
    return made


def _make(name: str, case: Case, clock: Clock) -> Path:
    if name not in _CEILINGS and name != "torch-symm":
        name = name.removeprefix("gloo").removeprefix("nccl")
    if name in _CEILINGS:
        return _CEILINGS[name](case, clock)
    if case.options.program == "alltoall":
        return permute.BareAllToAll(case).dispatch_path()
    baseline = _BASELINES[name](case)
    return baseline.combine_path() if case.options.program == "combine" else baseline.dispatch_path()
