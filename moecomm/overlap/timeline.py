"""The timeline of a run: when its stages ran, and how to look at it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moecomm.errors import Unsupported


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

    def chrome_trace(self, path: str | Path, *, process: str = "moecomm") -> None:
        """Writes a JSON file for chrome://tracing and Perfetto: a row for each stream (the Trace Event Format
        of Chromium, complete events in microseconds)."""
        rows = {stream: number for number, stream in enumerate(self.streams)}
        start = self.spans[0].begin if self.spans else 0.0
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": process}}
        ]
        for stream, row in rows.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": stream}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": row, "args": {"sort_index": row}}
            )
        for span in self.spans:
            events.append(
                {
                    "name": span.name,
                    "cat": "communication" if span.communicates else "compute",
                    "ph": "X",
                    "pid": 0,
                    "tid": rows[span.stream],
                    "ts": (span.begin - start) * 1e6,
                    "dur": (span.end - span.begin) * 1e6,
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n")

    def picture(self, path: str | Path, *, title: str = "") -> None:
        """Draws the timeline, a row for each stream, in the format that the file's name ends with (.png,
        .svg). Raises Unsupported without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise Unsupported("a picture of a timeline needs matplotlib; pip install matplotlib") from error
        height = 0.7
        figure = Figure(figsize=(12, 1.2 + 1.4 * len(self.streams)), layout="constrained")
        axes = figure.add_subplot()
        start = self.spans[0].begin if self.spans else 0.0
        for span in self.spans:
            begin, length = (span.begin - start) * 1e6, (span.end - span.begin) * 1e6
            row = self.streams.index(span.stream)
            colour = "tab:orange" if span.communicates else "tab:blue"
            axes.broken_barh(
                [(begin, length)], (row - height / 2, height), facecolors=colour, edgecolors="white"
            )
            share = length / (self.seconds * 1e6)
            if share > _LEAST_WIDTH:  # names that do not fit in the span's width stand upright in it
                upright = 90 if share < _OF_A_LETTER * len(span.name) else 0
                middle = begin + length / 2
                axes.text(middle, row, span.name, ha="center", va="center", fontsize=6, rotation=upright)
        axes.set_yticks(range(len(self.streams)), self.streams)
        axes.set_ylim(len(self.streams) - 0.5, -0.5)
        axes.set_xlabel("us")
        axes.set_title(
            title or f"{self.seconds * 1e6:.0f} us, {self.exposed_share:.1%} exposed communication"
        )
        figure.savefig(path, dpi=120)


_LEAST_WIDTH, _OF_A_LETTER = 0.009, 0.005
"""Parts of a picture's width: of a span that has its name in it, and of a letter."""


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
