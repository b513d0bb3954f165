"""A report on a run: one HTML file, pictures included."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import numpy as np
from lm.files import write_whole
from lm.metrics import Record
from lm.plots import draw_expert_load, draw_loss

from finetune.options import Options
from finetune.watch import STAGES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
img { max-width: 100%; height: auto }
table { border-collapse: collapse }
th, td { text-align: left; padding: .2rem 1.5rem .2rem 0; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; background: #f5f5f5; padding: 1rem } .prompt { color: #888 }
"""


def write(
    path: Path,
    records: list[Record],
    *,
    options: Options,
    ep: int,
    memory: Sequence[int],
    facts: dict[str, str],
    sample: tuple[str, str],
) -> None:
    """Writes the report. `memory`: each rank's peak in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = {}
        for name, draw in (
            ("loss", draw_loss),
            ("load", draw_expert_load),
            ("ranks", lambda of, to: _draw_ranks(of, ep, to)),
            ("stages", _draw_stages),
        ):
            picture = Path(folder, f"{name}.png")
            draw(records, picture)
            if picture.exists():
                data = base64.b64encode(picture.read_bytes()).decode()
                pictures[name] = f'<img alt="{name}" src="data:image/png;base64,{data}">'
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    chosen = " ".join(
        f"{name}={value}"
        for name, value in asdict(options).items()
        if value not in (None, "", []) and value is not False
    )
    used = "".join(
        f'<tr><td>rank {rank}</td><td class="n">{size / 2**30:.2f} GiB</td></tr>'
        for rank, size in enumerate(memory)
    )
    prompt, went_on = map(html.escape, sample)
    written = f'<h2>A sample</h2><pre><span class="prompt">{prompt}</span>{went_on}</pre>' if went_on else ""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Fine-tuning {html.escape(Path(facts["model"]).name)}</title><style>{STYLE}</style></head><body>
<h1>Fine-tuning {html.escape(Path(facts["model"]).name)}</h1>
<table>{rows}</table>
<h2>Loss</h2>{pictures["loss"]}
<h2>Load of experts</h2>
<p>Tokens of each expert beside the mean of its layer: white is the mean, red more, blue less.</p>
{pictures.get("load", "")}
<h2>Load of ranks</h2>
<p>Tokens that go to each of the {ep} ranks that share the experts, beside the mean of the layer, in the
last steps. The busiest rank decides how long a layer takes.</p>
{pictures.get("ranks", "")}
<h2>Where a step's time goes</h2>
<p>On the first rank. Experts: dispatch, their products, combine.</p>
{pictures.get("stages", "")}
<h2>Memory</h2><p>The most that each rank took.</p><table>{used}</table>
{written}
<h2>Options</h2><pre>{html.escape(chosen)}</pre>
</body></html>
"""
    write_whole(path, page)


def _draw_ranks(records: list[Record], ep: int, path: Path) -> None:
    logged = [r["load"] for r in records if "load" in r]
    if not logged:
        return
    load_LE = np.asarray(logged[-3:], dtype=float).sum(0)
    load_LR = load_LE.reshape(len(load_LE), ep, -1).sum(2)
    load_LR /= np.maximum(load_LR.mean(1, keepdims=True), 1e-9)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(load_LR)), layout="constrained")
    image = axes.imshow(load_LR, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
    axes.set(xlabel="rank of the experts", ylabel="layer", xticks=range(ep))
    if load_LR.size <= 256:
        for (layer, rank), value in np.ndenumerate(load_LR):
            axes.text(rank, layer, f"{value:.2f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, ax=axes, label="load / mean load")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_stages(records: list[Record], path: Path) -> None:
    logged = [(r["step"], r["stages"]) for r in records if "stages" in r]
    if not logged:
        return
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    steps = [step for step, _ in logged]
    names = [name for name in STAGES if any(name in stages for _, stages in logged)]
    seconds_NS = np.maximum([[stages.get(name, 0.0) for name in names] for _, stages in logged], 0.0)
    axes.stackplot(steps, seconds_NS.T * 1e3, labels=names)
    axes.set(xlabel="step", ylabel="ms a step", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)
    plt.close(figure)
