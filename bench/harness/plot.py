"""The picture of a run: algbw over size, one line a path, the memcpy ceiling dashed."""

from __future__ import annotations

from collections.abc import Sequence

from .options import Options
from .record import Row
from .report import CEILING


def draw(path: str, options: Options, rows: Sequence[Row]) -> None:
    """Writes the plot to `path` (.png, .svg or .pdf)."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, dtype in dict.fromkeys((row.path, row.dtype) for row in rows):
        line = [row for row in rows if (row.path, row.dtype) == (name, dtype)]
        axes.plot(
            [row.tokens for row in line],
            [row.algbw_GBps for row in line],
            marker="o",
            linestyle="--" if name == CEILING else "-",
            label=name if len(options.dtypes) == 1 else f"{name} {dtype}",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("algbw, GB/s per rank")
    axes.set_title(
        f"{options.operation}: {options.ranks} ranks, hidden {options.hidden}, "
        f"top-{options.topk} of {options.experts} experts"
    )
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
