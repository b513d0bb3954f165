"""The pictures of docs/model.md: what bench.costmodel predicts, over nodes, routing, puts and tokens.

Nothing is measured here. Writes docs/results/model-*.svg, or elsewhere with --into. The same versions of the
model and of matplotlib write the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.costmodel import MACHINES, MODELS, Machine, Operation, Prediction, Shape, predict

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
LOCAL = 8  # ranks of a node
TOKENS = 4096
H200 = MACHINES["h200"]
NICS = (25.0, 50.0, 100.0)
MOST_GPUS = 2048
MARKERS = {
    "NIC": "o",
    "node links": "s",
    "reduce": "P",
    "command rate": "^",
    "put rate": "v",
    "metadata": "D",
    "plan": "d",
    "fixed cost": "x",
    "latency": "+",
    "memory": "p",
    "staging": "h",
}


def nodes_of(experts: int) -> list[int]:
    """Numbers of nodes for which the ranks divide the experts: powers of two, times 3 where that goes on."""
    most = experts // LOCAL
    return [n for n in range(1, most + 1) if most % n == 0 and (n & (n - 1) == 0 or n % 3 == 0)]


def of_model(name: str, nodes: int, **changes: Any) -> Shape:
    """`nodes` nodes that hold the experts of a published model."""
    return replace(Shape(nodes=nodes, ranks_per_node=LOCAL, tokens=TOKENS, **MODELS[name]), **changes)


def marked_line(
    axes: Any, x: Sequence[float], operations: Sequence[Operation], seen: set[str], **style: Any
) -> None:
    """Milliseconds over x, each point with the marker of what holds it."""
    milliseconds = [operation.seconds * 1e3 for operation in operations]
    (line,) = axes.plot(x, milliseconds, **style)
    for place, height, operation in zip(x, milliseconds, operations, strict=True):
        seen.add(operation.bottleneck)
        marker = MARKERS[operation.bottleneck]
        axes.plot([place], [height], marker=marker, markersize=5, color=line.get_color(), linestyle="none")


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def count_axis(axes: Any, label: str) -> None:
    """Powers of two from left to right, written out."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel(label)
    axes.grid(True, alpha=0.3)


def explain_markers(figure: Any, seen: set[str]) -> None:
    """A legend of the markers below the axes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="black", linestyle="none", marker=MARKERS[name], label=f"held by {name}")
        for name in MARKERS
        if name in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)


def over_nodes(pyplot: Any) -> Any:
    """Time over GPUs for four models and three NICs; one group of ranks ends where the experts do."""
    figure, grid = pyplot.subplots(2, len(MODELS), figsize=(13, 6.5), layout="constrained", sharex=True)
    seen: set[str] = set()
    for column, name in enumerate(MODELS):
        numbers = nodes_of(MODELS[name]["experts"])
        gpus = [n * LOCAL for n in numbers]
        for nic in NICS:
            machine = replace(H200, nic_GBps=nic)
            found = [predict(machine, of_model(name, n)) for n in numbers]
            for row, operation in enumerate(("dispatch", "combine")):
                axes = grid[row][column]
                times: list[Operation] = [getattr(each, operation) for each in found]
                marked_line(axes, gpus, times, seen, label=f"{nic:.0f} GB/s a GPU")
                last = times[-1].seconds * 1e3
                color = axes.lines[-1].get_color()
                axes.plot([gpus[-1], MOST_GPUS], [last, last], linestyle=":", color=color)
        for row, operation in enumerate(("dispatch", "combine")):
            axes = grid[row][column]
            axes.set_title(f"{name}, {operation}", fontsize=10)
            count_axis(axes, "GPUs of the job" if row == 1 else "")
            axes.set_ylim(bottom=0)
            if column == 0:
                axes.set_ylabel("ms")
    grid[0][0].legend(fontsize=8)
    explain_markers(figure, seen)
    figure.suptitle(
        f"predicted, {TOKENS} tokens a GPU, bfloat16, {LOCAL} GPUs a node; dotted: further groups"
    )
    return figure


def over_limits(pyplot: Any) -> Any:
    """DeepSeek-V3 with and without limited routing: nodes of a token, and time."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    numbers = nodes_of(MODELS["deepseek-v3"]["experts"])
    seen: set[str] = set()
    plans: dict[str, Callable[[int], tuple[int | None, int | None]]] = {
        "no limit": lambda _: (None, None),
        "4 of the model's 8 groups": lambda _: (8, 4),
        "at most 4 nodes": lambda n: (n, 4) if n > 4 else (None, None),
        "at most 2 nodes": lambda n: (n, 2) if n > 2 else (None, None),
    }
    for label, groups in plans.items():
        found = []
        for n in numbers:
            num_groups, topk_groups = groups(n)
            shape = of_model("deepseek-v3", n, num_groups=num_groups, topk_groups=topk_groups)
            found.append(predict(H200, shape))
        left.plot(numbers, [each.traffic.nodes_per_token for each in found], marker=".", label=label)
        marked_line(right, numbers, [each.dispatch for each in found], seen, label=label)
    left.set_ylabel("nodes that a token needs, its own counted")
    right.set_ylabel("dispatch, ms")
    for axes in (left, right):
        count_axis(axes, "nodes")
        axes.set_ylim(bottom=0)
    left.legend(fontsize=8)
    explain_markers(figure, seen)
    figure.suptitle("predicted, deepseek-v3, random routing, 50 GB/s a GPU")
    return figure


def over_puts(pyplot: Any) -> Any:
    """Draws where the proxy limits a dispatch: small puts, and commands for single rows."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    seen: set[str] = set()
    sizes = [14336 << power for power in range(9)]
    for rate in (0.1e6, 0.3e6, 1e6, 3e6):
        machine = replace(H200, put_rate=rate)
        found = [predict(machine, of_model("deepseek-v3", 16, put_bytes=size)).dispatch for size in sizes]
        marked_line(
            left, [size / 1024 for size in sizes], found, seen, label=f"{rate / 1e6:.1f} M puts/s a proxy"
        )
    count_axis(left, "KiB of a put, from one row on")
    left.set_title("bfloat16, 50 GB/s a GPU", fontsize=10)
    nics = [25.0, 50.0, 100.0, 200.0, 400.0]
    for rate, covered in ((1e6, 1), (1e6, 4), (8e6, 1), (1e6, 16)):
        shape = of_model("deepseek-v3", 16, wire="fp8", rows_per_command=covered)
        found = [predict(replace(H200, nic_GBps=nic, command_rate=rate), shape).dispatch for nic in nics]
        label = f"{rate / 1e6:.0f} M commands/s, {covered} row{'s' * (covered > 1)} each"
        marked_line(right, nics, found, seen, label=label)
    count_axis(right, "GB/s of a NIC")
    right.set_xticks(nics, [f"{nic:.0f}" for nic in nics])
    right.set_title("fp8, puts as moecomm makes them", fontsize=10)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("dispatch, ms")
        axes.legend(fontsize=8)
    explain_markers(figure, seen)
    figure.suptitle(f"predicted, deepseek-v3 on 16 nodes, {TOKENS} tokens a GPU")
    return figure


def bottlenecks(pyplot: Any) -> Any:
    """Draws which resource limits a dispatch, by number of nodes and tokens."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    numbers = nodes_of(MODELS["deepseek-v3"]["experts"])
    tokens = [8 << power for power in range(12)]
    cases: dict[str, tuple[Machine, dict[str, Any]]] = {
        "bfloat16, 50 GB/s": (H200, {}),
        "bfloat16, 50 GB/s, a put a row": (H200, {"put_bytes": 14336}),
        "fp8, 100 GB/s, a command a row": (
            replace(H200, nic_GBps=100.0),
            {"wire": "fp8", "rows_per_command": 1},
        ),
    }
    names = list(MARKERS)
    figure, grid = pyplot.subplots(1, len(cases), figsize=(13, 4.2), layout="constrained", sharey=True)
    colors = pyplot.get_cmap("tab20").colors
    seen: set[str] = set()
    for axes, (title, (machine, changes)) in zip(grid, cases.items(), strict=True):
        cells = []
        for many in tokens:
            found = [
                predict(machine, of_model("deepseek-v3", n, tokens=many, **changes)).dispatch.bottleneck
                for n in numbers
            ]
            seen.update(found)
            cells.append([names.index(name) for name in found])
        axes.pcolormesh(cells, cmap=ListedColormap(colors[: len(names)]), vmin=-0.5, vmax=len(names) - 0.5)
        axes.set_xticks([i + 0.5 for i in range(len(numbers))], [str(n) for n in numbers])
        axes.set_yticks([i + 0.5 for i in range(len(tokens))], [str(many) for many in tokens])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("nodes")
    grid[0].set_ylabel("tokens a GPU")
    handles = [Patch(color=colors[i], label=name) for i, name in enumerate(names) if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle("predicted: what holds a dispatch of deepseek-v3")
    return figure


def one_wide_group(pyplot: Any) -> Any:
    """The stages of one dispatch over up to 4096 ranks, of a model with so many experts."""
    experts = 4096
    figure, grid = pyplot.subplots(1, 3, figsize=(13, 4.5), layout="constrained")
    cases: dict[str, dict[str, Any]] = {
        "4096 tokens, bfloat16": {},
        "4096 tokens, fp8": {"wire": "fp8"},
        "128 tokens, fp8": {"wire": "fp8", "tokens": 128},
    }
    numbers = nodes_of(experts)
    for axes, (title, changes) in zip(grid, cases.items(), strict=True):
        found: list[Prediction] = []
        for n in numbers:
            shape = of_model("deepseek-v3", 1, experts=experts, num_groups=None, topk_groups=None)
            found.append(predict(H200, replace(shape, nodes=n, **changes)))
        gpus = [n * LOCAL for n in numbers]
        for stage in ("wire", "pull", "metadata", "plan", "staging", "fixed", "latency"):
            line = [each.dispatch.stage(stage).seconds * 1e3 for each in found]
            axes.plot(gpus, [each or float("nan") for each in line], marker=".", label=stage)
        whole = [each.dispatch.seconds * 1e3 for each in found]
        axes.plot(gpus, whole, color="black", linewidth=2, label="dispatch")
        count_axis(axes, "GPUs, all in one group")
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
    grid[0].set_ylabel("ms")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8)
    figure.suptitle("predicted, top-8 of 4096 experts, hidden 7168, 50 GB/s a GPU, no limit on nodes")
    return figure


FIGURES: dict[str, Callable[[Any], Any]] = {
    "model-nodes": over_nodes,
    "model-limits": over_limits,
    "model-puts": over_puts,
    "model-bottlenecks": bottlenecks,
    "model-wide": one_wide_group,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws all pictures as SVG files."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(
        prog="python -m bench.costmodel.plots", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="default docs/results")
    folder: Path = parser.parse_args(arguments).into
    folder.mkdir(parents=True, exist_ok=True)
    # Text stays text, which is small, and ids do not change from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moecomm"}):
        for name, make in FIGURES.items():
            figure = make(pyplot)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
    print(f"written: {', '.join(f'{name}.svg' for name in FIGURES)} into {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
