"""The benchmark harness without ranks: options, sizes, routings, bytes counted, and a check that does catch
mistakes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import run_all
from bench.harness import (
    bulk,
    case,
    ceilings,
    data,
    machine,
    options,
    report,
    results,
    routing,
    sizes,
    traffic,
    verify,
)
from bench.harness.data import DataKey
from bench.harness.machine import Gpus
from bench.harness.record import Missing, Row, document
from bench.harness.verify import Received

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # Where there are GPUs, the tests mean the CPU all the same when they say nothing.
    monkeypatch.setattr(options, "find_device", lambda given: "cpu" if given == "auto" else given)


# -- sizes -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2048", 2048),
        ("16K", 1),
        ("32M", 2048),
        ("32MB", 2048),
        ("32MiB", 2048),
        ("1G", 65536),
        ("100B", 1),
        ("0.5m", 32),
    ],
)
def test_a_bare_size_is_tokens_and_a_suffix_makes_it_bytes(text: str, tokens: int) -> None:
    assert sizes.parse_size(text, row_bytes=16384) == tokens


@pytest.mark.parametrize("text", ["", "x", "12Q", "-4", "0", "1.5", "nanK", "infM", "K"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        sizes.parse_size(text, row_bytes=16)


def test_sweeps_add_or_multiply_and_include_the_last_size() -> None:
    assert sizes.sweep(8, 64) == (8, 16, 32, 64)
    assert sizes.sweep(8, 65, factor=4.0) == (8, 32)
    assert sizes.sweep(5, 20, step=5) == (5, 10, 15, 20)
    assert sizes.sweep(7, 7) == (7,)
    assert sizes.sweep(1, 4, factor=1.1) == (1, 2, 3, 4)  # never stands still


def test_flags_arrive() -> None:
    flags = (
        "-g 4 -b 64 -e 256 -f 2 -n 3 -w 1 -c 2 -d half,bf16 --hidden 512 --experts 16 --topk 2 --layout rank "
        "--capacity 99 --routing zipf --zipf 1.5 --baselines memcpy,gloo --seed 7 --flush 0"
    )
    given = options.parse("dispatch", flags.split())
    assert given.sizes == (64, 128, 256)
    assert given.dtypes == ("float16", "bfloat16")
    assert (given.ranks, given.iters, given.warmup, given.checks) == (4, 3, 1, 2)
    assert (given.experts, given.topk, given.layout, given.capacity) == (16, 2, "rank", 99)
    assert (given.routing, given.zipf, given.baselines, given.flush_bytes) == (
        "zipf",
        1.5,
        ("memcpy", "gloo"),
        0,
    )
    assert options.parse("combine", ["--baselines"]).baselines == ("memcpy", "gloo", "gloo-tuned")
    assert options.parse("dispatch", ["-d", "all"]).dtypes == tuple(options.DTYPES)


def test_alltoall_is_balanced_top_1_with_an_expert_a_rank() -> None:
    given = options.parse("alltoall", ["-g", "3"])
    assert (given.experts, given.topk, given.routing) == (3, 1, "balanced")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nonsense", "--nonsense"),
        ("-g 0", "-g"),
        ("-g 3 --experts 32", "--experts 32"),
        ("-b 64 -e 32", "-e"),
        ("-b 8 -e 64 -i 8 -f 2", "-i or -f"),
        ("-e 4096 -f 1", "-f"),
        ("-b 12Q", "12Q"),
        ("-n 0", "-n"),
        ("-n x", "-n"),
        ("-c -1", "-c"),
        ("-d int8", "int8"),
        ("--topk 33", "--topk"),
        ("--hidden 3", "16"),
        ("--layout diagonal", "diagonal"),
        ("--layout rank --alignment 8", "--alignment"),
        ("--alignment 0", "--alignment"),
        ("--capacity none", "--capacity"),
        ("--routing round", "round"),
        ("--routing trace", "trace"),
        ("--routing uniform x", "uniform"),
        ("--routing trace /nowhere/ids.npy", "ids.npy"),
        ("--routing zipf --zipf -1", "--zipf"),
        ("--device cpu --baselines nccl", "nccl"),
        ("--device tpu", "--device"),
        ("--device cpu --num-sms 8", "--num-sms"),
        ("--device cpu --graph --capacity auto", "--graph"),
        ("--device cpu --wire fp8", "--wire"),
        ("--device cuda -g 2 --graph", "--capacity"),
        ("--device cuda -g 2 --num-sms 0", "--num-sms"),
        ("--device cuda -g 2 --no-dequantize", "--no-dequantize"),
        ("--device cuda -g 2 --baselines gloo", "gloo"),
        ("--baselines-only", "--baselines"),
        ("--experts 8,x", "--experts"),
        ("--experts 4,32 --topk 8", "--topk"),
        ("--routing zipf --zipf 1,y", "--zipf"),
        ("-J /nowhere/x.json", "nowhere"),
        ("--plot x.txt", ".png"),
        ("--timeout 0", "--timeout"),
        ("--threads 0", "--threads"),
        ("-c 0 --inject-error", "-c 0"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse("dispatch", flags.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("dispatch_perf.py: error: ")
    assert says in err


@pytest.mark.parametrize("flags", ["--routing uniform", "--experts 4", "--baselines gloo-tuned"])
def test_alltoall_refuses_what_would_make_it_something_else(flags: str) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse("alltoall", flags.split())
    assert ended.value.code == 2


def test_under_torchrun_its_world_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert options.parse("dispatch", []).ranks == 4
    with pytest.raises(SystemExit) as ended:
        options.parse("dispatch", ["-g", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""  # rank 0 says it for all


@pytest.mark.parametrize("operation", ["dispatch", "combine", "alltoall"])
def test_help_defines_the_columns(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(operation, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("algbw", "busbw", "#wrong", "tokens per rank", "-J", "--plot"))


def test_ranks_share_the_cores() -> None:
    assert [options.threads_for(ranks, 8) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


# -- routing -----------------------------------------------------


def _check_ids(ids_TK: routing.Ids, tokens: int, topk: int, experts: int) -> None:
    assert ids_TK.shape == (tokens, topk)
    assert ids_TK.dtype == np.int32
    assert ids_TK.min() >= 0
    assert ids_TK.max() < experts
    ordered = np.sort(ids_TK, axis=1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()


def test_generated_ids_are_distinct_and_repeat_for_a_seed(seed: int) -> None:
    for make in (routing.uniform, routing.zipf):
        ids_TK = make(500, 4, 12, seed, 1)
        _check_ids(ids_TK, 500, 4, 12)
        assert np.array_equal(ids_TK, make(500, 4, 12, seed, 1))
        assert not np.array_equal(ids_TK, make(500, 4, 12, seed, 2))
    _check_ids(routing.balanced(10, 3, 7), 10, 3, 7)
    _check_ids(routing.one_hot(10, 3, 7), 10, 3, 7)


def test_balanced_gives_the_worked_example_and_equal_blocks() -> None:
    assert routing.balanced(4, 2, 4).tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert routing.balanced(6, 1, 3)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_zipf_is_skewed_and_uniform_is_not(seed: int) -> None:
    def share_of_most_popular(ids_TK: routing.Ids) -> float:
        return float(np.bincount(ids_TK.ravel(), minlength=16).max()) / ids_TK.size

    assert share_of_most_popular(routing.zipf(4000, 1, 16, seed, 0)) > 0.2  # 1 / H_16 = 0.296 expected
    assert share_of_most_popular(routing.uniform(4000, 1, 16, seed, 0)) < 0.1  # 1 / 16 expected
    popular = [int(np.bincount(routing.zipf(4000, 1, 16, seed, rank).ravel()).argmax()) for rank in range(3)]
    assert len(set(popular)) == 1  # all ranks like the same expert


def test_traces_are_read_and_wrap_round(tmp_path: Path) -> None:
    ids = np.array([[0, 1], [2, -1], [3, 0]], dtype=np.int64)
    np.save(tmp_path / "flat.npy", ids)
    flat = routing.load_trace(str(tmp_path / "flat.npy"), 4)
    assert routing.trace_ids(flat, 2, 1).tolist() == [[3, 0], [0, 1]]
    np.savez(tmp_path / "ranks.npz", topk_idx=np.stack([ids, ids[::-1]]), other=np.zeros(3))
    own = routing.load_trace(str(tmp_path / "ranks.npz"), 4)
    assert routing.trace_ids(own, 4, 1).tolist() == [[3, 0], [2, -1], [0, 1], [3, 0]]
    given = options.parse("dispatch", ["--experts", "4", "--routing", "trace", str(tmp_path / "flat.npy")])
    assert given.topk == 2
    assert routing.topk_ids(given, 3, 0).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (np.zeros((2, 2), dtype=np.float32), "integers"),
        (np.array([[0, 9]]), "outside"),
        (np.array([[1, 1]]), "twice"),
        (np.zeros(3, dtype=np.int32), "integers"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, content: np.ndarray, says: str) -> None:
    np.save(tmp_path / "bad.npy", content)
    with pytest.raises(ValueError, match=says):
        routing.load_trace(str(tmp_path / "bad.npy"), 4)


# -- bytes -------------------------------------------------------


def test_traffic_counts_the_worked_example() -> None:
    ids_R = [np.array([[0, 2]], dtype=np.int32), np.array([[0, 1]], dtype=np.int32)]
    counted = traffic.traffic(ids_R, experts=4, row_bytes=10, layout="expert")
    assert counted.useful_R == (30, 10)
    assert counted.remote == 20
    assert traffic.traffic(ids_R, experts=4, row_bytes=10, layout="rank").useful_R == (20, 10)


def test_traffic_leaves_out_padding_ids() -> None:
    ids_R = [np.array([[0, -1]], dtype=np.int32), np.array([[-1, -1]], dtype=np.int32)]
    counted = traffic.traffic(ids_R, experts=2, row_bytes=8, layout="expert")
    assert counted.useful_R == (8, 0)
    assert counted.remote == 0


def test_rows_between_ranks_count_a_token_once_for_each_other_rank() -> None:
    ids_R = [np.array([[0, 2], [3, 2]], dtype=np.int32), np.array([[0, 1]], dtype=np.int32)]
    assert traffic.pairs(ids_R, experts=4).tolist() == [[1, 2], [1, 0]]
    assert traffic.traffic(ids_R, 4, 10, "expert", wire_row_bytes=3).remote == 9


def test_wire_bytes_of_fp8_are_values_and_scales_and_combine_travels_in_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(case, "device_of", lambda options: CPU)
    text = "--device cuda -g 2 -b 4 --hidden 272 -d bfloat16 --experts 4 --topk 2 --wire fp8"
    flags = text.split()
    dispatch = case.Case(options.parse("dispatch", flags), 0, 4, "bfloat16")
    assert (dispatch.row_bytes, dispatch.wire_row_bytes) == (544, 272 + 3 * 4)
    combine = case.Case(options.parse("combine", flags), 1, 4, "bfloat16")
    assert combine.wire_row_bytes == 544
    there, back = np.array(dispatch.rows_between()), np.array(combine.rows_between())
    assert (there == back.T).all()
    assert dispatch.traffic.remote == there.sum() * 284
    assert dispatch.traffic.useful == 2 * 4 * 2 * 544


# -- the ceilings ------------------------------------------------


def test_shared_memory_is_divided_into_lanes_and_slots() -> None:
    assert bulk.ring(14336, 227 << 10) == bulk.Ring(3, 5, 15 * (14336 + 8))
    for row_bytes in (16, 128, 7392, 14336, 28672, 65536):
        found = bulk.ring(row_bytes, 227 << 10)
        assert found.shared_bytes <= 227 << 10
        assert found.slots >= 3
    with pytest.raises(ValueError, match="shared memory"):
        bulk.ring(100_000, 227 << 10)
    with pytest.raises(ValueError, match="16"):
        bulk.ring(284, 227 << 10)


def test_pushed_rows_take_turns_over_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--device cpu -g 3 -b 3 --experts 3 --topk 2 --hidden 16"
    blocks = ceilings.Blocks(case.Case(options.parse("dispatch", flags.split()), 0, 3, "float32"))
    blocks.rows = [[0, 2, 3], [0, 0, 0], [0, 0, 0]]
    assert ceilings.push_order(blocks) == [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    blocks.rank = 2
    assert blocks.peers == [0, 1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiles for a GPU, and there is no nvcc")
def test_the_push_kernel_compiles() -> None:
    assert bulk.compile_with_nvcc("sm_90").startswith(b"\x7fELF")


# -- data --------------------------------------------------------


@pytest.mark.parametrize("dtype", list(options.DTYPES))
def test_rows_are_never_zero_and_differ_by_rank_and_round(dtype: str, seed: int) -> None:
    first = data.rows(DataKey(seed, 0, 20, 32, dtype), 0, CPU)
    assert first.element_size() == options.DTYPES[dtype]
    assert (first.double().abs() >= 0.25).all()
    assert torch.equal(first, data.rows(DataKey(seed, 0, 20, 32, dtype), 0, CPU))
    for other in (
        data.rows(DataKey(seed, 0, 20, 32, dtype), 1, CPU),
        data.rows(DataKey(seed, 1, 20, 32, dtype), 0, CPU),
    ):
        assert int((first == other).sum()) < first.numel() // 4


def test_quantised_rows_are_within_the_steps_of_e4m3(seed: int) -> None:
    x_NH = data.rows(DataKey(seed, 0, 9, 200, "bfloat16"), 0, CPU) * 37
    values, scales = data.quantised(x_NH)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (9, 2)
    back = data.dequantised(values, scales, torch.float32)
    assert ((back - x_NH.float()).abs() <= x_NH.float().abs() * 2.0**-4).all()
    top = x_NH[:, :128].float().abs().amax(1)
    assert torch.allclose(back[:, :128].abs().amax(1), top, rtol=1e-6)  # the largest of a block is hit
    zero, _ = data.quantised(torch.zeros(2, 128))
    assert not zero.float().any()


# -- the check ---------------------------------------------------

IDS_R = [np.array([[0, 2], [1, 0]], dtype=np.int32), np.array([[0, 3]], dtype=np.int32)]


def test_expert_layout_gives_the_worked_example() -> None:
    layout = verify.expert_layout(IDS_R, rank=0, experts=4, alignment=2)
    assert layout.source_N.tolist() == [0, 0, 1, 0]
    assert layout.token_N.tolist() == [0, 1, 0, 1]
    assert layout.slot_N.tolist() == [0, 1, 0, 0]
    assert layout.row_N.tolist() == [0, 1, 2, 4]
    assert layout.group_G.tolist() == [3, 1]
    assert layout.offsets_G.tolist() == [4, 6]


def test_rank_layout_has_a_row_per_token_and_local_ids() -> None:
    layout = verify.rank_layout(IDS_R, rank=1, experts=4)
    assert (layout.source_N.tolist(), layout.token_N.tolist()) == ([0, 1], [0, 0])
    assert layout.ids_NK is not None
    assert layout.ids_NK.tolist() == [[-1, 0], [-1, 1]]
    assert layout.offsets_G.tolist() == [1, 2]
    assert layout.expert_rows_L.tolist() == [1, 1]


def _right_dispatch(dtype: str, seed: int) -> tuple[Received, verify.Layout, DataKey]:
    """A correct result for rank 0 of two ranks of 40 tokens, written row by row."""
    ids_R = [routing.uniform(40, 3, 8, seed, rank) for rank in range(2)]
    key = DataKey(seed, 1, 40, 16, dtype)
    layout = verify.expert_layout(ids_R, 0, 8, alignment=4)
    x_R = [data.rows(key, rank, CPU) for rank in range(2)]
    w_R = [data.weights(key, rank, 3, CPU) for rank in range(2)]
    tokens = torch.zeros(layout.num_rows, 16, dtype=key.torch_dtype)
    weights = torch.zeros(layout.num_rows)
    for source, token, slot, row in zip(
        layout.source_N, layout.token_N, layout.slot_N, layout.row_N, strict=True
    ):
        tokens[row] = x_R[source][token]
        weights[row] = w_R[source][token, slot]
    got = Received(
        tokens=tokens,
        counts=torch.from_numpy(layout.group_G).int(),
        offsets=torch.from_numpy(layout.offsets_G).int(),
        weights=weights,
    )
    return got, layout, key


@pytest.mark.parametrize("dtype", list(options.DTYPES))
def test_a_right_dispatch_passes_and_each_mistake_is_counted(dtype: str, seed: int) -> None:
    got, layout, key = _right_dispatch(dtype, seed)
    assert verify.wrong_dispatch(got, layout, key, 3) == 0

    row = int(layout.row_N[5])
    kept = got.tokens[row].clone()
    got.tokens[row] = got.tokens[int(layout.row_N[-1])]  # a wrong row
    assert verify.wrong_dispatch(got, layout, key, 3) > 8
    got.tokens[row] = kept
    got.tokens.view(torch.uint8)[row, 0] ^= 1  # one bit
    assert verify.wrong_dispatch(got, layout, key, 3) == 1
    got.tokens[row] = kept
    got.tokens.view(torch.uint8)[row] = 0xFF  # poison: a row that was never written
    assert verify.wrong_dispatch(got, layout, key, 3) == 16
    got.tokens[row] = kept

    padding = sorted(set(range(layout.num_rows)) - set(layout.row_N.tolist()))
    got.tokens[padding[0], 3] = 1
    assert verify.wrong_dispatch(got, layout, key, 3) == 1
    got.tokens[padding[0], 3] = 0
    assert got.weights is not None and got.counts is not None and got.offsets is not None
    got.weights[row] += 0.5
    got.counts[0] += 1
    got.offsets[-1] -= 1
    assert verify.wrong_dispatch(got, layout, key, 3) == 3


def test_a_result_of_the_wrong_size_is_all_wrong(seed: int) -> None:
    got, layout, key = _right_dispatch("float32", seed)
    cut = Received(tokens=got.tokens[:-1])
    assert verify.wrong_dispatch(cut, layout, key, 3) == layout.num_rows * 16


def test_fixed_capacity_leaves_the_rows_behind_open(seed: int) -> None:
    got, layout, key = _right_dispatch("float32", seed)
    longer = torch.full((layout.num_rows + 9, 16), float("nan"))
    longer[: layout.num_rows] = got.tokens
    assert verify.wrong_dispatch(Received(tokens=longer), layout, key, 3, capacity=layout.num_rows + 9) == 0
    assert (
        verify.wrong_dispatch(
            Received(tokens=longer, overflow=7), layout, key, 3, capacity=layout.num_rows + 9
        )
        == 1
    )


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("dtype", list(options.DTYPES))
def test_a_right_combine_passes_and_a_wrong_value_is_counted(dtype: str, layout: str, seed: int) -> None:
    ids_TK = routing.uniform(30, 3, 8, seed, 1)
    ids_TK[3, 1] = -1
    ids_TK[4] = -1
    key = DataKey(seed, 2, 30, 16, dtype)
    x_TH, w_TK = data.rows(key, 1, CPU), data.weights(key, 1, 3, CPU)
    y_TH = torch.zeros(30, 16, dtype=torch.float64)
    for token in range(30):
        used = [(k, int(e)) for k, e in enumerate(ids_TK[token]) if e >= 0]
        if layout == "expert":
            terms = [(float(w_TK[token, k]), expert) for k, expert in used]
        else:
            terms = [(1.0, rank) for rank in sorted({expert // 4 for _, expert in used})]
        for factor, who in terms:
            y_TH[token] += factor * data.answer(x_TH[token : token + 1], torch.tensor([who]))[0].double()
    got = y_TH.to(key.torch_dtype)
    arguments = {"experts": 8, "ranks": 2, "layout": layout}
    assert verify.wrong_combine(got, ids_TK, key, 1, **arguments) == 0
    got[7, 2] += 0.25
    got.view(torch.uint8)[9] = 0xFF
    assert verify.wrong_combine(got, ids_TK, key, 1, **arguments) == 1 + 16
    assert verify.wrong_combine(got[:-1], ids_TK, key, 1, **arguments) == 30 * 16


def test_rows_that_travel_in_fp8_are_checked_as_quantised(seed: int) -> None:
    got, layout, key = _right_dispatch("bfloat16", seed)
    assert verify.wrong_dispatch(got, layout, key, 3, wire="fp8") > 0  # they were not
    values, scales = data.quantised(got.tokens)
    back = dataclasses.replace(got, tokens=data.dequantised(values, scales, torch.bfloat16))
    assert verify.wrong_dispatch(back, layout, key, 3, wire="fp8") == 0
    handed_on = dataclasses.replace(got, tokens=values, scales=scales)
    assert verify.wrong_dispatch(handed_on, layout, key, 3, wire="fp8") == 0
    scales[layout.row_N[2], 0] *= 2
    values.view(torch.uint8)[layout.row_N[1], 5] ^= 1
    assert verify.wrong_dispatch(handed_on, layout, key, 3, wire="fp8") == 2


def test_answers_leave_padding_poisoned(seed: int) -> None:
    ids_R = [routing.uniform(10, 2, 4, seed, rank) for rank in range(2)]
    for dtype in options.DTYPES:
        key = DataKey(seed, 0, 10, 8, dtype)
        layout = verify.expert_layout(ids_R, 1, 4, alignment=8)
        rows_PH = verify.answers(layout, key, layout.num_rows + 3, CPU)
        assert torch.isfinite(rows_PH[layout.row_N]).all()
        padding = sorted(set(range(layout.num_rows + 3)) - set(layout.row_N.tolist()))
        assert torch.isnan(rows_PH[padding]).all()


# -- the tables --------------------------------------------------


def _row(path: str, seconds: float, wrong: int | None = 0) -> Row:
    return Row(
        path=path,
        dtype="float32",
        tokens=64,
        size_bytes=4096,
        useful_bytes=16384,
        remote_bytes=4096,
        time_s=seconds,
        min_s=seconds / 2,
        algbw_GBps=1.5,
        busbw_GBps=None if path == "memcpy" else 0.5,
        wrong=wrong,
        note="",
        samples_s=(seconds,),
    )


def test_the_comparison_shows_ratio_and_share_of_the_ceiling() -> None:
    rows = [_row("moecomm", 100e-6), _row("memcpy", 60e-6), _row("gloo", 450e-6)]
    last = report.comparison(rows).splitlines()[-1].split()
    assert last == ["64", "float32", "100.0", "450.0", "4.50x", "60.0", "60%"]
    assert report.comparison(rows[:1]) == ""


def test_a_baseline_that_did_not_run_is_a_line_with_its_reason() -> None:
    absent = Missing(
        path="gloo", dtype="float32", tokens=64, experts=8, topk=2, num_sms=None, reason="OSError: no"
    )
    given = options.parse("dispatch", ["--device", "cpu"])
    assert report.table_row(absent, given) == "# 64 float32 gloo: n/a: OSError: no"
    rows = [_row("moecomm", 1e-4), dataclasses.replace(_row("moecomm", 2e-4), tokens=128), _row("gloo", 3e-4)]
    assert report.comparison(rows).splitlines()[-1].split() == ["128", "float32", "200.0", "n/a", "-"]


def test_gpu_rows_say_their_sms_and_host_time() -> None:
    given = options.parse("dispatch", ["--device", "cuda", "-g", "2"])
    row = dataclasses.replace(_row("moecomm", 1e-4), sms=24, host_s=15e-6)
    assert report.table_row(row, given).split()[-3:] == ["24", "15.0", "0"]
    assert report.table_row(_row("nccl", 1e-4), given).split()[-3:] == ["-", "-", "0"]


def test_the_comparison_of_variants_names_them() -> None:
    rows = [
        dataclasses.replace(_row(path, seconds), experts=32, topk=4, num_sms=sms)
        for sms in (8, None)
        for path, seconds in (("moecomm", 2e-4), ("memcpy", 9e-5), ("sm-push", 1e-4))
    ]
    lines = [line.split() for line in report.comparison(rows).splitlines()[-2:]]
    assert [line[:4] for line in lines] == [["32", "4", "-", "8"], ["32", "4", "-", "auto"]]
    assert lines[0][-2:] == ["100.0", "50%"]  # sm-push is the ceiling where it ran


def test_the_footer_gives_the_verdict() -> None:
    assert "0 OK" in report.footer([_row("moecomm", 1e-3)])
    assert "3 FAILED" in report.footer([_row("moecomm", 1e-3), _row("gloo", 1e-3, wrong=3)])
    assert "not checked" in report.footer([_row("moecomm", 1e-3, wrong=None)])


def test_the_results_page_shows_every_run_with_its_command() -> None:
    given = options.parse("dispatch", ["--device", "cpu", "--baselines"])
    record = document(given, [_row("moecomm", 1e-3), _row("memcpy", 8e-4), _row("gloo", 4e-3)], {})
    lines = results.cpu_lines({"some-run": record})
    assert lines == [["some-run", "64", "float32", "1.00", "1.50", "4.00x", "-", "0.80", "80%", "0"]]
    table = results.summary({"some-run": record}).splitlines()
    assert len({len(line) for line in table}) == 1
    assert len({line.count("|") for line in table}) == 1
    part = results.cpu_part({"some-run": record}, "python bench/run_all.py --write")
    assert "python bench/dispatch_perf.py --device cpu --baselines" in part
    assert results.summary({"some-run": record}) in part


GPUS = Gpus(("A GPU",) * 2, 1 << 34, 132, 50 << 20, "580.1", "NV18")


def _gpu_record(
    monkeypatch: pytest.MonkeyPatch, flags: str, rows: list[Row], missing: tuple[Missing, ...] = ()
) -> dict[str, object]:
    monkeypatch.setattr(machine, "describe_gpus", lambda: GPUS)
    monkeypatch.setattr(machine, "versions", lambda device: {"python": "3", "torch": "2", "nccl": "2.28"})
    given = options.parse("dispatch", ["--device", "cuda", "-g", "2", *flags.split()])
    return document(given, rows, {}, missing)


def test_the_gpu_part_shows_shares_of_the_ceiling_and_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = dataclasses.replace(_row("moecomm", 500e-6), sms=24, host_s=12e-6, experts=256, topk=8)
    push = dataclasses.replace(_row("sm-push", 450e-6), sms=64, experts=256, topk=8, note="best of 9, 64 SMs")
    nccl = dataclasses.replace(_row("nccl", 2000e-6), experts=256, topk=8)
    copy = dataclasses.replace(_row("memcpy", 100e-6), experts=256, topk=8)
    absent = Missing(
        path="torch-symm", dtype="float32", tokens=64, experts=256, topk=8, num_sms=None, reason="no NVSHMEM"
    )
    record = _gpu_record(monkeypatch, "--capacity auto --graph", [own, push, nccl, copy], (absent,))
    records = {"cuda-dispatch": record}
    (line,) = results.gpu_lines(records)
    assert line[:4] == ["cuda-dispatch", "64", "float32, top-8 of 256, graph", "500.0"]
    assert line[4:] == ["0.5", "90.0%", "0.5", "24", "12.0", "4.00x", "-", "-", "0"]
    paths = {line[1]: line for line in results.path_lines(records)}
    assert paths["sm-push"][-1] == "64 SMs, best of 9, 64 SMs"
    assert paths["memcpy"][-2:] == ["3.0", "on one GPU, read + written"]
    part = results.gpu_part(records, "python bench/run_all.py", {})
    assert "- cuda-dispatch: torch-symm n/a: no NVSHMEM" in part
    assert "2 x A GPU (132 SMs, 16 GiB), links NV18, driver 580.1" in part


def test_a_sweep_gets_a_table_of_its_own_and_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        dataclasses.replace(_row(path, 1e-4), tokens=tokens)
        for tokens in (1, 2, 4, 8)
        for path in ("moecomm", "sm-push")
    ]
    record = _gpu_record(monkeypatch, "-b 1 -e 8", rows)
    assert results.pictured(record)
    assert not results.pictured(_gpu_record(monkeypatch, "", rows[:2]))
    part = results.gpu_part({"sweep": record}, "x", {"sweep": "sweep.svg"})
    assert "### sweep" in part and "![sweep](results/sweep.svg)" in part


def test_the_parts_of_the_page_are_renewed_one_by_one() -> None:
    page = results.renewed("", "cpu", "of the CPU\n")
    both = results.renewed(page, "cuda", "of GPUs\n")
    assert both.index("of GPUs") < both.index("of the CPU")
    again = results.renewed(both, "cpu", "new\n")
    assert "of GPUs" in again and "new" in again and "of the CPU" not in again


@pytest.mark.parametrize("plan", [run_all.cpu_plan(2, 3, 1), run_all.cuda_plan(4, 3, 1)])
def test_the_plan_names_each_run_once_with_flags_that_parse(plan: list[run_all.Run]) -> None:
    assert len({run.name for run in plan}) == len(plan)
    assert any(run.quick for run in plan)
    for run in plan:
        assert options.parse(run.program, run.flags).iters == 3


def test_the_reference_cases() -> None:
    first = run_all.cpu_plan(2, 3, 1)[0]
    cpu = options.parse(first.program, first.flags)
    assert (cpu.hidden, cpu.experts, cpu.topk, cpu.sizes) == (4096, 32, 4, (2048,))
    first = run_all.cuda_plan(4, 3, 1)[0]
    cuda = options.parse(first.program, first.flags)
    assert (cuda.hidden, cuda.experts, cuda.topk, cuda.sizes) == (7168, 256, 8, (4096,))
    assert {"sm-push", "copy-engine", "memcpy", "nccl"} <= set(cuda.baselines)
    assert "torch-symm" not in cuda.baselines
