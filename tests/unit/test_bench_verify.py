"""Parts of the benchmarks, without ranks: routings, bytes, and checks that do catch mistakes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness import case, command_line, inputs, placing, verify
from bench.harness.inputs import DataKey
from bench.harness.verify import Received
from bench.paths import between_nodes
from bench.paths.layer_variants import FixedRouting
from bench.paths.liger_layer import LigerLayer
from moecomm.setup.memory_plan import plan_memory, window_shape
from tests import reference

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("bench_on_cpu")


def one_case(flags: str, rank: int = 0, program: str = "dispatch") -> case.Case:
    given = command_line.parse(program, flags.split())
    (point,) = given.points()
    return case.Case(given, point, rank)


# -- inputs --------------------------------------------------------------------------------------------------
def test_generated_ids_are_distinct_and_repeat_for_a_seed(seed: int) -> None:
    one_hot = one_case("--routing one-hot --experts 12 --topk 4 -b 500").ids_TK
    made = [one_hot, inputs.balanced(500, 4, 12), inputs.hot(500, 4, 12, seed, 0)]
    assert (made[2][:, 0] == 0).all() and not inputs.hot(5, 1, 12, seed, 0).any()
    for make in (inputs.uniform.__wrapped__, inputs.zipf.__wrapped__):  # not what the cache has
        made += [make(500, 4, 12, seed, 1), make(500, 4, 12, seed, 1), make(500, 4, 12, seed, 2)]
        assert np.array_equal(made[-3], made[-2]) and not np.array_equal(made[-2], made[-1])
    for ids_TK in made:
        assert ids_TK.shape == (500, 4) and ids_TK.dtype == np.int32
        assert ids_TK.min() >= 0 and ids_TK.max() < 12
        ordered = np.sort(ids_TK, axis=1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert inputs.balanced(4, 2, 4).tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    popular = [
        np.bincount(make(4000, 1, 16, seed, 0).ravel()).max() / 4000 for make in (inputs.zipf, inputs.uniform)
    ]
    assert popular[0] > 0.2 and popular[1] < 0.1  # 1 / H_16 = 0.296 and 1 / 16 expected


def test_recorded_ids_are_consecutive_tokens_of_the_file(tmp_path: Path, seed: int) -> None:
    ids_NK = np.stack((np.arange(50), 50 + np.arange(50)), axis=1)
    np.save(tmp_path / "ids.npy", ids_NK)
    flags = f"--routing {tmp_path}/ids.npy --topk 2 --seed {seed} -b 30 -g 2 --experts "
    both = np.concatenate([one_case(f"{flags}100", rank).ids_TK for rank in range(2)])
    assert np.array_equal(both, ids_NK[(both[0, 0] + np.arange(60)) % 50])
    for experts, name in (("98", "ids"), ("100", "none")):
        with pytest.raises(SystemExit):
            command_line.parse("dispatch", f"{flags}{experts}".replace("ids", name).split())


@pytest.mark.parametrize("wire", inputs.SCALES)
def test_quantised_rows_are_those_of_the_reference(wire: str, seed: int) -> None:
    """Bit for bit, on rows of several magnitudes, a zero block, and columns that fill no block."""
    x_NH = inputs.rows(DataKey(seed, 0, 9, 200, "bfloat16"), 0, CPU) * torch.logspace(-30, 8, 9)[:, None]
    x_NH[4] = 0
    values, scales = inputs.quantised(x_NH, wire)
    want_values, want_scales = reference.quantised(x_NH.float().numpy(), wire)
    assert np.array_equal(values.float().numpy(), want_values)
    assert np.array_equal(inputs.factors(scales).numpy(), want_scales)
    back = inputs.dequantised(values, scales, torch.bfloat16, wire).float().numpy()
    assert np.array_equal(back, reference.dequantised(want_values, want_scales, "bfloat16", wire))


# -- bytes ---------------------------------------------------------------------------------------------------
def test_rows_that_travel_are_counted_once_for_each_rank_or_node(seed: int) -> None:
    ids_R = [np.array([[0, 2]], dtype=np.int32), np.array([[0, 1]], dtype=np.int32)]
    assert case.pairs(ids_R, 4).tolist() == [[1, 1], [1, 0]]
    assert case.rows_per_rank(ids_R, 4) == [3, 1]
    ids_R = [np.array([ids], dtype=np.int32) for ids in ([1, 2], [2, 3], [0, 1], [-1, 3])]
    assert case.pairs(ids_R, 4, ranks_per_group=2).tolist() == [[1, 1], [0, 1], [1, 0], [0, 1]]
    assert case.rows_per_rank(ids_R, 4) == [1, 2, 2, 2]


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (1024, 2048), (4096, 7168), (3, 1 << 22)])
def test_full_puts_are_as_large_as_moecomms(tokens: int, hidden: int) -> None:
    found = one_case(f"-g 2 --ranks-per-node 1 --hidden {hidden} -b 1 -d bfloat16 --topk 4")
    object.__setattr__(found.options, "sizes", (tokens,))
    shape = window_shape(
        ranks=2, top_k=4, hidden=hidden, max_tokens=tokens, dtype=torch.bfloat16, ranks_per_node=1
    )
    (staging,) = [size for name, _, size in plan_memory(shape, 1).sections if name == "staging"]
    assert staging == -(-16 * between_nodes.put_bytes(found) // 4096) * 4096


# -- the checks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_mistake_of_a_dispatch_is_counted(dtype: str, seed: int) -> None:
    """The check counts each mistake made in rows that the reference's own dispatch has put there."""
    ids_R = [inputs.uniform(40, 3, 8, seed, rank) for rank in range(2)]
    key = DataKey(seed, 1, 40, 16, dtype)
    rows = placing.rows_of(ids_R, 0, 8, alignment=64)  # some 30 rows an expert: there is padding
    x_R = [inputs.rows(key, rank, CPU).float().numpy() for rank in range(2)]
    w_R = [inputs.weights(key, rank, 3, CPU).numpy() for rank in range(2)]
    want = reference.dispatch(x_R, ids_R, w_R, rank=0, num_experts=8, alignment=64)
    got = Received(
        tokens=torch.from_numpy(want.tokens).to(key.torch_dtype),
        counts=torch.from_numpy(want.tokens_per_expert),
        offsets=torch.from_numpy(want.offsets),
        weights=torch.from_numpy(want.weights),
    )

    def wrong(received: Received = got, capacity: int | None = None) -> int:
        return verify.wrong_dispatch(received, rows, key, 3, capacity)

    assert wrong() == 0
    row = int(rows.row_N[5])
    kept = got.tokens[row].clone()
    got.tokens.view(torch.uint8)[row, 0] ^= 1  # one bit
    assert wrong() == 1
    got.tokens.view(torch.uint8)[row] = 0xFF  # poison: a row that was never written
    assert wrong() == 16
    got.tokens[row] = kept
    got.tokens[int(rows.row_N[-1]) + 1, 3] = 1  # padding
    assert wrong() == 1
    got.tokens[int(rows.row_N[-1]) + 1, 3] = 0
    for changed in (got.weights, got.counts, got.offsets):
        changed[0] += 1
    assert wrong() == 3
    assert wrong(Received(tokens=got.tokens[:-1])) == rows.num_rows * 16
    longer = torch.cat([got.tokens, torch.full((9, 16), float("nan"), dtype=key.torch_dtype)])
    assert wrong(Received(tokens=longer, overflow=7), rows.num_rows + 9) == 1


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_each_mistake_of_a_combine_is_counted(
    layout: str, wire: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check counts each mistake made in sums that the reference's own combine has made of the answers."""
    monkeypatch.setattr(case, "device_of", lambda options: CPU)
    flags = f"-g 2 -b 20 --hidden 16 --experts 8 --topk 3 -d bfloat16 --layout {layout}"
    if wire is not None:
        flags += f" --device cuda --combine-wire {wire}"
    cases = [one_case(flags, rank, "combine") for rank in range(2)]
    x_R, w_R = ([each.float().numpy() for each in found] for found in (
        [one.x_TH for one in cases], [one.weights_TK for one in cases]
    ))  # fmt: skip
    ids_R = cases[0].ids_R
    sent = [reference.dispatch(x_R, ids_R, w_R, rank=rank, num_experts=8, layout=layout) for rank in range(2)]
    answers = []
    for rank, one in enumerate(cases):
        found = verify.answers(one.rows, one.key, one.rows.num_rows, CPU, rank if layout == "rank" else None)
        answers.append(found.float().numpy())
    weights = [each.weights for each in sent] if layout == "expert" else None
    y_R = reference.combine(answers, sent, [20, 20], dtype="bfloat16", weights=weights, wire=wire)
    farther = 1.05 if wire is None else 1.3
    for one, want in zip(cases, y_R, strict=True):
        y_TH = torch.from_numpy(want).to(torch.bfloat16)
        assert verify.wrong_combine(y_TH, one) == 0
        assert verify.wrong_combine(y_TH.roll(1, 0), one) > 200
        assert verify.wrong_combine(y_TH * farther, one) > 200
        assert verify.wrong_combine(y_TH[:-1], one) == 20 * 16
        case.corrupt(y_TH)
        y_TH[3, 4] = float("nan")
        assert verify.wrong_combine(y_TH, one) == 2


def layer_case(dtype: str, seed: int, more: str = "") -> case.LayerCase:
    flags = f"-g 1 -d {dtype} --seed {seed % 2**31} --hidden 32 --ffn 16 --experts 8 --topk 3 -b 23 {more}"
    given = command_line.parse("moe_layer", [*flags.split(), "--presets", "qwen3-30b", "--graph-tokens", "0"])
    (point,) = given.points()
    return case.LayerCase(given, point, 0, case.Experts(given, point, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_of_a_layer_catches_what_is_wrong(dtype: str, seed: int) -> None:
    one = layer_case(dtype, seed)
    wanted = verify.wanted(one, 0)[0]
    right = {name: wanted[name].to(one.dtype) for name in ("y", "dx", "dw_in", "dw_out", "rows moved")}
    right |= {"dweights": wanted["dweights"].to(torch.float32)}
    assert verify.compare(right, wanted, dtype).wrong == 0

    def wrong(name: str, value: torch.Tensor) -> int:
        return verify.compare({**right, name: value}, wanted, dtype).wrong

    without_a_token = right["y"].clone()
    without_a_token[7] = 0
    assert wrong("y", without_a_token) > 16 and wrong("y", right["y"] * 1.5) > 23 * 16
    assert wrong("dw_in", right["dw_in"].roll(1, 0)) > 100
    for name, value in right.items():
        broken = value.clone()
        broken.view(-1)[0] = float("nan")
        assert wrong(name, broken) == 1 and wrong(name, value[:-1]) >= value.numel()
    nudged = right["rows moved"].clone()
    nudged[0, 0] *= 1 + 2.0**-7
    assert wrong("rows moved", nudged) == 1  # what is only moved is compared bit for bit


class PlayedLiger(torch.nn.Module):
    """LigerExpertParallelFusedMoe in torch, one expert after another, with the layouts of its page."""

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *matrices_and_experts: Any
    ) -> torch.Tensor:
        gate, up, down, experts = matrices_and_experts
        assert weights.dtype == torch.bfloat16 and all(each.is_contiguous() for each in (gate, up, down))
        y = torch.zeros(x.shape)
        for e in range(experts):
            token, k = torch.nonzero(ids == e, as_tuple=True)
            rows = x[token].float()
            z = torch.nn.functional.silu(rows @ gate[e].float().t()) * (rows @ up[e].float().t())
            y = y.index_add(0, token, weights[token, k].float()[:, None] * (z @ down[e].float().t()))
        return y.to(x.dtype)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_interleaved"])
def test_ligercute_gets_the_weights_as_it_wants_them(
    activation: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[dict[str, int]] = []
    kernels = SimpleNamespace(MoEConfig=lambda **sizes: sizes, configure=lambda device, moe: most.append(moe))
    frontend = SimpleNamespace(LigerExpertParallelFusedMoe=PlayedLiger)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels", kernels)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.moe", frontend)
    one = layer_case("bfloat16", seed, f"--variants LigerCute --activation {activation}")
    layer = LigerLayer(one, FixedRouting([one]), lambda y_TH, x_TH: y_TH)
    sizes = {"max_tokens": 23, "hidden_size": 32, "num_experts": 8, "top_k": 3, "gpus_per_host": 1}
    assert most == [sizes | {"num_hosts": 1}]
    wanted = verify.wanted(one, 0)[0]
    y_TH = layer(one.x_TH)
    dx_TH, dw_TK, *grads = torch.autograd.grad(y_TH, (one.x_TH, one.weights_TK, *layer.weights), one.dy_TH)
    found = {"y": y_TH.detach(), "dx": dx_TH, "dweights": dw_TK, **layer.by_name(grads)}
    assert verify.compare(found, wanted, "bfloat16").wrong == 0
    swapped = layer.by_name([grads[1], grads[0], grads[2]])
    assert verify.compare(swapped, wanted, "bfloat16").wrong > 0
