"""Training gives the same numbers under every layout of the ranks: the curves of loss and gradient norm over
some steps on 8 ranks are those of a single process.

Some mappings, schedules of pipelines and models of each kind run by default.
MOECOMM_TEST_MAPPINGS=all runs all mappings, for 20 steps each; with -s pytest shows the largest differences,
of which docs/folding.md has the largest.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.nn import sharded_state
from tests.examples.conftest import Never, train_on  # and puts examples/ on the path
from tests.multirank.conftest import Pools, own_pool

from lm import fitting, options, ranks  # isort: skip
from lm.errors import UsageError  # isort: skip
from lm.metrics import read_metrics  # isort: skip
from lm.pipeline import lay_out  # isort: skip
from lm.trainer import Trainer  # isort: skip

pool = own_pool()

ALL = os.environ.get("MOECOMM_TEST_MAPPINGS") == "all"
if_all = pytest.mark.skipif(not ALL, reason="MOECOMM_TEST_MAPPINGS=all runs it")

WORLD, STEPS = 8, 20 if ALL else 4
RUNS_OF_A_POOL = 4
"""Runs of the same ranks, before there are new ones."""
HALF, QUARTER, LAST = STEPS // 2, STEPS // 4, f"step-{STEPS:08d}"
BOUND = 2e-6
"""Largest relative difference of a loss or a gradient norm over the steps. Ranks add the same numbers in
another order, in float32, whose numbers are 1.2e-7 apart; ten times what was seen is room for the sums of
another machine."""
LEARNS = 0.3 if ALL else 0.05
"""By how much a loss has to become less."""
MODEL = (
    "--device cpu --dim 32 --layers 2 --heads 8 --kv-heads 4 --qk-norm --experts 8 --top-k 2 --ffn 32 "
    f"--seq 32 --batch 8 --steps {STEPS} --warmup 4 --lr 0.002 --aux-coef 0.01 --aux-loss sequence "
    f"--eval-every {STEPS} --eval-windows 9 --save-every 1000"
)
MAPPINGS = (
    "--tp 2 --cp 2 --ep 4 --etp 2",
    "--ep 4 --etp 2",
    "--cp 2 --ep 4",
    "--ep 1",
    "--ep 8",
    "--ep 4",
    "--ep 2 --etp 4",
    "--ep 1 --etp 2",
    "--tp 2 --ep 8",
    "--tp 2 --ep 1",
    "--tp 2 --ep 2",
    "--tp 2 --ep 2 --etp 2",
    "--tp 4 --ep 8",
    "--tp 4 --ep 2 --etp 4",
    "--cp 2 --ep 1",
    "--cp 4 --ep 8",
    "--cp 8 --ep 8",
    "--cp 2 --ep 2 --etp 2",
    "--tp 2 --cp 2 --ep 1",
    "--tp 2 --cp 2 --ep 8",
    "--tp 4 --cp 2 --ep 8",
    "--tp 2 --cp 4 --ep 4 --etp 2",
)

STAGED = "--layers 4 --no-tied"
"""The model of pipelines, beside MODEL."""


def parse(folder: Path, flags: str) -> options.Options:
    return options.parse([*MODEL.split(), *flags.split(), "--out", str(folder)])


PIPELINES = (
    "--tp 2 --pp 2 --ep 2 --etp 2 --microbatches 2",
    "--tp 2 --cp 2 --pp 2 --ep 2 --etp 2 --microbatches 2",
    "--pp 2 --ep 4 --microbatches 2",
    "--tp 2 --pp 2 --ep 4 --microbatches 4",
    "--cp 2 --pp 2 --ep 2 --etp 2 --microbatches 4",
    "--pp 4 --ep 1 --etp 2 --microbatches 4",
    "--tp 2 --pp 4 --ep 2 --microbatches 4",
    "--tp 2 --cp 2 --pp 2 --ep 4 --microbatches 4 --schedule interleaved",
    "--pp 2 --ep 2 --etp 2 --microbatches 2 --schedule zero-bubble",
    "--tp 2 --cp 2 --pp 2 --ep 4 --microbatches 8 --schedule zbv",
    "--tp 2 --pp 2 --ep 2 --microbatches 4 --schedule dualpipev",
)

SHARDED = (
    (4, "--tp 2 --ep 2 --microbatches 2"),
    (WORLD, "--ep 1"),
    (WORLD, "--ep 4"),
    (WORLD, "--ep 8"),
    (WORLD, "--ep 2 --etp 2"),
    (WORLD, "--cp 2 --ep 2 --microbatches 2"),
    (WORLD, "--tp 2 --cp 2 --ep 2 --etp 2 --microbatches 2"),
    (WORLD, "--tp 4 --cp 2 --ep 4 --etp 2"),
    (WORLD, "--tp 2 --ep 8 --microbatches 2"),
    (WORLD, "--tp 2 --pp 2 --ep 2 --microbatches 2"),
    (WORLD, "--cp 2 --pp 2 --ep 2 --etp 2 --microbatches 2 --schedule interleaved"),
    (WORLD, "--pp 2 --ep 1 --microbatches 2 --schedule zero-bubble"),
    (WORLD, "--tp 2 --pp 2 --ep 2 --microbatches 4 --schedule zbv"),
    (WORLD, "--tp 2 --pp 2 --ep 2 --microbatches 4 --schedule dualpipev"),
)
"""Ranks and mappings that are tried with --fsdp."""
LATENT = (
    "--attention latent --no-qk-norm --kv-heads 0 --head-dim 4 --q-rank 12 --kv-rank 8 --rope-dim 4 "
    "--value-dim 6"
)
SHARING = f"{LATENT} --shared-experts 1"
KINDS = {
    "latent attention, a dense layer": f"{LATENT} --layers 3 --dense-layers 1 --dense-ffn 48",
    "windows, sinks and biases": "--window 5 --sinks --qkv-bias --out-bias --expert-bias --activation "
    "swiglu_clamped --no-tied --shared-experts 1",
}


WINDOW = 8192 if ALL else 2048
LONG = f"--dim 16 --layers 1 --heads 1 --kv-heads 1 --seq {WINDOW} --batch 1 --steps 2 --eval-windows 1"
"""A model of one long window, beside MODEL."""


Curve = dict[str, list[float]]
Run = Callable[..., Curve]


@pytest.fixture(scope="module")
def run(pool: Pools, text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(world, flags, out=None) trains on so many ranks and returns what it recorded; runs of the same
    flags without `out` are made once."""
    kept: dict[tuple[int, str], Curve] = {}
    runs: Counter[int] = Counter()

    def made(world: int, flags: str, out: Path | None = None) -> Curve:
        if out is None and (world, flags) in kept:
            return kept[world, flags]
        # A mapping's groups stay as long as the ranks, with threads of gloo that wake up again and again.
        runs[world] += 1
        if runs[world] % RUNS_OF_A_POOL == 0:
            pool(world).close()
        folder = out or tmp_path_factory.mktemp("mapping")
        arguments = [*f"{MODEL} {flags}".split(), "--data", str(text_folder), "--out", str(folder)]
        pool(world)(train_on, arguments)
        records = read_metrics(folder / "metrics.jsonl")
        curve = {
            name: [record[name] for record in records if name in record]
            for name in ("loss", "grad_norm", "val_loss")
        }
        for record in records:  # all layers are there, each with all tokens of the step
            for load in record.get("load", ()):
                assert sum(load) == 2 * (WINDOW if flags.startswith(LONG) else 8 * 32)
        if out is None:
            shutil.rmtree(folder)
            kept[world, flags] = curve
        return curve

    return made


def difference(found: list[float], wanted: list[float]) -> float:
    """Returns the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def require_same(found: Curve, alone: Curve, what: str) -> None:
    assert len(found["loss"]) == len(found["grad_norm"]) == STEPS and len(found["val_loss"]) == 1
    apart = {name: difference(found[name], alone[name]) for name in alone}
    print(f"\n| {what} | " + " | ".join(f"{value:.1e}" for value in apart.values()) + " |", end="")
    assert max(apart.values()) < BOUND, (what, apart)


SAVING = (
    ("", "--tp 2 --cp 2 --ep 4 --etp 2 --recompute norms,moe"),
    ("", "--tp 2 --ep 8 --recompute norms"),
    ("", "--tp 2 --ep 4 --etp 2 --recompute attention,fc1"),
    ("", "--cp 2 --ep 8 --recompute all"),
    ("", "--cp 2 --ep 2 --etp 2 --recompute norms,attention,dispatch"),
    ("", "--tp 2 --cp 2 --ep 8 --microbatches 2 --recompute norms,attention,dispatch"),
    (SHARING, "--tp 2 --cp 2 --ep 4 --etp 2 --recompute norms,mla-up,shared,fc1"),
    (SHARING, "--tp 2 --ep 4 --recompute all"),
    (STAGED, "--tp 2 --pp 2 --ep 2 --etp 2 --microbatches 2 --recompute norms,moe"),
    (STAGED, "--cp 2 --pp 2 --ep 4 --microbatches 4 --schedule interleaved --recompute all"),
    (STAGED, "--tp 2 --pp 2 --ep 2 --etp 2 --microbatches 4 --schedule zbv --recompute attention,fc1"),
    (f"{STAGED} {SHARING}", "--tp 2 --pp 2 --ep 4 --microbatches 4 --recompute mla-up,shared,dispatch"),
    (
        f"{STAGED} --shared-experts 1",
        "--tp 2 --pp 2 --ep 4 --microbatches 4 --schedule dualpipev --recompute norms,fc1,shared",
    ),
)
"""Models, and mappings with parts that are computed again."""


def over(model: str, mappings: Iterable[str], world: int = WORLD) -> list[tuple[int, str, str]]:
    return [(world, model, mapping) for mapping in mappings]


BALANCED = f"{STAGED} --aux-coef 0.01 --bias-rate 0.01"
"""A balancing loss, whose gradient no schedule scales, and balancing biases."""
ROUNDED = f"{STAGED} --dtype bfloat16 --microbatches 4"
"""The one process that is compared has as many microbatches, since each rounds its gradients."""
DENSE = f"{STAGED} --dense-layers 2 --dense-ffn 48"
SCHEDULES = ("interleaved", "zero-bubble", "dualpipev", "zbv")
GROUPS: dict[str, tuple[int, list[tuple[int, str, str]]]] = {
    "mappings": (1, over("", MAPPINGS)),
    "stages": (1, over(STAGED, PIPELINES)),
    "shards": (1, [(n, STAGED if "--pp" in each else "", f"{each} --fsdp") for n, each in SHARDED]),
    "schedules": (3, over(BALANCED, [f"--pp 2 --microbatches 4 --schedule {s}" for s in SCHEDULES], 2)),
    "bfloat16": (0, over(ROUNDED, [f"--pp 2 --schedule {s}" for s in ("1f1b", "dualpipev")], 2)),
    "a stage without experts": (0, over(DENSE, ["--tp 2 --pp 2 --ep 2 --microbatches 4"], 4)),
    "parts computed again": (1, [(WORLD, *each) for each in SAVING]),
    "kinds": (1, [(WORLD, each, "--tp 2 --cp 2 --ep 4 --etp 2") for each in KINDS.values()]),
    "kinds in shards": (0, [(WORLD, each, "--tp 2 --cp 2 --ep 2 --etp 2 --fsdp") for each in KINDS.values()]),
    "compiled blocks": (0, over("", ["--tp 2 --ep 8 --compile", "--cp 2 --ep 4 --etp 2 --compile"])),
}
"""Groups of tests by name: how many of a group run by default, and all, each as ranks, model and mapping."""
CHOSEN = {
    f"{name}: {model} {mapping}": (world, model, mapping)
    for name, (count, found) in GROUPS.items()
    for world, model, mapping in (found if ALL else found[:count])
}


@pytest.mark.parametrize(("world", "model", "mapping"), CHOSEN.values(), ids=CHOSEN)
def test_mapping_trains_as_one_process_does(world: int, model: str, mapping: str, run: Run) -> None:
    alone = run(1, model)
    if model in ("", STAGED):  # it learns: an optimizer that does nothing is seen
        assert alone["loss"][-1] < alone["loss"][0] - LEARNS
    require_same(run(world, f"{model} {mapping}".strip()), alone, f"{model} {mapping}")


@pytest.mark.parametrize("mapping", ["--ep 2", pytest.param("--pp 2 --schedule dualpipev", marks=if_all)])
def test_a_run_goes_on_with_other_stages(mapping: str, run: Run, tmp_path: Path) -> None:
    """Half of the steps in two stages, the others in none or in four."""
    alone = run(1, STAGED)
    before = f"{STAGED} --pp 2 --microbatches 4 --save-every {HALF}"
    require_same(run(2, before, tmp_path), alone, "before")
    shutil.rmtree(tmp_path / "checkpoints" / LAST)
    require_same(run(2, f"{STAGED} {mapping} --resume", tmp_path), alone, f"resumed {mapping}")


@pytest.mark.parametrize(
    "kind",
    [
        "",
        pytest.param("--window 128 --sinks --rope-factor 4 --rope-positions 2048", marks=if_all),
        pytest.param(
            "--attention latent --no-qk-norm --kv-heads 0 --head-dim 8 --q-rank 8 --kv-rank 8 --rope-dim 8 "
            "--value-dim 4 --rope-factor 4 --rope-positions 2048 --rope-mscale 1",
            marks=if_all,
        ),
    ],
    ids=["grouped", "windows and sinks", "latent"],
)
def test_a_long_window_trains_as_in_one_process(kind: str, run: Run) -> None:
    found, alone = run(2, f"{LONG} {kind} --cp 2"), run(1, f"{LONG} {kind}")
    apart = {name: difference(found[name], alone[name]) for name in alone}
    assert len(found["loss"]) == 2 and max(apart.values()) < BOUND, apart


def test_a_run_goes_on_with_and_without_shards(run: Run, tmp_path: Path) -> None:
    """Half of the steps without shards, a quarter with and a quarter without."""
    alone = run(1, "")
    require_same(run(2, f"--save-every {HALF}", tmp_path), alone, "before")
    for flags in (f"--fsdp --ep 1 --save-every {QUARTER}", "--ep 2"):
        shutil.rmtree(tmp_path / "checkpoints" / LAST)
        require_same(run(2, f"{flags} --resume", tmp_path), alone, f"resumed {flags}")


def test_bfloat16_weights_and_moments(run: Run, tmp_path: Path) -> None:
    """They learn as float32 ones do, and a run that is resumed has the bits of one that is not."""
    flags = "--dtype bfloat16 --weights bfloat16 --moments bfloat16 --fsdp --ep 1 --microbatches 2"
    flags += f" --save-every {HALF}"
    unbroken = run(2, flags, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / LAST)
    assert run(2, f"{flags} --resume", tmp_path) == unbroken
    assert unbroken["loss"] == pytest.approx(run(1, "")["loss"], abs=0.05)


def test_shards_write_the_same_text_in_bfloat16(run: Run, tmp_path: Path) -> None:
    """Of two ranks sums have the same bits in either order."""
    model = "--dtype bfloat16 --ep 1 --microbatches 2 --shared-experts 1 --shared-gate --sample 12"
    curves = [run(2, f"{model} {flags}", tmp_path / f"with {flags}") for flags in ("", "--fsdp")]
    require_same(curves[1], curves[0], "bfloat16")
    texts = [(tmp_path / f"with {flags}" / "sample.txt").read_bytes() for flags in ("", "--fsdp")]
    assert texts[0] == texts[1] and len(texts[0]) > len("def ")


def elements(rank: int, world: int, arguments: list[str]) -> dict[str, tuple[int, list[int]]]:
    """Of each parameter that is sharded: the elements that all ranks share out, and the room that this one
    has for its own, in the weight and in each moment."""
    chosen = options.parse(arguments)
    folding = fitting.check_ranks(chosen, world)
    trainer = Trainer(chosen, ranks.Ranks(rank, world, torch.device("cpu"), folding), Never())  # type: ignore[arg-type]
    found = {}
    with trainer.comm:
        sharded_state(trainer.model, trainer.optimizer)  # which makes the optimizer's
        for name, parameter in trainer.model.named_parameters():
            state = trainer.optimizer.state[parameter]
            tensors: list[Any] = [parameter, state["exp_avg"], state["exp_avg_sq"]]
            if parameter.ndim >= 2:
                parts = folding.size("etp-ep") if ".experts." in name else 1
                local = [each.to_local().untyped_storage().nbytes() // 4 for each in tensors]
                found[name] = parameter.numel() * parts, local
    return found


@pytest.mark.parametrize("mapping", ["--tp 2 --ep 2", "--ep 1 --etp 2", "--ep 2 --experts 2"])
def test_a_rank_has_its_share_of_all_that_is_kept(
    mapping: str, pool: Pools, text_folder: Path, tmp_path: Path
) -> None:
    flags = f"{MODEL} {mapping} --fsdp --shared-experts 1 --no-tied --qkv-bias"
    told = pool(4)(elements, [*flags.split(), "--data", str(text_folder), "--out", str(tmp_path)])
    assert len(told[0]) == 2 + 2 * 9
    for name, (count, _) in told[0].items():
        rows = 64 if name.endswith("shared.w_in") else 32
        for rooms in zip(*(each[name][1] for each in told), strict=True):
            assert sum(rooms) >= count and 4 * max(rooms) <= count + 4 * rows, (name, rooms)


# -- what does not fit -------------------------------------------------------------------------------------

WRONG = {
    "--tp 3 --heads 12 --kv-heads 3 --dim 48 --seq 33": "tp is 3, expected a divisor of",
    "--tp 2 --heads 5 --kv-heads 5 --dim 40": "--heads 5 must be a multiple of --tp 2",
    "--tp 2 --kv-heads 1": "--kv-heads 1 must be a multiple of --tp 2",
    "--tp 2 --cp 4 --seq 40": "--seq 40 must be a multiple of 16 with --tp 2 --cp 4",
    "--cp 2 --seq 34": "--seq 34 must be a multiple of 4 with --cp 2",
    "--cp 3 --seq 36": "cp is 3, expected a divisor of",
    "--etp 3 --ffn 33": "etp is 3, expected a divisor of",
    "--etp 4 --ffn 34": "--ffn 34 must be a multiple of --etp 4",
    "--ep 8 --etp 2": "ep is 8, expected a divisor of world_size / (pp * etp) = 4",
    "--ep 16": "--ep 16 does not divide the number of ranks, 8",
    "--tp 2 --batch 6": "--batch 6 is not divisible by the data-parallel size, 4",
    "--batch 12": "--batch 12 is not divisible by the number of ranks, 8",
    "--tp 2 --sample 3": "--sample: text is written by ranks that see whole windows: not with --tp 2",
    "--cp 2 --graph": "--graph: a graph is of whole windows: not with --cp 2",
    "--schedule zbv": "--schedule zbv is of pipelines: give --pp 2 or more",
    "--pp 1 --stages-per-rank 2": "--stages-per-rank 2 is of pipelines: give --pp 2 or more",
    "--pp 3 --layers 3 --no-tied --microbatches 3": "pp is 3, expected a divisor of",
    "--pp 2 --microbatches 2": "--tied: embedding and output are of different stages with --pp 2: --no-tied",
    "--pp 4 --no-tied": "--layers 2 is less than the 4 stages of --pp 4, 1 on a rank",
    "--pp 2 --schedule zbv": "--layers 2 is less than the 4 stages of --pp 2, 2 on a rank",
    "--pp 2 --stages-per-rank 2": "--stages-per-rank 2 must be 1 with --schedule 1f1b",
    "--pp 2 --schedule zbv --stages-per-rank 3": "--stages-per-rank 3 must be 2 with --schedule zbv",
    "--pp 2 --schedule gpipe": "argument --schedule: invalid choice: 'gpipe'",
    "--pp 2 --no-tied": "--microbatches 1 must be at least 2 with --pp 2 --schedule 1f1b",
    f"{STAGED} --pp 2 --schedule dualpipev --microbatches 2": "--microbatches 2 must be at least 4 with",
    f"{STAGED} --pp 2 --schedule interleaved --microbatches 3": "--microbatches 3 must be a multiple of 2",
    f"{STAGED} --pp 2 --microbatches 4": "--batch 8 is 2 windows a rank, which do not divide into",
    "--no-tied --pp 2 --sample 3": "--sample: text is written by ranks that hold all layers: not with --pp 2",
    "--graph --fsdp": "--graph: a graph is of weights that stay where they are: not with --fsdp",
    "--pp 8 --layers 8 --no-tied --microbatches 8 --fsdp": "--fsdp: a stage of --pp 8 has 1 rank, and",
    "--weights bfloat16": "--weights bfloat16 needs --dtype bfloat16, not float32",
    "--weights float16": "argument --weights: invalid choice: 'float16'",
    "--recompute mla-up": "--recompute mla-up is of --attention latent, not of grouped",
    "--compile --recompute norms": "--compile: not with --recompute of what it compiles",
    "--recompute shared": "--recompute shared needs --shared-experts, above 0",
    "--recompute norms,core": "argument --recompute: invalid choice: 'core' (choose from norms, mla-up",
    "--no-tied --pp 2 --graph": "--graph: a graph is of a step on all layers: not with --pp 2",
}


@pytest.mark.parametrize("flags", WRONG)
def test_mappings_that_do_not_fit(flags: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        fitting.check_ranks(parse(tmp_path, flags), WORLD)
    message = str(caught.value)
    assert WRONG[flags] in message and "\n" not in message


def test_a_single_rank_has_no_shards(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--fsdp: there is 1 rank, and shards need 2 or more"):
        fitting.check_ranks(parse(tmp_path, "--fsdp"), 1)


def test_a_schedule_that_torch_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.pipelining.ScheduleDualPipeV")
    flags = f"{STAGED} --cp 4 --pp 2 --schedule dualpipev --microbatches 4"
    with pytest.raises(UsageError, match=r"--schedule dualpipev: torch .* has no ScheduleDualPipeV"):
        fitting.check_ranks(parse(tmp_path, flags), WORLD)


def test_the_layout_is_said_in_words(tmp_path: Path) -> None:
    folding = fitting.check_ranks(parse(tmp_path, "--tp 2 --cp 2 --ep 4"), WORLD)
    assert ranks.describe(folding) == "8 = tp 2 x cp 2 x dp 2; experts etp 1 x ep 4 x edp 2"
    # By default EP is as many as divide ranks and experts.
    assert fitting.check_ranks(parse(tmp_path, "--etp 2"), WORLD).ep == 4
    stages = fitting.check_ranks(parse(tmp_path, "--pp 2 --no-tied --microbatches 2"), WORLD)
    said = "8 = tp 1 x cp 1 x dp 4 x pp 2; experts etp 1 x ep 4 x edp 1 x pp 2"
    assert ranks.describe(stages) == said


def test_layers_are_shared_out_evenly(tmp_path: Path) -> None:
    of_schedules = {
        "1f1b": ((0, 1), [4, 3]),
        "interleaved": ((0, 1, 0, 1), [2, 2, 2, 1]),
        "dualpipev": ((0, 1, 1, 0), [2, 2, 2, 1]),
    }
    for schedule, (owners, sizes) in of_schedules.items():
        flags = f"--layers 7 --no-tied --microbatches 4 --pp 2 --schedule {schedule}"
        chosen = parse(tmp_path, flags)
        layouts = [lay_out(chosen, place) for place in range(2)]
        assert layouts[0].owners == owners and [len(each) for each in layouts[0].layers] == sizes
        parts = ["embedding", *(f"blocks.{layer}" for layer in range(7)), "head"]
        assert [sum(layout.holds(part) for layout in layouts) for part in parts] == [1] * len(parts)
        assert layouts[0].holds("embedding") and layouts[owners[-1]].holds("head")
