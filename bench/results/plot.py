#!/usr/bin/env python3
"""The picture of a record: bandwidth over size, one line a path, the ceiling dashed.

python bench/results/plot.py docs/results/cuda-dispatch-tokens.json picture.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.harness import record
from bench.harness.report import ceiling_of


def draw(path: str, content: record.Record) -> None:
    """Writes the picture of a record of an operation to `path` (.png, .svg or .pdf).

    Of GPUs it shows what crosses the links, for the paths that use them; else the useful bytes.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    options = content["options"]
    key = "busbw_GBps" if options["device"] == "cuda" else "algbw_GBps"
    rows = [row for row in content["rows"] if row[key] is not None]
    ceiling = ceiling_of({row["path"]: row for row in rows})
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, dtype in dict.fromkeys((row["path"], row["dtype"]) for row in rows):
        line = [row for row in rows if (row["path"], row["dtype"]) == (name, dtype)]
        axes.plot(
            [row["tokens"] for row in line],
            [row[key] for row in line],
            marker="o",
            linestyle="--" if name == ceiling else "-",
            label=f"{name} {dtype}",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("remote GB/s sent per GPU" if key == "busbw_GBps" else "algbw, GB/s per rank")
    axes.set_title(f"{content['program']}: {content['ranks']} ranks")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(sys.argv[2], record.read(sys.argv[1]))
