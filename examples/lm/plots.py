"""Two pictures of a run, drawn from its metrics: the loss curve, and how evenly the experts are loaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from lm.metrics import Record

matplotlib.use("Agg")  # writes files only: there may be no display
import matplotlib.pyplot as plt

NEIGHBOURS = 10  # steps on either side that the running mean includes
MOST_PANELS = 8


def draw_loss(records: list[Record], path: Path) -> None:
    """Draws training loss with its running mean, validation loss, and the unigram baseline."""
    training, validation = (
        [(r["step"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
        for name in ("loss", "val_loss")
    )
    unigram = next((r["unigram"] for r in records if "unigram" in r), None)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if training:
        steps, losses = zip(*training, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        axes.plot(steps, running_mean(losses), color="tab:blue", label="training, running mean")
    if validation:
        steps, losses = zip(*validation, strict=True)
        label = f"held-out text (last: {losses[-1]:.3f})"
        axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, label=label)
    if unigram is not None:
        axes.axhline(unigram, color="tab:gray", linestyle="--", label=f"unigram baseline ({unigram:.3f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns means over equally many neighbours before and after a value, so that the curve does not lag."""
    means = []
    for place in range(len(values)):
        reach = min(NEIGHBOURS, place, len(values) - 1 - place)
        means.append(sum(values[place - reach : place + reach + 1]) / (2 * reach + 1))
    return means


def draw_expert_load(records: list[Record], path: Path) -> None:
    """Draws a panel per layer: steps to the right, experts upward, colour = load over that step's mean
    load."""
    logged = [r for r in records if "load" in r]
    if not logged:
        return
    steps = [r["step"] for r in logged]
    load_SAE = np.asarray([r["load"] for r in logged], dtype=float)
    relative_SAE = load_SAE / load_SAE.mean(axis=2, keepdims=True)
    layers, experts = relative_SAE.shape[1:]
    shown = sorted(set(np.linspace(0, layers - 1, min(layers, MOST_PANELS)).astype(int).tolist()))
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(5.5 * columns, 1.2 + 2.4 * rows), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    edges = _edges(steps)
    for axes, layer in zip(grid.flat, shown, strict=False):
        worst = relative_SAE[-1, layer].max()
        # Symmetric in the logarithm, so that half and twice the mean load stand out equally.
        image = axes.pcolormesh(
            edges, np.arange(experts + 1) - 0.5, np.log2(np.maximum(relative_SAE[:, layer].T, 1e-3)),
            cmap="RdBu_r", vmin=-1.5, vmax=1.5,
        )  # fmt: skip
        axes.set_title(f"layer {layer}: max/mean {worst:.2f} at the end", fontsize=10)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("step")
    for axes in grid[:, 0]:
        axes.set_ylabel("expert")
        axes.yaxis.get_major_locator().set_params(integer=True)
    ticks = [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    bar = figure.colorbar(image, ax=grid, ticks=ticks, extend="both", label="load / mean load")
    bar.ax.set_yticklabels([f"{2**tick:.2g}" for tick in ticks])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _edges(steps: list[int]) -> list[float]:
    """Returns the columns' borders, half-way between neighbours, so that unequal distances look unequal."""
    inner = [(left + right) / 2 for left, right in itertools.pairwise(steps)]
    first = 2 * steps[0] - inner[0] if inner else steps[0] - 0.5
    last = 2 * steps[-1] - inner[-1] if inner else steps[-1] + 0.5
    return [first, *inner, last]
