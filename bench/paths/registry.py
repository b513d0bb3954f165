"""The paths of an operation: moecomm's and the baselines that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import moecomm

from ..harness.case import Case
from ..harness.options import BETWEEN_NODES, MOECOMM
from ..harness.path import NotRun, Path, Yardstick, attempt
from ..harness.timing import Clock
from . import between_nodes, ceilings, moecomm_path, permute, torch_symm

_Make = Callable[[Case, Clock], Path]
# By name without the backend: gloo and nccl are one code.
_OF_ALL: dict[str, _Make] = {
    "memcpy": ceilings.memcpy_path,
    "sm-push": ceilings.sm_push_path,
    "copy-engine": lambda case, clock: ceilings.copy_engine_path(case),
    "-rows": lambda case, clock: ceilings.bare_rows_path(case),
}
_MAKERS: dict[str, dict[str, _Make]] = {
    "dispatch": {
        "": lambda case, clock: permute.dispatch_path(case, tuned=False),
        "-tuned": lambda case, clock: permute.dispatch_path(case, tuned=True),
        "torch-symm": lambda case, clock: torch_symm.dispatch_path(case),
    },
    "combine": {
        "": lambda case, clock: permute.combine_path(case, tuned=False),
        "-tuned": lambda case, clock: permute.combine_path(case, tuned=True),
        "torch-symm": lambda case, clock: torch_symm.combine_path(case),
    },
    "alltoall": {"": lambda case, clock: permute.bare_alltoall_path(case)},
}


def make_paths(
    comm: moecomm.Communicator | None, case: Case, clock: Clock
) -> list[Path | Yardstick | NotRun]:
    """moecomm's path first, then the baselines; one that cannot be made on any rank runs on none."""
    made: list[Path | Yardstick | NotRun] = []
    if comm is not None:
        own, problem = attempt(lambda: moecomm_path.make_path(comm, case))
        made.append(own or NotRun(MOECOMM, problem, failed=True))
    for name in case.options.baselines:
        if name in BETWEEN_NODES:
            made.append(between_nodes.yardstick(name, case, 1 if comm is None else comm.network_lanes))
            continue
        path, problem = attempt(partial(_maker(name, case.options.program), case, clock))
        made.append(path or NotRun(name, problem))
    return made


def _maker(name: str, program: str) -> _Make:
    known = _MAKERS[program] | _OF_ALL
    return known[name] if name in known else known[name.removeprefix("gloo").removeprefix("nccl")]
