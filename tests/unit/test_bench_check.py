"""What the benchmark harness works with, without ranks: routings, bytes counted, data, and a check that does
catch mistakes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.harness import bulk, case, ceilings, data, options, routing, traffic, verify, wire
from bench.harness.data import DataKey
from bench.harness.verify import Received
from moecomm.memory import plan_memory, window_shape

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("bench_on_cpu")

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


def test_a_limit_on_nodes_leaves_the_best_ones(seed: int) -> None:
    scores_TE = np.array([[9.0, 0.0, 5.0, 6.0, 8.0, 1.0], [1.0, 2.0, 9.0, 0.0, 3.0, 8.5]])
    # Three nodes of two experts. Two ids from one node: the sum of both scores decides; from two nodes: the
    # best score of each does.
    limited = [routing._top_k(scores_TE, 2, routing.Limit(3, most)).tolist() for most in (1, 2, 3)]
    assert limited == [[[3, 2], [5, 4]], [[0, 4], [2, 5]], [[0, 4], [2, 5]]]
    for make in (routing.uniform, routing.zipf):
        ids_TK = make(500, 4, 16, seed, 1, limit=routing.Limit(4, 2))
        _check_ids(ids_TK, 500, 4, 16)
        nodes = np.array([len(set(row)) for row in (ids_TK // 4).tolist()])
        assert nodes.max() == 2
    free = routing.uniform(500, 4, 16, seed, 1)
    assert np.array_equal(free, routing.uniform(500, 4, 16, seed, 1, limit=routing.Limit(4, 4)))


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


def test_rows_to_other_nodes_count_a_token_once_for_each_node(seed: int) -> None:
    ids_R = [np.array([ids], dtype=np.int32) for ids in ([1, 2], [2, 3], [0, 1], [-1, 3])]
    assert traffic.node_rows(ids_R, 4, 2).tolist() == [[0, 1], [0, 1], [1, 0], [0, 0]]
    assert not traffic.node_rows(ids_R, 4, 4).any()
    random_R = [routing.uniform(40, 3, 8, seed, rank) for rank in range(4)]
    alone = traffic.pairs(random_R, 8)
    np.fill_diagonal(alone, 0)
    assert np.array_equal(traffic.node_rows(random_R, 8, 1), alone)  # one rank a node: nodes are ranks


def test_the_least_between_nodes_is_rows_and_full_puts() -> None:
    nodes = ["-g", "4", "--ranks-per-node", "2", "--experts", "4", "--topk", "4", "--routing", "one-hot"]
    flags = [*nodes, "--hidden", "65536", "-b", "5"]
    for name in ("dispatch", "combine"):
        one = case.Case(options.parse(name, flags), 1, 5, "float32")
        # Rows of 256 KiB, two a put: every rank's five tokens to one other node.
        assert wire.put_bytes(one) == 1 << 19
        assert wire.least(one) == (4 * 5 * (1 << 18), 4 * 3)


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(1, 8), (3, 2048), (1024, 2048), (512, 7168), (4096, 7168), (3, 1 << 22)]
)
def test_full_puts_are_as_large_as_moecomms(tokens: int, hidden: int) -> None:
    flags = ["-g", "2", "--ranks-per-node", "1", "--hidden", str(hidden), "-b", str(tokens)]
    row = 2 * hidden
    sizes = SimpleNamespace(options=options.parse("dispatch", flags), row_bytes=row, wire_row_bytes=row)
    plan = plan_memory(
        window_shape(
            ranks=2, top_k=4, hidden=hidden, max_tokens=tokens, dtype=torch.bfloat16, ranks_per_node=1
        ),
        1,
    )
    (staging,) = [size for name, _, size in plan.sections if name == "staging"]
    assert staging == -(-16 * wire.put_bytes(sizes) // 4096) * 4096


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


def test_pushed_pieces_take_turns_over_the_peers() -> None:
    flags = "--device cpu -g 3 -b 3 --experts 3 --topk 2 --hidden 16"
    blocks = ceilings.Blocks(case.Case(options.parse("dispatch", flags.split()), 0, 3, "float32"))
    blocks.row_bytes = 160
    blocks.send_splits = [0, 320, 480]
    assert ceilings.push_pieces(blocks) == (256, [(1, 0), (2, 0), (1, 64), (2, 224)])
    blocks.send_splits = [0, 160, 480]  # a block of one row is no whole piece
    assert ceilings.push_pieces(blocks) == (160, [(1, 0), (2, 0), (2, 160), (2, 320)])
    blocks.send_splits = [0, 0, 512]
    assert ceilings.push_pieces(blocks) == (256, [(2, 0), (2, 256)])
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
    layout = verify.expert_layout(ids_R, 0, 8, alignment=64)  # some 30 rows an expert: there is padding
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


@pytest.mark.parametrize("dtype", list(options.DTYPES))
def test_a_right_backward_passes_and_each_mistake_is_counted(dtype: str, seed: int) -> None:
    got, layout, made = _right_dispatch(dtype, seed)
    given = dataclasses.replace(made, round=made.round + 1)
    assert got.weights is not None
    rows_PH = verify.answers(layout, made, layout.num_rows, CPU)
    dy_PH = torch.zeros(layout.num_rows, 16, dtype=torch.float64)
    for source, token, row in zip(layout.source_N, layout.token_N, layout.row_N, strict=True):
        dy_PH[row] = data.rows(given, int(source), CPU)[token].double()
    wide = data.wide(made.torch_dtype)
    grad_PH = (got.weights[:, None].to(wide) * dy_PH.to(wide)).to(made.torch_dtype)
    grad_weights_P = (rows_PH.double() * dy_PH).sum(1).to(wide)

    def wrong() -> int:
        return verify.wrong_backward(grad_PH, grad_weights_P, rows_PH, layout, given, made, 3)

    assert wrong() == 0
    grad_PH.view(torch.uint8)[int(layout.row_N[4]), 0] ^= 1
    grad_weights_P[int(layout.row_N[5])] *= 1.001
    grad_weights_P[int(layout.row_N[6])] = float("nan")  # and a row that was never written
    assert wrong() == 3
    assert verify.wrong_backward(grad_PH[1:], grad_weights_P, rows_PH, layout, given, made, 3) > 16


def test_answers_leave_padding_poisoned(seed: int) -> None:
    ids_R = [routing.uniform(10, 2, 4, seed, rank) for rank in range(2)]
    for dtype in options.DTYPES:
        key = DataKey(seed, 0, 10, 8, dtype)
        layout = verify.expert_layout(ids_R, 1, 4, alignment=8)
        rows_PH = verify.answers(layout, key, layout.num_rows + 3, CPU)
        assert torch.isfinite(rows_PH[layout.row_N]).all()
        padding = sorted(set(range(layout.num_rows + 3)) - set(layout.row_N.tolist()))
        assert torch.isnan(rows_PH[padding]).all()
