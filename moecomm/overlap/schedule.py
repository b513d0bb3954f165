"""A schedule: stages with their streams, dependencies and resources. Pure data, built and looked at without a
GPU.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from moecomm.errors import InvalidSchedule

SMS = "sms"
"""The resource that `Executor` looks after: matrix products of a stage leave the SMs that it does not use."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One piece of work, such as a transfer or a matrix product.

    Attributes:
        name: the name by which other stages and the work refer to it; unique in a schedule.
        stream: stages of one stream run one after another, in the order of the schedule.
        after: names of the stages whose results it needs.
        uses: what it holds while it runs, of the schedule's resources: {"sms": 24}.
        communicates: it waits for peers or for links, and is to be hidden behind stages that do not.
        yields: another program of `interleave` may go on when it has been issued.
        leaves_sms: it is a product that can leave SMs, and does so for what another program has on its way.
    """

    name: str
    stream: str
    after: tuple[str, ...] = ()
    uses: Mapping[str, float] = field(default_factory=dict)
    communicates: bool = False
    yields: bool = False
    leaves_sms: bool = False


class Schedule:
    """Stages in an order in which a host can issue them: after all that they depend on, and else as listed.

    Args:
        stages: the stages in the wanted order.
        streams: names of all streams. The first is the caller's own; `Executor` ends with it.
        resources: how much there is of each thing that stages use.

    Raises InvalidSchedule, with the names of the stages: for a cycle, an unknown stage, stream or resource,
    a use of more than there is, and two stages of one name.

    Attributes:
        stages: all of them, in the order of issue.
        names: those of all stages.
        awaited: names of the stages that some stage of another stream waits for.
        is_chain: every stage waits for the one before it, so that one stream would do for all.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        streams: Iterable[str],
        resources: Mapping[str, float] | None = None,
    ) -> None:
        self.streams: tuple[str, ...] = tuple(dict.fromkeys(streams))
        self.resources: Mapping[str, float] = MappingProxyType(dict(resources or {}))
        listed = tuple(stages)
        self._check(listed)
        self.stages: tuple[Stage, ...] = _in_order(listed)
        self._by_name = {stage.name: stage for stage in self.stages}
        self.names: frozenset[str] = frozenset(self._by_name)
        self.awaited: frozenset[str] = frozenset(
            other
            for stage in self.stages
            for other in stage.after
            if self._by_name[other].stream != stage.stream
        )
        self.is_chain: bool = all(
            a.stream == b.stream or a.name in b.after for a, b in itertools.pairwise(self.stages)
        )

    def __getitem__(self, name: str) -> Stage:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def _check(self, stages: tuple[Stage, ...]) -> None:
        names: set[str] = set()
        for stage in stages:
            if stage.name in names:
                raise InvalidSchedule(f"two stages are called {stage.name!r}")
            names.add(stage.name)
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount > 0):
                raise InvalidSchedule(f"there is {amount} of the resource {name!r}, must be above 0")
        for stage in stages:
            self._check_stage(stage, names)

    def _check_stage(self, stage: Stage, names: set[str]) -> None:
        who = f"stage {stage.name!r}"
        if stage.stream not in self.streams:
            raise InvalidSchedule(f"{who} is on stream {stage.stream!r}, there are {_listed(self.streams)}")
        for other in stage.after:
            if other not in names:
                raise InvalidSchedule(f"{who} comes after {other!r}, which is no stage")
        for name, amount in stage.uses.items():
            if name not in self.resources:
                raise InvalidSchedule(f"{who} uses {name!r}, there are {_listed(self.resources)}")
            if not 0 <= amount <= self.resources[name]:
                raise InvalidSchedule(f"{who} uses {amount:g} of {name!r}, there is {self.resources[name]:g}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _in_order(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Returns the stages so that each comes after those it depends on, always taking the first listed that
    can run."""
    number = {stage.name: i for i, stage in enumerate(stages)}
    missing = [len(set(stage.after)) for stage in stages]
    needed_by: list[list[int]] = [[] for _ in stages]
    for i, stage in enumerate(stages):
        for other in set(stage.after):
            needed_by[number[other]].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    ordered = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(stages[i])
        for later in needed_by[i]:
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(ready, later)
    if len(ordered) < len(stages):
        raise InvalidSchedule("stages wait for each other: " + " after ".join(_cycle(stages, ordered)))
    return tuple(ordered)


def _cycle(stages: tuple[Stage, ...], ordered: list[Stage]) -> list[str]:
    """Returns the names along a cycle, the first one again at the end; `ordered`: stages that are in none."""
    fine = {stage.name for stage in ordered}
    waits_for = {
        stage.name: next(other for other in stage.after if other not in fine)
        for stage in stages
        if stage.name not in fine
    }
    path = [next(iter(waits_for))]
    while path[-1] not in path[:-1]:
        path.append(waits_for[path[-1]])
    return path[path.index(path[-1]) :]
