"""The timeline of a run: when its stages ran, and how much of its communication was exposed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """One stage on its stream, in seconds from the start.

    Attributes:
        name: name of the stage.
        stream: name of the stream that it ran on.
        begin: seconds from the start of the run.
        end: seconds from the start of the run.
        communicates: whether it was a transfer, not a computation.
    """

    name: str
    stream: str
    begin: float
    end: float
    communicates: bool = False


class Timeline:
    """The stages of one recorded run (`Stages.timeline`, `MoELayer.timelines`), by their begin.

    Attributes:
        spans: all stages, by their begin.
        streams: names of all streams, also of those with no span.
    """

    def __init__(self, spans: Iterable[Span], *, streams: Iterable[str]) -> None:
        self.spans: tuple[Span, ...] = tuple(sorted(spans, key=lambda span: (span.begin, span.end)))
        self.streams: tuple[str, ...] = tuple(streams)

    @property
    def seconds(self) -> float:
        """The time in seconds from the first begin to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - self.spans[0].begin

    @property
    def exposed_seconds(self) -> float:
        """The time in seconds in which some stage communicates and none computes."""
        computing = _union(span for span in self.spans if not span.communicates)
        return _length(_union(self.spans)) - _length(computing)

    @property
    def exposed_share(self) -> float:
        """The fraction exposed_seconds / seconds; 0 for an empty timeline."""
        return self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns disjoint intervals that cover the spans."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)
