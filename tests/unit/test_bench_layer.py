"""The layer benchmark without ranks of its own: presets and their arithmetic, flags, the independent check,
the baseline against it, records, tables and the page.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench import run_all
from bench.harness import (
    entry,
    layer_options,
    layer_plan,
    layer_record,
    layer_reference,
    layer_report,
    layer_results,
    options,
    results,
)
from bench.harness.layer_case import Experts, LayerCase, ids_of, rows_per_rank
from bench.harness.layer_presets import PRESETS, Preset, scaled, why_left_out
from bench.harness.layer_record import Exposed, LayerMissing, LayerRow, Measured
from bench.harness.plain_layer import PlainLayer
from bench.harness.timing import Timing

pytestmark = pytest.mark.usefixtures("bench_on_cpu")
CPU = torch.device("cpu")
TINY = Preset(name="tiny", hidden=32, ffn=16, experts=6, topk=2)

# -- presets -----------------------------------------------------


def test_the_presets_are_the_published_layers() -> None:
    shapes = {name: (p.hidden, p.ffn, p.experts, p.topk) for name, p in PRESETS.items()}
    assert shapes == {
        "deepseek-v3": (7168, 2048, 256, 8),
        "kimi-k2": (7168, 2048, 384, 8),
        "qwen3-235b": (4096, 1536, 128, 8),
        "qwen3-30b": (2048, 768, 128, 8),
        "mixtral-8x22b": (6144, 16384, 8, 2),
        "gpt-oss-120b": (2880, 2880, 128, 4),
    }
    assert all(p.hidden % 16 == 0 and p.ffn % 16 == 0 for p in PRESETS.values())


def test_flops_are_those_of_both_products() -> None:
    assert Preset(name="", hidden=4, ffn=2, experts=1, topk=1).forward_flops(1) == 48
    # 4096 tokens of top-8: 17.88 ms of forward and backward are 485 TFLOP/s.
    assert PRESETS["deepseek-v3"].step_flops(4096 * 8) / 17.88e-3 / 1e12 == pytest.approx(485, abs=1)
    assert PRESETS["mixtral-8x22b"].step_flops(4096 * 2) / 26.59e-3 / 1e12 == pytest.approx(555, abs=5)


def test_scaled_presets_stay_aligned() -> None:
    small = scaled(PRESETS["gpt-oss-120b"], 16)
    assert (small.hidden, small.ffn, small.experts, small.topk) == (176, 176, 128, 4)
    assert scaled(PRESETS["qwen3-30b"], 1000).ffn == 16
    assert scaled(TINY, 1) == TINY


def test_a_preset_that_ranks_cannot_share_says_why() -> None:
    assert why_left_out(PRESETS["mixtral-8x22b"], 3) == "8 experts cannot be shared evenly by 3 ranks"
    assert why_left_out(PRESETS["kimi-k2"], 3) == ""


# -- flags -------------------------------------------------------


def test_flags_arrive() -> None:
    flags = (
        "-g 4 --presets qwen3-30b,kimi-k2 --scale 8 --topk 3 -b 64 --graph-tokens 0 -d half "
        "--routing uniform,zipf --zipf 0.5,1 --ways overlapped,serial --keep rows --headroom 2 "
        "--dense 8x16x32 -n 3 -w 1 -c 2 --seed 7"
    )
    given = layer_options.parse(flags.split())
    assert [(p.name, p.hidden, p.topk) for p in given.presets] == [("qwen3-30b", 256, 3), ("kimi-k2", 896, 3)]
    assert (given.ranks, given.tokens, given.graph_tokens, given.dtype) == (4, 64, 0, "float16")
    assert given.routings == (("uniform", None), ("zipf", 0.5), ("zipf", 1.0))
    assert (given.ways, given.keeps) == (("overlapped", "serial"), ("rows",))
    assert (given.headroom, given.dense, given.iters, given.checks) == (2.0, (8, 16, 32), 3, 2)
    assert given.command.startswith("python bench/moe_layer_perf.py -g 4 ")
    everything = layer_options.parse([])
    assert [p.name for p in everything.presets] == list(PRESETS)
    assert everything.ways == layer_options.WAYS
    assert layer_options.parse(["--ways", "serial,fp8 overlapped"]).ways == ("serial", "fp8 overlapped")
    assert (everything.tokens, everything.graph_tokens, everything.most_tokens) == (4096, 512, 4096)
    assert everything.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--presets gpt-9", "gpt-9"),
        ("--presets ,", "--presets"),
        ("--scale 0", "--scale"),
        ("--hidden 24", "--hidden 24"),
        ("--ffn 8", "--ffn 8"),
        ("--experts 4 --topk 5", "--topk 5"),
        ("-b 0", "-b"),
        ("-d float32,bfloat16", "one type"),
        ("-d int8", "int8"),
        ("--routing one-hot", "one-hot"),
        ("--routing zipf --zipf -1", "--zipf"),
        ("--ways serial,some", "some"),
        ("--keep everything", "everything"),
        ("--headroom 0.5", "--headroom"),
        ("--dense 16x16", "--dense"),
        ("--num-sms 8", "--num-sms"),
        ("-c 0 --inject-error", "-c 0"),
        ("-J /nowhere/x.json", "nowhere"),
        ("--timeout 0", "--timeout"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_what_cannot_be_followed_is_one_line(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        layer_options.parse(flags.split())
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert says in captured.err and captured.err.count("\n") == 1


def test_every_program_is_found_by_its_name() -> None:
    assert isinstance(entry.parse("moe_layer", []), layer_options.LayerOptions)
    assert isinstance(entry.parse("combine", []), options.Options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_plans_can_be_run(ranks: int) -> None:
    for plan in (layer_plan.layers_cpu_plan, layer_plan.layers_cuda_plan):
        runs = plan(ranks, 5, 1)
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            assert layer_results.is_one(run.name)
            flags = [each if each != "cuda" else "cpu" for each in run.flags]
            if "--num-sms" in flags:  # only with GPUs
                at = flags.index("--num-sms")
                assert int(flags[at + 1]) > 0
                del flags[at : at + 2]
            assert entry.parse(run.program, flags).ranks == ranks
    quick = [run.name for run in layer_plan.layers_cuda_plan(4, 5, 1) if run.quick]
    assert len(quick) == 5 and quick[0] == "cuda-layers-deepseek-v3"


def test_parts_are_numbers() -> None:
    assert layer_options.parse(["--parts", "1, 4,2,4"]).parts == (1, 4, 2)
    for text in ("", "0", "2,x", "-1"):
        with pytest.raises(SystemExit):
            layer_options.parse(["--parts", text])


def test_tables_of_parts_and_of_fp8() -> None:
    """Of the committed records."""
    folder = Path(__file__).resolve().parents[2] / "docs" / "results"
    names = ("cuda-layers-deepseek-v3-parts-24", "cuda-layers-deepseek-v3-fp8")
    records = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    parts = layer_results.parts_lines(records)
    assert [line[2:4] for line in parts] == [["24", each] for each in ("1, serial", "1", "2", "4", "8")]
    steps = {row["way"]: row["step_s"] for row in records[names[0]]["rows"]}
    assert parts[2][5] == f"{steps['overlapped, 2 parts'] * 1e3:.3f}"
    (line,) = layer_results.fp8_lines(records)
    steps = {row["way"]: row["step_s"] for row in records[names[1]]["rows"]}
    assert line[4] == f"{steps['overlapped'] / steps['fp8 overlapped']:.2f}x"
    assert line[5] == f"{steps['overlapped'] / steps['fp8 weights anew']:.2f}x"
    assert not layer_results.keep_lines(records)


# -- data and the independent check ------------------------------


def test_rows_of_ranks_are_counted() -> None:
    assert rows_per_rank([np.array([[0, 2]]), np.array([[0, 1]])], 4) == [3, 1]


def test_skew_fills_ranks_unevenly(seed: int) -> None:
    ids_R = [ids_of("zipf", 1.5, PRESETS["qwen3-30b"], 200, seed, rank) for rank in range(4)]
    even_R = [ids_of("balanced", None, PRESETS["qwen3-30b"], 200, seed, rank) for rank in range(4)]
    assert sum(rows_per_rank(ids_R, 128)) == sum(rows_per_rank(even_R, 128)) == 4 * 200 * 8
    assert max(rows_per_rank(ids_R, 128)) > max(rows_per_rank(even_R, 128)) == 200 * 8


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, for the baseline."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _case(dtype: str, seed: int, preset: Preset = TINY, tokens: int = 23) -> LayerCase:
    given = layer_options.parse(["-g", "1", "-d", dtype, "--seed", str(seed % 2**31)])
    experts = Experts(given, preset, 0, CPU)
    return LayerCase(given, preset, ("zipf", 1.0), tokens, 0, CPU, experts)


def _by_autograd(case: LayerCase) -> dict[str, torch.Tensor]:
    """A layer on one rank in a few lines of float64, differentiated by autograd."""
    x_TH, weights_TK = (each.detach().double().requires_grad_() for each in (case.x_TH, case.weights_TK))
    w_in, w_out = (
        each.detach().double().requires_grad_() for each in (case.experts.w_in, case.experts.w_out)
    )
    gate, up = torch.einsum("th,ehi->tei", x_TH, w_in).chunk(2, dim=-1)
    all_TEH = torch.einsum("tef,efh->teh", torch.nn.functional.silu(gate) * up, w_out)
    chosen_TKH = all_TEH[torch.arange(case.tokens)[:, None], case.topk_idx_TK.long()]
    y_TH = (weights_TK[:, :, None] * chosen_TKH).sum(1)
    found = torch.autograd.grad(y_TH, (x_TH, weights_TK, w_in, w_out), case.dy_TH.double())
    return dict(zip(("dx", "dweights", "dw_in", "dw_out"), found, strict=True)) | {"y": y_TH.detach()}


def test_the_independent_check_agrees_with_autograd(seed: int) -> None:
    case = _case("float64", seed)
    case.load(3)
    wanted = layer_reference.expected(case)
    verdict = layer_reference.compare(_by_autograd(case), wanted, "float64")
    assert verdict.wrong == 0 and verdict.worst < 1e-12
    # What a rank's experts make of their rows, summed at home, is the layer's result.
    y_TH = torch.zeros_like(wanted["y"])
    y_TH.index_add_(0, torch.from_numpy(case.layout.token_N), wanted["rows out"])
    assert torch.allclose(y_TH, wanted["y"])
    weights_P1 = case.weights_P.detach()[:, None]
    assert torch.allclose(wanted["rows out without weights"] * weights_P1, wanted["rows out"])
    assert torch.allclose(wanted["drow weights"].sum(), wanted["dweights"].sum())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_baseline_is_right(dtype: str, tuned: bool, seed: int) -> None:
    case = _case(dtype, seed)
    case.load(1)
    y_TH = PlainLayer(case.preset.experts, tuned=tuned).forward(
        case.x_TH, case.topk_idx_TK, case.weights_TK, case.experts.w_in, case.experts.w_out
    )
    inputs = (case.x_TH, case.weights_TK, case.experts.w_in, case.experts.w_out)
    grads = torch.autograd.grad(y_TH, inputs, case.dy_TH)
    got = dict(zip(("dx", "dweights", "dw_in", "dw_out"), grads, strict=True)) | {"y": y_TH.detach()}
    verdict = layer_reference.compare(got, layer_reference.expected(case), dtype)
    assert verdict.wrong == 0 and verdict.worst > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_catches_what_is_wrong(dtype: str, seed: int) -> None:
    case = _case(dtype, seed)
    wanted = layer_reference.expected(case)
    right = {name: wanted[name].to(case.dtype) for name in ("y", "dx", "dw_in", "dw_out", "rows moved")}
    right |= {"dweights": wanted["dweights"].to(torch.float32)}
    assert layer_reference.compare(right, wanted, dtype).wrong == 0

    def wrong(name: str, value: torch.Tensor) -> int:
        return layer_reference.compare({**right, name: value}, wanted, dtype).wrong

    without_a_token = right["y"].clone()
    without_a_token[7] = 0
    assert wrong("y", without_a_token) > case.preset.hidden // 2
    assert wrong("y", torch.roll(right["y"], 1, dims=0)) > case.tokens * case.preset.hidden // 2
    assert wrong("y", right["y"] * 1.5) > case.tokens * case.preset.hidden // 2
    assert wrong("dw_in", right["dw_in"].roll(1, 0)) > 100
    assert wrong("dw_out", right["dw_out"].roll(1, 1)) > 100
    assert wrong("dweights", right["dweights"].roll(1, 0)) > case.tokens // 2
    for name, value in right.items():
        broken = value.clone()
        broken.view(-1)[0] = float("nan")
        assert wrong(name, broken) == 1
        assert wrong(name, value[:-1]) >= value.numel()
    nudged = right["rows moved"].clone()
    nudged[0, 0] *= 1 + 2.0**-7
    assert wrong("rows moved", nudged) == 1  # what is only moved is compared bit for bit


def test_the_check_of_products_in_fp8(seed: int) -> None:
    """Lets pass what e4m3 leaves, and nothing like another row or factor."""
    case = _case("bfloat16", seed)
    wanted = layer_reference.expected(case)
    torch.manual_seed(seed)
    names = ("y", "dx", "dw_in", "dw_out", "dweights")
    right = {name: wanted[name] * (1 + 0.1 * torch.randn_like(wanted[name])) for name in names}
    assert layer_reference.compare(right, wanted, layer_reference.FP8).wrong == 0
    assert layer_reference.compare(right, wanted, "bfloat16").wrong > 0
    for name, value in right.items():
        broken = value.clone()
        broken.view(-1)[3] = float("nan")
        for wrong in (value.roll(1, 0), value * 1.3, torch.zeros_like(value), broken):
            found = layer_reference.compare({**right, name: wrong}, wanted, layer_reference.FP8).wrong
            assert found >= value.numel(), name


def test_an_expert_without_rows_has_to_have_no_gradient(seed: int) -> None:
    case = _case("float32", seed, dataclasses.replace(TINY, experts=40), tokens=3)
    wanted = layer_reference.expected(case)
    (idle,) = np.nonzero(case.layout.group_G == 0)
    right = wanted["dw_out"].to(torch.float32)
    assert layer_reference.compare({"dw_out": right}, wanted, "float32").wrong == 0
    right[int(idle[0]), 2, 3] = 1e-20
    assert layer_reference.compare({"dw_out": right}, wanted, "float32").wrong == 1


def test_fresh_ids_have_the_same_traffic(seed: int) -> None:
    case = _case("float32", seed)
    before = case.topk_idx_TK.clone()
    case.fresh_ids()
    assert not torch.equal(before, case.topk_idx_TK)
    assert torch.equal(before.flatten().sort().values, case.topk_idx_TK.flatten().sort().values)
    case.load(2)
    assert torch.equal(before, case.topk_idx_TK)
    assert case.capacity >= max(case.rows_R)


# -- records, tables, the page -----------------------------------

EXPOSED = Exposed(
    forward_share=0.25,
    step_share=0.125,
    step_s=1e-3,
    forward_spans=(("dispatch", "comm", 0.0, 1e-3, True), ("up", "compute", 1e-3, 4e-3, False)),
    backward_spans=(("gradient rows", "comm", 0.0, 1e-3, True),),
)


def _row(
    given: layer_options.LayerOptions,
    way: str,
    forward_s: float,
    step_s: float,
    *,
    graphs: bool = False,
    **found: Any,
) -> LayerRow:
    preset = given.presets[0]
    tokens = given.graph_tokens if graphs else given.tokens
    rows_R = [tokens * preset.topk] * given.ranks
    return layer_record.make_row(
        preset=preset,
        point=layer_record.point_of(preset, given, tokens, ("uniform", None), rows_R, graphs=graphs),
        ranks=given.ranks,
        way=way,
        computes=way != layer_options.COMM,
        note="",
        forward=Timing((forward_s, forward_s / 2, 2 * forward_s)),
        step=Timing((step_s, step_s / 2, 2 * step_s)),
        compute=(Timing((2e-3,)), Timing((5e-3,))),
        dense_tflops=0.5,
        measured=Measured(**({"wrong": 0, "worst": 0.01} | found)),
    )


def _rows(given: layer_options.LayerOptions) -> list[LayerRow]:
    return [
        _row(given, layer_options.COMPUTE, 2e-3, 5e-3),
        _row(given, layer_options.PLAIN, 2.2e-3, 5.5e-3),
        _row(given, layer_options.COMM, 1e-3, 2e-3),
        _row(given, layer_options.SERIAL, 3e-3, 7e-3),
        _row(given, layer_options.OVERLAPPED, 2.5e-3, 5.25e-3, exposed=EXPOSED, memory_bytes=3 * 10**9),
        _row(given, "overlapped, keep nothing", 2.5e-3, 6e-3, memory_bytes=10**9, kept_bytes=4096 * 64),
        _row(given, layer_options.INTERLEAVED, 2.5e-3, 5.2e-3),
        _row(given, layer_options.BASELINE, 5e-3, 10.5e-3),
        _row(given, layer_options.OVERLAPPED, 1e-3, 3e-3, graphs=True),
        _row(given, layer_options.FIXED, 1e-3, 2.5e-3, graphs=True),
        _row(given, layer_options.GRAPH, 0.5e-3, 1.5e-3, graphs=True),
        _row(given, layer_options.GRAPHED, 0.5e-3, 2e-3, graphs=True),
    ]


def _given(*flags: str) -> layer_options.LayerOptions:
    return layer_options.parse(["--presets", "qwen3-30b", "--commit", "abc", *flags])


def _record(given: layer_options.LayerOptions, missing: tuple[LayerMissing, ...] = ()) -> dict[str, Any]:
    document = layer_record.document(given, _rows(given), missing, {"qwen3-30b": {"dispatch_calls": 3}})
    content: dict[str, Any] = json.loads(json.dumps(document))
    return content


def test_a_row_joins_times_and_work() -> None:
    given = _given("-g", "2")
    row = _row(given, layer_options.OVERLAPPED, 2.5e-3, 5.25e-3)
    assert (row.forward_ratio, row.step_ratio) == (1.25, 1.05)
    flops = 6 * 2048 * 768 * 4096 * 8  # of a rank
    assert (row.forward_flops, row.step_flops) == (flops, 3 * flops)
    assert row.step_tflops == pytest.approx(3 * flops / 5.25e-3 / 1e12)
    assert row.step_share == pytest.approx(row.step_tflops / 0.5)
    assert (row.step_min_s, row.rows, row.most_rows) == (5.25e-3 / 2, 2 * 4096 * 8, 4096 * 8)
    moved = _row(given, layer_options.COMM, 1e-3, 2e-3)
    assert moved.step_tflops is None and moved.step_share is None and moved.step_ratio == 0.4


def test_the_tables_show_ratios_and_what_did_not_run() -> None:
    given = _given()
    rows = _rows(given)
    cells = layer_report.table_row(rows[4], given).split()
    assert cells[0] == "overlapped" and cells[4:7] == ["5250.0", "2625.0", "1.050"]
    assert cells[-3:] == ["12.5%", "0.01", "0"]
    text = layer_report.comparison(rows[:8])
    assert "# overlapped 1.33 (1.20) times as fast as serial" in text
    assert "# overlapped 2.00 (2.00) times as fast as baseline" in text
    assert "# compute only 1.10 (1.10) times as fast as plain compute" in text
    assert "# graph replay 2.00 (2.00) times as fast as overlapped" in layer_report.comparison(rows[8:])
    assert "other bits" not in text
    different = dataclasses.replace(rows[4], same_bits=False)
    assert "other bits than serial" in layer_report.comparison([different])
    absent = LayerMissing(
        preset="kimi-k2", tokens=8, routing="all", way="all", reason="384 experts", failed=False
    )
    assert layer_report.table_row(absent, given) == "# kimi-k2 all: n/a: 384 experts"
    failed = dataclasses.replace(absent, failed=True)
    assert "FAILED" in layer_report.table_row(failed, given)
    assert "0 OK; 1 ways failed" in layer_report.footer(rows, [failed])
    assert "2 FAILED" in layer_report.footer([dataclasses.replace(rows[0], wrong=2)], [])
    gpu = layer_options.parse(["--device", "cuda", "-g", "2", "--presets", "qwen3-30b"])
    assert layer_report.table_row(rows[4], gpu).split()[-4:] == ["3.00", "-", "0.01", "0"]


def test_the_record_says_what_it_was_made_with() -> None:
    record = _record(_given())
    assert record["program"] == "moe_layer_perf" and record["git"] == {"commit": "abc", "dirty": None}
    assert record["command"] == "python bench/moe_layer_perf.py --presets qwen3-30b --commit abc"
    assert record["gpus"] is None and record["wrong"] == 0
    assert record["options"]["presets"][0]["name"] == "qwen3-30b"
    assert record["rows"][4]["exposed"]["forward_spans"][0] == ["dispatch", "comm", 0.0, 1e-3, True]
    assert record["stats"] == {"qwen3-30b": {"dispatch_calls": 3}}


def test_the_page_shows_steps_forwards_graphs_memory_and_stages() -> None:
    absent = LayerMissing(
        preset="qwen3-30b", tokens=512, routing="uniform", way="graph replay", reason="no GPU", failed=False
    )
    records = {"layers-qwen3-30b": _record(_given(), (absent,))}
    (step,) = layer_results.step_lines(records)
    assert step[0] == "qwen3-30b (2048, 768, 128, 8)"
    assert step[3:10] == ["5.000", "5.250", "1.050", "1.400", "1.040", "2.000", "12.5%"]
    assert step[-4:] == ["2.00x", "-", "1.10x", "3.00"]
    (forward,) = layer_results.forward_lines(records)
    assert forward[3:] == ["2.000", "2.500", "1.250", "1.500", "1.000", "25.0%", "2.00x", "-"]
    (graph,) = layer_results.graph_lines(records)
    assert graph[1:] == ["512", "3.000", "2.500", "1.500", "2.000", "2.00x", "1.67x", "1.50x"]
    kept = layer_results.keep_lines(records)
    assert [line[2] for line in kept] == ["serial", "all", "nothing", "baseline"]
    assert kept[2][3:] == ["6.000", "1.200", "1.00", "0.000", "64"] and kept[1][-1] == "-"
    assert len(layer_results.way_lines(records)) == 12
    forward_stages, backward_stages = layer_results.stage_lines(records)
    assert forward_stages[3:] == ["forward", "(dispatch 1000), up 3000", "4000"]
    assert backward_stages[4] == "(gradient rows 1000)"
    part = layer_results.part(records, "python bench/run_all.py --layers --write")
    assert "Layers on CPU ranks" in part and "Layers on GPUs" not in part
    assert "- layers-qwen3-30b: qwen3-30b, 512 tokens, graph replay: no GPU" in part
    assert "python bench/moe_layer_perf.py --presets qwen3-30b" in part
    for table in [block for block in part.split("\n\n") if block.startswith("| ")]:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    page = results.renewed("", "layers", part)
    assert results.renewed(page, "layers", part) == page
    both = results.renewed(page, "cuda", "## GPUs\n")
    assert both.index("## GPUs") < both.index("## Layers")


_GPUS = {"names": ["GPU"] * 4, "sms": 132, "memory_bytes": 1 << 37, "links": "NV18", "driver": "580"}


def test_the_page_is_made_of_the_records_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--layers", "--device", "cpu", "--page"])
    (tmp_path / "results").mkdir()
    assert run_all.main() == 0
    assert "no records of layers" in capsys.readouterr().err
    (tmp_path / "results" / "layers-one.json").write_text(json.dumps(_record(_given())))
    assert run_all.main() == 0
    page = (tmp_path / "results.md").read_text()
    assert "Made by `python bench/run_all.py --layers --device cpu --write`" in page
    # Records of GPUs: a part for each number of ranks, the most first.
    four = _record(_given()) | {"gpus": _GPUS, "ranks": 4}
    two = four | {"ranks": 2}
    for name, record in (("cuda-layers-one.small", two), ("cuda-layers-one", four)):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(record))
    assert run_all.main() == 0
    page = (tmp_path / "results.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("### ")]
    assert titles == ["### Layers on 4 GPUs", "### Layers on 2 GPUs", "### Layers on CPU ranks"]
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--layers", "--nodes"])
    with pytest.raises(SystemExit) as ended:
        run_all.main()
    assert ended.value.code == 2
