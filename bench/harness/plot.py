"""The picture of a run: bandwidth over size, one line a path, the ceiling dashed."""

from __future__ import annotations

from collections.abc import Sequence

from .record import Row
from .report import ceiling_of


def draw(path: str, rows: Sequence[Row], *, title: str, remote: bool) -> None:
    """Writes the plot to `path` (.png, .svg or .pdf).

    With `remote` it shows what crosses the links, for the paths that use them; else the useful bytes.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    ceiling = ceiling_of([row.path for row in rows])
    shown = [row for row in rows if not remote or row.busbw_GBps is not None]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, dtype in dict.fromkeys((row.path, row.dtype) for row in shown):
        line = [row for row in shown if (row.path, row.dtype) == (name, dtype)]
        axes.plot(
            [row.tokens for row in line],
            [(row.busbw_GBps or 0.0) if remote else row.algbw_GBps for row in line],
            marker="o",
            linestyle="--" if name == ceiling else "-",
            label=name if len({row.dtype for row in shown}) == 1 else f"{name} {dtype}",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("remote GB/s sent per GPU" if remote else "algbw, GB/s per rank")
    axes.set_title(title)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
