"""A progress bar on a terminal, plain lines elsewhere; both show the same numbers."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lm.metrics import WARM_UP, Record

ESTIMATE_AFTER = 10  # steps
SHOWN_LATE = 0.02  # part of a step: longer waits of other ranks for one rank are reported


class StepProgress:
    """Shows the steps of one run; its speeds are means since the line before. Silent on all ranks but the
    first."""

    def __init__(self, *, start: int, steps: int, log_every: int, shown: bool) -> None:
        self._start, self._steps, self._log_every, self._shown = start, steps, log_every, shown
        self._seconds = 0.0
        self._lately: list[float] = []  # seconds of the steps since the line before
        self._bar: Progress | None = None
        if shown and sys.stdout.isatty():
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stdout))
            self._task = self._bar.add_task("", total=steps, completed=start)
            self._bar.start()

    def step(self, record: Record) -> None:
        if not self._shown:
            return
        done = record["step"] - self._start
        if done > WARM_UP:
            self._seconds += record["seconds"]
        if done == ESTIMATE_AFTER:
            left = (self._steps - record["step"]) * self._seconds / (done - WARM_UP)
            self.note(
                f"estimate: {duration(left)} left for {self._steps - record['step']} steps, then validation"
            )
        self._lately.append(record["seconds"])
        faster = record["seconds"] * len(self._lately) / sum(self._lately)
        shown: Record = dict(record)
        for name in shown.keys() & {"tokens_per_s", "tflops", "mfu"}:
            shown[name] *= faster
        text = _describe(shown)
        ends_line = record["step"] % self._log_every == 0 or record["step"] in (1, self._steps)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=text)
        elif ends_line:
            print(f"step {record['step']:>5}/{self._steps}  {text}", flush=True)
        if ends_line:
            self._lately = []

    def note(self, text: str) -> None:
        """Prints a line that stays, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _describe(record: Record) -> str:
    text = (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tok/s  "
        f"expert max/mean {record['balance']:.2f}  dispatch+combine {record['comm_share']:.1%}"
    )
    if "exposed_share" in record:
        seconds = record["exposed_share"] * record["seconds"]
        text += f", {record['exposed_share']:.1%} exposed ({seconds * 1e3:.1f} ms)"
    if record.get("late_share", 0.0) >= SHOWN_LATE:
        text += f", {record['late_share']:.1%} waiting for rank {record['late_rank']}"
    if "tflops" in record:
        text += f"  {record['tflops']:.1f} TFLOP/s"
    return f"{text}, MFU {record['mfu']:.1%}" if "mfu" in record else text


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
